"""How directions are spread over the unit sphere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from st_magnitude.geometry.arrays import matrix_of, unit_rows

__all__ = ["alignment", "mean_cosine", "uniformity"]


def mean_cosine(x: Any) -> float:
    """Mean cosine over all pairs of different rows: (n, D) -> [-1, 1], in O(n D).

    With unit rows u the sum over ordered pairs is |sum u|² - sum |u|². A zero row has cosine 0 with everything.
    Random directions give 0; collapse onto one direction gives 1.

    Example:
        >>> mean_cosine([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])  # pairs: 0, 1, 0
        0.3333333333333333
    """
    unit = unit_rows(matrix_of(x, at_least=2))
    total, pairs = unit.sum(axis=0), len(unit) * (len(unit) - 1)
    return float(total @ total - unit.any(axis=1).sum()) / pairs


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
