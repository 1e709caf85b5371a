"""The statistic of SIGReg and its gradient, over given directions and over all directions.

The Epps-Pulley distance of N projected embeddings p_i = a · x_i from a target with the characteristic function phi:

    T(a) = sum_k w_k [ (mean_i cos(t_k p_i) - phi(t_k))² + (mean_i sin(t_k p_i))² ]

averaged over directions a. There are two ways to the average:

* `sampled` takes given directions. The knots t_k are multiples of one step, so the cosines and sines at a few multiples
  give those at all of them: with 2 and 3 multiples, cos(5b ± a) = cos 5b cos a ∓ sin 5b sin a reaches 17 knots. The
  sums over rows of such products are one small matrix product per direction, and the gradient is another one with the
  same factors.
* `exact` takes the whole sphere of directions, where E_a cos(a · v) = Lambda_D(|v|). One smooth function of the
  distance of every pair remains, which is tabulated as a Chebyshev series.

Under torch.distributed both give the statistic of the joined batch, also when batches differ in size. The gradient is
multiplied by the number of ranks, because DDP takes the mean over ranks.

Source: Epps and Pulley, A Test for Normality Based on the Empirical Characteristic Function, Biometrika 1983; LeJEPA,
arXiv 2511.08544, section 4; for the closed form also arXiv 2606.17603.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["Statistic", "exact", "null_expectation", "num_rows", "sampled", "sphere_characteristic"]

Array = NDArray[np.float64]

# The number of projections in a chunk; each takes 24 numbers of memory. On a CPU they stay in the cache.
_CHUNK = {"cpu": 2**16, "cuda": 2**21}
# The number of pairs in a tile of the exact form.
_TILE = {"cpu": 2**17, "cuda": 2**23}
_MAX_ANGLE = 800.0  # the largest t · |v| for which Lambda is tabulated


@dataclass(frozen=True)
class Statistic:
    """Knots t_k > 0 (0 adds nothing), weights w_k, target phi(t_k), and whether the sum is multiplied by N."""

    knots: tuple[float, ...]
    weights: tuple[float, ...]
    target: tuple[float, ...]
    scale_by_n: bool


def null_expectation(statistic: Statistic, num_rows: int) -> float:
    """The mean of T(a) over samples of the target: sum_k w_k (1 - phi(t_k)²), divided by N unless scale_by_n."""
    w, phi = np.array(statistic.weights), np.array(statistic.target)
    return float(w @ (1 - phi**2)) / (1 if statistic.scale_by_n else num_rows)


class _Walk(torch.autograd.Function):
    """The value of walk(x, with_gradient) -> (value, gradient); the forward pass takes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, walk: Callable[[Tensor, bool], tuple[Tensor, Tensor | None]]) -> Tensor:
        value, gradient = walk(x, ctx.needs_input_grad[0])
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0] * grad_output, None


# --- given directions -------------------------------------------------------------------------------------------------


def sampled(x: Tensor, directions: Tensor, statistic: Statistic, gather: bool = True) -> Tensor:
    """The mean of T(a) over the columns of directions: (n, D), (D, K) -> scalar. It is differentiable in x."""
    walk = partial(_walk_directions, directions=directions, statistic=statistic, ranks=_num_ranks(gather))
    return _Walk.apply(x, walk)


