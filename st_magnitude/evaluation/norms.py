"""GeometryEvaluator: norms and directions of embeddings, without a search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor
from typing_extensions import Unpack

from st_magnitude import geometry
from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.base import CsvEvaluator, CsvOptions
from st_magnitude.surgery.raw import encode_raw

__all__ = ["GeometryEvaluator", "geometry_figures", "norm_figures"]


class GeometryEvaluator(CsvEvaluator):
    """The norms of embeddings and how evenly their directions spread, without judgments.

    Embeddings are taken before a closing Normalize or ExponentNorm. Two evaluators with the names
    "before" and "after" put a table with both into the model card. Returned keys, with the prefix
    ``"{name}_"`` if there is a name:

    - ``{document,query}_norm_mean`` and ``{document,query}_norm_cv`` (standard deviation over
      mean);
    - ``document_mean_cosine`` and ``document_isoscore`` (the primary metric; n documents in D
      dimensions reach at most about n / (n + D), so compare samples of one size only);
    - ``cohens_d`` of document norms, relevant minus never-relevant, and ``cohens_d_error``, its
      standard error, if both are given.

    Args:
        documents: At least two texts.
        queries: Texts that are encoded as queries, whose norms are reported.
        is_relevant: Whether each document is relevant to any query of any split. An answer to a
            query of another split that counts as never-relevant makes d wrong.
        **options: ``name``, ``batch_size``, ``show_progress_bar`` and ``write_csv`` of
            `SearchEvaluator`.

    Raises:
        ValueError: If there are fewer than two documents; at the call, if an embedding is not
            finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> documents = ["bee bee bee", "bee wax", "wax wax wax", "wax"]
        >>> metrics = GeometryEvaluator(documents, is_relevant=[True, False, True, False])(model)
        >>> round(metrics["document_norm_mean"], 3), round(metrics["cohens_d"], 1)
        (2.104, 8.7)

    Formulas and their sources: `st_magnitude.geometry`.
    """

    kind = "Geometry"
    primary = "document_isoscore"

    def __init__(
        self,
        documents: Sequence[str],
        queries: Sequence[str] = (),
        is_relevant: Sequence[bool] | None = None,
        **options: Unpack[CsvOptions],
    ) -> None:
        super().__init__(**options)
        if len(documents) < 2:
            raise ValueError(
                "GeometryEvaluator needs at least two documents, better hundreds, got"
                f" {len(documents)}."
            )
        self.texts = {"document": list(documents), "query": list(queries)}
        self.metrics: dict[str, float] = {}  # after a call, without the name
        self.is_relevant = None if is_relevant is None else np.asarray(is_relevant, dtype=bool)

    def get_config_dict(self) -> dict[str, Any]:
        return {"documents": len(self.texts["document"]), "queries": len(self.texts["query"])}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        embeddings = {}
        for role, texts in self.texts.items():
            if texts:
                embeddings[role] = encode_raw(model, texts, role, **self.encoding)
                check_finite(embeddings[role], role)
        self.metrics = geometry_figures(embeddings, self.is_relevant)
        return self.metrics


def geometry_figures(
    sides: Mapping[str, Tensor], is_relevant: NDArray[np.bool_] | None
) -> dict[str, float]:
    """`norm_figures`, and how evenly the directions of the documents spread."""
    figures = norm_figures(sides, is_relevant)
    figures["document_mean_cosine"] = geometry.mean_cosine(sides["document"])
    figures["document_isoscore"] = geometry.isoscore(sides["document"])
    return figures


def norm_figures(
    sides: Mapping[str, Tensor], is_relevant: NDArray[np.bool_] | None
) -> dict[str, float]:
    """Mean and CV of the norms of each side, and Cohen's d of groups of two documents or more, with
    its standard error."""
    figures: dict[str, float] = {}
    for role, side in sides.items():
        values = geometry.norms(side)
        figures[f"{role}_norm_mean"] = float(values.mean())
        figures[f"{role}_norm_cv"] = geometry.coefficient_of_variation(values)
    if is_relevant is not None and min(is_relevant.sum(), (~is_relevant).sum()) > 1:
        documents = geometry.norms(sides["document"])
        relevant = documents[is_relevant]
        others = documents[~is_relevant]
        d = geometry.cohens_d(relevant, others)
        figures["cohens_d"] = d
        figures["cohens_d_error"] = geometry.cohens_d_error(d, len(relevant), len(others))
    return figures
