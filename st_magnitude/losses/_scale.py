"""scale="auto": measured once on the first batch of a run, and kept."""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from st_magnitude._checks import positive
from st_magnitude.similarity import Similarity
from st_magnitude.training.state import Remembering, ResumeGuard

__all__ = ["ScaledLoss", "mean_remaining_norm"]

logger = logging.getLogger(__name__)


class ScaledLoss(Remembering):
    """A loss with a scale, which may be measured on the first batch of the run.

    With a scale of ``"auto"`` it is

        unit / (mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document))

    with the means over the first batch of all ranks. The number then stays in ``scale``, is part of the loss's
    ``state_dict``, and survives the resume of a Trainer after ``stm.attach(trainer)``.

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 3.1, whose scale of 20 is meant for norms of 1.
    """

    model: nn.Module
    scale: float | Literal["auto"]

    def _set_scale(self, scale: float | Literal["auto"], similarity: Similarity, unit: float) -> None:
        """Takes the argument of the constructor; ``unit`` is the scale for vectors of norm 1."""
        positive("scale", scale, ["auto"])
        self.auto_scale: float | None = None
        self._unit = unit
        is_known = scale == "auto" and not similarity.keeps_magnitude  # every vector is a unit vector
        self.scale = unit if is_known else scale
        self._guard = ResumeGuard(self.model) if self.scale == "auto" else None

    def _find_scale(self, queries: Tensor, documents: list[Tensor], similarity: Similarity) -> None:
        """Replaces ``"auto"`` by a number: (B, D), columns (B, D) each.

        Raises:
            ValueError: If weights were loaded after the loss was built, so that this is not the first batch of the
                run; if the mean norms are zero or not finite.
        """
        if self._guard is not None:
            self._guard.refuse(
                f"{type(self).__name__} with scale='auto' measures the scale on the first batch of a run",
                "the scale in the checkpoints, or pass the number that the first run logged, scale=...",
            )
        self._keep_scale(self._unit / mean_remaining_norm(queries, documents, similarity))
        logger.info("scale='auto' is %r for %s.", self.scale, similarity)

    def _keep_scale(self, scale: float) -> None:
        self.scale = self.auto_scale = scale
        if self._guard is not None:
            self._guard.release()

    def get_extra_state(self) -> dict[str, Any]:
        return {"auto_scale": self.auto_scale}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if self.scale == "auto" and state["auto_scale"] is not None:
            self._keep_scale(state["auto_scale"])


@torch.no_grad()
def mean_remaining_norm(queries: Tensor, documents: list[Tensor], similarity: Similarity) -> float:
    """The product of the mean norms that the similarity leaves on both sides, over all ranks.

    Raises:
        ValueError: If it is zero or not finite.
    """
    norms = [torch.linalg.vector_norm(x.detach().float(), dim=-1) for x in (queries, torch.cat(documents))]
    sums = torch.stack([x for n in norms for x in (n.sum(), n.new_tensor(float(len(n))))])  # (4,)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(sums)
    query, num_queries, document, num_documents = sums.tolist()
    gamma_query, gamma_document = similarity.exponents
    size = (query / num_queries) ** (1 - gamma_query) * (document / num_documents) ** (1 - gamma_document)
    if not 0 < size < float("inf"):
        raise ValueError(
            f"scale='auto' needs positive, finite norms, but the mean norm of the queries is {query / num_queries} and "
            f"that of the documents is {document / num_documents}. Check the model, or pass a number."
        )
    return size
