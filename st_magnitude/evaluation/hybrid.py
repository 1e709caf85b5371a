"""Hybrid retrieval: BM25 and embeddings, fused by rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sentence_transformers import SentenceTransformer
from typing_extensions import Unpack

from st_magnitude._checks import InputError, at_least
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import Judgments
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.lexical import bm25_run

Run = dict[str, dict[str, float]]


def reciprocal_rank_fusion(
    runs: Sequence[Mapping[str, Mapping[str, float]]], k: float = 60, top_k: int | None = None
) -> Run:
    """Fuses several runs by rank alone, so their scores need no common scale.

        score(d) = sum_r  1 / (k + rank_r(d)),   rank_r(d) = 1, 2, ... in run r

    Equal scores rank by document id, the lower first, as in sentence-transformers.

    Args:
        runs: Runs, ``{query id: {document id: score}}``, where a higher score is better.
        k: Constant that damps the weight of the first ranks.
        top_k: Number of documents to keep for each query; all by default.

    Example:
        >>> dense = {"q": {"d1": 0.9, "d2": 0.8}}
        >>> bm25 = {"q": {"d2": 7.1, "d3": 4.0}}
        >>> reciprocal_rank_fusion([dense, bm25], k=1)
        {'q': {'d2': 0.8333333333333333, 'd1': 0.5, 'd3': 0.3333333333333333}}

    Source: Cormack, Clarke and Buettcher, Reciprocal Rank Fusion Outperforms Condorcet and
    Individual Rank Learning Methods, 2009 (k = 60).
    """
    fused: Run = {}
    for query in dict.fromkeys(query for run in runs for query in run):
        shares: dict[str, list[float]] = {}
        for run in runs:
            for position, (document, _) in enumerate(_ranked(run.get(query, {})), start=1):
                shares.setdefault(document, []).append(1 / (k + position))
        # exact in any order of the runs
        scores = {document: math.fsum(parts) for document, parts in shares.items()}
        fused[query] = dict(_ranked(scores)[:top_k])
    return fused


def _ranked(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    if lost := next((document for document, score in scores.items() if math.isnan(score)), None):
        raise InputError(f"A run has the score nan for {lost!r}; remove what has no score.")
    return sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))


class HybridEvaluator(SearchEvaluator):
    """Retrieval metrics of a model, of BM25, and of the two fused by rank.

    The keys are ``{dense,bm25,hybrid}_{ndcg@10,mrr@10,recall@{top_k},map@{top_k}}``, as defined by
    sentence-transformers' InformationRetrievalEvaluator. The primary metric is ``hybrid_ndcg@10``.
    BM25 searches once, when the evaluator is made, and sees no prompts.

    Args:
        top_k: Number of documents of each search that are fused, and that the fused run keeps, at
            least 10.
        bm25: A run in place of ``bm25_run(data, top_k)``, of any search engine.

    `SearchEvaluator` documents the other arguments, attributes and errors.

    Attributes:
        runs: The `Ranking` ``"bm25"``, and after a call also ``"dense"`` and ``"hybrid"``.

    Raises:
        ImportError: If bm25s is not installed and no run is given.
        ValueError: If ``top_k`` is below 10, or ``bm25`` is a run of other queries, names a
            document that is not in the corpus, or has a score that is not a number.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "honey"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "Honey, honey, honey!", "d2": "Bees make honey."}
        >>> corpus["d3"] = "Bees like honey from flowers."
        >>> evaluator = HybridEvaluator({"q": "bees honey"}, corpus, {"q": {"d2"}}, name="dev")
        >>> metrics = evaluator(model)
        >>> metrics["dev_dense_mrr@10"], metrics["dev_bm25_mrr@10"], metrics["dev_hybrid_mrr@10"]
        (0.5, 1.0, 1.0)

    Source: Cai et al., Revela, section 4.2 and App. A.5.
    """

    kind = "Hybrid"
    primary = "hybrid_ndcg@10"
    settings = ("top_k",)

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Judgments,
        top_k: int = 100,
        bm25: Mapping[str, Mapping[str, float]] | None = None,
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        at_least("top_k", top_k, 10, ", for nDCG@10")
        self.top_k = top_k
        run = bm25_run(self.data, top_k) if bm25 is None else bm25
        if bm25 is not None and not any(run.get(query) for query in self.queries_ids):
            raise InputError(
                f"bm25 has no document for any judged query; its keys start with {list(run)[:3]}."
            )
        self.runs = {"bm25": Ranking.of_run(self.data, run, top_k)}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        dense = self.encode(model).search(self.top_k)
        lexical = Ranking.of_run(self.data, self.runs["bm25"], self.top_k)
        fused = reciprocal_rank_fusion([dense, lexical], top_k=self.top_k)
        hybrid = Ranking.of_run(self.data, fused, self.top_k)
        self.runs = {"dense": dense, "bm25": self.runs["bm25"], "hybrid": hybrid}
        return self.figures(self.runs | {"bm25": lexical}, self.top_k)
