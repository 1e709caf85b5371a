"""MagnitudeEvaluator scores one encoding with its own similarity, by cosine and by dot."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_magnitude._checks import whole_number
from st_magnitude.data.retrieval import Judgments
from st_magnitude.data.task import check_finite, ndcg
from st_magnitude.evaluation.base import append_csv, as_lines, csv_name, judged
from st_magnitude.evaluation.metrics import are_unit, scoring_of
from st_magnitude.geometry import CosineSum, coefficient_of_variation, cohens_d, norms
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import raw_embeddings

__all__ = ["MagnitudeEvaluator"]

logger = logging.getLogger(__name__)

METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")
COLLAPSED_BELOW = 0.75  # cosine nDCG over dot nDCG: 0.97 to 1 in arXiv 2602.09229, Table 18; 0.24 in the collapsed E5


class MagnitudeEvaluator(InformationRetrievalEvaluator):
    """Retrieval metrics of the same embeddings under the matched similarity, cosine and dot, and their geometry.

    Queries and corpus are encoded once, with ``encode_query`` and ``encode_document``, before a closing ExponentNorm.
    sentence-transformers' InformationRetrievalEvaluator, the base class, ranks and computes the metrics. Returned keys,
    with the prefix ``"{name}_"`` if there is a name:

    - ``{matched,cosine,dot}_{ndcg@10,mrr@10,recall@100,map@100}``;
    - ``cohens_d`` between the norms of documents that are relevant to some query and those of never-relevant documents
      (pooled by degrees of freedom); left out where either group has fewer than two documents;
    - ``{query,document}_{norm_mean,norm_cv,mean_cosine}``, the last left out for a single text.

    The primary metric is ``matched_ndcg@10``, so in the Trainer
    ``metric_for_best_model="eval_{name}_matched_ndcg@10"``. A warning reports magnitude collapse: cosine nDCG@10 below
    three quarters of dot nDCG@10, in a model whose directions no longer rank (arXiv 2602.09229, App. N).

    Args:
        main_metric: The metric under the matched similarity that chooses the best checkpoint.
        corpus_chunk_size: Number of documents that are encoded and ranked at a time; memory holds one such chunk.
        truncate_dim: Number of dimensions of the prefix to evaluate. A prefix is cut before it is divided.
        **retrieval: Arguments of InformationRetrievalEvaluator: ``query_prompt``, ``query_prompt_name``,
            ``corpus_prompt``, ``corpus_prompt_name``, ``write_predictions``.

    The other arguments are those of `SearchEvaluator`; ``similarity`` is that of the ``matched`` metrics, and
    ``truncate_dim`` is appended to the name. The CSV file is ``Magnitude_evaluation_{name}_results.csv``.

    Attributes:
        per_query: After a call, nDCG@10 of every query under ``"matched"``, ``"cosine"`` and ``"dot"``, in the order of
            ``queries_ids``.

    Raises:
        ValueError: As `SearchEvaluator`.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], similarity_fn_name="dot", device="cpu")
        >>> queries, corpus = {"q": "honey"}, {"d1": "honey", "d2": "honey, honey of bees"}
        >>> evaluator = MagnitudeEvaluator(queries, corpus, relevant_docs={"q": {"d2"}}, name="dev")
        >>> metrics = evaluator(model)
        >>> metrics["dev_matched_mrr@10"], metrics["dev_cosine_mrr@10"], evaluator.primary_metric
        (1.0, 0.5, 'dev_matched_ndcg@10')
    """

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        similarity: Similarity | str | None = None,
        name: str = "",
        main_metric: str = "ndcg@10",
        corpus_chunk_size: int = 50_000,
        batch_size: int = 32,
        show_progress_bar: bool = False,
        truncate_dim: int | None = None,
        write_csv: bool = True,
        **retrieval: Any,
    ) -> None:
        if main_metric not in METRICS:
            raise ValueError(f"main_metric must be one of {METRICS}, got {main_metric!r}.")
        if truncate_dim is not None:
            whole_number("truncate_dim", truncate_dim)
        self.task = judged(queries, corpus, relevant_docs)
        super().__init__(
            queries=dict(queries),
            corpus=dict(corpus),
            relevant_docs={query: set(grades) for query, grades in self.task.relevant.items()},
            name="_".join(str(part) for part in (name, truncate_dim) if part),
            corpus_chunk_size=corpus_chunk_size,
            batch_size=batch_size,
            show_progress_bar=show_progress_bar,
            truncate_dim=truncate_dim,
            write_csv=write_csv,
            accuracy_at_k=[10],
            precision_recall_at_k=[100],
            mrr_at_k=[10],
            ndcg_at_k=[10],
            map_at_k=[100],
            **retrieval,
        )
        self.primary_metric = f"{self.name}_matched_{main_metric}" if self.name else f"matched_{main_metric}"
        self.csv_file = csv_name("Magnitude", self.name, write_csv)
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self.per_query: dict[str, NDArray[np.float64]] = {}

    def __call__(  # type: ignore[override]
        self,
        model: SentenceTransformer,
        output_path: str | None = None,
        epoch: int = -1,
        steps: int = -1,
        **kwargs: Any,
    ) -> dict[str, float]:
        """Encodes, ranks, measures, logs, writes the CSV row, and returns all metrics by key."""
        matched = scoring_of(model, self.similarity)
        self.score_functions = {"matched": matched, "cosine": COSINE, "dot": DOT}
        self.score_function_names = list(self.score_functions)
        scores = self.compute_all_metrics(model, output_path=output_path, **kwargs)
        metrics = {
            f"{function}_{metric}@{k}": float(scores[function][f"{metric}@k"][int(k)])
            for function in self.score_function_names
            for metric, k in (key.split("@") for key in METRICS)
        } | self._geometry()
        logger.info(
            f"Magnitude evaluation of the model on the {self.name or 'given'} dataset, matched is {matched.name}:\n"
            + as_lines(metrics)
        )
        self._warn_of_collapse(metrics)
        if output_path is not None and self.write_csv:
            append_csv(Path(output_path) / self.csv_file, {"epoch": epoch, "steps": steps, **metrics})
        metrics = self.prefix_name_to_metrics(metrics, self.name)
        self.store_metrics_in_model_card_data(model, metrics, epoch, steps)
        return metrics

    def compute_all_metrics(
        self,
        model: SentenceTransformer,
        corpus_model: SentenceTransformer | None = None,
        corpus_embeddings: Any = None,
        output_path: str | None = None,
    ) -> dict[str, Any]:
        """The metrics of the base class. Embeddings and rankings are measured on their way through it."""
        self._norms: dict[str, list[NDArray[np.float64]]] = {"query": [], "document": []}
        self._cosines = {role: CosineSum() for role in self._norms}
        self._ndcg: list[NDArray[np.float64]] = []
        if corpus_embeddings is not None:
            self._measure("document", corpus_embeddings)
        scores = super().compute_all_metrics(model, corpus_model, corpus_embeddings, output_path)
        self.per_query = dict(zip(self.score_function_names, self._ndcg, strict=True))
        return scores

    def embed_inputs(
        self, model: SentenceTransformer, sentences: Any, encode_fn_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Raw embeddings of the queries, or of one chunk of the corpus: (n, D)."""
        with raw_embeddings(model, keep_normalize=True):
            embeddings = super().embed_inputs(model, sentences, encode_fn_name, *args, **kwargs)
        role = encode_fn_name or "document"
        self._measure(role, embeddings)
        return embeddings

    def compute_metrics(self, queries_result_list: list[Any]) -> dict[str, Any]:
        """The metrics of one score function. nDCG@10 of every query is kept as well."""
        relevant = [self.task.relevant[query] for query in self.queries_ids]
        gains = [
            [grades.get(hit["corpus_id"], 0) for hit in ranked[:10]]
            for grades, ranked in zip(relevant, queries_result_list, strict=True)
        ]
        self._ndcg.append(ndcg(gains, [grades.values() for grades in relevant], k=10))
        return super().compute_metrics(queries_result_list) | {"ndcg@k": {10: float(self._ndcg[-1].mean())}}

    def output_scores(self, scores: dict[str, Any]) -> None:
        """Does nothing, because a call logs all metrics together."""

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows."""
        return super().get_config_dict() | ({"similarity": repr(self.similarity)} if self.similarity else {})

    def _measure(self, role: str, embeddings: Any) -> None:
        start = sum(map(len, self._norms[role]))
        ids = (self.queries_ids if role == "query" else self.corpus_ids)[start:]
        check_finite(embeddings, role, ids)
        self._norms[role].append(norms(embeddings))
        self._cosines[role].add(embeddings)

    def _geometry(self) -> dict[str, float]:
        sizes = {role: np.concatenate(chunks) for role, chunks in self._norms.items()}
        if are_unit(sizes["document"]):
            logger.info(
                "All document norms are 1: the model normalises, so that cosine and dot rank alike. "
                'stm.prepare(model, "dot") strips the normalisation.'
            )
        judged_relevant = set().union(*self.relevant_docs.values())
        is_relevant = np.array([document in judged_relevant for document in self.corpus_ids])
        geometry: dict[str, float] = {}
        if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
            logger.info(
                f"cohens_d is left out: {is_relevant.sum()} of {len(is_relevant)} documents are relevant to a query, "
                "and it needs two that are and two that are not. Add never-relevant documents to the corpus."
            )
        else:
            geometry["cohens_d"] = cohens_d(sizes["document"][is_relevant], sizes["document"][~is_relevant])
        for role, values in sizes.items():
            geometry[f"{role}_norm_mean"] = float(values.mean())
            geometry[f"{role}_norm_cv"] = coefficient_of_variation(values)
            if len(values) > 1:
                geometry[f"{role}_mean_cosine"] = self._cosines[role].mean
        return geometry

    def _warn_of_collapse(self, metrics: dict[str, float]) -> None:
        cosine, dot = metrics["cosine_ndcg@10"], metrics["dot_ndcg@10"]
        if cosine < COLLAPSED_BELOW * dot:
            logger.warning(
                f"Magnitude collapse: the same embeddings reach nDCG@10 {dot:.4f} by dot but {cosine:.4f} by cosine: "
                "the norm does the ranking and the directions no longer do (arXiv 2602.09229, App. N). Use the loss's "
                'scale="auto" and a lower learning rate, or train this model with CosineRankingLoss.'
            )
