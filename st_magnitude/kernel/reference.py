"""The loss of the kernel as plain cross entropies of full score matrices: read it for the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Exclude
from st_magnitude.kernel.infonce import Direction
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import Judge, Side
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

    hardnesses = hardness if isinstance(hardness, tuple) else (hardness, hardness)
    batch = Batch(
        queries,
        documents,
        offset,
        all_queries,
        hardnesses,
        exclude,
        exclude_queries,
        positives,
        log_q,
        log_q_queries,
    )
    batch.check()

    def one_way(name: str, rows: Tensor, columns: Tensor, similarity: Similarity) -> Tensor:
        panel = batch.panel(name, Side(rows, None), Side(columns, None), attracts=True)
        tile, own = slice(0, len(rows)), (torch.arange(len(rows)), torch.arange(len(rows)) + (panel.own or 0))
        loss, excluded = rows.new_zeros(()), torch.zeros(len(rows), len(columns), dtype=torch.bool, device=rows.device)
        longest = max(term.dim or rows.shape[1] for term in terms)
        scores = similarity(rows[:, :longest], columns[:, :longest]).detach()
        for judge in panel.judges:
            excluded |= judge(tile, scores).bool()
        is_positive = torch.zeros_like(excluded) if panel.kept is None else panel.kept(tile, scores).bool()
        is_positive[own] = True
        excluded &= ~is_positive
        share = is_positive.double() / is_positive.sum(dim=1, keepdim=True)  # (B, M)
        for term in terms:
            scores = similarity(rows[:, : term.dim], columns[:, : term.dim])  # (B, M)
            logits = scores / term.temperature + (0 if panel.bias is None else panel.bias)
            extra = panel.hardness * scores.detach().masked_fill(
                is_positive, 0
            )  # a negative counts exp(alpha · s) times
            attraction = (share.to(scores.dtype) * logits).sum(dim=1)
            log_sum = (logits + extra).masked_fill(excluded, -torch.inf).logsumexp(dim=1)
            loss = loss + term.weight * (log_sum - attraction).mean()
        return loss

    own_documents = documents[batch.own] if own_documents is None else own_documents  # (B, D)
    others = queries if all_queries is None else all_queries  # (Q, D)
    losses = []
    if direction in ("query_to_document", "both"):
        losses.append(one_way("query_to_doc", queries, documents, similarity))
    if direction in ("document_to_query", "both"):
        losses.append(one_way("doc_to_query", own_documents, others, similarity.swapped))
    return torch.stack(losses).mean()
