"""Isotropy, dimension and normality of a set of embeddings."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy.integrate import trapezoid

from st_magnitude.geometry.arrays import Array, float64, matrix_of

__all__ = [
    "effective_rank",
    "epps_pulley",
    "explained_variance",
    "intrinsic_dimension",
    "isoscore",
    "isoscore_ceiling",
]


def isoscore(x: Any) -> float:
    """IsoScore, how evenly the variance fills the dimensions: (n, D) -> [0, 1]; 1 is isotropic, 0 is a single line.

        (PR - 1) / (D - 1),   PR = (sum lambda)² / sum lambda²

    over the eigenvalues lambda of the covariance; PR is the participation ratio. The scale of the rows does not matter,
    and rows without any variance give 0. A finite sample cannot reach 1: compare the score with `isoscore_ceiling`.

    Example:
        >>> isoscore([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        1.0

    Source: Rudman et al., IsoScore: Measuring the Uniformity of Embedding Space Utilization, ACL 2022, Alg. 1,
    simplified (the two are equal).
    """
    scatter = _scatter(x)
    if (dim := np.shape(x)[1]) < 2:
        raise ValueError(f"IsoScore compares dimensions and needs at least 2, got {dim}.")
    trace, squares = float(np.trace(scatter)), float(np.square(scatter).sum())
    return (trace**2 / squares - 1) / (dim - 1) if squares else 0.0


def isoscore_ceiling(num_samples: int, dim: int) -> float:
    """The IsoScore that an isotropic Gaussian sample of this size reaches, about 1 / (1 + D / N).

    Example:
        >>> isoscore_ceiling(num_samples=1000, dim=1000)
        0.5
    """
    return 1 / (1 + dim / num_samples)


def intrinsic_dimension(x: Any, variance: float = 0.95, num_samples: int | None = 5000, seed: int = 0) -> int:
    """Number of principal components that explain a share of the variance: (n, D) -> 0 .. min(n - 1, D).

    The result depends on n, so compare samples of one size only (5,000 x 1,024 Gaussian values give 896, 2,000 x
    1,024 give 792). A warning says when n is below 4 D, where the sample rather than the space sets the number. Rows
    without any variance give 0.

    Args:
        x: The embeddings.
        variance: The share of the variance to explain.
        num_samples: Number of rows to draw without replacement if there are more; None takes all.
        seed: Seed for the draw.

    Example:
        >>> intrinsic_dimension([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]] * 2)
        2

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive
    Training, ICLR 2025, Fig. 4.
    """
    if not 0.0 < variance < 1.0:
        raise ValueError(f"variance must be a share strictly between 0 and 1, got {variance}; 0.95 is usual.")
    matrix = _drawn(x, num_samples, seed)
    if len(matrix) < 4 * matrix.shape[1]:
        warnings.warn(
            f"{len(matrix)} embeddings are few for the intrinsic dimension of {matrix.shape[1]} dimensions: the sample "
            f"limits it. Use at least {4 * matrix.shape[1]}, and compare samples of one size only.",
            stacklevel=2,
        )
    explained = _cumulated_variance(matrix)
    return int(np.searchsorted(explained, variance * explained[-1])) + 1 if explained[-1] > 0 else 0


def explained_variance(x: Any, num_samples: int | None = 5000, seed: int = 0) -> Array:
    """Share of the variance in the first k principal components, k = 1 .. D: (n, D) -> (D,), rising to 1.

    Rows without any variance give 1 throughout. `intrinsic_dimension` is the first k that reaches its share; its
    ``num_samples`` and ``seed`` are the same.

    Example:
        >>> explained_variance([[2.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        array([0.8, 1. ])
    """
    matrix = _drawn(x, num_samples, seed)
    explained = _cumulated_variance(matrix)
    shares = np.ones(matrix.shape[1])
    if explained[-1] > 0:
        shares[: len(explained)] = explained / explained[-1]
    return shares


def effective_rank(x: Any) -> float:
    """RankMe, how many dimensions the embeddings fill: (n, D) -> [1, min(n, D)].

        exp( -sum_k p_k log p_k ),   p_k = sigma_k / sum sigma

    over the singular values sigma of the matrix, which is not centred. A matrix of zeros gives 0.

    Example:
        >>> round(effective_rank([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]), 6)
        2.0

    Source: Garrido et al., RankMe, ICML 2023, Eq. 1; Roy and Vetterli, The Effective Rank, EUSIPCO 2007.
    """
    values = np.linalg.svd(matrix_of(x), compute_uv=False)
    shares = values[values > 0] / max(values.sum(), np.finfo(float).tiny)
    return float(np.exp(-(shares * np.log(shares)).sum())) if len(shares) else 0.0


def epps_pulley(x: Any, num_knots: int = 17, t_max: float = 3.0) -> Any:
    """Distance of a sample from N(0, 1), by its characteristic function: (n,) -> float; (n, K) -> (K,), by column.

        n · integral over [-t_max, t_max] of |mean_i exp(i t x_i) - exp(-t²/2)|² exp(-t²/2) dt

    by the trapezoid rule with ``num_knots`` values of t from 0 to ``t_max``. :class:`~st_magnitude.SIGReg` averages it
    over directions. A sample of N(0, 1) has the expectation 1.0525 for any n. Mean and variance count: standardise
    first to test for normality alone.

    Example:
        >>> sample = [-1.5, -0.8, -0.3, 0.0, 0.3, 0.8, 1.5]
        >>> epps_pulley(sample) < 0.2, epps_pulley([v + 2 for v in sample]) > 5
        (True, True)

    Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function, Biometrika 1983.
    """
    sample = float64(x)
    if sample.ndim not in (1, 2) or not sample.size:
        raise ValueError(f"epps_pulley takes a sample (n,) or columns (n, K), got shape {sample.shape}.")
    knots = np.linspace(0.0, t_max, num_knots)
    target = np.exp(-(knots**2) / 2)
    error = np.zeros((num_knots, *sample.shape[1:]))
    for k, t in enumerate(knots):
        real, imaginary = np.cos(t * sample).mean(axis=0), np.sin(t * sample).mean(axis=0)
        error[k] = target[k] * ((real - target[k]) ** 2 + imaginary**2)
    total = 2 * len(sample) * trapezoid(error, knots, axis=0)  # the integrand is even
    return float(total) if sample.ndim == 1 else total


def _scatter(x: Any) -> Array:
    """Centred Gram matrix, (D, D) or (n, n), whichever is smaller.

    Its non-zero eigenvalues are the eigenvalues of the covariance times a constant. The rows are scaled by a power of
    two first, which is exact and keeps every square from overflowing or vanishing.
    """
    matrix = matrix_of(x, at_least=2)
    centred = np.where(np.ptp(matrix, axis=0) > 0, matrix - matrix.mean(axis=0), 0.0)  # constant columns: exactly 0
    centred = np.ldexp(centred, -np.frexp(np.abs(centred).max())[1])
    return centred.T @ centred if centred.shape[0] > centred.shape[1] else centred @ centred.T


def _drawn(x: Any, num_samples: int | None, seed: int) -> Array:
    """At most num_samples rows, drawn without replacement."""
    matrix = matrix_of(x, at_least=2)
    if num_samples is None or len(matrix) <= num_samples:
        return matrix
    return matrix[np.random.default_rng(seed).choice(len(matrix), num_samples, replace=False)]


def _cumulated_variance(matrix: Array) -> Array:
    """Variance in the first k principal components times a constant: (n, D) -> (min(n, D),)."""
    return np.cumsum(np.linalg.eigvalsh(_scatter(matrix))[::-1].clip(min=0.0))
