"""What ranking and regression losses share: a scale that is measured once."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator, ForwardDecorator
from torch import Tensor, nn

from st_magnitude.similarity import Similarity
from st_magnitude.training.trainer import once_in_a_run

__all__ = ["auto_scale", "refuse_matryoshka"]

logger = logging.getLogger(__name__)


def refuse_matryoshka(loss: nn.Module, advice: str) -> None:
    """For a loss that learns from length.

    Raises:
        ValueError: If sentence-transformers' ``MatryoshkaLoss`` is wrapped around it.
    """
    is_wrapped = isinstance(getattr(loss.model, "forward", None), ForwardDecorator)
    if is_wrapped or isinstance(vars(loss).get("calculate_loss"), CachedLossDecorator):
        raise ValueError(
            "sentence-transformers' MatryoshkaLoss normalises every prefix, which takes from "
            f"{type(loss).__name__} the length it learns from. {advice}"
        )


@torch.no_grad()
def auto_scale(
    loss: nn.Module, queries: Tensor, documents: list[Tensor], similarity: Similarity, of_unit: float = 1.0
) -> float:
    """What ``scale="auto"`` is, fixed by the first batch of a run: (B, D), columns (B, D) each -> number.

        of_unit / (mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document)),   the means over all ranks

    The Trainer logs it, and a resumed one finds it in its log.

    Raises:
        ValueError: If the mean norms are zero or not finite.

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 3.1, whose 20 is meant for norms of 1.
    """
    scale = once_in_a_run(loss, "auto_scale", lambda: of_unit / _mean_remaining_norm(queries, documents, similarity))
    logger.info("scale='auto' is %.4g for %s.", scale, similarity)
    return scale


def _mean_remaining_norm(queries: Tensor, documents: list[Tensor], similarity: Similarity) -> float:
    norms = [torch.linalg.vector_norm(x.float(), dim=-1) for x in (queries, torch.cat(documents))]
    sums = torch.stack([x for n in norms for x in (n.sum(), n.new_tensor(float(len(n))))])  # (4,)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    query, num_queries, document, num_documents = sums.tolist()
    gamma_query, gamma_document = similarity.exponents
    size = (query / num_queries) ** (1 - gamma_query) * (document / num_documents) ** (1 - gamma_document)
    if not 0 < size < float("inf"):
        raise ValueError(
            f"scale='auto' cannot be read off embeddings with mean norms {query / num_queries} (queries) and "
            f"{document / num_documents} (documents). Check the model, or pass a number."
        )
    return size
