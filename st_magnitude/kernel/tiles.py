"""The tiles behind :func:`~st_magnitude.infonce`: how the loss and its gradients are computed. See docs/kernel.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.terms import Term
from st_magnitude.similarity import at_least_float32, safe_norm

_LOG2_E = math.log2(math.e)  # exp2 is several times as fast as exp in PyTorch on a CPU


# (rows, their scores (n, M)) -> booleans (n, M), True for the columns that do not count as negatives of a row
Judge = Callable[[slice, Tensor], Tensor]


@dataclass(frozen=True)
class Plan:
    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # per prefix, the terms that use it
    weights: tuple[float, ...]  # per term
    hardness: float
    judges: tuple[Judge, ...]  # what leaves columns out, tile by tile
    positives: Judge | None  # the columns that are not negatives but stay; None: the diagonal
    log_q: Tensor | None  # (M,)
    tile_rows: int | None  # None: rows_of_a_tile


def rows_of_a_tile(device: torch.device, num_columns: int) -> int:
    """The default height of a tile: enough rows for matrix products at full speed.

    On a CPU a tile should also stay in the cache, and many small tiles cost more in calls than they compute: a tile
    has half a million scores, but at least 256 rows.
    """
    return 1024 if device.type == "cuda" else max(256, 2**19 // num_columns)


def prefixes_of(terms: Sequence[Term], width: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The prefixes of the terms in ascending order, and the numbers of the terms that compare each of them."""
    dims = tuple(sorted({term.dim or width for term in terms}))
    return dims, tuple(tuple(i for i, term in enumerate(terms) if (term.dim or width) == dim) for dim in dims)


def of_both_sides(hardness: float | tuple[float, float]) -> tuple[float, float]:
    """The weights of similar documents and of similar queries."""
    return hardness if isinstance(hardness, tuple) else (hardness, hardness)


def divide_by_norms(x: Tensor, dims: tuple[int, ...], gamma: float | Tensor) -> tuple[Tensor, Tensor | None]:
    """x / |x|^gamma of the longest prefix, (n, D'), and the factors that turn it into shorter ones, (K - 1, n)."""
    x = at_least_float32(x[:, : dims[-1]])
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return x, None
    divided, scales = _DivideByNorms.apply(x, torch.as_tensor(gamma, dtype=x.dtype), dims)
    return divided, scales if len(dims) > 1 else None


class _DivideByNorms(torch.autograd.Function):
    """(x / |x|^gamma, (|x| / |x[:dim]|)^gamma for all prefixes but the last): (n, D) -> (n, D), (K - 1, n).

    Autograd of the same formulas holds several temporaries of the size of x, which set the peak memory of a large
    batch. This backward pass holds only the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        norms = torch.cat([safe_norm(x[:, :dim]) for dim in dims], dim=1).T
        norms = norms.contiguous()  # (K, n); factors with a stride multiply at a seventh of the speed
        scale, scales = norms[-1] ** -gamma, (norms[-1] / norms[:-1]) ** gamma  # (n,), (K - 1, n)
        ctx.save_for_backward(x, gamma, norms, scale, scales)
        ctx.dims = dims
        return x * scale[:, None], scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divided: Tensor, grad_scales: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, norms, scale, scales = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            grad = grad_divided * scale[:, None]
            whole = torch.linalg.vecdot(x, grad)  # d loss / d -log |x|^gamma, (n,)
            parts = grad_scales * scales  # d loss / d log of the scales, (K - 1, n)
            grad_gamma = (parts * (norms[-1] / norms[:-1]).log()).sum() - (whole * norms[-1].log()).sum()
            # The derivative of log |x| is x / |x|^2, in the coordinates of the prefix. One of the two norms is divided
            # out at the end, because the square of a small norm is 0.
            pulls = gamma * torch.cat([parts, (whole - parts.sum(dim=0))[None]]) * (norms[-1] / norms) / norms  # (K, n)
            grad *= norms[-1:].T
            for k, (start, stop) in enumerate(pairwise((0, *ctx.dims))):
                block = slice(start, stop)
                grad[:, block].addcmul_(x[:, block], pulls[k:].sum(dim=0)[:, None], value=-1)
            grad /= norms[-1:].T
        return grad, grad_gamma, None


class InfoNCE(torch.autograd.Function):
    """The sum of all terms for plain inner products; the forward pass takes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (B, D), D the longest prefix
        columns: Tensor,  # (M, D)
        row_scale: Tensor | None,  # (K - 1, B)
        column_scale: Tensor | None,  # (K - 1, M)
        temperatures: Tensor,  # (T,)
        offset: int,
        plan: Plan,
    ) -> Tensor:
        with torch.autocast(rows.device.type, enabled=False):
            loss, gradients = _walk(
                rows, columns, row_scale, column_scale, temperatures.tolist(), offset, plan, ctx.needs_input_grad
            )
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*(g if g is None else g * grad_output for g in ctx.saved_tensors), None, None)


