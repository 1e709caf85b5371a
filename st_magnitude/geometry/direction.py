"""How directions are spread over the unit sphere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import logsumexp

from st_magnitude.geometry.arrays import Array, matrix_of, unit_rows

__all__ = ["CosineSum", "alignment", "infonce_alignment", "infonce_uniformity", "mean_cosine", "uniformity"]


def mean_cosine(x: Any) -> float:
    """Mean cosine over all pairs of different rows: (n, D) -> [-1, 1], in O(n D).

    With unit rows u the sum over ordered pairs is |sum u|² - sum |u|². A zero row has cosine 0 with everything.
    Random directions give 0; collapse onto one direction gives 1.

    Example:
        >>> mean_cosine([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])  # pairs: 0, 1, 0
        0.3333333333333333
    """
    return CosineSum().add(matrix_of(x, at_least=2)).mean


class CosineSum:
    """`mean_cosine` of rows that arrive in chunks: it keeps the sum of the unit rows and their number."""

    def __init__(self) -> None:
        self.total: Array = np.zeros(1)
        self.num_nonzero = self.num_rows = 0

    def add(self, x: Any) -> CosineSum:
        """Adds a chunk, (n, D), and returns the sum itself."""
        unit = unit_rows(matrix_of(x))
        self.total = self.total + unit.sum(axis=0)
        self.num_nonzero += int(unit.any(axis=1).sum())
        self.num_rows += len(unit)
        return self

    @property
    def mean(self) -> float:
        """Mean cosine over all pairs of different rows so far; nan below two rows."""
        pairs = self.num_rows * (self.num_rows - 1)
        return float(self.total @ self.total - self.num_nonzero) / pairs if pairs else math.nan


def alignment(queries: Any, documents: Any, alpha: float = 2.0) -> float:
    """Mean distance of positive pairs on the unit sphere, raised to a power: (n, D), (n, D) -> [0, 2^alpha].

        mean_i |u_i - v_i|^alpha,   u and v the normalised rows

    Lower is better. Row i of one is the positive of row i of the other.

    Example:
        >>> alignment([[2.0, 0.0]], [[0.0, 1.0]])
        2.0

    Source: Wang and Isola, Understanding Contrastive Representation Learning through Alignment and Uniformity on
    the Hypersphere, ICML 2020, Sec. 4.1.
    """
    u, v = unit_rows(matrix_of(queries)), unit_rows(matrix_of(documents))
    if u.shape != v.shape:
        raise ValueError(
            f"Row i of queries and row i of documents must make a pair, got shapes {u.shape} and {v.shape}."
        )
    return float(np.mean(np.square(u - v).sum(axis=1) ** (alpha / 2)))


def uniformity(x: Any, t: float = 2.0) -> float:
    """Logarithm of the mean Gaussian potential of all pairs on the unit sphere: (n, D) -> [-4 t, 0], lower is better.

        log mean_{i < j} exp(-t |u_i - u_j|²),   u the normalised rows

    Example:
        >>> uniformity([[1.0, 0.0], [-5.0, 0.0]])  # opposite points: -t 2²
        -8.0

    Source: Wang and Isola, ICML 2020, Sec. 4.1. Takes O(n² D) time, in tiles of 1,024 rows.
    """
    unit = unit_rows(matrix_of(x, at_least=2))
    n, squares = len(unit), np.square(unit).sum(axis=1)
    total = 0.0
    for i in range(0, n, 1024):
        distances = squares[i : i + 1024, None] + squares[i:] - 2 * unit[i : i + 1024] @ unit[i:].T
        total += np.triu(np.exp(-t * distances), k=1).sum()  # row a, column b of the tile: the pair (i + a, i + b)
    return math.log(total / (n * (n - 1) / 2))


def infonce_alignment(queries: Any, documents: Any, temperature: float) -> float:
    """The part of the InfoNCE loss that pulls positive pairs together: (n, D), (n, D) -> float, lower is better.

        -mean_i cos(q_i, d_i) / tau

    `alignment` is another quantity: a distance without a temperature.

    Example:
        >>> infonce_alignment([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 3.0]], temperature=0.5)
        -2.0

    Source: Dinu et al., Effective Post-Training Embedding Compression via Temperature Control in Contrastive
    Training, ICLR 2025, Eq. 4, first term; with `infonce_uniformity` it is the limit of InfoNCE - log M for M
    negatives.
    """
    u, v = unit_rows(matrix_of(queries)), unit_rows(matrix_of(documents))
    if u.shape != v.shape:
        raise ValueError(
            f"Row i of queries and row i of documents must make a pair, got shapes {u.shape} and {v.shape}."
        )
    return -float((u * v).sum(axis=1).mean()) / _positive(temperature)


def infonce_uniformity(x: Any, temperature: float) -> float:
    """The part of the InfoNCE loss that pushes all others apart: (n, D) -> [-1/tau, 1/tau], lower is better.

        mean_i log mean_{j != i} exp(cos(x_i, x_j) / tau)

    `uniformity` is another quantity: it has one mean over all pairs inside the logarithm and a fixed bandwidth. At a
    low temperature the nearest neighbours decide; at a high temperature the result is the mean cosine over tau.

    Example:
        >>> infonce_uniformity([[1.0, 0.0], [-5.0, 0.0]], temperature=0.5)  # opposite points: -1 / 0.5
        -2.0

    Source: Dinu et al., ICLR 2025, Eq. 4, second term, with cosine (their section 3.2). Takes O(n² D) time, in tiles
    of 1,024 rows.
    """
    unit, tau = unit_rows(matrix_of(x, at_least=2)), _positive(temperature)
    n, total = len(unit), 0.0
    for start in range(0, n, 1024):
        logits = unit[start : start + 1024] @ unit.T / tau  # (rows, n)
        own = np.arange(len(logits))
        logits[own, start + own] = -np.inf
        total += float(logsumexp(logits, axis=1).sum())
    return total / n - math.log(n - 1)


def _positive(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}; usual values are 0.01 to 1.")
    return temperature
