"""infonce: one kernel for every contrastive loss of this package.

A loss is a sum of *terms*. A term is a prefix of the embedding, a temperature and a weight:

    L = sum_t w_t · mean_i [ -log softmax_j( s_t(q_i, d_j) / tau_t ) at j = offset + i ]

where s_t is a :class:`~st_magnitude.similarity.Similarity` of the first ``dim_t`` coordinates. Plain InfoNCE has one
term, temperature aggregation has T terms at the full dimension, Matryoshka has K prefixes, both together K x T.

What makes it cheap (B queries, M documents, D dimensions):

* The scores are walked in tiles of rows; no B x M matrix is ever held.
* The inner products of a prefix are those of the next shorter one plus the block of columns between them, and the
  gradient is taken block by block in the reverse order, so that any number of prefixes costs the 6 B M D
  floating-point operations of a single one.
* Temperatures of one prefix share its scores.
* Gradients are taken in the forward pass, while a tile is at hand. The backward pass only scales them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.similarity import COSINE, Similarity, at_least_float32, safe_norm

__all__ = ["Direction", "Term", "infonce"]

Direction = Literal["query_to_document", "document_to_query", "both"]

# Rows of scores held at a time: enough for matrix products at full speed.
_TILE_ROWS = {"cpu": 256, "cuda": 1024}
_LOG2_E = math.log2(math.e)  # exp2 is several times as fast as exp in PyTorch on a CPU


@dataclass(frozen=True)
class Term:
    """One summand of a contrastive loss.

    Args:
        dim: How many leading coordinates are compared; None for all of them.
        temperature: What the scores are divided by; a positive float, or a 0-d tensor when it is learned.
        weight: What the term is multiplied by in the sum.

    Raises:
        ValueError: If dim < 1, or if temperature (given as a number) is not positive.
    """

    dim: int | None = None
    temperature: float | Tensor = 0.05
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.dim is not None and self.dim < 1:
            raise ValueError(f"Term.dim must be at least 1, or None for all dimensions; got {self.dim}.")
        if not isinstance(self.temperature, Tensor) and not self.temperature > 0:
            raise ValueError(f"Term.temperature must be positive, got {self.temperature}.")


def infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    direction: Direction = "query_to_document",
    offset: int = 0,
    *,
    hardness: float = 0.0,
    tile_rows: int | None = None,
) -> Tensor:
    """InfoNCE over in-batch (and explicit) negatives, mean over queries, sum over terms.

    Args:
        queries: (B, D) embeddings, not normalised.
        documents: (M, D) embeddings, M >= B. Row ``offset + i`` is the positive of query i, all others are negatives.
        terms: Prefix dimensions, temperatures and weights.
        similarity: The exponents of the norms. Learnable ones (0-d tensors) receive gradients.
        direction: ``"query_to_document"``: the softmax of a query runs over all documents. ``"document_to_query"``:
            the softmax of a positive document runs over all queries. ``"both"``: the mean of the two.
        offset: Where the positives of these queries begin, for documents gathered from several devices.
        hardness: alpha >= 0. Every negative counts exp(alpha · s) times in the softmax, s taken as a constant, so
            that similar negatives weigh more (Lan et al. 2025, arXiv 2503.04812, Eq. 5; sentence-transformers'
            ``hardness_mode="all_negatives"``).
        tile_rows: Rows of scores held at a time (up to twice as many queries are not split); default 256 on a CPU and
            1024 on a GPU. Memory beyond inputs and gradients is that of both sides divided by their norms and of tiles
            of tile_rows x M numbers: 2 for one term, 3 for several temperatures of one prefix, 3 + K for K prefixes;
            one more if a temperature is learned.

    Returns:
        A scalar, float64 for float64 inputs and float32 otherwise.

    Raises:
        ValueError: If shapes, dims, offset or direction do not fit together.

    Gradients reach queries, documents, and exponents and temperatures that are tensors. They are taken once in the
    forward pass: there is no second derivative.

    Example:
        >>> import torch
        >>> from st_magnitude import QNORM, Term, infonce
        >>> embeddings = torch.eye(4, requires_grad=True)
        >>> loss = infonce(embeddings, embeddings, terms=[Term(temperature=0.5), Term(dim=2, weight=0.1)])
        >>> round(loss.item(), 4)
        0.4101

    Source: van den Oord et al. 2018, arXiv 1807.03748, Eq. 4; Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 2.
    """
    terms = tuple(terms)
    width = _check(queries, documents, terms, direction, offset)
    dims = sorted({t.dim or width for t in terms})
    plan = _Plan(
        dims=tuple(dims),
        members=tuple(tuple(i for i, t in enumerate(terms) if (t.dim or width) == dim) for dim in dims),
        weights=tuple(t.weight for t in terms),
        hardness=hardness,
        tile_rows=tile_rows or _TILE_ROWS.get(queries.device.type, 256),
    )
    # From here on everything is a plain inner product: the norms of the longest prefix are divided out first,
    # those of shorter prefixes are factors on rows and columns.
    with torch.autocast(queries.device.type, enabled=False):
        q, q_scale = _divide_by_norms(queries, plan.dims, similarity.gamma_query)  # (B, D'), (K - 1, B)
        d, d_scale = _divide_by_norms(documents, plan.dims, similarity.gamma_document)  # (M, D'), (K - 1, M)
        temperatures = torch.stack([torch.as_tensor(t.temperature, dtype=q.dtype, device=q.device) for t in terms])
        losses = []
        if direction in ("query_to_document", "both"):
            losses.append(_InfoNCE.apply(q, d, q_scale, d_scale, temperatures, offset, plan))
        if direction in ("document_to_query", "both"):
            own = slice(offset, offset + len(q))
            own_scale = None if d_scale is None else d_scale[:, own]
            losses.append(_InfoNCE.apply(d[own], q, own_scale, q_scale, temperatures, 0, plan))
    return losses[0] if len(losses) == 1 else (losses[0] + losses[1]) / 2


@dataclass(frozen=True)
class _Plan:
    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # per prefix, the terms that use it
    weights: tuple[float, ...]  # per term
    hardness: float
    tile_rows: int


def _check(queries: Tensor, documents: Tensor, terms: tuple[Term, ...], direction: str, offset: int) -> int:
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise ValueError(
            "infonce takes queries (B, D) and documents (M, D), got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}."
        )
    if not terms:
        raise ValueError("infonce needs at least one Term.")
    if direction not in ("query_to_document", "document_to_query", "both"):
        raise ValueError(f"direction must be 'query_to_document', 'document_to_query' or 'both', got {direction!r}.")
    if len(queries) == 0 or offset < 0 or offset + len(queries) > len(documents):
        raise ValueError(
            f"{len(queries)} queries with offset {offset} need their positives in documents[{offset}:"
            f"{offset + len(queries)}], but there are {len(documents)} documents."
        )
    width = queries.shape[1]
    if too_long := [t.dim for t in terms if t.dim is not None and t.dim > width]:
        raise ValueError(f"Term dims {too_long} exceed the {width} dimensions of the embeddings.")
    return width


def _divide_by_norms(x: Tensor, dims: tuple[int, ...], gamma: float | Tensor) -> tuple[Tensor, Tensor | None]:
    """x / |x|^gamma of the longest prefix, (n, D'); and what takes its products to those of the shorter prefixes."""
    x = at_least_float32(x[:, : dims[-1]])
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return x, None
    divided, scales = _DivideByNorms.apply(x, torch.as_tensor(gamma, dtype=x.dtype), dims)
    return divided, scales if len(dims) > 1 else None


class _DivideByNorms(torch.autograd.Function):
    """(x / |x|^gamma, (|x| / |x[:dim]|)^gamma for all prefixes but the last): (n, D) -> (n, D), (K - 1, n).

    Autograd through the same formulas would hold several temporaries of the size of x, and so set the peak of a large
    batch. This backward pass holds the gradient alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        norms = torch.cat([safe_norm(x[:, :dim]) for dim in dims], dim=1).T  # (K, n)
        scale, scales = norms[-1] ** -gamma, (norms[-1] / norms[:-1]) ** gamma  # (n,), (K - 1, n)
        ctx.save_for_backward(x, gamma, norms, scale, scales)
        ctx.dims = dims
        return x * scale[:, None], scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_divided: Tensor, grad_scales: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, norms, scale, scales = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            whole = torch.linalg.vecdot(x, grad_divided) * scale  # d loss / d -log |x|^gamma, (n,)
            parts = grad_scales * scales  # d loss / d log of the scales, (K - 1, n)
            grad_gamma = (parts * (norms[-1] / norms[:-1]).log()).sum() - (whole * norms[-1].log()).sum()
            # The log of a norm grows by x / |x|^2, in the coordinates of its prefix. One of the two norms is divided
            # out at the end, as the square of a small one is 0.
            pulls = gamma * torch.cat([parts, (whole - parts.sum(dim=0))[None]]) * (norms[-1] / norms) / norms  # (K, n)
            grad = grad_divided * (scale * norms[-1])[:, None]
            for k, (start, stop) in enumerate(pairwise((0, *ctx.dims))):
                block = slice(start, stop)
                grad[:, block].addcmul_(x[:, block], pulls[k:].sum(dim=0)[:, None], value=-1)
            grad /= norms[-1:].T
        return grad, grad_gamma, None


class _InfoNCE(torch.autograd.Function):
    """The sum of all terms for plain inner products, with the gradients taken on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (B, D), D the longest prefix
        columns: Tensor,  # (M, D)
        row_scale: Tensor | None,  # (K - 1, B)
        column_scale: Tensor | None,  # (K - 1, M)
        temperatures: Tensor,  # (T,)
        offset: int,
        plan: _Plan,
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
    plan: _Plan,
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Loss, and the gradients of the first five arguments where ``needs`` asks for them."""
    num_rows, num_columns, last = len(rows), len(columns), len(plan.dims) - 1
    blocks = [slice(a, b) for a, b in pairwise((0, *plan.dims))]
    height = num_rows if num_rows <= 2 * plan.tile_rows else plan.tile_rows
    with_gradient = any(needs)

    def buffer() -> Tensor:
        return rows.new_empty(height, num_columns)

    products_ = buffer()
    scores_ = buffer() if last else products_
    slopes_ = [buffer() for _ in plan.dims] if with_gradient else []  # d loss / d products of each prefix
    softmax_ = buffer() if last or len(temperatures) > 1 or not with_gradient else slopes_[0]
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
        products, slopes = products_[:n], [slope[:n] for slope in slopes_]
        diagonal = offset + start  # on which the positives of these rows lie

        for k, (block, members) in enumerate(zip(blocks, plan.members, strict=True)):
            torch.addmm(products, rows[tile, block], columns[:, block].T, beta=float(k > 0), out=products)
            row_factor = row_scale[k, tile] if row_scale is not None and k < last else None  # (n,)
            column_factor = column_scale[k] if column_scale is not None and k < last else None  # (M,)

            # scores: relative to the best of the row, and still without row_factor, which rides on the temperature;
            # in place of the products where no longer prefix needs these
            scores = scores_[:n] if k < last else products
            if column_factor is None:
                peak = products.amax(dim=1)
                torch.sub(products, peak[:, None], out=scores)
            else:
                torch.mul(products, column_factor, out=scores)
                peak = scores.amax(dim=1)
                scores.sub_(peak[:, None])
            score_positive = _times(scores.diagonal(diagonal), row_factor)  # (n,)

            for position, t in enumerate(members):
                temperature, weight = temperatures[t], plan.weights[t] / num_rows
                total, positive = totals[t, tile], positives[t, tile]
                softmax = slopes[k] if with_gradient and position == 0 else softmax_[:n]
                rate = _times((1 / temperature + plan.hardness) * _LOG2_E, row_factor)
                torch.mul(scores, rate if row_factor is None else rate[:, None], out=softmax)
                torch.div(score_positive, temperature, out=positive)
                if plan.hardness:
                    _spare_positives(softmax, positive, plan.hardness * _times(peak, row_factor), diagonal)
                torch.sum(softmax.exp2_(), dim=1, out=total)
                if grad_temperatures is not None:
                    expected = _times(torch.linalg.vecdot(softmax, scores) / total, row_factor)
                    grad_temperatures[t] -= (expected - score_positive).sum() * (weight / temperature**2)
                if with_gradient:
                    share = _times(weight / temperature / total, row_factor)
                    softmax.mul_(share[:, None])
                    if position > 0:
                        slopes[k].add_(softmax)
            if not with_gradient:
                continue
            pull = sum(plan.weights[t] / temperatures[t] for t in members) / num_rows
            slopes[k].diagonal(diagonal).sub_(_times(pull, row_factor))
            if column_factor is not None:
                slopes[k].mul_(column_factor)
            if row_factor is not None or column_factor is not None:
                moments = torch.mul(slopes[k], products, out=softmax_[:n])
                if row_factor is not None and grad_row_scale is not None:
                    grad_row_scale[k, tile] = moments.sum(dim=1) / row_factor
                if column_factor is not None and grad_column_scale is not None:
                    grad_column_scale[k] += moments.sum(dim=0) / column_factor

        if not with_gradient:
            continue
        # A block of coordinates takes part in every prefix that reaches it: add up the slopes from the longest down.
        slope = slopes[last]
        for k in range(last, -1, -1):
            if k < last:
                slope.add_(slopes[k])
            if grad_rows is not None:
                torch.mm(slope, columns[:, blocks[k]], out=grad_rows[tile, blocks[k]])
            if grad_columns is not None:
                grad_columns[:, blocks[k]].addmm_(slope.T, rows[tile, blocks[k]])

    weights = torch.tensor(plan.weights, dtype=rows.dtype, device=rows.device)
    loss = (totals.log_() - positives).mean(dim=1) @ weights  # (T,) @ (T,)
    return loss, gradients


def _times(x: Any, factor: Tensor | None) -> Any:
    return x if factor is None else x * factor


def _spare_positives(logits: Tensor, positive: Tensor, peak: Tensor, diagonal: int) -> None:
    """Takes the weight of hard negatives off the positives, in place; logits (n, M) are in base 2.

    Relative to the best of the row, the positive's own logit is less by the weight of the best. Where that makes it the
    largest of the row, the row moves down with it, so that nothing overflows.
    """
    positive.sub_(peak)
    excess = positive.clamp(min=0)
    positive.sub_(excess)
    logits.sub_(excess[:, None] * _LOG2_E)
    logits.diagonal(diagonal).copy_(positive * _LOG2_E)
