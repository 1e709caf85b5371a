"""The loss of the kernel as plain cross entropies of full score matrices: read it for the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Direction, PartitionMode
from st_magnitude.kernel.infonce import softmaxes_of
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import Side
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["infonce_reference"]


def infonce_reference(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    directions: Sequence[Direction] = ("query_to_doc",),
    offset: int = 0,
    *,
    partition_mode: PartitionMode = "joint",
    own_documents: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """The loss of :func:`~st_magnitude.infonce` as cross entropies of full score matrices, with the same arguments.

    Read it for the definition, and compare with it in tests. It needs memory for every B x M matrix of scores.

    Example:
        >>> import torch
        >>> from st_magnitude import QNORM, Term, infonce
        >>> queries, documents = torch.randn(4, 8), torch.randn(10, 8)
        >>> terms, directions = [Term(temperature=0.5), Term(dim=2, weight=0.1)], ("query_to_doc", "doc_to_query")
        >>> arguments = queries, documents, terms, QNORM, directions, 3
        >>> torch.allclose(infonce(*arguments), infonce_reference(*arguments))
        True
    """
    batch = Batch(queries, documents, offset, **others)
    batch.check(directions)
    own = documents[batch.own] if own_documents is None else own_documents  # (B, D)
    rows = {"query": (queries, similarity.query), "doc": (own, similarity.document)}
    all_queries = queries if batch.all_queries is None else batch.all_queries  # (Q, D)
    columns = {"query": (all_queries, similarity.query), "doc": (documents, similarity.document)}

    def logits(direction: Direction, term: Term, attracts: bool) -> tuple[Tensor, Tensor]:
        """The logits (B, M) of a direction, and the mean of those of the positives (B,)."""
        of_row, of_column = direction.split("_to_")
        (x, as_row), (y, as_column) = rows[of_row], columns[of_column]
        names = "queries" if batch.all_queries is None else "all_queries", "documents"
        row, column = ("queries", "own_documents")[of_row == "doc"], names[of_column == "doc"]
        sides = Side(x, about=batch.about(row)), Side(y, about=batch.about(column))
        panel = batch.panel(direction, *sides, attracts)
        longest = max(term.dim or x.shape[1] for term in terms)
        scores = (as_row(x[:, :longest]) @ as_column(y[:, :longest]).T).detach()
        tile, nothing = slice(0, len(x)), torch.zeros_like(scores, dtype=torch.bool)
        excluded = sum((judge(tile, scores).bool() for judge in panel.judges), nothing).bool()
        is_positive = nothing.clone() if panel.kept is None else panel.kept(tile, scores).bool()
        stays = is_positive.clone()
        if panel.own is not None:
            stays.diagonal(panel.own).fill_(True)
            is_positive.diagonal(panel.own)[:] = True if panel.own_attracts is None else panel.own_attracts.bool()
        bare = stays if panel.bare is None else stays | panel.bare(tile, scores).bool()

        scores = as_row(x[:, : term.dim]) @ as_column(y[:, : term.dim]).T
        plain = scores / term.temperature + (0 if panel.bias is None else panel.bias)
        share = is_positive.to(scores.dtype) / is_positive.sum(dim=1, keepdim=True).clamp(min=1)
        extra = panel.hardness * scores.detach().masked_fill(bare, 0)  # such a document counts exp(strength · s) times
        return (plain + extra).masked_fill(excluded & ~stays, -torch.inf), (share * plain).sum(dim=1)

    losses, softmaxes = [], softmaxes_of(directions, partition_mode)
    for softmax in softmaxes:
        for term in terms:
            parts, (attraction, *_) = zip(*(logits(d, term, d == softmax[0]) for d in softmax), strict=True)
            losses.append(term.weight * (torch.cat(parts, dim=1).logsumexp(dim=1) - attraction).mean())
    return torch.stack(losses).sum() / len(softmaxes)
