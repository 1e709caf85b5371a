"""The loss of the kernel as plain cross entropies of full score matrices: read it for the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from st_magnitude.kernel.infonce import Direction, Exclude, Side, check_priors, sides_of
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import Judge, of_both_sides
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["infonce_reference"]


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
    exclude: Exclude | None = None,
    exclude_queries: Judge | Sequence[Judge] | None = None,
    positives: Tensor | None = None,
    log_q: Tensor | None = None,
    log_q_queries: Tensor | None = None,
) -> Tensor:
    """The loss of :func:`~st_magnitude.infonce` as cross entropies of full score matrices, with the same arguments.

    Read it for the definition, and compare with it in tests. It needs memory for every B x M matrix of scores.

    Example:
        >>> import torch
        >>> from st_magnitude import QNORM, Term, infonce
        >>> queries, documents = torch.randn(4, 8), torch.randn(10, 8)
        >>> arguments = queries, documents, [Term(temperature=0.5), Term(dim=2, weight=0.1)], QNORM, "both", 3
        >>> torch.allclose(infonce(*arguments), infonce_reference(*arguments))
        True
    """

    def one_way(
        rows: Tensor,
        columns: Tensor,
        similarity: Similarity,
        offset: int,
        alpha: float,
        side: Side,
        log_q: Tensor | None,
    ) -> Tensor:
        tile = slice(0, len(rows))
        own = torch.arange(len(rows)), torch.arange(len(rows)) + offset  # row and column of each query's own positive
        loss, excluded = rows.new_zeros(()), torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)
        for judge in side.judges:
            longest = max(term.dim or rows.shape[1] for term in terms)
            excluded |= judge(tile, similarity(rows[:, :longest], columns[:, :longest]).detach())
        is_positive = torch.zeros_like(excluded)
        is_positive[own] = True
        excluded &= ~is_positive
        if side.positives is not None:
            is_positive = side.positives(tile, excluded)
            excluded &= ~is_positive
        share = is_positive.double() / is_positive.sum(dim=1, keepdim=True)  # (B, M)
        for term in terms:
            scores = similarity(rows[:, : term.dim], columns[:, : term.dim])  # (B, M)
            extra = alpha * scores.detach().masked_fill(is_positive, 0)  # a negative counts exp(alpha · s) times
            logits = scores / term.temperature - (0 if log_q is None else log_q)
            attraction = (share.to(scores.dtype) * logits).sum(dim=1)
            log_sum = (logits + extra).masked_fill(excluded, -torch.inf).logsumexp(dim=1)
            loss = loss + term.weight * (log_sum - attraction).mean()
        return loss

    own_documents = documents[offset : offset + len(queries)] if own_documents is None else own_documents  # (B, D)
    others, shift = (queries, 0) if all_queries is None else (all_queries, offset)  # (Q, D)
    priors = check_priors(log_q, log_q_queries, documents, others)
    sides = sides_of(exclude, exclude_queries, positives, queries, documents, offset, all_queries, direction)
    losses = []
    if direction in ("query_to_document", "both"):
        alpha = of_both_sides(hardness)[0]
        losses.append(one_way(queries, documents, similarity, offset, alpha, sides[0], priors[0]))
    if direction in ("document_to_query", "both"):
        alpha = of_both_sides(hardness)[1]
        losses.append(one_way(own_documents, others, similarity.swapped, shift, alpha, sides[1], priors[1]))
    return torch.stack(losses).mean()
