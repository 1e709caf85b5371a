"""BM25, with words or 4-grams of characters, and runs of several searches fused by rank."""

from __future__ import annotations

import logging
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from st_magnitude._checks import InputError, needs
from st_magnitude.data.beir import canonical
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData

FEW_HITS = 0.8  # share of queries for which BM25 finds a document, below which it warns
GRAM = 4  # characters
LARGE = 100_000  # documents, from which on bm25s shows its progress

# Thai, Lao, Burmese, Khmer, kana and ideographs: scripts without spaces between words
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
_RUN = re.compile(f"([{_UNSPACED}]{{2,}})|([{_UNSPACED}]|[^{_UNSPACED}]+)")

logger = logging.getLogger(__name__)
_bar = partial(tqdm, disable=None, delay=2)


class _Spaces(dict[int, str]):
    """A space for each character that is no letter, mark or number, by code point."""

    def __missing__(self, code: int) -> str:
        letter = chr(code)
        self[code] = letter if unicodedata.category(letter)[0] in "LMN" else " "
        return self[code]


_SPACES = _Spaces()


def words(text: str) -> list[str]:
    """The words of a text in lower case and NFKC: runs of letters, marks and numbers.

    In scripts without spaces between words, the words are the pairs of neighbouring characters.

    Example:
        >>> words("Wi-Fi 6, 絵は駅"), words("茶")
        (['wi', 'fi', '6', '絵は', 'は駅'], ['茶'])
    """
    spelled = unicodedata.normalize("NFKC", text).lower().translate(_SPACES)
    found: list[str] = []
    for unspaced, others in _RUN.findall(spelled):
        found += map("".join, pairwise(unspaced)) if unspaced else others.split()
    return found


def grams(text: str) -> list[str]:
    """All sequences of four characters of the canonical text between two spaces, across words.

    Source: McNamee and Mayfield, Character N-Gram Tokenization for European Language Text
    Retrieval, 2004.

    Example:
        >>> grams("Red tea")
        [' red', 'red ', 'ed t', 'd te', ' tea', 'tea ']
    """
    spelled = canonical(text)
    padded = f" {spelled} "  # a text of two letters has a sequence, too
    last = max(1, len(padded) - GRAM + 1)
    return [padded[i : i + GRAM] for i in range(last)] if spelled else []


TOKENS: dict[str, Callable[[str], list[str]]] = {"words": words, "4-grams": grams}


def bm25_run(
    data: RetrievalData, top_k: int = 100, tokenizer: Callable[[str], list[str]] = words
) -> Ranking:
    """The best documents of each query by BM25 in Lucene's form, computed by the library bm25s.

        score(q, d) = sum_{t in q}  idf_t * f / (f + k1 (1 - b + b |d| / mean |d|)),
        idf_t = log(1 + (N - n_t + 1/2) / (n_t + 1/2))

    Here f is the number of times that t occurs in d, |d| the number of words of d, n_t the number
    of documents with t, N the number of all documents, k1 = 1.5 and b = 0.75, as in mteb.

    Args:
        top_k: Number of documents for each query.
        tokenizer: Splits a text into the words that count: `words`, `grams`, which are 4-grams of
            characters, or one of yours, without stop words for example.

    Logs a warning if fewer than 80 % of the queries have a document with one of their words.

    Raises:
        ImportError: If bm25s is not installed.

    Example:
        >>> corpus = {"d1": "Bees make honey.", "d2": "Honey, honey!"}
        >>> data = RetrievalData({"q1": "honey", "q2": "tea"}, corpus, {})
        >>> {query: list(found) for query, found in bm25_run(data).items()}
        {'q1': ['d2', 'd1'], 'q2': []}

    Source: Lù, BM25S, arXiv 2407.03618; the formula is "Lucene (accurate)" of Kamphuis et al.,
    Which BM25 Do You Mean?, 2020.
    """
    ranking = LexicalIndex(data, tokenizer).search(data, top_k)
    without = np.flatnonzero(ranking.columns[:, 0] < 0)
    if len(ranking) - len(without) < FEW_HITS * len(ranking):
        logger.warning(
            f"BM25 finds no document for {len(without):,} of {len(ranking):,} queries, such as"
            f" {ranking.query_ids[without[0]]!r}: no document has one of their words."
        )
    return ranking


class LexicalIndex:
    """BM25 over the corpus of data; `bm25_run` documents arguments, formula and errors."""

    def __init__(self, data: RetrievalData, tokenizer: Callable[[str], list[str]] = words) -> None:
        with needs("BM25", "eval"):
            import bm25s

        self.tokenizer = tokenizer
        self.numbers: dict[str, int] = {}  # of each word
        documents = [
            [self.numbers.setdefault(word, len(self.numbers)) for word in tokenizer(text)]
            for text in _bar([data.corpus[i] for i in data.document_ids], "BM25 of documents")
        ]
        self.bm25 = bm25s.BM25(k1=1.5, b=0.75, method="lucene", dtype="float64")
        if self.numbers:
            shows = len(documents) >= LARGE and sys.stderr.isatty()
            given = (documents, self.numbers)
            self.bm25.index(given, create_empty_token=False, show_progress=shows)

    def search(self, data: RetrievalData, top_k: int = 100) -> Ranking:
        """The best documents of each query of data with the same corpus."""
        found = map(self._found, _bar(data.queries.values(), "BM25 of queries"))
        return Ranking.of(data, list(data.queries), found, top_k)

    def _found(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        if not self.numbers:
            return np.empty(0, dtype=np.int64), np.empty(0)
        ids = self.bm25.get_tokens_ids(self.tokenizer(text))
        scores = self.bm25.get_scores_from_ids(ids)  # (m,)
        places = np.flatnonzero(scores > 0)
        return places, scores[places]


def reciprocal_rank_fusion(
    runs: Sequence[Mapping[str, Mapping[str, float]]], k: float = 60, top_k: int | None = None
) -> dict[str, dict[str, float]]:
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
    fused = {}
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
