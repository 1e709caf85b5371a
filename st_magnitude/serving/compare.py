"""Pure comparisons of served vectors with local ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from st_magnitude.geometry import norms
from st_magnitude.geometry.arrays import unit_rows

__all__ = [
    "changed_rankings",
    "direction_errors",
    "finite_rows",
    "nearest_change",
    "norm_law",
    "precision_of",
    "unequal_rows",
]

Array = NDArray[np.float64]
Key = TypeVar("Key")
CLOSE = 0.02  # error of directions that needs no other explanation than precision
UNLIKE = 0.05  # error of directions beyond weights in int8 (MiniLM: 0.017 to 0.032; three steps of training: 0.036)
MOVED = 0.01  # shift of norms that training leaves at such an error of directions, and rounding does not


def finite_rows(x: Array) -> NDArray[np.bool_]:
    """Rows without nan: (n, D) -> (n,)."""
    return np.asarray(np.isfinite(x).all(axis=1))


def direction_errors(served: Array, local: Array) -> Array:
    """|s / |s| - l / |l||, on the dimensions that are served: (n, D), (n, >= D) -> (n,) in [0, 2].

    Example:
        >>> direction_errors(np.array([[2.0, 0.0]]), np.array([[0.0, 1.0]])).round(3)
        array([1.414])
    """
    return norms(unit_rows(served) - unit_rows(local[:, : served.shape[1]]))


def nearest_change(served: Array, candidates: Iterable[tuple[Key, Callable[[], Array]]]) -> tuple[Key | None, float]:
    """The candidate whose directions are nearest by the median error, and that error.

    The first candidate is the model as it is. It is taken if it is close, and another candidate must halve its error.
    """
    best: tuple[Key | None, float] = (None, 2.0)
    for i, (key, local) in enumerate(candidates):
        rows = local()
        if rows.shape[1] < served.shape[1]:
            continue
        error = float(np.median(direction_errors(served, rows)))
        if i == 0 or error < best[1] / 2:
            best = (key, error)
        if best[1] < CLOSE:
            break
    return best


def norm_law(served: Array, laws: Mapping[str, Array]) -> tuple[str, float]:
    """The law that norms follow, and its factor: "" for the model's own, or "norms scaled" or "norms differ".

    Example:
        >>> norm_law(np.array([1.0, 1.0]), {"": np.array([4.0, 6.0]), "norms lost": np.array([1.0, 1.0])})
        ('norms lost', 1.0)
    """
    alive = laws[""] > 1e-12  # a text without a known word has a zero vector
    if not alive.any():
        return "", 1.0
    served, laws = served[alive], {name: law[alive] for name, law in laws.items()}
    errors = {name: float(np.median(np.abs(served / law - 1))) for name, law in laws.items()}
    nearest = min(errors, key=errors.__getitem__)
    if errors[nearest] < 0.03:
        return ("" if errors[""] < 1e-3 else nearest), 1.0
    ratios = served / laws[""]
    factor = float(np.median(ratios))
    if factor > 0 and float(np.median(np.abs(ratios / factor - 1))) < 0.01:
        return "norms scaled", factor
    return "norms differ", 1.0


def unequal_rows(errors: Array, usual: float) -> NDArray[np.bool_]:
    """Rows whose error is not explained by the precision of the others."""
    return errors > max(6 * usual, 2e-3)


def precision_of(served: Array, errors: Array, tolerance: float) -> str:
    """The number format that explains relative errors; empty if they are rounding of float32.

    Example:
        >>> x = np.random.default_rng(0).standard_normal((5, 8))
        >>> precision_of(x.astype(np.float16).astype(float), np.full(5, 3e-4), tolerance=1e-4)
        'float16'
    """
    if not len(errors) or np.median(errors) <= tolerance:
        return ""
    single = np.ascontiguousarray(served, dtype=np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():  # most of these numbers are float16 as well
        return "bfloat16"
    if (np.abs(single) < 6e4).all() and np.array_equal(single.astype(np.float16).astype(np.float32), single):
        return "float16"
    level = float(np.median(errors))
    return (
        "float16"
        if level < 2e-3
        else "bfloat16"
        if level < 2e-2
        else "int8 weights or by a checkpoint very near this one"
    )


def changed_rankings(served: Array, local: Array, k: int = 10) -> NDArray[np.bool_]:
    """Whether the first k ranks of a query differ by more than ties: two score matrices (n, m) -> (n,).

    Example:
        >>> local = np.array([[3.0, 2.0, 1.0], [1.0, 1.0, 0.0]])
        >>> changed_rankings(np.array([[1.0, 2.0, 3.0], [0.1, 0.2, 0.0]]), local)
        array([ True, False])
    """
    order = np.argsort(-served, axis=1, kind="stable")[:, :k]
    ranked = np.take_along_axis(local, order, axis=1)
    best = -np.sort(-local, axis=1)[:, :k]
    tolerance = 1e-5 * np.abs(local).max(axis=1, keepdims=True)
    return (best - ranked > tolerance).any(axis=1)
