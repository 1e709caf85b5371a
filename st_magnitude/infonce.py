"""infonce: the one kernel of every contrastive loss in this package, and the same loss in ten readable lines.

A loss is a sum of *terms*. A term is a prefix of the embedding, a temperature and a weight:

    L = sum_t w_t · mean_i [ -log softmax_j( s_t(q_i, d_j) / tau_t ) at j = offset + i ]

where s_t is a :class:`~st_magnitude.similarity.Similarity` of the first ``dim_t`` coordinates. Plain InfoNCE has one
term, temperature aggregation has T terms at the full dimension, Matryoshka has K prefixes, both together K x T.
:func:`infonce_reference` is this formula in code; :func:`infonce` computes the same number faster and in less memory.

With B queries, M documents and D dimensions:

* The kernel walks the scores in tiles of rows and never holds a B x M matrix.
* The inner products of a prefix are those of the next shorter prefix plus the block of columns between them. The
  gradient is taken block by block in the reverse order. So any number of prefixes costs the 6 B M D floating-point
  operations of a single one.
* All temperatures of a prefix share its scores.
* The forward pass takes the gradients while it holds a tile. The backward pass only scales them.
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
from torch.nn.functional import cross_entropy

from st_magnitude.similarity import COSINE, Similarity, at_least_float32, safe_norm
from st_magnitude.terms import LearnedTemperature, Term

__all__ = ["Direction", "Term", "infonce", "infonce_reference"]

Direction = Literal["query_to_document", "document_to_query", "both"]

# The number of rows of scores in a tile: enough for matrix products at full speed.
_TILE_ROWS = {"cpu": 256, "cuda": 1024}
_LOG2_E = math.log2(math.e)  # exp2 is several times as fast as exp in PyTorch on a CPU


def infonce_reference(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    direction: Direction = "query_to_document",
    offset: int = 0,
    *,
    all_queries: Tensor | None = None,
    own_documents: Tensor | None = None,
    hardness: float | tuple[float, float] = 0.0,
) -> Tensor:
    """The loss of :func:`infonce` as plain cross entropies of full score matrices, with the same arguments.

    Read it for the definition, and compare with it in tests. It needs memory for every B x M matrix of scores.

    Example:
        >>> import torch
        >>> from st_magnitude import QNORM, Term, infonce
        >>> queries, documents = torch.randn(4, 8), torch.randn(10, 8)
        >>> arguments = queries, documents, [Term(temperature=0.5), Term(dim=2, weight=0.1)], QNORM, "both", 3
        >>> torch.allclose(infonce(*arguments), infonce_reference(*arguments))
        True
    """
    rows = torch.arange(len(queries), device=queries.device)
    own = documents[rows + offset] if own_documents is None else own_documents  # (B, D)
    others, shift = (queries, 0) if all_queries is None else (all_queries, offset)  # (Q, D)
    chosen = {"query_to_document": [0], "document_to_query": [1], "both": [0, 1]}[direction]
    loss = torch.zeros((), device=queries.device)
    for term in terms:
        forward = similarity(queries[:, : term.dim], documents[:, : term.dim])  # (B, M)
        backward = similarity(others[:, : term.dim], own[:, : term.dim]).T  # (B, Q)
        for side in chosen:
            scores, positives = ((forward, rows + offset), (backward, rows + shift))[side]
            extra = _both(hardness)[side] * scores.detach()  # a negative counts exp(hardness · s) times
            extra[rows, positives] = 0
            loss = loss + term.weight * cross_entropy(scores / term.temperature + extra, positives) / len(chosen)
    return loss


def infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    direction: Direction = "query_to_document",
    offset: int = 0,
    *,
    all_queries: Tensor | None = None,
    own_documents: Tensor | None = None,
    hardness: float | tuple[float, float] = 0.0,
    tile_rows: int | None = None,
) -> Tensor:
    """InfoNCE over in-batch (and explicit) negatives: the mean over queries, summed over terms.

    Args:
        queries: Embeddings (B, D), not normalised.
        documents: Embeddings (M, D), M >= B. Row ``offset + i`` is the positive of query i, and all other rows are its
            negatives.
        terms: Prefix dimensions, temperatures and weights.
        similarity: Exponents of the norms. Learnable exponents (0-d tensors) receive gradients.
        direction: ``"query_to_document"``: the softmax of a query runs over all documents. ``"document_to_query"``:
            the softmax of a positive document runs over all queries. ``"both"``: the mean of the two losses.
        offset: Index of the first query's positive, for documents that were gathered from several devices.
        all_queries: Embeddings (Q, D) that the softmax of a document runs over, for queries that were gathered from
            several devices. Row ``offset + i`` is query i. None: the queries themselves.
        own_documents: The positives (B, D), for documents that were gathered without their gradient. The softmax of a
            document takes them from here. None: rows ``offset`` to ``offset + B`` of the documents.
        hardness: Weight alpha >= 0 of similar negatives. A negative counts exp(alpha · s) times in the softmax, where
            s is treated as a constant (Lan et al. 2025, arXiv 2503.04812, Eq. 5; sentence-transformers'
            ``hardness_mode="all_negatives"``). One number weights the negatives of both directions. A pair gives
            each direction its own alpha: ``(alpha, 0)`` weights documents only, as sentence-transformers does.
        tile_rows: Number of rows of scores in a tile; up to twice as many queries are not split. The default is 256
            on a CPU and 1024 on a GPU. Beside inputs and gradients, memory holds both sides divided by their norms
            and tiles of tile_rows x M numbers: 2 for one term, 3 for several temperatures of one prefix, 3 + K for K
            prefixes, and one more if a temperature is learned.

    Returns:
        A scalar, in float64 for float64 inputs and in float32 otherwise.

    Raises:
        ValueError: If shapes, dims, offset or direction do not fit together.

    Gradients reach queries, documents, all_queries, and those exponents and temperatures that are tensors. The forward
    pass takes them once, so a second derivative does not exist. :func:`infonce_reference` is the same loss in ten
    lines.

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
    width = _check(queries, documents, all_queries, own_documents, terms, direction, offset)
    dims = sorted({t.dim or width for t in terms})
    forward, backward = (
        _Plan(
            dims=tuple(dims),
            members=tuple(tuple(i for i, t in enumerate(terms) if (t.dim or width) == dim) for dim in dims),
            weights=tuple(t.weight for t in terms),
            hardness=alpha,
            tile_rows=tile_rows or _TILE_ROWS.get(queries.device.type, 256),
        )
        for alpha in _both(hardness)
    )
    # From here on every score is a plain inner product: the norms of the longest prefix are divided out first, and
    # those of shorter prefixes are factors of rows and columns.
    with torch.autocast(queries.device.type, enabled=False):
        q, q_scale = _divide_by_norms(queries, forward.dims, similarity.gamma_query)  # (B, D'), (K - 1, B)
        d, d_scale = _divide_by_norms(documents, forward.dims, similarity.gamma_document)  # (M, D'), (K - 1, M)
        temperatures = torch.stack([torch.as_tensor(t.temperature, dtype=q.dtype, device=q.device) for t in terms])
        losses = []
        if direction in ("query_to_document", "both"):
            losses.append(_InfoNCE.apply(q, d, q_scale, d_scale, temperatures, offset, forward))
        if direction in ("document_to_query", "both"):
            if own_documents is None:
                rows = slice(offset, offset + len(q))
                own, own_scale = d[rows], None if d_scale is None else d_scale[:, rows]
            else:
                own, own_scale = _divide_by_norms(own_documents, forward.dims, similarity.gamma_document)  # (B, D')
            if all_queries is None:
                offset = 0
            else:
                q, q_scale = _divide_by_norms(all_queries, forward.dims, similarity.gamma_query)  # (Q, D')
            losses.append(_InfoNCE.apply(own, q, own_scale, q_scale, temperatures, offset, backward))
    return losses[0] if len(losses) == 1 else (losses[0] + losses[1]) / 2


