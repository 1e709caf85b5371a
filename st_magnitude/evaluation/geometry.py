"""GeometryEvaluator measures norms and directions of a model's embeddings from texts alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude import geometry
from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.base import CsvEvaluator
from st_magnitude.surgery.raw import encode_raw

__all__ = ["GeometryEvaluator", "card_evaluators"]

logger = logging.getLogger(__name__)

NUM_DOCUMENTS = 500  # size of the sample for a model card


class GeometryEvaluator(CsvEvaluator):
    """The norms of embeddings and how evenly their directions spread, without judgments.

    Embeddings are taken before a closing Normalize or ExponentNorm, so that models that normalise have norms too. Two
    calls with the names "before" and "after" training put a table with both into the model card that
    ``save_pretrained`` writes. ``st-magnitude train`` and ``st-magnitude revela`` make these calls. Returned keys, with
    the prefix ``"{name}_"`` if there is a name:

    - ``{document,query}_norm_mean`` and ``{document,query}_norm_cv`` (standard deviation over mean);
    - ``document_mean_cosine`` and ``document_isoscore`` (the primary metric; n documents in D dimensions reach at most
      about n / (n + D), so that only samples of one size compare);
    - ``cohens_d`` of document norms, relevant minus never-relevant, if both are given.

    Args:
        documents: At least two texts.
        queries: Texts that are encoded as queries, whose norms are reported.
        is_relevant: Whether each document is relevant to any query.

    The other arguments are those of `SearchEvaluator`; the CSV file is ``Geometry_evaluation_{name}_results.csv``.

    Attributes:
        metrics: After a call, the returned metrics without the name.

    Raises:
        ValueError: If there are fewer than two documents or is_relevant has another number of entries; at the call, if
            an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> documents = ["bee bee bee", "bee wax", "wax wax wax", "wax"]
        >>> metrics = GeometryEvaluator(documents, is_relevant=[True, False, True, False])(model)
        >>> round(metrics["document_norm_mean"], 3), round(metrics["cohens_d"], 1)
        (2.104, 8.7)

    Formulas and their sources: `st_magnitude.geometry`.
    """

    def __init__(
        self,
        documents: Sequence[str],
        queries: Sequence[str] = (),
        is_relevant: Sequence[bool] | None = None,
        name: str = "",
        batch_size: int = 32,
        write_csv: bool = True,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__("Geometry", "document_isoscore", name, batch_size, write_csv, show_progress_bar)
        if len(documents) < 2:
            raise ValueError(
                f"GeometryEvaluator needs at least two documents, better some hundreds, got {len(documents)}."
            )
        if is_relevant is not None and len(is_relevant) != len(documents):
            raise ValueError(f"is_relevant has {len(is_relevant)} entries for {len(documents)} documents.")
        self.texts = {"document": list(documents), "query": list(queries)}
        self.is_relevant = None if is_relevant is None else np.asarray(is_relevant, dtype=bool)
        self.metrics: dict[str, float] = {}

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows."""
        return {"documents": len(self.texts["document"]), "queries": len(self.texts["query"])}

    def __call__(  # type: ignore[override]
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Encodes, measures, logs, writes the CSV row, and returns all metrics by key."""
        embeddings = {
            role: encode_raw(model, texts, role, self.batch_size, self.show_progress_bar)
            for role, texts in self.texts.items()
            if texts
        }
        for role, side in embeddings.items():
            check_finite(side, role)
        sizes = {role: geometry.norms(side) for role, side in embeddings.items()}
        metrics: dict[str, float] = {}
        for role, values in sizes.items():
            metrics[f"{role}_norm_mean"] = float(values.mean())
            metrics[f"{role}_norm_cv"] = geometry.coefficient_of_variation(values)
        if self.is_relevant is not None and min(self.is_relevant.sum(), (~self.is_relevant).sum()) > 1:
            metrics["cohens_d"] = geometry.cohens_d(
                sizes["document"][self.is_relevant], sizes["document"][~self.is_relevant]
            )
        documents = embeddings["document"]
        metrics["document_mean_cosine"] = geometry.mean_cosine(documents)
        metrics["document_isoscore"] = geometry.isoscore(documents)
        self.metrics = metrics
        line = f"Geometry of the model on the {self.name or 'given'} texts"
        return self.finish(model, metrics, [metrics], output_path, epoch, steps, (logger, line))


def card_evaluators(
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    number: int = NUM_DOCUMENTS,
    seed: int = 0,
) -> tuple[GeometryEvaluator, GeometryEvaluator]:
    """Two evaluators of one sample of documents, and a fifth as many queries, named "before" and "after"."""
    rng = np.random.default_rng(seed)

    def drawn(ids: Sequence[str], at_most: int) -> list[str]:
        return [ids[i] for i in rng.permutation(len(ids))[:at_most]]

    asked, documents = drawn(list(queries), number // 5), drawn(list(corpus), number)
    answers = set().union(*relevant_docs.values())
    sample = [corpus[i] for i in documents], [queries[i] for i in asked], [i in answers for i in documents]
    before, after = (GeometryEvaluator(*sample, name=name, write_csv=False) for name in ("before", "after"))
    return before, after
