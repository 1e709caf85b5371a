"""The labels of a ranking loss: weights of rows, classes, or what a teacher says of documents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from st_magnitude._checks import InputError, one_of, positive
from st_magnitude.losses.base import to_host
from st_magnitude.losses.keys import BatchRule, Texts, unlike_all
from st_magnitude.losses.ranks import Gathered
from st_magnitude.similarity import at_least_float32, without_autocast

logger = logging.getLogger(__name__)

Labels = Literal["weights", "classes", "teacher"]
Rows = Callable[[slice], Tensor]  # the targets of a slice of the rows, (n, M)


class LabelRule(BatchRule):
    """Turns the labels of a batch into weights, positives of a class, or targets of its `Batch`.

    Without a kind, labels have to say nothing: all 1, or all 0. One value holds for a run. On a GPU
    another one is refused at the next batch, which keeps the host from waiting.
    """

    def __init__(
        self,
        name: str,
        kind: Labels | None,
        teacher_temperature: float | None = None,
        teacher_weight: float = 1.0,
    ) -> None:
        one_of("labels", kind, (None, *get_args(Labels)))
        if kind != "teacher" and (teacher_temperature is not None or teacher_weight != 1.0):
            raise InputError("teacher_temperature and teacher_weight are for labels='teacher'.")
        self.name = name
        self.kind = kind
        positive("teacher_temperature", teacher_temperature, [None])
        if not 0 <= teacher_weight <= 1:
            raise InputError(f"teacher_weight must lie in [0, 1], got {teacher_weight}.")
        self.temperature = teacher_temperature
        self.weight = teacher_weight

    def start(self) -> None:
        self._has_scores = False  # of a teacher, so far
        self._value: float | None = None
        self._differs = torch.zeros(())  # on a GPU, those of the batch before

    def check(self, labels: Tensor | None, sizes: Sequence[int]) -> None:
        """Checks that the labels of a batch, with columns of these sizes, are what a loss takes."""
        if self.kind is None:
            if labels is not None:
                self._check_silent(labels, sizes[0])
            return
        if labels is None:
            raise InputError(
                f"{self.name} has labels={self.kind!r}, but the dataset has no column 'label' or"
                " 'score'."
            )
        shapes: list[tuple[int, ...]] = [(sizes[0],)]
        if self.kind == "teacher":
            shapes = [(sizes[0], len(sizes) - 1), (sizes[0], len(sizes), labels.shape[-1])]
        fits_type = labels.is_floating_point() == (self.kind != "classes")
        if tuple(labels.shape) not in shapes or not fits_type:
            what = "whole numbers" if self.kind == "classes" else "numbers"
            raise InputError(
                f"{self.name} with labels={self.kind!r} takes {what} of shape"
                f" {' or '.join(map(str, shapes))} for this batch; got {labels.dtype} of shape"
                f" {tuple(labels.shape)}."
            )

    def _check_silent(self, labels: Tensor, size: int) -> None:
        is_first = self._value is None
        value = float(labels.flatten()[0] == 1) if self._value is None else self._value
        differs = to_host(labels.ne(value).any())
        if labels.is_cuda and not is_first:
            differs, self._differs = self._differs, differs
        if differs or labels.shape != (size,):
            raise InputError(
                f"{self.name} would train every pair as relevant, whatever its label, but the data"
                f" have labels ({labels.dtype}) that are neither all 1 nor all 0. Train on scores,"
                " and on labels 0 and 1, with SimilarityMSELoss. Or keep the relevant pairs, give"
                " texts that are not relevant as a further column of negatives, and remove the"
                ' labels: dataset.remove_columns("label"). A ranking loss can also read labels as'
                " weights of rows, as classes, or as scores of a teacher: labels='weights',"
                " 'classes' or 'teacher'."
            )
        if is_first:
            self._value = value
            logger.warning(
                f"Labels that are all {value:g} say nothing to {self.name}, which trains every pair"
                " as relevant, as MultipleNegativesRankingLoss does."
            )

    def fields(self, texts: Texts, ranks: Gathered) -> dict[str, Any]:
        """``weights``, ``positives``, or ``targets`` of both sides."""
        labels = texts.labels
        if labels is None or self.kind is None:
            return {}
        if self.kind == "weights":
            return {"weights": labels}
        if self.kind == "teacher":
            of_queries, of_documents = self._targets(labels, ranks)
            return {"targets": of_queries, "targets_queries": of_documents}
        negatives = [unlike_all(x, i) for i, x in enumerate(ranks.columns[2:], start=1)]
        classes = labels.where(labels >= 0, -1 - unlike_all(labels, 0))  # -1 is one of its own
        return {"positives": ranks.join_columns([classes, *negatives])}

    def get_config_dict(self) -> dict[str, object]:
        teacher = {"temperature": self.temperature, "weight": self.weight}
        return {"labels": self.kind, "teacher": teacher if self.kind == "teacher" else None}

    def _targets(self, labels: Tensor, ranks: Gathered) -> tuple[Rows, Rows]:
        """Targets that follow the scores t of a teacher.

            T_ij = (1 - weight) · [j is the positive of i]
                   + weight · softmax_j( t(q_i, d_j) / temperature )

        Scores (B, n) of the documents of each row give no target to the documents of other rows.
        Embeddings (B, 1 + n, T) of all columns score each query with all documents of the batch.

        Source: Hinton et al. 2015, Distilling the Knowledge in a Neural Network, arXiv 1503.02531.
        """
        if labels.ndim == 2:
            self._warn_of_sigmoid(labels)
            return self._of_scores(labels, ranks)
        queries, *documents = labels.unbind(dim=1)  # (B, T) each
        all_documents = ranks.join_columns(documents)  # (M, T)
        all_queries = ranks.join_queries(queries)  # (Q, T)
        of_queries = self._of_products(queries, all_documents, ranks.offset)
        of_documents = self._of_products(documents[0], all_queries, ranks.first_column)
        return of_queries, of_documents

    def _of_products(self, rows: Tensor, columns: Tensor, start: int) -> Rows:
        """Targets of rows (B, T) among columns (M, T); row i belongs to column ``start + i``."""

        def targets(tile: slice) -> Tensor:
            with without_autocast(rows):
                scores = rows[tile] @ columns.T / (self.temperature or 0.05)  # (n, M)
            shares = self.weight * scores.softmax(dim=1)
            shares.diagonal(start + tile.start).add_(1 - self.weight)
            return shares

        return targets

    def _of_scores(self, scores: Tensor, ranks: Gathered) -> tuple[Rows, Rows]:
        """Targets from scores (B, n) of the documents of each row."""
        size = scores.shape[1]
        logits = at_least_float32(scores) / (self.temperature or 1.0)
        shares = self.weight * logits.softmax(dim=1)  # (B, n)
        shares[:, 0] += 1 - self.weight
        rows = torch.arange(len(scores), device=scores.device)
        starts = ranks.num_queries * torch.arange(size, device=scores.device)  # of columns
        places = (rows + ranks.offset)[:, None] + starts  # (B, n)

        def of_queries(tile: slice) -> Tensor:
            found = shares.new_zeros(len(rows[tile]), size * ranks.num_queries)
            return found.scatter_(1, places[tile], shares[tile])

        def of_documents(tile: slice) -> Tensor:  # whose only target is their query
            found = shares.new_zeros(len(rows[tile]), ranks.num_columns)
            return found.scatter_(1, rows[tile, None] + ranks.first_column, 1.0)

        return of_queries, of_documents

    def _warn_of_sigmoid(self, scores: Tensor) -> None:
        """Warns if the first scores lie in [0, 1], where a softmax hardly tells them apart."""
        is_first = not self._has_scores
        self._has_scores = True
        if is_first and self.temperature in (None, 1) and scores.sub(0.5).abs().max() <= 0.5:
            logger.warning(
                "The teacher's scores lie in [0, 1], where the softmax at teacher_temperature=1 is"
                " almost even. CrossEncoder.predict applies a sigmoid by default: give logits,"
                " predict(..., activation_fn=torch.nn.Identity()), or a teacher_temperature."
            )
