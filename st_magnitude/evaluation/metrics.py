"""Functions that the evaluators share: the similarity of a model, rankings, and nDCG of every query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = [
    "TILE",
    "are_unit",
    "model_name",
    "ndcg",
    "rank",
    "raw_scoring_of",
    "scoring_of",
]

TILE = 2**24  # scores that are held at a time


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether all norms are 1 to the precision of half floats, which shows that a model normalises.

    Example:
        >>> are_unit(np.array([1.0, 1.0001])), are_unit(np.array([1.0, 1.01]))
        (True, False)
    """
    return bool(np.abs(norms - 1).max() < 1e-3)


def scoring_of(model: SentenceTransformer, similarity: Similarity | str | None = None) -> Similarity:
    """The given similarity, or the one that a model says it is for, with plain numbers as exponents.

    The model's own is that of a closing ExponentNorm, else its ``similarity_fn_name``, which must not be a distance.
    """
    if similarity is None:
        closing = getattr(list(model.children())[-1], "similarity", None)
        similarity = closing if isinstance(closing, Similarity) else model.similarity_fn_name
        if isinstance(similarity, str) and similarity not in ("cosine", "dot"):
            raise ValueError(
                f"The model's similarity_fn_name is {similarity!r}, which is not an inner product; "
                'pass similarity="cosine", "dot", "qnorm", "dnorm" or a Similarity.'
            )
    return Similarity(*Similarity.named(similarity).exponents)


def raw_scoring_of(model: SentenceTransformer, similarity: Similarity | str | None = None) -> Similarity:
    """`scoring_of` for embeddings from before a closing Normalize: the own similarity of a unit model is cosine."""
    return scoring_of(model, COSINE if similarity is None and normalizes_output(model) else similarity)


def model_name(model: SentenceTransformer) -> str:
    """What a model calls itself: a hub id, the last two names of a path, or the names of its modules."""
    known = model.model_card_data.model_id or model.model_card_data.base_model
    for module in model.modules():
        known = known or getattr(module, "name_or_path", None)  # of a model of transformers
    if not known:
        return " + ".join(type(module).__name__ for module in model)
    path = Path(known)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(known)


def rank(scores: Tensor, k: int) -> Tensor:
    """Column indices of the k best scores of each row, best first, ties to the lower index: (n, m) -> (n, min(k, m)).

    Example:
        >>> import torch
        >>> rank(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), k=3)
        tensor([[1, 3, 2]])
    """
    k = min(k, scores.shape[1])
    values, indices = scores.topk(k, dim=1)
    # topk leaves open which of several equal scores it takes, and in which order.
    last = values[:, -1:]
    tied = ((scores >= last).sum(dim=1) > k).nonzero()[:, 0]
    if len(tied):  # rows with a document outside that equals the k-th best: keep the lowest columns of those
        rows, last = scores[tied], last[tied]
        above, equal = rows > last, rows == last
        equal &= equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)
        indices[tied] = (above | equal).nonzero()[:, 1].view(-1, k)
    indices = indices.sort(dim=1).values
    order = scores.gather(1, indices).sort(dim=1, descending=True, stable=True).indices
    return indices.gather(1, order)


def ndcg(hits: Any, num_relevant: Any, k: int = 10) -> NDArray[np.float64]:
    """nDCG@k of every query with binary relevance: (n, >= k or the whole corpus), (n,) -> (n,) in [0, 1].

        sum_{i <= k} hit_i / log2(i + 1)  over the same sum with all relevant documents first

    Args:
        hits: Whether the document at each rank is relevant, best rank first.
        num_relevant: Number of relevant documents of each query, at least 1.
        k: Number of ranks that count.

    Example:
        >>> ndcg([[True, False], [False, True]], num_relevant=[1, 1]).round(3)
        array([1.   , 0.631])

    Source: Järvelin and Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques, 2002; the same as
    sentence-transformers' InformationRetrievalEvaluator.
    """
    discounts = 1 / np.log2(np.arange(2, k + 2))
    ranked = np.asarray(hits, dtype=np.float64)[:, :k]
    ideal = np.cumsum(discounts)[np.minimum(num_relevant, k) - 1]
    return ranked @ discounts[: ranked.shape[1]] / ideal
