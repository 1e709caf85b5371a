"""Functions of a matrix of embeddings: norms, the spread of directions, isotropy and dimension."""

from __future__ import annotations

import math
import warnings

import numpy as np
from numpy.typing import ArrayLike

from st_magnitude.geometry.arrays import Array, matrix_of, unit_rows

MOST_ROWS = 5000  # of an intrinsic dimension


def norms(x: ArrayLike) -> Array:
    """Euclidean norm of every row: (n, D) -> (n,).

    Example:
        >>> norms([[3.0, 4.0], [0.0, 2.0]])
        array([5., 2.])
    """
    return np.linalg.norm(matrix_of(x), axis=1)


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
    rows does not matter. A finite sample cannot reach 1: compare with `isoscore_ceiling`.

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


def isoscore_ceiling(num_samples: int, dim: int) -> float:
    """The IsoScore that an isotropic Gaussian sample of this size reaches, about 1 / (1 + D / N).

    Example:
        >>> isoscore_ceiling(num_samples=1000, dim=1000)
        0.5
    """
    return 1 / (1 + dim / num_samples)


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
    return int(np.searchsorted(explained, variance * explained[-1])) + 1 if explained[-1] > 0 else 0


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
    return centred.T @ centred if centred.shape[0] > centred.shape[1] else centred @ centred.T
