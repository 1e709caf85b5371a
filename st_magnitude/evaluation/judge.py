"""Verdicts on differences of a metric."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Judgment", "judge"]


@dataclass(frozen=True)
class Judgment:
    """Whether a change of the model or of its scoring is an improvement, as `judge` finds it.

    Attributes:
        gain: Mean difference with its 95 % interval: (gain, low, high).
        num_queries, num_changed: Number of queries, and of those whose metric changed at all.
        verdict: ``"better"`` if the interval lies above 0 and reaches ``min_gain``; ``"worse"`` if
            it lies below 0; ``"no better"`` if it excludes a gain of ``min_gain``; else
            ``"undecided"``.
    """

    gain: tuple[float, float, float]
    num_queries: int
    num_changed: int
    verdict: str


def judge(
    differences: ArrayLike, min_gain: float = 0.0, num_samples: int = 10_000, seed: int = 0
) -> Judgment:
    """Judges a mean difference by an interval that also holds for few queries and few changes.

    A bootstrap of queries that all stayed the same gives [0, 0]. This interval has one more query,
    which lost everything for the lower end and won everything for the upper end:

        low, high = quantiles at 2.5 and 97.5 % of  w_1 x_1 + ... + w_n x_n -+ w_{n+1},

    where the weights w are uniform on the simplex (Dirichlet(1, ..., 1)). For differences of 0 or
    1, these are the exact limits of Clopper and Pearson; for many changes, about a bootstrap's.

    Args:
        differences: A metric such as nDCG@10 of every query with the change minus the one without,
            each in [-1, 1], (n,).
        min_gain: The smallest gain that is worth a change.
        num_samples: Number of draws of the weights.
        seed: Seed of the draws.

    Raises:
        ValueError: If there is no query, or a difference is not a number in [-1, 1].

    Example:
        >>> judge([0.0] * 25, min_gain=0.02).verdict, judge([0.0] * 250, min_gain=0.02).verdict
        ('undecided', 'no better')

    Source: Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random
    Variable, arXiv 1905.06208. That it covers for every distribution is a conjecture without a
    known exception.
    """
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not (np.abs(x) <= 1 + 1e-9).all():
        raise ValueError(
            "differences must be one number in [-1, 1] for each query, such as differences of "
            f"nDCG@10; got an array of shape {x.shape}."
        )
    changed = x[x != 0]
    unchanged = len(x) - len(changed)
    rng = np.random.default_rng(seed)
    extra = rng.standard_exponential(num_samples)
    total = extra + (rng.standard_gamma(unchanged, num_samples) if unchanged else 0.0)
    weighted = np.zeros(num_samples)
    for value in changed:
        weights = rng.standard_exponential(num_samples)
        weighted += weights * value
        total += weights
    low = float(np.quantile((weighted - extra) / total, 0.025))
    high = float(np.quantile((weighted + extra) / total, 0.975))
    verdict = "undecided"
    if high < 0:
        verdict = "worse"
    elif high < min_gain:
        verdict = "no better"
    elif low > 0:
        verdict = "better"
    return Judgment((float(x.mean()), low, high), len(x), len(changed), verdict)
