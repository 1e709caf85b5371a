"""Checked arrays in float64, with which every function of the package starts."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from st_magnitude.similarity import COSINE

Array = NDArray[np.float64]


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
    x, y = sample_of(a, "The first", at_least), sample_of(b, "The second", at_least)
    if len(x) != len(y):
        raise ValueError(
            f"The two samples must describe the same things, got {len(x)} and {len(y)} values."
        )
    return x, y


def unit_rows(matrix: Array) -> Array:
    """Rows with norm 1. A zero row stays zero."""
    return COSINE.document(matrix).numpy()