def _walk(
    rows: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    column_scale: Tensor | None,
    temperatures: list[float],
    offset: int,
    plan: Plan,
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss, and the gradients of the first five arguments where ``needs`` asks for them."""
    num_rows, num_columns, last = len(rows), len(columns), len(plan.dims) - 1
    blocks = [slice(a, b) for a, b in pairwise((0, *plan.dims))]
    most = plan.tile_rows or rows_of_a_tile(rows.device, num_columns)
    height = math.ceil(num_rows / math.ceil(num_rows / most))  # tiles of the same size
    with_gradient = any(needs)
    chains = [_powers(members, temperatures, plan.hardness) for members in plan.members]
    # A bias of the logits is a factor of the exponentials, which leaves powers of them alone. No factor exceeds 1, so
    # the best score of a row is still a safe shift.
    log_prior = None if plan.log_q is None else plan.log_q.min() - plan.log_q  # (M,)
    prior = None if log_prior is None else log_prior.exp()

    def buffer() -> Tensor:
        return rows.new_empty(height, num_columns)

    scores_ = [buffer() for _ in plan.dims]  # of each prefix, later d loss / d products
    free = buffer()
    softmax_ = buffer() if max(map(len, plan.members)) > 1 else None
    totals = rows.new_empty(len(temperatures), num_rows)  # softmax denominators
    positives = torch.empty_like(totals)  # logits of the positives
    inputs = (rows, columns, row_scale, column_scale, rows.new_empty(len(temperatures)))
    gradients: list[Any] = [
        torch.zeros_like(x) if x is not None and need else None for x, need in zip(inputs, needs, strict=False)
    ]
    grad_rows, grad_columns, grad_row_scale, grad_column_scale, grad_temperatures = gradients

    for start in range(0, num_rows, height):
        tile = slice(start, min(start + height, num_rows))
        n = tile.stop - tile.start
        diagonal = offset + start  # the positives of these rows lie on it

        # A longer prefix only adds the block of coordinates that the shorter one lacks, so all prefixes together cost
        # one matrix product.
        products = [scores[:n] for scores in scores_]
        for k, block in enumerate(blocks):
            shorter = products[max(k - 1, 0)]
            torch.addmm(shorter, rows[tile, block], columns[:, block].T, beta=float(k > 0), out=products[k])
        kept = plan.positives(tile, products[last]) if plan.positives and (plan.judges or plan.hardness) else None
        excluded = _excluded(plan.judges, tile, products[last], diagonal, kept)
        slopes: list[Tensor] = []

        for k, chain in enumerate(chains):
            row_factor = row_scale[k, tile] if row_scale is not None and k < last else None  # (n,)
            column_factor = column_scale[k] if column_scale is not None and k < last else None  # (M,)

            # Scores are relative to the best one of their row and still lack row_factor, which goes into the
            # temperature.
            scores = products[k] if column_factor is None else products[k].mul_(column_factor)
            if excluded is not None:
                scores.masked_fill_(excluded, torch.finfo(scores.dtype).min / 4)  # infinity would make 0 · infinity
            peak = scores.amax(dim=1)  # (n,)
            scores.sub_(peak[:, None])
            score_positive = _times(scores.diagonal(diagonal), row_factor)  # (n,)

            # Terms of falling temperature: where the ratio of two is 2 or 3, the next exponential is a power of the one
            # at hand, which is cheaper. The gradient is taken now, because the tile is gone after this pass.
            slope = free[:n]
            scores_[k], free = free, scores_[k]  # the slopes stay, the scores are not needed after this prefix
            softmax = slope if softmax_ is None else softmax_[:n]
            for position, (t, power) in enumerate(chain):
                temperature, weight = temperatures[t], plan.weights[t] / num_rows
                total, positive = totals[t, tile], positives[t, tile]
                torch.div(score_positive, temperature, out=positive)
                if power > 1:
                    softmax.pow_(power)
                else:
                    rate = _times((1 / temperature + plan.hardness) * _LOG2_E, row_factor)
                    torch.mul(scores, rate if row_factor is None else rate[:, None], out=softmax)
                    if plan.hardness:
                        bare = None  # logits without hardness
                        if kept is not None:
                            bare = scores / (temperature if row_factor is None else temperature / row_factor[:, None])
                        own = plan.hardness * _times(peak, row_factor)
                        _spare_positives(softmax, positive, own, diagonal, kept, bare)
                    softmax.exp2_()
                if prior is None:
                    torch.sum(softmax, dim=1, out=total)
                else:
                    torch.mv(softmax, prior, out=total)
                if grad_temperatures is not None:
                    expected = _times(torch.linalg.vecdot(_times(softmax, prior), scores) / total, row_factor)
                    grad_temperatures[t] -= (expected - score_positive).sum() * (weight / temperature**2)
                if with_gradient:
                    share = _times(weight / temperature / total, row_factor)[:, None]
                    if position:
                        slope.addcmul_(softmax, share)
                    else:
                        torch.mul(softmax, share, out=slope)
            slopes.append(slope)
            if not with_gradient:
                continue
            if prior is not None:
                slope.mul_(prior)
            # The softmax pulls a row towards all columns; its positive pushes back by the weight of all terms.
            pull = sum(plan.weights[t] / temperatures[t] for t, _ in chain) / num_rows
            slope.diagonal(diagonal).sub_(_times(pull, row_factor))
            if row_factor is not None or column_factor is not None:
                moments = scores.mul_(slope)
                if row_factor is not None and grad_row_scale is not None:
                    # A row of slopes sums to 0, so the peak does not matter.
                    grad_row_scale[k, tile] = moments.sum(dim=1) / row_factor
                if column_factor is not None and grad_column_scale is not None:
                    grad_column_scale[k] += (moments.sum(dim=0) + peak @ slope) / column_factor
            if column_factor is not None:
                slope.mul_(column_factor)

        if not with_gradient:
            continue
        # A block of coordinates belongs to every prefix that reaches it: add up the slopes, the longest prefix first.
        slope = slopes[last]
        for k in range(last, -1, -1):
            if k < last:
                slope.add_(slopes[k])
            if grad_rows is not None:
                torch.mm(slope, columns[:, blocks[k]], out=grad_rows[tile, blocks[k]])
            if grad_columns is not None:
                grad_columns[:, blocks[k]].addmm_(slope.T, rows[tile, blocks[k]])

    if log_prior is not None:
        positives += log_prior[offset : offset + num_rows]
    weights = torch.tensor(plan.weights, dtype=rows.dtype, device=rows.device)
    loss = (totals.log_() - positives).mean(dim=1) @ weights  # (T,) @ (T,)
    return loss, gradients


def _powers(members: tuple[int, ...], temperatures: list[float], hardness: float) -> list[tuple[int, int]]:
    """Terms by falling temperature, each with the power of the exponential before it that is its own, or with 0."""
    chain: list[tuple[int, int]] = []
    for t in sorted(members, key=lambda t: -temperatures[t]):
        ratio = temperatures[chain[-1][0]] / temperatures[t] if chain and not hardness else 0.0
        chain.append((t, round(ratio) if round(ratio) in (2, 3) and abs(ratio - round(ratio)) < 2e-7 else 0))
    return chain


def _excluded(
    judges: tuple[Judge, ...], tile: slice, scores: Tensor, diagonal: int, kept: Tensor | None
) -> Tensor | None:
    """The columns that do not count as negatives, (n, M); positives always stay."""
    if not judges:
        return None
    excluded = torch.zeros_like(scores, dtype=torch.bool)
    for judge in judges:
        excluded |= judge(tile, scores)
    if kept is not None:
        excluded &= ~kept
    excluded.diagonal(diagonal).fill_(False)
    return excluded


def _times(x: Any, factor: Tensor | None) -> Any:
    return x if factor is None else x * factor


def _spare_positives(
    logits: Tensor, positive: Tensor, peak: Tensor, diagonal: int, kept: Tensor | None, bare: Tensor | None
) -> None:
    """Removes the weight of hard negatives from the positives, in place; logits (n, M) are in base 2.

    Relative to the best score of the row, the logit of a positive loses the weight of the best, so another logit
    can be the largest of its row: all are taken relative to it. ``bare`` are the logits without weights, for
    several positives: those in ``kept``.
    """
    positive.sub_(peak)
    if kept is None or bare is None:
        logits.diagonal(diagonal).copy_(positive * _LOG2_E)
    else:
        torch.where(kept, bare.sub_(peak[:, None]).mul_(_LOG2_E), logits, out=logits)
    best = logits.amax(dim=1)
    logits.sub_(best[:, None])
    positive.sub_(best / _LOG2_E)
