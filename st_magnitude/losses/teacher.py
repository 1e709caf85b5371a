"""Teacher: how relevant the documents of a batch are, from another model or from labels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_magnitude._checks import positive
from st_magnitude.losses.negatives import Guide
from st_magnitude.losses.ranks import Gathered
from st_magnitude.losses.texts import Features, Labels, Texts
from st_magnitude.similarity import at_least_float32

logger = logging.getLogger(__name__)

Rows = Callable[[slice], Tensor]  # the targets of a slice of the rows, (n, M)


class Teacher:
    """Targets of a ranking loss that follow the scores t of a teacher.

        T_ij = (1 - weight) · [j is the positive of i]
               + weight · softmax_j( t(q_i, d_j) / temperature )

    Scores (B, n) of a row's own documents give no target to the documents of other rows.

    Source: Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv 1503.02531.
    """

    def __init__(
        self,
        model: SentenceTransformer | None,
        temperature: float | None,
        weight: float,
        labels: Labels | None,
    ) -> None:
        positive("teacher_temperature", temperature, [None])
        if not 0 <= weight <= 1:
            raise ValueError(f"teacher_weight must lie in [0, 1], got {weight}.")
        if model is not None and labels in ("teacher", "classes"):
            raise ValueError(
                f"teacher is a model and labels={labels!r} name the targets too: pass one of the"
                " two."
            )
        self.given = model
        self.temperature = temperature
        self.weight = weight
        self.model: Guide | None = None
        self._has_begun = False

    def start(self, model: SentenceTransformer) -> None:
        """Takes the model whose tokens the teacher reads."""
        self.model = None if self.given is None else Guide(self.given, model, "teacher")

    def read(
        self,
        texts: Texts,
        model: nn.Module,
        columns: Sequence[Features],
        mini_batch_size: int | None,
        guide: Guide | None,
    ) -> Texts:
        """The texts of a batch with the teacher's embeddings, which may be the guide's."""
        if self.model is None:
            return texts
        if guide is not None and guide.model is self.model.model:
            return replace(texts, teacher=texts.guide)
        return replace(texts, teacher=self.model.embed_columns(columns, model, mini_batch_size))

    def targets(self, texts: Texts, batch: Gathered) -> tuple[Rows, Rows]:
        """``targets`` and ``targets_queries`` of :func:`~st_magnitude.infonce`."""
        if texts.scores is not None:
            self._warn_of_sigmoid(texts.scores)
            return self._of_own_documents(texts.scores, batch)
        own, *documents = texts.teacher  # (B, T) each
        queries = batch.join_queries(own)  # (Q, T)
        place = batch.offset if batch.all_queries is not None else 0
        joined = torch.cat([batch.join(x) for x in documents])  # (M, T)
        return (
            self._of_all(own, joined, batch.offset),
            self._of_all(documents[0], queries, place),
        )

    def _of_all(self, rows: Tensor, columns: Tensor, own: int) -> Rows:
        """Targets of rows (B, T) among columns (M, T); row i belongs to column ``own + i``."""

        def targets(tile: slice) -> Tensor:
            scores = rows[tile] @ columns.T / (self.temperature or 0.05)  # (n, M)
            shares = self.weight * scores.softmax(dim=1)
            shares.diagonal(own + tile.start).add_(1 - self.weight)
            return shares

        return targets

    def _of_own_documents(self, scores: Tensor, batch: Gathered) -> tuple[Rows, Rows]:
        """Targets from scores (B, n) of the documents of each row."""
        size = scores.shape[1]
        logits = at_least_float32(scores) / (self.temperature or 1.0)
        shares = self.weight * logits.softmax(dim=1)  # (B, n)
        shares[:, 0] += 1 - self.weight
        rows = torch.arange(len(scores), device=scores.device)
        starts = batch.num_queries * torch.arange(size, device=scores.device)  # of columns
        places = (rows + batch.offset)[:, None] + starts  # (B, n)

        def of_queries(tile: slice) -> Tensor:
            found = shares.new_zeros(len(rows[tile]), size * batch.num_queries)
            return found.scatter_(1, places[tile], shares[tile])

        def of_documents(tile: slice) -> Tensor:  # whose only target is the own query
            found = shares.new_zeros(len(rows[tile]), batch.num_columns)
            start = batch.offset if batch.all_queries is not None else 0
            return found.scatter_(1, rows[tile, None] + start, 1.0)

        return of_queries, of_documents

    def _warn_of_sigmoid(self, scores: Tensor) -> None:
        """Warns if the first scores lie in [0, 1], where a softmax hardly tells them apart."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first and self.temperature in (None, 1) and scores.sub(0.5).abs().max() <= 0.5:
            logger.warning(
                "The teacher's scores lie in [0, 1], where the softmax at teacher_temperature=1 is"
                " almost even. CrossEncoder.predict applies a sigmoid by default: give logits,"
                " predict(..., activation_fn=torch.nn.Identity()), or a teacher_temperature."
            )

    def get_config_dict(self) -> dict[str, object]:
        name = "labels" if self.model is None else self.model.name
        return {"model": name, "temperature": self.temperature, "weight": self.weight}