@dataclass(frozen=True)
class _Plan:
    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # per prefix, the terms that use it
    weights: tuple[float, ...]  # per term
    hardness: float
    tile_rows: int


def _both(hardness: float | tuple[float, float]) -> tuple[float, float]:
    """The weights of similar documents and of similar queries."""
    return hardness if isinstance(hardness, tuple) else (hardness, hardness)


def _check(
    queries: Tensor,
    documents: Tensor,
    all_queries: Tensor | None,
    own_documents: Tensor | None,
    terms: tuple[Term, ...],
    direction: str,
    offset: int,
) -> int:
    """The number of dimensions, after a check that the arguments fit together."""
    if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
        raise ValueError(
            "infonce takes queries (B, D) and documents (M, D); got "
            f"{tuple(queries.shape)} and {tuple(documents.shape)}."
        )
    if not terms:
        raise ValueError("infonce needs at least one Term.")
    if any(isinstance(t.temperature, LearnedTemperature) for t in terms):
        raise ValueError(
            "Ranking losses learn temperatures, infonce does not: give it a 0-d tensor that requires a gradient, "
            "Term(temperature=tau)."
        )
    if direction not in ("query_to_document", "document_to_query", "both"):
        raise ValueError(f"direction must be 'query_to_document', 'document_to_query' or 'both'; got {direction!r}.")
    if len(queries) == 0 or offset < 0 or offset + len(queries) > len(documents):
        raise ValueError(
            f"{len(queries)} queries with offset {offset} need their positives in documents[{offset}:"
            f"{offset + len(queries)}], but there are {len(documents)} documents."
        )
    width = queries.shape[1]
    if all_queries is not None and (all_queries.shape[1:] != (width,) or offset + len(queries) > len(all_queries)):
        raise ValueError(
            f"all_queries holds these {len(queries)} queries from row {offset} on, so it has the shape (Q, {width}) "
            f"with Q >= {offset + len(queries)}; got {tuple(all_queries.shape)}."
        )
    if own_documents is not None and own_documents.shape != queries.shape:
        raise ValueError(
            f"own_documents are the positives of the queries, {tuple(queries.shape)}; got {tuple(own_documents.shape)}."
        )
    if too_long := [t.dim for t in terms if t.dim is not None and t.dim > width]:
        raise ValueError(f"Term dims {too_long} exceed the {width} dimensions of the embeddings.")
    return width


