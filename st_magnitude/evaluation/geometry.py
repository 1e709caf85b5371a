"""Evaluators without a search: GeometryEvaluator for norms and directions, ScoredPairsEvaluator for scored pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.base import CsvEvaluator
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.losses.regression import warn_if_one_sided
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import encode_raw, raw_embeddings

__all__ = ["GeometryEvaluator", "ScoredPairsEvaluator", "card_evaluators", "norm_figures"]

NUM_DOCUMENTS = 500  # size of the sample for a model card


class GeometryEvaluator(CsvEvaluator):
    """The norms of embeddings and how evenly their directions spread, without judgments.

    Embeddings are taken before a closing Normalize or ExponentNorm. Two evaluators with the names "before" and "after"
    put a table with both into the model card; ``st-magnitude train`` does. Returned keys, with the prefix
    ``"{name}_"`` if there is a name:

    - ``{document,query}_norm_mean`` and ``{document,query}_norm_cv`` (standard deviation over mean);
    - ``document_mean_cosine`` and ``document_isoscore`` (the primary metric; n documents in D dimensions reach at most
      about n / (n + D), so compare samples of one size only);
    - ``cohens_d`` of document norms, relevant minus never-relevant, if both are given.

    Args:
        documents: At least two texts.
        queries: Texts that are encoded as queries, whose norms are reported.
        is_relevant: Whether each document is relevant to any query.
        **options: ``name``, ``batch_size``, ``show_progress_bar`` and ``write_csv`` of `SearchEvaluator`.

    Raises:
        ValueError: If there are fewer than two documents; at the call, if an embedding is not finite.

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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if len(documents) < 2:
            raise ValueError(f"GeometryEvaluator needs at least two documents, better hundreds, got {len(documents)}.")
        self.texts = {"document": list(documents), "query": list(queries)}
        self.metrics: dict[str, float] = {}  # after a call, without the name
        self.is_relevant = None if is_relevant is None else np.asarray(is_relevant, dtype=bool)

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows."""
        return {"documents": len(self.texts["document"]), "queries": len(self.texts["query"])}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """Encodes and measures."""
        embeddings = {
            role: encode_raw(model, texts, role, **self.encoding) for role, texts in self.texts.items() if texts
        }
        for role, side in embeddings.items():
            check_finite(side, role)
        self.metrics = norm_figures(embeddings, self.is_relevant)
        self.metrics["document_mean_cosine"] = geometry.mean_cosine(embeddings["document"])
        self.metrics["document_isoscore"] = geometry.isoscore(embeddings["document"])
        return self.metrics


def norm_figures(sides: Mapping[str, Tensor], is_relevant: NDArray[np.bool_] | None) -> dict[str, float]:
    """Mean and CV of the norms of each side, and Cohen's d of the documents where both groups have two members."""
    sizes = {role: geometry.norms(side) for role, side in sides.items()}
    figures: dict[str, float] = {}
    for role, values in sizes.items():
        figures[f"{role}_norm_mean"] = float(values.mean())
        figures[f"{role}_norm_cv"] = geometry.coefficient_of_variation(values)
    if is_relevant is not None and min(is_relevant.sum(), (~is_relevant).sum()) > 1:
        documents = sizes["document"]
        figures["cohens_d"] = geometry.cohens_d(documents[is_relevant], documents[~is_relevant])
    return figures


def card_evaluators(data: RetrievalData, seed: int = 0) -> tuple[GeometryEvaluator, GeometryEvaluator]:
    """Two evaluators of one sample of documents, and a fifth as many queries, named "before" and "after"."""
    rng = np.random.default_rng(seed)

    def drawn(ids: Sequence[str], at_most: int) -> list[str]:
        return [ids[i] for i in rng.permutation(len(ids))[:at_most]]

    asked, documents = drawn(list(data.queries), NUM_DOCUMENTS // 5), drawn(list(data.corpus), NUM_DOCUMENTS)
    answers = set().union(*data.relevant.values())
    sample = [data.corpus[i] for i in documents], [data.queries[i] for i in asked], [i in answers for i in documents]
    before, after = (GeometryEvaluator(*sample, name=name, write_csv=False) for name in ("before", "after"))
    before.warns = after.warns = False  # `train` says it once, with its verdict
    return before, after


class ScoredPairsEvaluator(CsvEvaluator):
    """Rank and linear correlation of three similarities with scores of pairs, and s(a, b) against s(b, a).

    It is sentence-transformers' EmbeddingSimilarityEvaluator for any Similarity. Texts are encoded once, by plain
    ``encode``, before a closing ExponentNorm. Returned keys, with the prefix ``"{name}_"`` if there is a name:

    - ``{matched,cosine,dot}_{spearman,pearson}``;
    - ``swapped_spearman``, the correlation of s(b, a) with the scores, and ``symmetry_gap``, the mean of
      |s(a, b) - s(b, a)| over the standard deviation of s(a, b). Cosine and dot have a gap of 0.

    A similarity that keeps the norm of one side only gives one warning.

    Args:
        sentences1: The first text of every pair.
        sentences2: The second text of every pair.
        scores: The judged score of every pair, in any range.
        similarity: The similarity of the ``matched`` metrics; by default the model's own (see `SearchEvaluator`).
        **options: ``name``, ``batch_size``, ``show_progress_bar`` and ``write_csv`` of `SearchEvaluator`.

    Raises:
        ValueError: If the three differ in length or there are fewer than two pairs; at the call, if the model's
            similarity is a distance or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> pairs = {"sentences1": ["bee", "wax", "bee"], "sentences2": ["bee bee", "bee", "wax bee"]}
        >>> metrics = ScoredPairsEvaluator(**pairs, scores=[1.0, 0.0, 0.5], similarity="dot")(model)
        >>> metrics["matched_spearman"], metrics["symmetry_gap"]
        (1.0, 0.0)
    """

    kind = "ScoredPairs"
    primary = "matched_spearman"

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        scores: Sequence[float],
        similarity: Similarity | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not len(sentences1) == len(sentences2) == len(scores) >= 2:
            raise ValueError(
                "sentences1, sentences2 and scores must describe the same pairs, at least two, got "
                f"{len(sentences1)}, {len(sentences2)} and {len(scores)}."
            )
        self.sentences = list(sentences1), list(sentences2)
        self.scores = np.asarray(scores, dtype=np.float64)
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self._warned = False

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """Encodes and correlates."""
        matched = scoring_of(model, self.similarity)
        if not self._warned:
            self._warned = True
            warn_if_one_sided(matched, type(self).__name__)
        with raw_embeddings(model, keep_normalize=True):
            a, b = (model.encode(texts, convert_to_tensor=True, **self.encoding) for texts in self.sentences)
        check_finite(a, "sentences1")
        check_finite(b, "sentences2")
        metrics: dict[str, float] = {}
        for key, similarity in {"matched": matched, "cosine": COSINE, "dot": DOT}.items():
            predicted = similarity.pairwise(a, b).double().cpu().numpy()
            metrics[f"{key}_spearman"] = geometry.spearman(predicted, self.scores)
            with np.errstate(invalid="ignore"):
                metrics[f"{key}_pearson"] = float(np.corrcoef(predicted, self.scores)[0, 1])
        swapped = matched.pairwise(b, a)
        metrics["swapped_spearman"] = geometry.spearman(swapped, self.scores)
        metrics["symmetry_gap"] = geometry.symmetry_gap(matched.pairwise(a, b), swapped)
        return metrics
