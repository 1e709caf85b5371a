"""MagnitudeEvaluator scores one encoding with its own similarity, by cosine and by dot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import whole_number
from st_magnitude.data.retrieval import Judgments
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.geometry import norm_figures
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.geometry import mean_cosine
from st_magnitude.similarity import COSINE, DOT

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MagnitudeEvaluator"]

logger = logging.getLogger(__name__)

METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")
# cosine nDCG over dot nDCG: 0.97 to 1 in arXiv 2602.09229, Table 18; 0.24 in the collapsed E5
COLLAPSED_BELOW = 0.75


class MagnitudeEvaluator(SearchEvaluator):
    """Retrieval metrics of the same embeddings under the matched similarity, cosine and dot, and
    their geometry.

    Metrics are defined as in sentence-transformers' InformationRetrievalEvaluator; nDCG also counts
    grades. Their keys:

    - ``{matched,cosine,dot}_{ndcg@10,mrr@10,recall@100,map@100}``;
    - ``cohens_d`` between the norms of documents that are relevant to some query and the norms of
      never-relevant documents (pooled by degrees of freedom); left out where either group has fewer
      than two documents;
    - ``{query,document}_{norm_mean,norm_cv,mean_cosine}``, the last left out for a single text.

    The primary metric is ``matched_ndcg@10``. A warning reports magnitude collapse: cosine nDCG@10
    below three quarters of dot nDCG@10, in a model whose directions no longer rank (arXiv
    2602.09229, App. N).

    Args:
        truncate_dim: Number of dimensions of the prefix to evaluate, which is appended to the name.
            A prefix is cut before it is divided by a power of its norm.

    `SearchEvaluator` documents the other arguments, attributes and errors. ``similarity`` is that
    of the ``matched`` metrics.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "honey", "wax"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
        >>> queries, corpus = {"q": "honey"}, {"d1": "honey", "d2": "honey, honey of bees"}
        >>> evaluator = MagnitudeEvaluator(queries, corpus, relevant_docs={"q": {"d2"}}, name="dev")
        >>> metrics = evaluator(model)
        >>> metrics["dev_matched_mrr@10"], metrics["dev_cosine_mrr@10"], evaluator.primary_metric
        (1.0, 0.5, 'dev_matched_ndcg@10')
    """

    kind = "Magnitude"
    primary = "matched_ndcg@10"
    settings = ("truncate_dim",)

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        truncate_dim: int | None = None,
        **options: Unpack[SearchOptions],
    ) -> None:
        self.truncate_dim = (
            None if truncate_dim is None else whole_number("truncate_dim", truncate_dim)
        )
        options["name"] = "_".join(
            str(part) for part in (options.get("name"), truncate_dim) if part
        )
        super().__init__(queries, corpus, relevant_docs, **options)

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """Encodes, ranks by each similarity, and measures."""
        similarities = {"matched": scoring_of(model, self.similarity), "cosine": COSINE, "dot": DOT}
        encoded = self.encode(model)
        if self.truncate_dim is not None:
            encoded = encoded.prefix(self.truncate_dim)
        metrics: dict[str, float] = {}
        for name, top in zip(
            similarities, encoded.tops(list(similarities.values()), k=100), strict=True
        ):
            self.per_query[name] = encoded.ndcg(top)
            values = [
                self.per_query[name].mean(),
                *_mrr_recall_map(encoded.hits(top), encoded.columns),
            ]
            metrics |= {
                f"{name}_{key}": float(value) for key, value in zip(METRICS, values, strict=True)
            }
        cosine, dot = metrics["cosine_ndcg@10"], metrics["dot_ndcg@10"]
        if cosine < COLLAPSED_BELOW * dot:
            logger.warning(
                f"Magnitude collapse: the same embeddings reach nDCG@10 {dot:.4f} by dot but"
                f" {cosine:.4f} by cosine: the norm does the ranking and the directions no longer"
                ' do (arXiv 2602.09229, App. N). Use the loss\'s scale="auto" and a lower learning'
                " rate, or train this model with CosineRankingLoss."
            )
        return metrics | _geometry(encoded)


def _mrr_recall_map(hits: NDArray[np.bool_], relevant: Any) -> list[float]:
    """MRR@10, recall@100 and MAP@100 of the best 100 documents: (n, <= 100) and n collections ->
    means."""
    number, ranks = np.array([len(row) for row in relevant]), np.arange(1, hits.shape[1] + 1)
    precision = hits.cumsum(axis=1) / ranks
    return [
        (hits / ranks)[:, :10].max(axis=1).mean(),
        (hits.sum(axis=1) / number).mean(),
        ((hits * precision).sum(axis=1) / number.clip(max=100)).mean(),
    ]


def _geometry(encoded: EncodedTask) -> dict[str, float]:
    """Norms and directions of both sides."""
    sides, is_relevant = (
        {
            "query": encoded.queries,
            "document": encoded.documents,
        },
        encoded.degrees > 0,
    )
    figures = norm_figures(sides, is_relevant)
    if abs(figures["document_norm_mean"] - 1) < 1e-3 and figures["document_norm_cv"] < 1e-3:
        logger.info(
            "All document norms are 1: the model normalises, and cosine and dot rank alike. "
            'stm.prepare(model, "dot") strips the normalisation.'
        )
    return figures | {
        f"{role}_mean_cosine": mean_cosine(side) for role, side in sides.items() if len(side) > 1
    }
