"""MagnitudeEvaluator scores the same embeddings as the model does, by cosine and by dot."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor
from typing_extensions import Unpack

from st_magnitude import geometry
from st_magnitude.data.retrieval import Judgments
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.judge import norm_warning
from st_magnitude.similarity import COSINE, DOT

logger = logging.getLogger(__name__)

# cosine nDCG over dot nDCG: 0.97 to 1 in arXiv 2602.09229, Table 18; 0.24 in the collapsed E5
COLLAPSED_BELOW = 0.75


class MagnitudeEvaluator(SearchEvaluator):
    """Retrieval metrics by the model's similarity, by cosine and by dot, and figures of norms.

    Metrics are defined as in sentence-transformers' InformationRetrievalEvaluator; nDCG also counts
    grades. Their keys:

    - ``{matched,cosine,dot}_{ndcg@10,mrr@10,recall@100,map@100}``;
    - ``cohens_d`` between the norms of documents that are relevant to some query and the norms of
      never-relevant documents (pooled by degrees of freedom), and ``cohens_d_error``, its standard
      error; left out where either group has fewer than two documents;
    - ``{query,document}_{norm_mean,norm_cv}``, the second the standard deviation over the mean, and
      ``{query,document}_{mean_cosine,isoscore}``, left out for a single text. IsoScore depends on
      the number of texts: compare it on the same data only.

    The primary metric is ``matched_ndcg@10``. A warning reports magnitude collapse: cosine nDCG@10
    below three quarters of dot nDCG@10, in a model whose directions no longer rank (arXiv
    2602.09229, App. N). Another one is that of `judge.norm_warning`, for which the first call
    stands for the model before training.

    Args:
        also_relevant: Ids of documents that answer queries of other splits, such as
            `load_splits(folder).relevant_documents()`. Without them they count as
            never-relevant, so d is right only if ``relevant_docs`` has the answers of all splits.

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

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        also_relevant: Collection[str] = (),
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        self.first_d = math.nan
        self.answers_others = np.isin(self.data.document_ids, list(also_relevant))  # (m,)

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        encoded = self.encode(model)
        similarities = {"matched": encoded.similarity, "cosine": COSINE, "dot": DOT}
        rankings = encoded.searches(list(similarities.values()), k=100)
        metrics: dict[str, float] = {}
        for name, ranking in zip(similarities, rankings, strict=True):
            self.per_query[name] = ranking.ndcg
            metrics |= {f"{name}_{key}": float(x.mean()) for key, x in ranking.metrics(100).items()}
        cosine = metrics["cosine_ndcg@10"]
        dot = metrics["dot_ndcg@10"]
        if cosine < COLLAPSED_BELOW * dot:
            logger.warning(
                f"Magnitude collapse: the same embeddings reach nDCG@10 {dot:.4f} by dot but "
                f"{cosine:.4f} by cosine: the norm does the ranking and the directions no longer "
                'do (arXiv 2602.09229, App. N). Use the loss\'s scale="auto" and a lower learning '
                "rate, or train this model with CosineRankingLoss."
            )
        sides = {"query": encoded.queries, "document": encoded.documents}
        is_relevant = self.data.is_relevant | self.answers_others
        metrics |= geometry_figures(sides, is_relevant)
        d = metrics.get("cohens_d", math.nan)
        error = metrics.get("cohens_d_error", math.nan)
        if warning := norm_warning(d, error, self.first_d):
            if not self.answers_others.any():
                warning += (
                    " If documents answer queries of other splits, pass them as also_relevant: they"
                    " count as never-relevant now."
                )
            logger.warning(warning)
        self.first_d = d if math.isnan(self.first_d) else self.first_d
        return metrics


def geometry_figures(
    sides: Mapping[str, Tensor], is_relevant: NDArray[np.bool_] | None = None
) -> dict[str, float]:
    """Norms and directions of each side, (n, D), and Cohen's d of the norms of its documents."""
    figures: dict[str, float] = {}
    for role, side in sides.items():
        values = geometry.norms(side)
        figures[f"{role}_norm_mean"] = float(values.mean())
        figures[f"{role}_norm_cv"] = geometry.coefficient_of_variation(values)
        if len(side) > 1:
            figures[f"{role}_mean_cosine"] = geometry.mean_cosine(side)
            figures[f"{role}_isoscore"] = geometry.isoscore(side)
    if is_relevant is not None and min(is_relevant.sum(), (~is_relevant).sum()) > 1:
        documents = geometry.norms(sides["document"])
        relevant = documents[is_relevant]
        others = documents[~is_relevant]
        d = geometry.cohens_d(relevant, others)
        figures["cohens_d"] = d
        figures["cohens_d_error"] = geometry.cohens_d_error(d, len(relevant), len(others))
    return figures
