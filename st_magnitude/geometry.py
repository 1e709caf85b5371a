"""Geometry of a set of embeddings: pure functions of arrays with one row for each embedding.

Arrays, tensors (on any device, of any float type) and nested lists go in; numbers come out,
computed in float64. An array of the wrong shape, or with too few rows or values, raises a
ValueError. Evaluators, callbacks and reports measure with these functions and nothing else.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from st_magnitude.similarity import COSINE

__all__ = [
    "adjusted_cohens_d",
    "coefficient_of_variation",
    "cohens_d",
    "cohens_d_error",
    "intrinsic_dimension",
    "isoscore",
    "mean_cosine",
    "norms",
]

Array = NDArray[np.float64]
MOST_ROWS = 5000  # of an intrinsic dimension

# --- checked arrays in float64, with which every function starts ----------------------------------


def float64(x: ArrayLike) -> Array:
    """An array, tensor or nested list in float64."""
    if isinstance(x, Tensor):
        return x.detach().cpu().double().numpy()
    return np.asarray(x, dtype=np.float64)


def matrix_of(x: ArrayLike, at_least: int = 1) -> Array:
    """Checked embeddings, (n, D) in float64."""
    matrix = float64(x)
    if matrix.ndim != 2 or len(matrix) < at_least:
        raise ValueError(
            f"Embeddings must be a matrix (n, D) of at least {at_least} row(s), got shape"
            f" {matrix.shape}." + (" Pass x[None] for a single vector." if matrix.ndim == 1 else "")
        )
    return matrix


def sample_of(x: ArrayLike, name: str, at_least: int) -> Array:
    """Checked one-dimensional sample, (n,) in float64."""
    sample = float64(x)
    if sample.ndim != 1 or len(sample) < at_least:
        raise ValueError(
            f"{name} must be a one-dimensional sample of at least {at_least} value(s), got shape"
            f" {sample.shape}." + (" Pass norms(x) for embeddings." if sample.ndim == 2 else "")
        )
    return sample


def same_length(a: ArrayLike, b: ArrayLike, at_least: int = 2) -> tuple[Array, Array]:
    """Two checked samples of the same things in the same order, (n,) each."""
    x = sample_of(a, "The first", at_least)
    y = sample_of(b, "The second", at_least)
    if len(x) != len(y):
        raise ValueError(
            f"The two samples must describe the same things, got {len(x)} and {len(y)} values."
        )
    return x, y


def unit_rows(matrix: Array) -> Array:
    """Rows with norm 1. A zero row stays zero."""
    return COSINE.document(matrix).numpy()


# --- functions of a matrix of embeddings: norms, the spread of directions, dimension --------------


def norms(x: ArrayLike) -> Array:
    """Euclidean norm of every row: (n, D) -> (n,).

    Example:
        >>> norms([[3.0, 4.0], [0.0, 2.0]])
        array([5., 2.])
    """
    return float64(np.linalg.norm(matrix_of(x), axis=1))


def mean_cosine(x: ArrayLike) -> float:
    """Mean cosine over all pairs of different rows: (n, D) -> [-1, 1], in O(n D).

    With unit rows u the sum over ordered pairs is |sum u|² - sum |u|². A zero row has cosine 0 with
    everything. Random directions give 0; collapse onto one direction gives 1.

    Example:
        >>> mean_cosine([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])  # pairs: 0, 1, 0
        0.3333333333333333
    """
    unit = unit_rows(matrix_of(x, at_least=2))
    total = unit.sum(axis=0)
    pairs = len(unit) * (len(unit) - 1)
    return float(total @ total - unit.any(axis=1).sum()) / pairs


def isoscore(x: ArrayLike) -> float:
    """IsoScore, how evenly the variance fills the dimensions: (n, D) -> [0, 1].

        (PR - 1) / (D - 1),   PR = (sum lambda)² / sum lambda²

    over the eigenvalues lambda of the covariance; PR is the participation ratio. 1 is isotropic,
    and 0 a single line or rows without variance; a single dimension gives nan. The scale of the
    rows does not matter. A finite sample cannot reach 1: an isotropic one of N rows has
    about 1 / (1 + D / N).

    Example:
        >>> isoscore([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        1.0

    Source: Rudman et al., IsoScore: Measuring the Uniformity of Embedding Space Utilization, ACL
    2022, Alg. 1, simplified (the two are equal).
    """
    scatter = _scatter(x)
    dim = np.shape(x)[1]
    if dim == 1:
        return math.nan
    trace = float(np.trace(scatter))
    squares = float(np.square(scatter).sum())
    return (trace**2 / squares - 1) / (dim - 1) if squares else 0.0


def intrinsic_dimension(x: ArrayLike, variance: float = 0.95) -> int:
    """Number of principal components that explain a share of the variance: (n, D) -> at most D.

    The result depends on n, so of more than 5,000 rows so many are drawn. Compare samples of one
    size only (5,000 x 1,024 Gaussian values give 896, 2,000 x 1,024 give 792). A warning says when
    n is below 4 D, where the sample rather than the space sets the number. Rows without any
    variance give 0.

    Example:
        >>> intrinsic_dimension([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]] * 2)
        2

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in
    Contrastive Training, ICLR 2025, Fig. 4.
    """
    if not 0.0 < variance < 1.0:
        raise ValueError(
            f"variance must be a share strictly between 0 and 1, got {variance}; 0.95 is usual."
        )
    matrix = matrix_of(x, at_least=2)
    if len(matrix) > MOST_ROWS:
        drawn = np.random.default_rng(0).choice(len(matrix), MOST_ROWS, replace=False)
        matrix = matrix[drawn]
    n, dim = matrix.shape
    if n < 4 * dim:
        warnings.warn(
            f"{n} embeddings are few for the intrinsic dimension of {dim} dimensions: the sample"
            f" limits it. Use at least {4 * dim}, and compare samples of one size only.",
            stacklevel=2,
        )
    eigenvalues = np.linalg.eigvalsh(_scatter(matrix))[::-1]  # falling, (min(n, D),)
    explained = np.cumsum(eigenvalues.clip(min=0.0))
    if not explained[-1] > 0:
        return 0
    return int(np.searchsorted(explained, variance * explained[-1])) + 1


def _scatter(x: ArrayLike) -> Array:
    """Centred Gram matrix, (D, D) or (n, n), whichever is smaller.

    Its non-zero eigenvalues are the eigenvalues of the covariance times a constant. The rows are
    scaled by a power of two first, which is exact and keeps every square from overflowing or
    vanishing.
    """
    matrix = matrix_of(x, at_least=2)
    # constant columns: exactly 0
    centred = np.where(np.ptp(matrix, axis=0) > 0, matrix - matrix.mean(axis=0), 0.0)
    centred = np.ldexp(centred, -np.frexp(np.abs(centred).max())[1])
    narrow = centred.T if centred.shape[0] > centred.shape[1] else centred
    return float64(narrow @ narrow.T)


# --- functions of samples, such as norms of embeddings or figures of queries ----------------------


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


def adjusted_cohens_d(values: ArrayLike, covariate: ArrayLike, is_relevant: ArrayLike) -> float:
    """Cohen's d of the residuals of a regression of the values on a covariate: 3 x (n,) -> d.

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
