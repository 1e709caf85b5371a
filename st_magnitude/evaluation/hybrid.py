"""Hybrid retrieval: BM25 and embeddings, fused by rank. A run is {query id: {document id: score}}, as in trec_eval."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_magnitude.evaluation.magnitude import implied_similarity
from st_magnitude.evaluation.metrics import (
    TILE,
    CsvEvaluator,
    check_judgments,
    check_texts,
    ndcg,
    rank,
    whole_number,
)
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import encode_raw

__all__ = ["HybridEvaluator", "Run", "bm25_run", "dense_run", "reciprocal_rank_fusion"]

logger = logging.getLogger(__name__)

Run = dict[str, dict[str, float]]


def reciprocal_rank_fusion(
    rankings: Sequence[Mapping[str, Mapping[str, float]]],
    k: float = 60,
    weights: Sequence[float] | None = None,
    depth: int | None = None,
    top_k: int | None = None,
) -> Run:
    """Several runs to one, by rank alone: scores of different make need no common scale.

        score(d) = sum_r  w_r / (k + rank_r(d)),   rank_r(d) = 1, 2, ... in run r

    A run adds nothing to a document, or to a query, that it does not have. The queries of the result are those of all
    runs together, in the order of their first appearance, its documents best first. Equal scores rank by document id,
    the lower first, inside a run and in the result: that is sentence-transformers' order, trec_eval's is the reverse.
    The order of the runs does not matter.

    Args:
        rankings: Runs, {query id: {document id: score}} each, where a higher score is better.
        k: How slowly the weight of a rank falls, at least 0.
        weights: One a run, at least 0; all 1 by default. A run of weight 0 is left out.
        depth: Documents of each run that count, best first; all by default.
        top_k: Documents of a query that are kept of the result; all by default.

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
            f"rankings is a list of runs, {{query id: {{document id: score}}}} each, got {type(rankings).__name__} of "
            f"{len(rankings)}: pass at least one run, as in [dense, bm25]."
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
        scores = {document: math.fsum(parts) for document, parts in shares.items()}  # exact: in any order of the runs
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
    """The best documents of each query by BM25, in Lucene's form, with the library bm25s.

        score(q, d) = sum_{t in q}  log(1 + (N - n_t + 1/2) / (n_t + 1/2)) * f / (f + k1 (1 - b + b |d| / mean |d|))

    with f the number of times that t is in d, |d| the words of d, n_t the documents with t, and N all documents. A word
    that a query has twice counts twice. Documents that share no word with a query are not in its run, which may be
    empty, or shorter than top_k. Equal scores rank by document id, the lower first.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text, which may be empty.
        top_k: Documents a query; the size of the corpus or more is no limit.
        k1: How far repetitions of a word count, at least 0. 1.5, with b = 0.75, is what bm25s and mteb's BM25 use;
            Lucene itself uses 1.2, and Anserini 0.9 with b = 0.4.
        b: How far length counts against a document, in [0, 1].
        stopwords: Words that do not count: a language that bm25s knows, a list, or None. For code, None: ``if``,
            ``not`` and ``for`` are stop words in English.
        stemmer: A language of PyStemmer (``pip install PyStemmer``), such as ``"english"``, which is what mteb uses; or
            a function from a list of words to the list of their stems. None by default, so that the figures do not
            depend on what is installed.
        token_pattern: What a word is, in the lower-cased text: two letters or digits at least.
        show_progress_bar: Whether to show those of bm25s.

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
    bm25s = _bm25s()
    check_texts(queries, corpus)
    top_k = whole_number("top_k", top_k)
    if not 0 <= k1 < math.inf:
        raise ValueError(f"k1 is a number of at least 0, got {k1}: 1.5 is usual.")
    if not 0 <= b <= 1:
        raise ValueError(f"b is a number in [0, 1], got {b}: 0.75 is usual, 0 ignores the length of documents.")
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

    document_ids = sorted(corpus)  # rank() gives a tie to the lower index
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
    """The best documents of each query by embeddings: all are compared, none is approximated.

    Queries are encoded by ``encode_query``, documents by ``encode_document``, with the prompts of each role; all
    embeddings are held in memory, scores a tile at a time. Equal scores rank by document id, the lower first.

    Args:
        model: Any SentenceTransformer; a closing ExponentNorm gives the similarity.
        queries: Query id -> text.
        corpus: Document id -> text.
        top_k: Documents a query; the size of the corpus or more is no limit.
        similarity: A Similarity or its name. By default the model's own: that of a closing ExponentNorm, else its
            ``similarity_fn_name``.
        batch_size: Texts encoded at a time.
        show_progress_bar: Whether to show one.
        query_prompt: Goes in front of every query, in place of the model's own.
        query_prompt_name: The same by its name in ``model.prompts``.
        corpus_prompt: Goes in front of every document, likewise.
        corpus_prompt_name: The same by its name.

    Raises:
        ValueError: If queries or corpus are empty, top_k is below 1, the model's similarity is a distance, or an
            embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey"])], similarity_fn_name="dot", device="cpu")
        >>> dense_run(model, {"q": "honey"}, {"d1": "honey", "d2": "honey of bees, honey", "d3": "bees"}, top_k=2)
        {'q': {'d2': 2.0, 'd1': 1.0}}
    """
    check_texts(queries, corpus)
    top_k = whole_number("top_k", top_k)
    similarity = Similarity(*Similarity.named(similarity or implied_similarity(model)).exponents)  # plain numbers
    document_ids = sorted(corpus)  # rank() gives a tie to the lower index
    sides = {
        "query": (list(queries), list(queries.values()), query_prompt, query_prompt_name),
        "document": (document_ids, [corpus[document] for document in document_ids], corpus_prompt, corpus_prompt_name),
    }
    embeddings = {}
    for role, (ids, texts, prompt, prompt_name) in sides.items():
        prompts = (prompt, prompt_name)
        raw = encode_raw(model, texts, role, batch_size, show_progress_bar, *prompts, keep_normalize=True)  # (n, D)
        if broken := (~raw.isfinite().all(dim=1)).nonzero()[:, 0].tolist():
            raise ValueError(
                f"{len(broken)} of {len(raw)} {role} embeddings are not finite, such as that of {ids[broken[0]]!r}: "
                "the model has diverged, or overflows in half precision; load it in float32."
            )
        embeddings[role] = similarity.query(raw) if role == "query" else similarity.document(raw)
    run: Run = {}
    for tile in embeddings["query"].split(max(1, TILE // len(document_ids))):
        scores = tile @ embeddings["document"].T  # (rows, m)
        best = rank(scores, top_k)  # (rows, min(top_k, m))
        for values, found in zip(scores.gather(1, best).tolist(), best.tolist(), strict=True):
            query = sides["query"][0][len(run)]
            run[query] = {document_ids[i]: value for i, value in zip(found, values, strict=True)}
    return run


class HybridEvaluator(CsvEvaluator):
    """Retrieval metrics of a model, of BM25, and of the two fused by rank.

    What a model adds to BM25 is not what it does alone: this chooses the checkpoint for a hybrid search. Returned keys,
    each behind ``"{name}_"`` where there is a name:

    - ``{dense,bm25,hybrid}_{ndcg@10,mrr@10,recall@10,recall@{top_k}}``, computed by sentence-transformers'
      InformationRetrievalEvaluator.

    The primary metric is ``hybrid_ndcg@10``, so in the Trainer ``metric_for_best_model="eval_{name}_hybrid_ndcg@10"``.
    BM25 searches once, when the evaluator is made: training does not change it.

    Args:
        queries: Query id -> text. Queries without a relevant document are left out.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        top_k: Documents of each search that are fused, and kept of the fused, at least 10.
        rrf_k: The k of `reciprocal_rank_fusion`.
        weights: Of the model's ranks and those of BM25.
        bm25: A run to use in place of the default of `bm25_run`: of the same with other arguments, or of another search
            engine. Its top_k best documents count.
        similarity: What the model ranks by, a Similarity or its name. By default the model's own (see `dense_run`).
        name: Goes in front of the keys and into the name of the CSV file.
        batch_size: Texts encoded at a time.
        show_progress_bar: Whether to show one.
        write_csv: Whether a call with an ``output_path`` adds a row to ``Hybrid_evaluation_{name}_results.csv``.
        query_prompt: Goes in front of every query for the model, in place of its own; BM25 sees no prompts.
        query_prompt_name: The same by its name in ``model.prompts``.
        corpus_prompt: Goes in front of every document, likewise.
        corpus_prompt_name: The same by its name.

    Attributes:
        runs: Under ``"bm25"``, and after a call also ``"dense"`` and ``"hybrid"``: what ir-measures and pytrec_eval
            take, and `reciprocal_rank_fusion` with another k.
        per_query: After a call, nDCG@10 of every query under the same names, in the order of ``queries_ids``: what
            `st_magnitude.geometry.paired_bootstrap` takes.

    Raises:
        ImportError: If bm25s is not installed and no run is given.
        ValueError: Before anything is encoded, if the data are empty or inconsistent (see `check_judgments`), an
            argument is out of its range, or ``bm25`` is a run of other queries or documents; at the call, if the
            model's similarity is a distance or an embedding is not finite.

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

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant_docs: Mapping[str, Collection[str]],
        top_k: int = 100,
        rrf_k: float = 60,
        weights: Sequence[float] = (1.0, 1.0),
        bm25: Mapping[str, Mapping[str, float]] | None = None,
        similarity: Similarity | str | None = None,
        name: str = "",
        batch_size: int = 32,
        show_progress_bar: bool = False,
        write_csv: bool = True,
        query_prompt: str | None = None,
        query_prompt_name: str | None = None,
        corpus_prompt: str | None = None,
        corpus_prompt_name: str | None = None,
    ) -> None:
        super().__init__("Hybrid", "hybrid_ndcg@10", name, batch_size, write_csv, show_progress_bar)
        relevant = check_judgments(queries, corpus, relevant_docs)
        self.queries = {query: text for query, text in queries.items() if relevant.get(query)}
        self.queries_ids = list(self.queries)
        self.corpus = dict(corpus)
        self.relevant_docs = {query: relevant[query] for query in self.queries_ids}
        self.top_k = whole_number("top_k", top_k)
        if self.top_k < 10:
            raise ValueError(f"top_k is at least 10, for nDCG@10, got {top_k}.")
        self.rrf_k, self.weights = rrf_k, _check_fusion(2, rrf_k, weights)
        self.similarity = None if similarity is None else Similarity.named(similarity)
        self.query_prompt = query_prompt
        self.query_prompt_name = query_prompt_name
        self.corpus_prompt = corpus_prompt
        self.corpus_prompt_name = corpus_prompt_name
        if bm25 is None:
            lexical = bm25_run(self.queries, self.corpus, self.top_k, show_progress_bar=show_progress_bar)
        else:
            lexical = self._check_run(bm25)
        self.runs: dict[str, Run] = {"bm25": lexical}
        self.per_query: dict[str, NDArray[np.float64]] = {}
        self._judge = InformationRetrievalEvaluator(
            queries=dict(self.queries),
            corpus=dict(self.corpus),
            relevant_docs=self.relevant_docs,
            mrr_at_k=[10],
            ndcg_at_k=[10],
            precision_recall_at_k=sorted({10, self.top_k}),
            accuracy_at_k=[],
            map_at_k=[],
        )

    def __call__(  # type: ignore[override]
        self, model: SentenceTransformer, output_path: str | None = None, epoch: int = -1, steps: int = -1
    ) -> dict[str, float]:
        """Encodes, ranks, fuses, measures, logs, writes the CSV row, and returns all metrics by key."""
        dense = dense_run(
            model,
            self.queries,
            self.corpus,
            self.top_k,
            self.similarity,
            self.batch_size,
            self.show_progress_bar,
            self.query_prompt,
            self.query_prompt_name,
            self.corpus_prompt,
            self.corpus_prompt_name,
        )
        lexical = self.runs["bm25"]
        hybrid = reciprocal_rank_fusion([dense, lexical], self.rrf_k, self.weights, top_k=self.top_k)
        self.runs = {"dense": dense, "bm25": lexical, "hybrid": hybrid}
        metrics: dict[str, float] = {}
        for key, run in self.runs.items():
            metrics |= {f"{key}_{metric}": value for metric, value in self._measure(run).items()}
        self.per_query = {key: self._ndcg(run) for key, run in self.runs.items()}
        logger.info(
            f"Hybrid evaluation of the model on the {self.name or 'given'} dataset:\n"
            + "\n".join(f"{key}: {value:.4f}" for key, value in metrics.items())
        )
        return self.finish(model, metrics, [metrics], output_path, epoch, steps)

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card says about this evaluation."""
        names = ("query_prompt", "query_prompt_name", "corpus_prompt", "corpus_prompt_name")
        config = {name: value for name in names if (value := getattr(self, name)) is not None}
        config |= {"top_k": self.top_k, "rrf_k": self.rrf_k, "weights": self.weights}
        return config | ({"similarity": repr(self.similarity)} if self.similarity else {})

    def _check_run(self, run: Mapping[str, Mapping[str, float]]) -> Run:
        """The given run: of the judged queries, the top_k best documents each."""
        if not any(run.get(query) for query in self.queries_ids):
            raise ValueError(
                f"bm25 has no document for any of the {len(self.queries_ids)} judged queries. Its keys start with "
                f"{list(run)[:3]}, those of queries with {self.queries_ids[:3]}: pass a run of these queries."
            )
        if unknown := sorted({str(d) for q in self.queries_ids for d in run.get(q, {}) if d not in self.corpus}):
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

    def _measure(self, run: Run) -> dict[str, float]:
        hits: list[Any] = [
            [{"corpus_id": document, "score": score} for document, score in run[query].items()]
            for query in self.queries_ids
        ]
        scores = self._judge.compute_metrics(hits)
        keys = ["ndcg@10", "mrr@10", *(f"recall@{k}" for k in self._judge.precision_recall_at_k)]
        return {key: float(scores[f"{metric}@k"][int(k)]) for key in keys for metric, k in [key.split("@")]}

    def _ndcg(self, run: Run) -> NDArray[np.float64]:
        hits = np.zeros((len(self.queries_ids), 10))
        for row, query in zip(hits, self.queries_ids, strict=True):
            found = [document in self.relevant_docs[query] for document in list(run[query])[:10]]
            row[: len(found)] = found
        return ndcg(hits, [len(self.relevant_docs[query]) for query in self.queries_ids], k=10)


def _ranked(scores: Mapping[str, float], number: int | None = None) -> list[str]:
    """Ids of the best documents, all by default, best first, ties to the lower id."""
    if nan := [document for document, score in scores.items() if math.isnan(score)]:
        raise ValueError(f"The score of {nan[0]!r} is not a number: drop the document from the run.")
    return sorted(scores, key=lambda document: (-scores[document], document))[:number]


def _check_fusion(number: int, k: float, weights: Sequence[float] | None) -> list[float]:
    """The weights, one a run."""
    if not 0 <= k < math.inf:
        raise ValueError(f"k is a number of at least 0, got {k}: 60 is usual.")
    chosen = [1.0] * number if weights is None else [float(weight) for weight in weights]
    if len(chosen) != number:
        raise ValueError(f"weights are one a run, got {len(chosen)} for {number} runs.")
    if not all(0 <= weight < math.inf for weight in chosen) or not any(chosen):
        raise ValueError(f"weights are numbers of at least 0, one of them above, got {chosen}: all 1 is usual.")
    return chosen


def _bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise ImportError('BM25 needs bm25s: pip install "st-magnitude[eval]".') from error
    return bm25s


def _stemmer(language: str) -> Any:
    try:
        import Stemmer
    except ImportError as error:
        raise ImportError(
            f"The stemmer {language!r} needs PyStemmer: pip install PyStemmer; or pass a function, or None."
        ) from error
    if language not in Stemmer.algorithms():
        raise ValueError(f"PyStemmer has no {language!r}: it has {', '.join(Stemmer.algorithms())}.")
    return Stemmer.Stemmer(language)
