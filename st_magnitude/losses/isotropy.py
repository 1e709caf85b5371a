"""SIGReg over all directions: a polynomial of the cosines of all pairs of rows.

SIGReg compares the characteristic function of projections a · x_i with that of N(0, 1), at knots
t_k of weight w_k. Its square is a sum over pairs of rows, in which a uniform unit direction a
enters by

    E_a cos(t a · v) = L(t |v|),   L(s) = 0F1(; D/2; -s²/4)

so the mean over all directions is a maximum mean discrepancy with a radial kernel:

    mean_ij K(|x_i - x_j|) - 2 mean_j H(|x_j|) + C
    K(r) = sum_k w_k L(t_k r),   H(r) = sum_k w_k exp(-t_k²/2) L(t_k r),   C = sum_k w_k exp(-t_k²)

Rows of norm sqrt(D) have |x_i - x_j|² = 2 D (1 - cos), so H is a constant, and K a function of the
cosine that a polynomial of degree 10 to 20 gives to 1e-10.

Source: Schoenberg, Metric Spaces and Completely Monotone Functions, Annals of Mathematics 1938, for
    L; Gretton et al., A Kernel Two-Sample Test, JMLR 2012; LeJEPA, arXiv 2511.08544, for SIGReg.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import e
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor

from st_magnitude._distributed import num_ranks
from st_magnitude.kernel.tiled import Known
from st_magnitude.losses.ranks import Gathered
from st_magnitude.similarity import safe_norm

Statistic: TypeAlias = Literal["epps_pulley", "plain_mean"]
Numbers = TypeVar("Numbers", Tensor, NDArray[np.float64])

NUM_KNOTS = {"epps_pulley": 17, "plain_mean": 16}  # with that at 0
LARGEST_KNOT = 3.0
NUM_TERMS = 60  # of a power series, whose last is below 1e-16
PRECISION = 1e-10
# Rows of a tile: on a CPU its cosines, polynomial and derivative fit the cache of a core
SIDE = {"cpu": 256, "cuda": 4096}
REFUSAL = (
    "SIGReg over all directions has no second derivative, which create_graph=True and torch.func"
    " ask for. Give a number of directions: SIGReg(1024)."
)


def over_all_directions(
    x: Tensor, dims: Sequence[int], statistic: Statistic, gather: bool
) -> Tensor:
    """SIGReg of rows (n, D), each prefix of which is normalised and scaled by the root of its
    dimension; with ``gather``, of the rows of all ranks."""
    gather = gather and num_ranks() > 1
    with torch.no_grad():
        everyone = Gathered([x], gather).join(x.detach())
        factor = (1 if statistic == "plain_mean" else len(everyone)) / len(dims)
        value, gradient = x.new_zeros(()), torch.zeros_like(x)
        for dim in dims:
            columns = everyone[:, :dim] if gather else None
            part, slopes = _part_of_mean(x[:, :dim], columns, statistic)
            value.add_(part, alpha=factor)
            gradient[:, :dim].add_(slopes, alpha=factor)
    known: Tensor = Known.apply(value, [gradient], REFUSAL, x)
    return all_gather_with_grad(known[None]).sum() if gather else known


def _part_of_mean(
    x: Tensor, everyone: Tensor | None, statistic: Statistic
) -> tuple[Tensor, Tensor]:
    """The part of rows (n, D) in the mean over all pairs of rows (N, D), and its gradient for them;
    None: they are all rows. A row of zeros counts as orthogonal to all rows."""
    norms = safe_norm(x)
    rows = x / norms
    columns = None if everyone is None else everyone / safe_norm(everyone)
    number = len(rows if columns is None else columns)
    total, slopes = _sums(rows, columns, polynomial(x.shape[1], statistic))

    # A pair counts twice. What lies along a row does not change its direction
    slopes -= rows * (rows * slopes).sum(dim=1, keepdim=True)
    return total / number**2, slopes / norms * (2 / number**2)


def _sums(
    rows: Tensor, columns: Tensor | None, coefficients: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """sum_ij P(u_i · v_j), and sum_j P'(u_i · v_j) v_j (n, D), tile by tile; where the columns are
    the rows (None), a tile is computed for both sides of the diagonal."""
    others = rows if columns is None else columns
    given = [rows.new_full((), x) for x in coefficients]
    side = SIDE.get(rows.device.type, SIDE["cuda"])
    total, slopes = rows.new_zeros(()), torch.zeros_like(rows)
    for i in range(0, len(rows), side):
        for j in range(i if columns is None else 0, len(others), side):
            u, v = rows[i : i + side], others[j : j + side]
            values, derivatives = _horner(u @ v.T, given)
            is_mirrored = columns is None and j > i
            total.add_(values.sum(), alpha=2 if is_mirrored else 1)
            slopes[i : i + side].addmm_(derivatives, v)
            if is_mirrored:
                slopes[j : j + side].addmm_(derivatives.T, u)
    return total, slopes


def _horner(x: Tensor, coefficients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A polynomial of x and its derivative, by Horner's rule in place."""
    *lower, highest = coefficients
    values, derivatives = highest.expand_as(x).clone(), torch.zeros_like(x)
    for coefficient in reversed(lower):
        torch.addcmul(values, derivatives, x, out=derivatives)
        torch.addcmul(coefficient, values, x, out=values)
    return values, derivatives


def knots_of(statistic: Statistic, numbers: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The knots t_k > 0, their weights w_k and the targets exp(-t_k²/2), (T,) each, from the
    numbers 1, 2, ... of the knots."""
    step = LARGEST_KNOT / (NUM_KNOTS[statistic] - 1)
    knots = step * numbers
    target = e ** (-(knots**2) / 2)
    if statistic == "plain_mean":
        return knots, 0 * knots + 1 / NUM_KNOTS[statistic], target
    weights = 2 * step * target
    weights[-1] /= 2
    return knots, weights, target


@cache
def polynomial(dim: int, statistic: Statistic) -> list[float]:
    """P(c) = K - 2 H + C as coefficients of 1, c, c², ...

    With z_k = t_k² D/2, K is sum_k w_k 0F1(; D/2; -z_k (1 - c)). Its Taylor series at c = 0 becomes
    a Chebyshev series, which is cut where its terms fall below 1e-10.
    """
    knots, weights, target = knots_of(statistic, np.arange(1.0, NUM_KNOTS[statistic]))
    half, z = dim / 2, knots**2 * dim / 2
    powers = _terms(half, z)
    series = [weights * powers[m] @ _terms(half + m, -z).sum(axis=0) for m in range(NUM_TERMS)]
    twice_h = 2 * weights * target @ _terms(half, -z / 2).sum(axis=0)
    series[0] += weights @ target**2 - twice_h
    short = chebyshev.chebtrim(chebyshev.poly2cheb(series), PRECISION)
    coefficients: list[float] = chebyshev.cheb2poly(short).tolist()
    return coefficients


def _terms(b: float, z: NDArray[np.float64]) -> NDArray[Any]:
    """z^m / (m! b (b + 1) ... (b + m - 1)) of numbers z (T,) for m = 0, 1, ..., (M, T), whose sum
    is 0F1(; b; z). scipy's overflows at D = 384."""
    m = np.arange(1, NUM_TERMS)[:, None]
    return np.concatenate([np.ones((1, len(z))), np.cumprod(z / ((b + m - 1) * m), axis=0)])
