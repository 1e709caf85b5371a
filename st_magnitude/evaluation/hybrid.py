"""Hybrid retrieval: BM25 and embeddings, fused by rank.

A run is ``{query id: {document id: score}}``, best documents first: the format of ir-measures, ranx
and mteb, which read and write files of it. A `Ranking` is one.
"""

from __future__ import annotations

import logging
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from typing_extensions import Unpack

from st_magnitude._checks import InputError, at_least, needs
from st_magnitude.data.beir import other_spelling
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import Judgments, RetrievalData
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.scoring import scoring_of

__all__ = ["HybridEvaluator", "bm25_run", "reciprocal_rank_fusion"]

Run = dict[str, dict[str, float]]
FEW_HITS = 0.8  # share of queries for which BM25 finds a document, below which it warns

logger = logging.getLogger(__name__)


def reciprocal_rank_fusion(
    runs: Sequence[Mapping[str, Mapping[str, float]]], k: float = 60, top_k: int | None = None
) -> Run:
    """Fuses several runs by rank alone, so their scores need no common scale.

        score(d) = sum_r  1 / (k + rank_r(d)),   rank_r(d) = 1, 2, ... in run r

    Equal scores rank by document id, the lower first, as in sentence-transformers; trec_eval ranks
    the higher first.

    Args:
        runs: Runs, where a higher score is better.
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


def bm25_run(
    data: RetrievalData,
    top_k: int = 100,
    stopwords: str | list[str] | None = "en",
    tokenizer: Callable[[str], list[str]] | None = None,
) -> Ranking:
    """The best documents of each query by BM25 in Lucene's form, computed by the library bm25s.

        score(q, d) = sum_{t in q}  idf_t * f / (f + k1 (1 - b + b |d| / mean |d|)),
        idf_t = log(1 + (N - n_t + 1/2) / (n_t + 1/2))

    Here f is the number of times that t occurs in d, |d| the number of words of d, n_t the number
    of documents with t, N the number of all documents, k1 = 1.5 and b = 0.75, as in mteb. A run has
    no documents without a word of the query, and ranks ties by id.

    Args:
        top_k: Number of documents for each query.
        stopwords: Words that do not count, in any case: a language that bm25s knows, a list, or
            None, which is best for code.
        tokenizer: Splits a text, in lower case and in Unicode's form NFC, into words. By default a
            word has two letters or digits and more between spaces or punctuation, as in mteb, which
            finds nothing in Chinese, Japanese or Thai, and cuts words of Hindi at vowel signs:
            there pass a segmenter, or ``list`` for single characters.

    Logs a warning if fewer than 80 % of the queries have a document with one of their words.

    Raises:
        ImportError: If bm25s is not installed.
        ValueError: If bm25s does not know the language of the stop words.

    Example:
        >>> corpus = {"d1": "Bees make honey.", "d2": "Honey, honey!"}
        >>> data = RetrievalData({"q1": "honey", "q2": "tea"}, corpus, {})
        >>> {query: list(found) for query, found in bm25_run(data).items()}
        {'q1': ['d2', 'd1'], 'q2': []}

    Source: Lù, BM25S, arXiv 2407.03618; the formula is "Lucene (accurate)" of Kamphuis et al.,
    Which BM25 Do You Mean?, 2020.
    """
    with needs("BM25", "eval"):
        import bm25s

    def spelled(text: str) -> str:
        return unicodedata.normalize("NFC", text).lower()

    split = tokenizer or re.compile(r"\b\w\w+\b").findall
    left_out = {*map(spelled, bm25s.tokenization.Tokenizer(stopwords=stopwords or []).stopwords)}

    def words(text: str) -> list[str]:
        return [word for word in split(spelled(text)) if word not in left_out]

    documents = [words(data.corpus[document]) for document in data.document_ids]
    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", dtype="float64")
    if any(documents):
        index.index(documents, create_empty_token=False, show_progress=False)

    def found(text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if not any(documents):
            return np.empty(0, dtype=np.int64), np.empty(0)
        scores = index.get_scores_from_ids(index.get_tokens_ids(words(text)))  # (m,)
        places = np.flatnonzero(scores > 0)
        return places, scores[places]

    ranking = Ranking.of(data, list(data.queries), map(found, data.queries.values()), top_k)
    without = [query for query in ranking if not ranking[query]]
    if len(without) > (1 - FEW_HITS) * len(ranking):
        logger.warning(
            f"BM25 finds no document for {len(without):,} of {len(ranking):,} queries, such as"
            f" {without[0]!r}: no document has one of their words. For languages without spaces,"
            " pass bm25_run a tokenizer."
        )
    return ranking


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
        run = bm25_run(self.task, top_k) if bm25 is None else bm25
        if bm25 is not None and not any(run.get(query) for query in self.queries_ids):
            raise InputError(
                f"bm25 has no document for any judged query; its keys start with {list(run)[:3]}."
            )
        named = {document for query in self.queries_ids for document in run.get(query, ())}
        if unknown := sorted(named - self.task.corpus.keys(), key=str):
            raise InputError(
                f"bm25 has {len(unknown):,} documents that are not in the corpus, such as"
                f" {unknown[0]!r}{other_spelling(unknown[0], self.task.corpus)}: give them the ids"
                " of the corpus, as strings."
            )
        self.runs = {"bm25": Ranking.of_run(self.task, run, top_k)}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        dense = self.encode(model).search(scoring_of(model, self.similarity), self.top_k)
        lexical = Ranking.of_run(self.task, self.runs["bm25"], self.top_k)
        fused = reciprocal_rank_fusion([dense, lexical], top_k=self.top_k)
        hybrid = Ranking.of_run(self.task, fused, self.top_k)
        self.runs = {"dense": dense, "bm25": self.runs["bm25"], "hybrid": hybrid}
        metrics: dict[str, float] = {}
        for key, ranking in (self.runs | {"bm25": lexical}).items():
            self.per_query[key] = ranking.ndcg
            of_query = ranking.metrics(self.top_k)
            metrics |= {f"{key}_{name}": float(x.mean()) for name, x in of_query.items()}
        return metrics
