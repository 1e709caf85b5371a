"""Norms of embeddings, and how far the norms of relevant documents differ from the others."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from st_magnitude.geometry.arrays import Array, matrix_of, same_length, sample_of

__all__ = ["adjusted_cohens_d", "coefficient_of_variation", "cohens_d", "norms"]


def norms(x: Any) -> Array:
    """Euclidean norm of every row: (n, D) -> (n,).

    Example:
        >>> norms([[3.0, 4.0], [0.0, 2.0]])
        array([5., 2.])
    """
    return np.linalg.norm(matrix_of(x), axis=1)


def cohens_d(relevant: Any, irrelevant: Any, pooled: str = "df") -> float:
    """Cohen's d, the standardised difference of two means: (n,), (m,) -> number of standard deviations.

        d = (mean(relevant) - mean(irrelevant)) / s

    Between the norms of relevant and of irrelevant documents it says how well the norm alone tells them apart:
    0.2 is called small, 0.5 medium, 0.8 large. Values that agree to one part in a million (the norms of normalised
    float32 embeddings) count as equal and give 0; two different constants give plus or minus infinity, the limit.

    Args:
        relevant: The first sample, such as ``norms(documents[is_relevant])``.
        irrelevant: The second sample.
        pooled: Weights of the two unbiased variances in s²: ``"df"`` takes their degrees of freedom n - 1 (Cohen's own
            definition), ``"mean"`` takes equal weights. With groups of unequal size and spread the two differ much,
            so a report should say which one it uses.

    Example:
        >>> cohens_d([4.0, 5.0, 6.0], [2.0, 3.0, 4.0])
        2.0

    Source: Cohen (1988), Statistical Power Analysis, Eq. 2.5.2; Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 8.
    """
    a, b = sample_of(relevant, "relevant", at_least=2), sample_of(irrelevant, "irrelevant", at_least=2)
    if pooled not in ("df", "mean"):
        raise ValueError(
            f"pooled must be 'df' (variances weighted by degrees of freedom) or 'mean' (equal weights), got {pooled!r}."
        )
    weights = (len(a) - 1, len(b) - 1) if pooled == "df" else (1, 1)
    both = np.concatenate([a, b])
    if np.ptp(both) <= 1e-6 * np.abs(both).max():
        return 0.0
    difference = float(a.mean() - b.mean())
    deviation = math.sqrt(np.average([s.var(ddof=1) if np.ptp(s) else 0.0 for s in (a, b)], weights=weights))
    return difference / deviation if deviation else math.copysign(math.inf, difference)


def without(values: Array, covariate: Array) -> Array:
    """The values after the covariate, but not its mean, has been regressed out: (n,), (n,) -> (n,)."""
    x = covariate - covariate.mean()
    return values - (x @ values / (x @ x) if x.any() else 0.0) * x


def adjusted_cohens_d(values: Any, covariate: Any, is_relevant: Any, pooled: str = "df") -> float:
    """Cohen's d of the residuals of a linear regression of the values on a covariate: (n,), (n,), (n,) -> d.

    This is the control for relevant documents that are merely longer texts: with norms as values and logarithms of text
    lengths as covariate, d falls to 0 where the text length explains the difference. The covariate gets the credit for
    everything that it shares with relevance, so the result is conservative. ``pooled`` is as in `cohens_d`.

    Example:
        >>> lengths, is_relevant = [1.0, 2.0, 3.0, 4.0], [False, False, True, True]
        >>> adjusted_cohens_d([5.0, 6.0, 7.0, 8.0], lengths, is_relevant)  # the length explains everything
        0.0
    """
    y, x = same_length(values, covariate, at_least=4)
    group = same_length(y, is_relevant)[1] > 0
    residual = without(y, x)
    return cohens_d(residual[group], residual[~group], pooled=pooled)


def coefficient_of_variation(x: Any, ddof: int = 0) -> float:
    """Standard deviation over mean of a sample: (n,) -> CV, without unit; nan when the mean is 0.

    For embedding norms, at most about 0.05 says that the norm is noise, and at least about 0.1 that the model uses it.

    Args:
        x: The sample, such as ``norms(documents)``.
        ddof: Degrees of freedom to subtract: 0 for the population, 1 for the unbiased variance.

    Example:
        >>> coefficient_of_variation([1.0, 3.0])
        0.5

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, App. M.
    """
    sample = sample_of(x, "x", at_least=ddof + 1)
    mean = float(sample.mean())
    return float(sample.std(ddof=ddof)) / mean if mean else math.nan