def _walk_directions(
    x: Tensor, with_gradient: bool, directions: Tensor, statistic: Statistic, ranks: int
) -> tuple[Tensor, Tensor | None]:
    """The loss and its gradient, by chunks of directions."""
    rows, num_directions = len(x), directions.shape[1]
    total = _joined_rows(x, ranks)
    num_fine, num_coarse = _basis(len(statistic.knots))
    products = _product_formulas(len(statistic.knots)).to(x)  # (2 T, P Q)
    first = statistic.knots[0]
    stride = 2 * num_fine + 1
    multiples = [*range(1, num_fine + 1), *(stride * b for b in range(1, num_coarse + 1))]
    steps = x.new_tensor([first * m for m in multiples])[:, None]  # (A + B, 1)
    knots, weights, target = (x.new_tensor(v) for v in (statistic.knots, statistic.weights, statistic.target))
    weights = weights * ((total if statistic.scale_by_n else 1) / num_directions)

    # All ranks must cut the directions in the same way, however many rows each of them has
    chunk = max(1, min(num_directions, _CHUNK.get(x.device.type, 2**16) * ranks // total))
    fine_ = x.new_ones(chunk, 2 * num_fine + 1, rows)  # 1, cosines, sines of a θ
    coarse_ = x.new_ones(chunk, 2 * num_coarse + 1, rows)  # 1, cosines, sines of (2 A + 1) b θ
    loss, gradient = x.new_zeros(()), torch.zeros_like(x) if with_gradient else None
    for start in range(0, num_directions, chunk):
        a = directions[:, start : start + chunk].T  # (C, D)
        c = len(a)
        fine, coarse = fine_[:c], coarse_[:c]
        angles = (a @ x.T)[:, None] * steps  # (C, A + B, n)
        for planes, angle, size in (
            (fine, angles[:, :num_fine], num_fine),
            (coarse, angles[:, num_fine:], num_coarse),
        ):
            torch.cos(angle, out=planes[:, 1 : size + 1])
            torch.sin(angle, out=planes[:, size + 1 :])
        sums = torch.bmm(fine, coarse.mT).view(c, -1) @ products.T  # (C, 2 T): of cosines and of sines at all knots
        error = (_sum_over_ranks(sums, ranks) / total).view(c, 2, -1)
        error[:, 0] -= target
        loss += (error.square() * weights).sum()
        if gradient is not None:
            # d T / d p = 2/N sum_k w_k t_k (imaginary error · cos(t_k p) - real error · sin(t_k p))
            slope = torch.stack([error[:, 1], -error[:, 0]], dim=1) * (weights * knots * (2 * ranks / total))
            mixed = (slope.view(c, -1) @ products).view(c, fine.shape[1], -1)  # (C, P, Q)
            slopes = torch.bmm(mixed.mT, fine).mul_(coarse).sum(dim=1)  # (C, n)
            gradient.addmm_(slopes.T, a)
    return loss, gradient


@lru_cache
def _basis(num_knots: int) -> tuple[int, int]:
    """The fewest multiples (A fine ones, B coarse ones) that reach num_knots: A + (2 A + 1) B >= num_knots."""
    candidates = [(a, -(-(num_knots - a) // (2 * a + 1))) for a in range(1, num_knots + 1)]
    return min(candidates, key=sum)


@lru_cache
def _product_formulas(num_knots: int) -> Tensor:
    """cos kθ (rows 0 .. T - 1) and sin kθ (rows T .. 2 T - 1), k = 1 .. T, of products fine x coarse: (2 T, P Q).

    With k = (2 A + 1) b + a and |a| <= A.
    """
    num_fine, num_coarse = _basis(num_knots)
    formulas = torch.zeros(2, num_knots, 2 * num_fine + 1, 2 * num_coarse + 1, dtype=torch.float64)
    for k in range(1, num_knots + 1):
        b = (k + num_fine) // (2 * num_fine + 1)
        a = k - (2 * num_fine + 1) * b
        cos_a, sin_a, sign = abs(a), num_fine + abs(a), math.copysign(1, a)  # 0 is the constant 1
        cos_b, sin_b = b, num_coarse + b
        formulas[0, k - 1, cos_a, cos_b] = 1
        if a:
            formulas[1, k - 1, sin_a, cos_b] = sign
        if b:
            formulas[1, k - 1, cos_a, sin_b] = 1
        if a and b:
            formulas[0, k - 1, sin_a, sin_b] = -sign
    return formulas.view(2 * num_knots, -1)


# --- all directions ---------------------------------------------------------------------------------------------------


def exact(x: Tensor, statistic: Statistic, radius: float | None = None, gather: bool = True) -> Tensor:
    """The expectation of T(a) over uniform directions: (n, D) -> scalar. It is differentiable in x.

        N^-2 sum_ij g(|x_i - x_j|²) - 2/N sum_i h(|x_i|²) + sum_k w_k phi(t_k)²,
        g(r²) = sum_k w_k Lambda_D(t_k r),   h(r²) = sum_k w_k phi(t_k) Lambda_D(t_k r)

    Args:
        x: Embeddings (n, D).
        statistic: Knots, weights and target.
        radius: Upper bound of the norms; None takes the largest norm of the data.
        gather: Whether to join the batches of all ranks.

    Raises:
        ValueError: If the norms are not finite (with ``radius=None``), or too large to be tabulated.
    """
    ranks = _num_ranks(gather)
    if radius is None:
        longest = torch.linalg.vector_norm(x.detach(), dim=1).max()
        if ranks > 1:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        radius = longest.item()
        if not math.isfinite(radius):
            raise ValueError("The exact form takes finite embeddings, but some are infinite or not a number.")
        radius = 2.0 ** math.ceil(math.log2(max(radius, 1e-3)))  # so that there are few different tables
    tolerance = 1e-13 if x.dtype == torch.float64 else 1e-8
    table = _table(statistic, x.shape[1], 4 * radius**2 * 1.0001, tolerance)
    return _Walk.apply(x, partial(_walk_pairs, statistic=statistic, table=table, ranks=ranks))


def _walk_pairs(
    x: Tensor, with_gradient: bool, statistic: Statistic, table: _Table, ranks: int
) -> tuple[Tensor, Tensor | None]:
    """The loss and its gradient, by tiles of this rank's rows against the rows of all ranks."""
    everyone = _gather_rows(x, ranks) if ranks > 1 else x  # (N, D)
    total = len(everyone)
    squares, all_squares = x.square().sum(dim=1), everyone.square().sum(dim=1)  # (n,), (N,)
    factor = float(total) if statistic.scale_by_n else 1.0
    constant = sum(w * p * p for w, p in zip(statistic.weights, statistic.target, strict=True))
    norms, all_norms = table.unit(squares), table.unit(all_squares)
    own, others = _series(norms, table.h), _series(all_norms, table.h)
    gradient = torch.zeros_like(x) if with_gradient else None
    height = max(1, _TILE.get(x.device.type, 2**17) // total)
    row_sums = torch.empty_like(squares)
    for start in range(0, len(x), height):
        tile = slice(start, start + height)
        distances = torch.addmm(all_squares, x[tile], everyone.T, alpha=-2).add_(squares[tile, None])  # (C, N)
        table.unit(distances, out=distances)
        # Each pair alone is close to 0, so that the sum loses few digits
        pairs = _series(distances, table.g).sub_(others).sub_(own[tile, None] - constant)
        torch.sum(pairs, dim=1, out=row_sums[tile])
        if gradient is not None:
            slopes = _series(distances, table.g_slope)
            gradient[tile] = x[tile] * slopes.sum(dim=1, keepdim=True) - slopes @ everyone
    if gradient is not None:
        gradient -= total * _series(norms, table.h_slope)[:, None] * x
        gradient *= 4 * ranks * factor / total**2
    return _sum_over_ranks(row_sums.sum() * (factor / total**2), ranks), gradient


@dataclass(frozen=True)
class _Table:
    """Chebyshev coefficients of g and h and of their derivatives, on [0, end]."""

    end: float
    g: tuple[float, ...]
    h: tuple[float, ...]
    g_slope: tuple[float, ...]
    h_slope: tuple[float, ...]

    def unit(self, squares: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps [0, end] to [-1, 1]."""
        scaled = torch.mul(squares, 2 / self.end, out=out) if out is not None else squares * (2 / self.end)
        return scaled.sub_(1).clamp_(-1, 1)


@lru_cache(maxsize=64)
def _table(statistic: Statistic, dim: int, end: float, tolerance: float) -> _Table:
    knots, weights, target = (np.array(v) for v in (statistic.knots, statistic.weights, statistic.target))
    if (angle := knots[-1] * math.sqrt(end)) > _MAX_ANGLE:
        raise ValueError(
            f"The exact form tabulates angles up to {_MAX_ANGLE:.0f}, but embeddings with norms up to "
            f"{math.sqrt(end) / 2:.4g} at t_max={knots[-1]:.4g} have angles up to {angle:.0f}. Give a scale, or a "
            "number of directions."
        )

    def values(y: Array, of_knot: Array) -> Array:
        r = np.sqrt((y + 1) / 2 * end)
        return sphere_characteristic(dim, np.outer(r, knots)) @ of_knot

    g = _interpolate(lambda y: values(y, weights), tolerance)
    h = _interpolate(lambda y: values(y, weights * target), tolerance)
    slopes = [tuple((chebyshev.chebder(c) * (2 / end)).tolist()) or (0.0,) for c in (g, h)]
    return _Table(end, tuple(g.tolist()), tuple(h.tolist()), *slopes)


def _interpolate(function: Callable[[Array], Any], tolerance: float) -> Array:
    """Chebyshev coefficients on [-1, 1], up to the last one that is not negligible beside the largest value, at -1.

    As functions of the squared distance, angles up to s need about s / 2 coefficients.
    """
    largest = float(np.abs(function(np.array([-1.0])))[0])
    for degree in (16, 32, 64, 128, 256, 512):
        coefficients: Array = chebyshev.chebinterpolate(function, degree)
        matters = np.flatnonzero(np.abs(coefficients) > tolerance * largest)
        if len(matters) and matters[-1] < 0.9 * degree:
            break
    return coefficients[: matters[-1] + 1] if len(matters) else coefficients[:1]


def _series(y: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """sum_n c_n T_n(y), by Clenshaw's recurrence."""
    twice, last, before, spare = 2 * y, torch.zeros_like(y), torch.zeros_like(y), torch.empty_like(y)
    for c in coefficients[:0:-1]:
        torch.mul(twice, last, out=spare).sub_(before).add_(c)
        last, before, spare = spare, last, before
    return torch.mul(y, last, out=spare).sub_(before).add_(coefficients[0])


def sphere_characteristic(dim: int, s: Array) -> Array:
    """Lambda_D(s) = E cos(s a_1) for a uniform on the unit sphere in D dimensions, = 0F1(; D/2; -s²/4): any shape.

    The marginal density of a_1 is (1 - a²)^((D - 3) / 2). Its Gaussian quadrature (Golub and Welsch, 1969) converges
    faster than exponentially in the number of nodes beyond s / 2, and unlike a power series it never overflows.
    """
    nodes, weights = _gegenbauer(dim, 64 * math.ceil((0.55 * float(np.max(s, initial=0.0)) + 40) / 64))
    flat = np.ravel(s)
    values = [
        np.cos(np.outer(part, nodes)) @ weights for part in np.array_split(flat, len(flat) * len(nodes) // 2**22 + 1)
    ]
    return np.concatenate(values).reshape(np.shape(s))


@lru_cache(maxsize=32)
def _gegenbauer(dim: int, count: int) -> tuple[Array, Array]:
    """Nodes and weights; the weights add up to 1. For D = 1 the nodes are the two points -1 and 1."""
    n = np.arange(2, count)
    squares = np.concatenate([[1 / dim], n * (n + dim - 3) / ((2 * n + dim - 2) * (2 * n + dim - 4))])
    nodes, vectors = np.linalg.eigh(np.diag(np.sqrt(squares), 1) + np.diag(np.sqrt(squares), -1))
    return nodes, vectors[0] ** 2


# --- ranks ------------------------------------------------------------------------------------------------------------


def _num_ranks(gather: bool) -> int:
    return dist.get_world_size() if gather and dist.is_available() and dist.is_initialized() else 1


def num_rows(x: Tensor, gather: bool = True) -> int:
    """The number of rows of the joined batch."""
    return _joined_rows(x, _num_ranks(gather))


def _joined_rows(x: Tensor, ranks: int) -> int:
    return int(_sum_over_ranks(x.new_tensor(float(len(x))), ranks).item()) if ranks > 1 else len(x)


def _sum_over_ranks(x: Tensor, ranks: int) -> Tensor:
    if ranks > 1:
        dist.all_reduce(x)
    return x


def _gather_rows(x: Tensor, ranks: int) -> Tensor:
    """The rows of all ranks, however many each has: (n, D) -> (N, D)."""
    sizes = x.new_zeros(ranks, dtype=torch.long)
    sizes[dist.get_rank()] = len(x)
    counts = _sum_over_ranks(sizes, ranks).tolist()
    padded = x.new_zeros(max(counts), x.shape[1])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