def _divide_by_norms(x: Tensor, dims: tuple[int, ...], gamma: float | Tensor) -> tuple[Tensor, Tensor | None]:
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
            # The derivative of log |x| is x / |x|^2, in the coordinates of the prefix. One of the two norms is divided
            # out at the end, because the square of a small norm is 0.
            pulls = gamma * torch.cat([parts, (whole - parts.sum(dim=0))[None]]) * (norms[-1] / norms) / norms  # (K, n)
            grad = grad_divided * (scale * norms[-1])[:, None]
            for k, (start, stop) in enumerate(pairwise((0, *ctx.dims))):
                block = slice(start, stop)
                grad[:, block].addcmul_(x[:, block], pulls[k:].sum(dim=0)[:, None], value=-1)
            grad /= norms[-1:].T
        return grad, grad_gamma, None


class _InfoNCE(torch.autograd.Function):
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
    """The loss, and the gradients of the first five arguments where ``needs`` asks for them."""
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
        diagonal = offset + start  # the positives of these rows lie on it

        for k, (block, members) in enumerate(zip(blocks, plan.members, strict=True)):
            torch.addmm(products, rows[tile, block], columns[:, block].T, beta=float(k > 0), out=products)
            row_factor = row_scale[k, tile] if row_scale is not None and k < last else None  # (n,)
            column_factor = column_scale[k] if column_scale is not None and k < last else None  # (M,)

            # Scores are relative to the best one of their row and still lack row_factor, which goes into the
            # temperature. They overwrite the products where no longer prefix needs those.
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
        # A block of coordinates belongs to every prefix that reaches it: add up the slopes, the longest prefix first.
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
    """Removes the weight of hard negatives from the positives, in place; logits (n, M) are in base 2.

    Relative to the best score of the row, the logit of the positive loses the weight of the best. Where it is then the
    largest of its row, the whole row moves down with it, so that nothing overflows.
    """
    positive.sub_(peak)
    excess = positive.clamp(min=0)
    positive.sub_(excess)
    logits.sub_(excess[:, None] * _LOG2_E)
    logits.diagonal(diagonal).copy_(positive * _LOG2_E)
