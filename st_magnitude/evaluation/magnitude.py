"""MagnitudeEvaluator: one encoding, read out with its own similarity, by direction alone and with full length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_magnitude.evaluation.metrics import append_csv, are_unit, check_judgments, csv_name, ndcg
from st_magnitude.geometry import CosineSum, coefficient_of_variation, cohens_d, norms
from st_magnitude.similarity import COSINE, DOT, Similarity
from st_magnitude.surgery.raw import raw_embeddings

__all__ = ["MagnitudeEvaluator"]

logger = logging.getLogger(__name__)

METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")
COLLAPSED_BELOW = 0.75  # cosine nDCG over dot nDCG: 0.97 to 1 in arXiv 2602.09229, Table 18; 0.24 in the collapsed E5


class MagnitudeEvaluator(InformationRetrievalEvaluator):
    """Retrieval metrics of the same embeddings under the matched similarity, cosine and dot, and their geometry.

    Queries and corpus are encoded once, with ``encode_query`` and ``encode_document``, and stay raw: before a closing
    ExponentNorm. Ranking and metrics are those of sentence-transformers' InformationRetrievalEvaluator. Returned keys,
    each behind ``"{name}_"`` where there is a name:

    - ``{matched,cosine,dot}_{ndcg@10,mrr@10,recall@100,map@100}``;
    - ``cohens_d`` of the norms of documents relevant to some query against those relevant to none (pooled by degrees
      of freedom); left out where either group has fewer than two documents;
    - ``{query,document}_{norm_mean,norm_cv,mean_cosine}``, the last left out for a single text.

    The primary metric is ``matched_ndcg@10``, so in the Trainer
    ``metric_for_best_model="eval_{name}_matched_ndcg@10"``. A warning tells of magnitude collapse: cosine nDCG@10 below
    three quarters of dot nDCG@10, on a model whose directions no longer rank (arXiv 2602.09229, App. N).

    Args:
        queries: Query id -> text. Queries without a relevant document are left out.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        similarity: What ``matched`` means, a Similarity or its name. By default the model's own: that of a closing
            ExponentNorm, else its ``similarity_fn_name``.
        name: Goes in front of the keys and into the name of the CSV file, with ``truncate_dim`` behind it.
        main_metric: The metric under the matched similarity that chooses the best checkpoint.
        corpus_chunk_size: Documents encoded and ranked at a time; only one chunk of embeddings is held in memory.
        batch_size: Texts encoded at a time.
        show_progress_bar: Whether to show one.
        truncate_dim: Evaluate this prefix of the embeddings.
        write_csv: Whether a call with an ``output_path`` adds a row to ``Magnitude_evaluation_{name}_results.csv``.
        **retrieval: More of InformationRetrievalEvaluator: ``query_prompt``, ``query_prompt_name``, ``corpus_prompt``,
            ``corpus_prompt_name``, ``write_predictions``.

    Attributes:
        per_query: After a call, nDCG@10 of every query under ``"matched"``, ``"cosine"`` and ``"dot"``, in the order of
            ``queries_ids``: what `st_magnitude.geometry.paired_bootstrap` takes.

    Raises:
        ValueError: Before anything is encoded, if the data are empty or inconsistent (see `check_judgments`), or an
            argument is not one of its choices; at the call, if the model's similarity is a distance.

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
        relevant_docs: Mapping[str, Collection[str]],
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
            raise ValueError(f"main_metric is one of {METRICS}, got {main_metric!r}.")
        if truncate_dim is not None and truncate_dim < 1:
            raise ValueError(f"truncate_dim is a number of dimensions, at least 1, got {truncate_dim}.")
        super().__init__(
            queries=dict(queries),
            corpus=dict(corpus),
            relevant_docs=check_judgments(queries, corpus, relevant_docs),
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
        matched = Similarity(*(self.similarity or implied_similarity(model)).exponents)  # plain numbers, no gradients
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
            + "\n".join(f"{key}: {value:.4f}" for key, value in metrics.items())
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
        """The metrics of the base class; the embeddings and rankings that pass by are measured on the way."""
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
        self._measure(encode_fn_name or "document", embeddings)
        return embeddings

    def compute_metrics(self, queries_result_list: list[Any]) -> dict[str, Any]:
        """The metrics of one score function; nDCG@10 of every query is kept as well."""
        relevant = [self.relevant_docs[query] for query in self.queries_ids]
        hits = [
            [hit["corpus_id"] in docs for hit in ranked[:10]]
            for docs, ranked in zip(relevant, queries_result_list, strict=True)
        ]
        self._ndcg.append(ndcg(hits, [len(docs) for docs in relevant], k=10))
        return super().compute_metrics(queries_result_list)

    def output_scores(self, scores: dict[str, Any]) -> None:
        """Nothing: a call logs all metrics together."""

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says about this evaluation."""
        return super().get_config_dict() | ({"similarity": repr(self.similarity)} if self.similarity else {})

    def _measure(self, role: str, embeddings: Any) -> None:
        self._norms[role].append(norms(embeddings))
        self._cosines[role].add(embeddings)

    def _geometry(self) -> dict[str, float]:
        lengths = {role: np.concatenate(chunks) for role, chunks in self._norms.items()}
        if are_unit(lengths["document"]):
            logger.info(
                "All document norms are 1: the model normalises, so cosine and dot rank alike and length says nothing. "
                'stm.prepare(model, "dot") strips the normalisation.'
            )
        judged_relevant = set().union(*self.relevant_docs.values())
        is_relevant = np.array([document in judged_relevant for document in self.corpus_ids])
        geometry: dict[str, float] = {}
        if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
            logger.info(
                f"cohens_d is left out: {is_relevant.sum()} of {len(is_relevant)} documents are relevant to a query, "
                "and it needs two that are and two that are not. Add distractors to the corpus."
            )
        else:
            geometry["cohens_d"] = cohens_d(lengths["document"][is_relevant], lengths["document"][~is_relevant])
        for role, values in lengths.items():
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
                "length does the ranking and direction has been given up (arXiv 2602.09229, App. N). Use the loss's "
                'scale="auto" and a lower learning rate, or train this model with CosineRankingLoss.'
            )


def implied_similarity(model: SentenceTransformer) -> Similarity:
    """The similarity that a model was made for: that of a closing ExponentNorm, else its ``similarity_fn_name``.

    Raises:
        ValueError: If that is a distance.
    """
    closing = getattr(list(model.children())[-1], "similarity", None)
    if isinstance(closing, Similarity):
        return closing
    if model.similarity_fn_name not in ("cosine", "dot"):
        raise ValueError(
            f"The model's similarity_fn_name is {model.similarity_fn_name!r}, which is no inner product: "
            'pass similarity="cosine", "dot", "qnorm", "dnorm" or a Similarity.'
        )
    return Similarity.named(model.similarity_fn_name)
