"""ScoredPairsEvaluator: sentence-transformers' STS evaluator, under any Similarity and with a check of symmetry."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude.evaluation.magnitude import implied_similarity
from st_magnitude.evaluation.metrics import CsvEvaluator
from st_magnitude.geometry import spearman, symmetry_gap
from st_magnitude.losses.regression import warn_if_one_sided
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import raw_embeddings

__all__ = ["ScoredPairsEvaluator"]

logger = logging.getLogger(__name__)


class ScoredPairsEvaluator(CsvEvaluator):
    """Rank and linear correlation of similarities with scores, read out three ways, and s(a, b) against s(b, a).

    sentence-transformers' EmbeddingSimilarityEvaluator knows cosine and dot; this one also what QNorm, DNorm and
    fractional exponents give. Texts are encoded once, by plain ``encode``, and stay raw. Keys, behind ``"{name}_"``:

    - ``{matched,cosine,dot}_{spearman,pearson}``;
    - ``swapped_spearman``, of s(b, a) with the scores, and ``symmetry_gap``: mean |s(a, b) - s(b, a)| over the
      standard deviation of s(a, b). Cosine and dot have a gap of 0.

    A similarity that keeps one norm of two gives one warning.

    Args:
        sentences1: The first texts.
        sentences2: The second texts.
        scores: One number a pair, of any range.
        similarity: What ``matched`` means; by default what the model says (see MagnitudeEvaluator).
        name: Goes in front of the keys and into the name of the CSV file.
        batch_size: Texts encoded at a time.
        write_csv: Whether a call with an ``output_path`` adds a row to ``ScoredPairs_evaluation_{name}_results.csv``.

    Raises:
        ValueError: If the three differ in length or there are fewer than two pairs.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax"])], device="cpu")
        >>> pairs = {"sentences1": ["bee", "wax", "bee"], "sentences2": ["bee bee", "bee", "wax bee"]}
        >>> metrics = ScoredPairsEvaluator(**pairs, scores=[1.0, 0.0, 0.5], similarity="dot")(model)
        >>> metrics["matched_spearman"], metrics["symmetry_gap"]
        (1.0, 0.0)
    """

    def __init__(
        self,
        sentences1: Sequence[str],
        sentences2: Sequence[str],
        scores: Sequence[float],
        similarity: Similarity | str | None = None,
        name: str = "",
        batch_size: int = 32,
        write_csv: bool = True,
    ) -> None:
        super().__init__("ScoredPairs", "matched_spearman", name, batch_size, write_csv)
        if not len(sentences1) == len(sentences2) == len(scores) >= 2:
            raise ValueError(
                "sentences1, sentences2 and scores describe the same pairs, at least two, got "
                f"{len(sentences1)}, {len(sentences2)} and {len(scores)}."
            )
        self.sentences = list(sentences1), list(sentences2)
        self.scores = np.asarray(scores, dtype=np.float64)
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self._warned = False

    def __call__(  # type: ignore[override]
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Encodes, correlates, logs, writes the CSV row, and returns all metrics by key."""
        matched = Similarity(*(self.similarity or implied_similarity(model)).exponents)
        if not self._warned:
            self._warned = True
            warn_if_one_sided(matched, type(self).__name__)
        with raw_embeddings(model, keep_normalize=True):
            a, b = (
                model.encode(texts, batch_size=self.batch_size, convert_to_tensor=True, show_progress_bar=False)
                for texts in self.sentences
            )
        metrics: dict[str, float] = {}
        for key, similarity in {"matched": matched, "cosine": COSINE, "dot": DOT}.items():
            predicted = similarity.pairwise(a, b).double().cpu().numpy()
            metrics[f"{key}_spearman"] = spearman(predicted, self.scores)
            with np.errstate(invalid="ignore"):
                metrics[f"{key}_pearson"] = float(np.corrcoef(predicted, self.scores)[0, 1])
        swapped = matched.pairwise(b, a)
        metrics["swapped_spearman"] = spearman(swapped, self.scores)
        metrics["symmetry_gap"] = symmetry_gap(matched.pairwise(a, b), swapped)
        logger.info(
            f"Evaluation of scored pairs on the {self.name or 'given'} dataset, matched is {matched.name}:\n"
            + "\n".join(f"{key}: {value:.4f}" for key, value in metrics.items())
        )
        return self.finish(model, metrics, [metrics], output_path, epoch, steps)
