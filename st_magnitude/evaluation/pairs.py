"""ScoredPairsEvaluator is sentence-transformers' STS evaluator for any Similarity, with a check of symmetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.base import CsvEvaluator
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.geometry import spearman, symmetry_gap
from st_magnitude.losses.regression import warn_if_one_sided
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import raw_embeddings

__all__ = ["ScoredPairsEvaluator"]


class ScoredPairsEvaluator(CsvEvaluator):
    """Rank and linear correlation of three similarities with scores of pairs, and s(a, b) against s(b, a).

    sentence-transformers' EmbeddingSimilarityEvaluator knows cosine and dot; this evaluator also scores by QNorm, DNorm
    and fractional exponents. Texts are encoded once, by plain ``encode``, before a closing ExponentNorm. Returned keys,
    with the prefix ``"{name}_"`` if there is a name:

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
        ValueError: If the three have different numbers of entries or there are fewer than two pairs; at the call, if
            the model's similarity is a distance or an embedding is not finite.

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
            metrics[f"{key}_spearman"] = spearman(predicted, self.scores)
            with np.errstate(invalid="ignore"):
                metrics[f"{key}_pearson"] = float(np.corrcoef(predicted, self.scores)[0, 1])
        swapped = matched.pairwise(b, a)
        metrics["swapped_spearman"] = spearman(swapped, self.scores)
        metrics["symmetry_gap"] = symmetry_gap(matched.pairwise(a, b), swapped)
        return metrics
