"""Hybrid retrieval: BM25 and embeddings, fused by rank. A run is {query id: {document id: score}}, as in trec_eval."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import needs, whole_number
from st_magnitude.data.task import EncodedTask, check_texts, encode_texts, ndcg, rank
from st_magnitude.evaluation.base import SearchEvaluator, SearchOptions
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.similarity import Similarity

__all__ = ["HybridEvaluator", "Run", "bm25_run", "dense_run", "reciprocal_rank_fusion"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

Run = dict[str, dict[str, float]]


def reciprocal_rank_fusion(
    rankings: Sequence[Mapping[str, Mapping[str, float]]],
    k: float = 60,
    weights: Sequence[float] | None = None,
    depth: int | None = None,
    top_k: int | None = None,
) -> Run:
    """Fuses several runs by rank alone, so that their scores need no common scale.

        score(d) = sum_r  w_r / (k + rank_r(d)),   rank_r(d) = 1, 2, ... in run r

    A document or query that a run does not contain gets nothing from it. The result contains the queries of all runs in
    the order of their first appearance, with the best documents first. Equal scores rank by document id, the lower
    first, both in a run and in the result: this is the order of sentence-transformers, and the reverse of trec_eval's.
    The order of the runs does not matter.

    Args:
        rankings: Runs, {query id: {document id: score}} each, where a higher score is better.
        k: Constant that damps the weight of the first ranks, at least 0.
        weights: Weight of every run, at least 0; all 1 by default. A run of weight 0 does not count.
        depth: Number of documents of each run that count, best first; all by default.
        top_k: Number of documents of each query that the result keeps; all by default.

    Raises:
        ValueError: If there are no runs, an argument is out of its range, all weights are 0, or a score is not a
            number.

    Example:
        >>> dense = {"q": {"d1": 0.9, "d2": 0.8}}
        >>> bm25 = {"q": {"d2": 7.1, "d3": 4.0}}
        >>> reciprocal_rank_fusion([dense, bm25], k=1)
        {'q': {'d2': 0.8333333333333333, 'd1': 0.5, 'd3': 0.3333333333333333}}

    Source: Cormack, Clarke and Buettcher, Reciprocal Rank Fusion Outperforms Condorcet and Individual Rank Learning
    Methods, 2009 (k = 60); Cai et al., Revela, section 4.2 and App. A.5, where the best 200 are kept.
    """
    if isinstance(rankings, Mapping) or not len(rankings):
        raise ValueError(
            "rankings must be a list of runs, {query id: {document id: score}} each, got "
            f"{type(rankings).__name__} of {len(rankings)}: pass at least one run, as in [dense, bm25]."
        )
    weights = _check_fusion(len(rankings), k, weights)
    depth = None if depth is None else whole_number("depth", depth)
    top_k = None if top_k is None else whole_number("top_k", top_k)
    fused: Run = {}
    for query in dict.fromkeys(query for run in rankings for query in run):
        shares: dict[str, list[float]] = {}
        for run, weight in zip(rankings, weights, strict=True):
            if weight > 0:
                for position, document in enumerate(_ranked(run.get(query, {}), depth), start=1):
                    shares.setdefault(document, []).append(weight / (k + position))
        scores = {document: math.fsum(parts) for document, parts in shares.items()}  # exact in any order of the runs
        fused[query] = {document: scores[document] for document in _ranked(scores, top_k)}
    return fused


def bm25_run(
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    top_k: int = 100,
    k1: float = 1.5,
    b: float = 0.75,
    stopwords: str | Sequence[str] | None = "en",
    stemmer: str | Callable[[list[str]], list[str]] | None = None,
    token_pattern: str = r"(?u)\b\w\w+\b",
    show_progress_bar: bool = False,
) -> Run:
    """The best documents of each query by BM25 in Lucene's form, computed by the library bm25s.

        score(q, d) = sum_{t in q}  log(1 + (N - n_t + 1/2) / (n_t + 1/2)) * f / (f + k1 (1 - b + b |d| / mean |d|))

    Here f is the number of times that t occurs in d, |d| the number of words of d, n_t the number of documents with t,
    and N the number of all documents. A word that occurs twice in a query counts twice. Documents that share no word
    with a query are not in its run. Equal scores rank by document id, the lower first.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text, which may be an empty string.
        top_k: Number of documents for each query; the size of the corpus or more keeps all.
        k1: Weight of repetitions of a word, at least 0. bm25s and mteb's BM25 use 1.5 with b = 0.75, Lucene itself uses
            1.2, and Anserini 0.9 with b = 0.4.
        b: Penalty for long documents, in [0, 1].
        stopwords: Words that do not count: a language that bm25s knows, a list, or None. Pass None for code, because
            ``if``, ``not`` and ``for`` are stop words in English.
        stemmer: A language of PyStemmer (``pip install PyStemmer``), such as ``"english"``, which mteb uses; or a
            function from a list of words to the list of their stems. The default None makes figures independent of what
            is installed.
        token_pattern: Regular expression of a word in the lower-cased text; by default two or more letters or digits.
        show_progress_bar: Whether to show the progress bars of bm25s.

    Raises:
        ImportError: If bm25s is not installed, or PyStemmer where a stemmer is given by name.
        ValueError: If queries or corpus are empty, or an argument is out of its range.

    Example:
        >>> corpus = {"d1": "Bees make honey.", "d2": "Honey, honey!", "d3": "Wax."}
        >>> {query: list(found) for query, found in bm25_run({"q1": "honey", "q2": "tea"}, corpus).items()}
        {'q1': ['d2', 'd1'], 'q2': []}

    Source: Lù, BM25S: Orders of Magnitude Faster Lexical Search via Eager Sparse Scoring, arXiv 2407.03618; the formula
    is "Lucene (accurate)" of Kamphuis et al., Which BM25 Do You Mean?, 2020.
    """
    with needs("BM25", "eval"):
        import bm25s as _bm25s
    bm25s: Any = _bm25s
    check_texts(queries, corpus)
    top_k = whole_number("top_k", top_k)
    if not 0 <= k1 < math.inf:
        raise ValueError(f"k1 must be a number of at least 0, got {k1}; 1.5 is usual.")
    if not 0 <= b <= 1:
        raise ValueError(f"b must be a number in [0, 1], got {b}; 0.75 is usual, 0 ignores the length of documents.")
    stems = _stemmer(stemmer) if isinstance(stemmer, str) else stemmer

    def words(texts: list[str]) -> list[list[str]]:
        return bm25s.tokenize(
            texts,
            stopwords=stopwords,
            stemmer=stems,
            token_pattern=token_pattern,
            return_ids=False,
            show_progress=show_progress_bar,
        )

    document_ids = sorted(corpus)  # rank() sorts ties by index
    documents = words([corpus[document] for document in document_ids])
    if not any(documents):
        return {query: {} for query in queries}
    index = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64")
    index.index(documents, create_empty_token=False, show_progress=show_progress_bar)
    run: Run = {}
    for query, tokens in zip(queries, words(list(queries.values())), strict=True):
        scores = index.get_scores_from_ids(index.get_tokens_ids(tokens))  # (m,)
        found = np.flatnonzero(scores > 0)
        best = found[rank(torch.from_numpy(scores[found])[None], top_k)[0].numpy()]
        run[query] = {document_ids[i]: float(scores[i]) for i in best}
    return run


def dense_run(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    top_k: int = 100,
    similarity: Similarity | str | None = None,
    batch_size: int = 32,
    show_progress_bar: bool = False,
    query_prompt: str | None = None,
    query_prompt_name: str | None = None,
    corpus_prompt: str | None = None,
    corpus_prompt_name: str | None = None,
) -> Run:
    """The best documents of each query by an exhaustive search over embeddings.

    Queries are encoded by ``encode_query`` and documents by ``encode_document``, with the prompts of each role. Memory
    holds all embeddings and a tile of the scores. Equal scores rank by document id, the lower first.

    Args:
        model: Any SentenceTransformer.
        queries: Query id -> text.
        corpus: Document id -> text.
        top_k: Number of documents for each query; the size of the corpus or more keeps all.

    The other arguments are those of `SearchEvaluator`.

    Raises:
        ValueError: If queries or corpus are empty, top_k is below 1, the model's similarity is a distance, or an
            embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey"])], similarity_fn_name="dot", device="cpu")
        >>> dense_run(model, {"q": "honey"}, {"d1": "honey", "d2": "honey of bees, honey", "d3": "bees"}, top_k=2)
        {'q': {'d2': 2.0, 'd1': 1.0}}
    """
    top_k = whole_number("top_k", top_k)
    similarity = scoring_of(model, similarity)
    encoded = encode_texts(
        model,
        queries,
        corpus,
        batch_size,
        show_progress_bar,
        query_prompt=query_prompt,
        query_prompt_name=query_prompt_name,
        corpus_prompt=corpus_prompt,
        corpus_prompt_name=corpus_prompt_name,
    )
    return _run(encoded, similarity, top_k)


def _run(encoded: EncodedTask, similarity: Similarity, top_k: int) -> Run:
    """The best documents of every query by their ids, with their scores."""
    top = encoded.top(similarity, top_k)
    rows = zip(encoded.query_ids or [], top.tolist(), encoded.scores(similarity, top).tolist(), strict=True)
    ids = encoded.document_ids or []
    return {query: {ids[c]: score for c, score in zip(columns, scores, strict=True)} for query, columns, scores in rows}


class HybridEvaluator(SearchEvaluator):
    """Retrieval metrics of a model, of BM25, and of the two fused by rank.

    A model that adds much to BM25 need not be the best one alone; this evaluator chooses the checkpoint for a hybrid
    search. Returned keys, with the prefix ``"{name}_"`` if there is a name:

    - ``{dense,bm25,hybrid}_{ndcg@10,mrr@10,recall@10,recall@{top_k}}``, as defined by sentence-transformers'
      InformationRetrievalEvaluator.

    The primary metric is ``hybrid_ndcg@10``, so in the Trainer ``metric_for_best_model="eval_{name}_hybrid_ndcg@10"``.
    BM25 searches once, when the evaluator is made, because training does not change it.

    Args:
        top_k: Number of documents of each search that are fused, and that the fused run keeps, at least 10.
        rrf_k: The k of `reciprocal_rank_fusion`.
        weights: Weights of the model's ranks and of those of BM25.
        bm25: A run to use in place of ``bm25_run(queries, corpus, top_k)``: of `bm25_run` with other arguments, or of
            another search engine. Its top_k best documents count.

    The other arguments are those of `SearchEvaluator`; BM25 sees no prompts. The CSV file is
    ``Hybrid_evaluation_{name}_results.csv``.

    Attributes:
        runs: The run ``"bm25"``, and after a call also ``"dense"`` and ``"hybrid"``.
        per_query: After a call, nDCG@10 of every query under the same names, in the order of ``queries_ids``.

    Raises:
        ImportError: If bm25s is not installed and no run is given.
        ValueError: As `SearchEvaluator`, and if ``bm25`` is a run of other queries or documents.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey"])], similarity_fn_name="dot", device="cpu")
        >>> corpus = {"d1": "Honey, honey, honey!", "d2": "Bees make honey.", "d3": "Bees like honey from flowers."}
        >>> evaluator = HybridEvaluator({"q": "bees honey"}, corpus, relevant_docs={"q": {"d2"}}, name="dev")
        >>> metrics = evaluator(model)
        >>> metrics["dev_dense_mrr@10"], metrics["dev_bm25_mrr@10"], metrics["dev_hybrid_mrr@10"]
        (0.5, 1.0, 1.0)
        >>> evaluator.primary_metric
        'dev_hybrid_ndcg@10'

    Source: Cai et al., Revela: Dense Retriever Learning via Language Modeling, section 4.2 and App. A.5.
    """

    kind = "Hybrid"
    primary = "hybrid_ndcg@10"

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Mapping[str, Collection[str]],
        top_k: int = 100,
        rrf_k: float = 60,
        weights: Sequence[float] = (1.0, 1.0),
        bm25: Mapping[str, Mapping[str, float]] | None = None,
        **options: Unpack[SearchOptions],
    ) -> None:
        super().__init__(queries, corpus, relevant_docs, **options)
        self.top_k = whole_number("top_k", top_k)
        if self.top_k < 10:
            raise ValueError(f"top_k must be at least 10, for nDCG@10, got {top_k}.")
        self.rrf_k, self.weights = rrf_k, _check_fusion(2, rrf_k, weights)
        if bm25 is None:
            judged = {query: queries[query] for query in self.queries_ids}
            lexical = bm25_run(judged, corpus, self.top_k, show_progress_bar=self.encoding["show_progress_bar"])
        else:
            lexical = self._check_run(bm25)
        self.runs: dict[str, Run] = {"bm25": lexical}
        self.per_query: dict[str, NDArray[np.float64]] = {}

    def measure(self, model: SentenceTransformer) -> dict[str, float]:
        """Encodes, ranks, fuses and measures."""
        dense, lexical = _run(self.encode(model), scoring_of(model, self.similarity), self.top_k), self.runs["bm25"]
        hybrid = reciprocal_rank_fusion([dense, lexical], self.rrf_k, self.weights, top_k=self.top_k)
        self.runs = {"dense": dense, "bm25": lexical, "hybrid": hybrid}
        metrics: dict[str, float] = {}
        for key, run in self.runs.items():
            self.per_query[key], measured = self._measure(run)
            metrics |= {f"{key}_{metric}": value for metric, value in measured.items()}
        return metrics

    def get_config_dict(self) -> dict[str, Any]:
        """The settings that the model card shows."""
        return {"top_k": self.top_k, "rrf_k": self.rrf_k, "weights": self.weights} | super().get_config_dict()

    def _check_run(self, run: Mapping[str, Mapping[str, float]]) -> Run:
        """The given run: of the judged queries, the top_k best documents each."""
        if not any(run.get(query) for query in self.queries_ids):
            raise ValueError(
                f"bm25 has no document for any of the {len(self.queries_ids)} judged queries. Its keys start with "
                f"{list(run)[:3]}, those of queries with {self.queries_ids[:3]}: pass a run of these queries."
            )
        if unknown := sorted({str(d) for q in self.queries_ids for d in run.get(q, {}) if d not in self.task.corpus}):
            raise ValueError(
                f"bm25 has {len(unknown)} document(s) that are not in the corpus, such as {unknown[:3]}: "
                "pass a run over this corpus."
            )
        return {
            query: {document: run[query][document] for document in _ranked(run[query], self.top_k)}
            if query in run
            else {}
            for query in self.queries_ids
        }

    def _measure(self, run: Run) -> tuple[NDArray[np.float64], dict[str, float]]:
        """nDCG@10 of every query, (n,), and the means of all metrics."""
        relevant = [self.task.relevant[query] for query in self.queries_ids]
        number = np.array([len(documents) for documents in relevant])
        gains = np.zeros((len(relevant), self.top_k))
        for row, query, grades in zip(gains, self.queries_ids, relevant, strict=True):
            found = list(run[query])[: self.top_k]
            row[: len(found)] = [grades.get(document, 0) for document in found]
        per_query, hits = ndcg(gains, [grades.values() for grades in relevant], k=10), gains > 0
        means = {"ndcg@10": per_query.mean(), "mrr@10": (hits[:, :10] / np.arange(1, 11)).max(axis=1).mean()}
        means |= {f"recall@{k}": (hits[:, :k].sum(axis=1) / number).mean() for k in sorted({10, self.top_k})}
        return per_query, {metric: float(value) for metric, value in means.items()}


def _ranked(scores: Mapping[str, float], number: int | None = None) -> list[str]:
    """Ids of the best documents, best first, with ties in the order of the ids."""
    if nan := [document for document, score in scores.items() if math.isnan(score)]:
        raise ValueError(f"The score of {nan[0]!r} is not a number: drop the document from the run.")
    return sorted(scores, key=lambda document: (-scores[document], document))[:number]


def _check_fusion(number: int, k: float, weights: Sequence[float] | None) -> list[float]:
    """The checked weights, one for each run."""
    if not 0 <= k < math.inf:
        raise ValueError(f"k must be a number of at least 0, got {k}; 60 is usual.")
    chosen = [1.0] * number if weights is None else [float(weight) for weight in weights]
    if len(chosen) != number:
        raise ValueError(f"weights must have one entry for each run, got {len(chosen)} for {number} runs.")
    if not all(0 <= weight < math.inf for weight in chosen) or not any(chosen):
        raise ValueError(f"weights must be numbers of at least 0, and one of them positive, got {chosen}.")
    return chosen


def _stemmer(language: str) -> Any:
    try:
        import Stemmer
    except ImportError as error:
        raise ImportError(
            f"The stemmer {language!r} needs PyStemmer: pip install PyStemmer, or pass a function or None."
        ) from error
    if language not in Stemmer.algorithms():
        raise ValueError(f"PyStemmer does not know {language!r}, but {', '.join(Stemmer.algorithms())}.")
    return Stemmer.Stemmer(language)
