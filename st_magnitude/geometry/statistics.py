"""Intervals, correlations and curves over samples of the same queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu, spearmanr

from st_magnitude.geometry.arrays import Array, same_length, sample_of

__all__ = ["auroc", "paired_bootstrap", "risk_coverage", "spearman", "symmetry_gap"]


def paired_bootstrap(
    a: Any, b: Any = None, num_samples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float, float]:
    """Mean of a - b over queries with its percentile bootstrap interval: (n,), (n,) -> (difference, low, high).

    Queries are resampled together with both of their values, so a query that is hard for both systems does not count.
    An interval without 0 shows a difference that other queries of the same kind should show too.

    Args:
        a: A metric per query, such as nDCG@10.
        b: The same metric of the other system on the same queries; ``None`` gives the interval of the mean of a.
        num_samples: Number of resamples.
        confidence: Share of the resampled means inside the interval.
        seed: Seed for the resampling.

    Example:
        >>> paired_bootstrap([0.5, 1.0, 0.75], [0.25, 0.75, 0.5])
        (0.25, 0.25, 0.25)

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Sec. 13.3.
    """
    difference = sample_of(a, "a", at_least=1)
    if b is not None:
        difference = np.subtract(*same_length(a, b, at_least=1))
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be strictly between 0 and 1, got {confidence}; 0.95 is usual.")
    rng, n = np.random.default_rng(seed), len(difference)
    batch = max(1, 2**20 // n)  # resamples at a time: a few MB
    sizes = [min(batch, num_samples - i) for i in range(0, num_samples, batch)]
    means = np.concatenate([difference[rng.integers(n, size=(size, n))].mean(axis=1) for size in sizes])
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(difference.mean()), float(low), float(high)


def spearman(a: Any, b: Any) -> float:
    """Spearman's rank correlation of two samples, with ties at their mean rank: (n,), (n,) -> [-1, 1].

    The result is nan if all values of a sample are equal.

    Example:
        >>> spearman([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
        1.0
    """
    x, y = same_length(a, b)
    if (x == x[0]).all() or (y == y[0]).all():  # scipy would warn
        return math.nan
    return round(float(spearmanr(x, y).statistic), 15)  # scipy gives 1 - 2e-16 for equal ranks


def auroc(positive: Any, negative: Any) -> float:
    """Probability that a value of the first sample exceeds one of the second, ties counting half: -> [0, 1].

    This is the area under the ROC curve: 0.5 is chance, and 1 separates the two samples. With norms of texts of the
    training domain and norms of others, 1 means that every text from outside has a smaller norm.

    Example:
        >>> auroc([3.0, 2.0], [1.0, 2.0])
        0.875
    """
    a, b = sample_of(positive, "positive", at_least=1), sample_of(negative, "negative", at_least=1)
    return float(mannwhitneyu(a, b, method="asymptotic").statistic / (len(a) * len(b)))


def risk_coverage(confidence: Any, is_correct: Any) -> tuple[Array, Array, float]:
    """Share of wrong answers among the k most confident, for every k: (n,), (n,) -> coverage (n,), risk (n,), area.

    A system answers only where its confidence exceeds a threshold: coverage k / n is the share of questions that it
    answers then, and risk the share of those answers that are wrong. The area is the mean risk over all coverages; a
    random confidence has the overall error rate as its area, and a useful one less. A threshold cannot separate equal
    values: within such a group the errors are spread evenly.

    Example:
        >>> coverage, risk, area = risk_coverage([3.0, 2.0, 1.0, 0.0], [True, True, False, False])
        >>> risk.round(2), round(area, 3)
        (array([0.  , 0.  , 0.33, 0.5 ]), 0.208)

    Source: El-Yaniv and Wiener, On the Foundations of Noise-free Selective Classification, JMLR 2010; the area is
    AURC of Geifman et al., ICLR 2019.
    """
    values, correct = same_length(confidence, is_correct)
    _, group = np.unique(-values, return_inverse=True)
    wrong = np.bincount(group, weights=1 - correct) / np.bincount(group)  # error rate of every group of equal values
    answered = np.arange(1, len(values) + 1)
    risk = np.cumsum(wrong[np.sort(group)]) / answered
    return answered / len(values), risk, float(risk.mean())


def symmetry_gap(forward: Any, backward: Any) -> float:
    """How far swapping the two texts moves a score: s(a, b), s(b, a) of n pairs, (n,), (n,) -> float; 0 is symmetric.

        mean |s(a, b) - s(b, a)| over the standard deviation of s(a, b)

    The result is nan if all scores are equal.

    Example:
        >>> symmetry_gap([1.0, 3.0], [1.5, 3.0])
        0.25

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Cor. 6.1: cosine and dot give 0, one-sided normalisation
    cannot.
    """
    a, b = same_length(forward, backward)
    deviation = float(a.std())
    return float(np.abs(a - b).mean()) / deviation if deviation else math.nan
