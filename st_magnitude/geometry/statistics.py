"""Functions of samples, such as norms of embeddings or figures of queries."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import spearmanr

from st_magnitude.geometry.arrays import same_length, sample_of


def cohens_d(relevant: ArrayLike, irrelevant: ArrayLike) -> float:
    """Cohen's d, the standardised difference of two means: (n,), (m,) -> standard deviations.

        d = (mean(relevant) - mean(irrelevant)) / s,   s² pooled by the degrees of freedom

    Between the norms of relevant and of irrelevant documents it says how well the norm alone tells
    them apart: 0.2 is called small, 0.5 medium, 0.8 large. Values that agree to one part in a
    million (the norms of normalised float32 embeddings) count as equal and give 0; two different
    constants give plus or minus infinity, the limit.

    Example:
        >>> cohens_d([4.0, 5.0, 6.0], [2.0, 3.0, 4.0])
        2.0

    Source: Cohen (1988), Statistical Power Analysis, Eq. 2.5.2; Beyond the Unit Hypersphere, arXiv
        2602.09229, Eq. 8.
    """
    a = sample_of(relevant, "relevant", at_least=2)
    b = sample_of(irrelevant, "irrelevant", at_least=2)
    both = np.concatenate([a, b])
    if np.ptp(both) <= 1e-6 * np.abs(both).max():
        return 0.0
    difference = float(a.mean() - b.mean())
    squares = sum(len(s) * float(s.var()) for s in (a, b) if np.ptp(s))  # constants: exactly 0
    deviation = math.sqrt(squares / (len(both) - 2))
    return difference / deviation if deviation else math.copysign(math.inf, difference)


def cohens_d_error(d: float, n: int, m: int) -> float:
    """Standard error of Cohen's d between groups of n and of m values.

        error² = (n + m) / (n m) + d² / (2 (n + m))

    d ± 1.96 of it is a 95 % interval. An infinite d has an infinite error.

    Example:
        >>> cohens_d_error(0.0, 20, 20)
        0.31622776601683794

    Source: Hedges and Olkin (1985), Statistical Methods for Meta-Analysis, Ch. 5.
    """
    return math.sqrt((n + m) / (n * m) + d**2 / (2 * (n + m)))


def norm_warning(d: float, error: float, before: float = math.nan) -> str:
    """Why no document may be kept for its large norm, in a few sentences; empty where d allows it.

    The norm marks the wrong documents where the 95 % interval of d, d ± 1.96 · error, lies below 0.
    Training has not taught it anything where d fell by more than 0.2, a small effect, and to below
    its interval.

    Args:
        d: `cohens_d` of document norms, relevant minus never-relevant; nan where it is undefined.
        error: `cohens_d_error` of d.
        before: d of the same documents before training.

    Example:
        >>> norm_warning(-0.1, error=0.3), norm_warning(0.5, error=0.1, before=0.6)
        ('', '')
        >>> print(norm_warning(-1.8, error=0.1, before=-0.2).split(". ")[0])
        Never-relevant documents have the larger norms (Cohen's d -1.80, before training -0.20)
    """
    is_negative = d == -math.inf or d + 1.96 * error < 0
    if not (is_negative or before - d > max(0.2, 1.96 * error)):
        return ""
    change = "" if math.isnan(before) else f", before training {before:+.2f}"
    fault = "Never-relevant documents have the larger norms"
    if not is_negative:
        fault = "Training has brought the norms of answers and of never-relevant documents together"
    return (
        f"{fault} (Cohen's d {d:+.2f}{change}). Do not drop documents by their norm. What helps"
        " differs between data: explicit negatives that resemble the queries, scale='auto' if the"
        " scale was fixed, or a fixed scale and a higher temperature if it was 'auto'. Measure d"
        " and nDCG@10 after each change."
    )


def adjusted_cohens_d(values: ArrayLike, covariate: ArrayLike, is_relevant: ArrayLike) -> float:
    """Cohen's d of the residuals of a regression of the values on a covariate: (n,) thrice -> d.

    This is the control for relevant documents that are merely longer texts: with norms as values
    and logarithms of text lengths as covariate, d falls to 0 where the text length explains the
    difference. The covariate gets the credit for everything that it shares with relevance.

    Example:
        >>> lengths, is_relevant = [1.0, 2.0, 3.0, 4.0], [False, False, True, True]
        >>> # the length explains everything
        >>> adjusted_cohens_d([5.0, 6.0, 7.0, 8.0], lengths, is_relevant)
        0.0
    """
    y, x = same_length(values, covariate, at_least=4)
    group = same_length(y, is_relevant)[1] > 0
    centred = x - x.mean()
    residual = y - (centred @ y / (centred @ centred) if centred.any() else 0.0) * centred
    return cohens_d(residual[group], residual[~group])


def coefficient_of_variation(x: ArrayLike) -> float:
    """Standard deviation over mean of a sample: (n,) -> CV, without unit; nan when the mean is 0.

    For embedding norms, at most about 0.05 says that the norm is noise, and at least about 0.1 that
    the model uses it.

    Example:
        >>> coefficient_of_variation([1.0, 3.0])
        0.5

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, App. M.
    """
    sample = sample_of(x, "x", at_least=1)
    mean = float(sample.mean())
    return float(sample.std()) / mean if mean else math.nan


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation: (n,), (n,) -> [-1, 1]; nan if a sample is constant.

    Example:
        >>> spearman([1.0, 2.0, 3.0], [10.0, 100.0, 1000.0])
        1.0
    """
    x, y = same_length(a, b)
    if (x == x[0]).all() or (y == y[0]).all():  # scipy would warn
        return math.nan
    return round(float(spearmanr(x, y).statistic), 15)  # scipy gives 1 - 2e-16 for equal ranks
