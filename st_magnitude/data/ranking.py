"""Ranking: what a search returns for each query, whoever searches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from st_magnitude._checks import InputError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import Difference, judge

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ranking(Mapping[str, Mapping[str, float]]):
    """The documents that a search found for each query, with their scores, the best first.

    As a mapping it is a run, ``{query id: {document id: score}}``, which ir-measures, ranx and mteb
    take. ``after - before`` is the `Difference` of nDCG@10. Equal scores rank by document id, the
    lower first; trec_eval ranks the higher first.

    Attributes:
        data: The queries, documents and judgments.
        query_ids: The n queries that were asked.
        columns: Positions in ``data.document_ids``, -1 after the last document, (n, k).
        scores: The scores, -inf after the last document, (n, k).

    Example:
        >>> data = RetrievalData({"q": "?"}, {"d1": "a", "d2": "b", "d3": "c"}, {"q": {"d2"}})
        >>> found = Ranking.of_run(data, {"q": {"d1": 0.5, "d2": 0.5}})
        >>> dict(found["q"]), found.ndcg.round(3), found.first("q")
        ({'d1': 0.5, 'd2': 0.5}, array([0.631]), 'd1')
    """

    data: RetrievalData
    query_ids: Sequence[str]
    columns: NDArray[np.int64]
    scores: Floats

    @classmethod
    def of(
        cls,
        data: RetrievalData,
        query_ids: Sequence[str],
        found: Iterable[tuple[NDArray[np.int64], Floats]],
        k: int,
    ) -> Ranking:
        """The first k of positions and scores, in any order, of each query, without the document
        that is the query itself and scores of -inf. A score of nan raises a ValueError."""
        columns = np.full((len(query_ids), k), -1)
        scores = np.full((len(query_ids), k), -np.inf)
        for row, (query, (places, values)) in enumerate(zip(query_ids, found, strict=True)):
            if np.isnan(values).any():
                lost = data.document_ids[places[np.isnan(values).argmax()]]
                raise InputError(f"A run has the score nan for {lost!r}; remove what has no score.")
            own = data.position[query] if query in data.own else -1
            counts = (values > -np.inf) & (places != own)
            places = places[counts]
            values = values[counts]
            if len(values) > k:  # of many, only the best have to be sorted
                best = values >= np.partition(values, -k)[-k]
                places = places[best]
                values = values[best]
            order = np.lexsort((places, -values))[:k]
            columns[row, : len(order)] = places[order]
            scores[row, : len(order)] = values[order]
        return cls(data, list(query_ids), columns, scores)

    @classmethod
    def of_rows(
        cls,
        data: RetrievalData,
        query_ids: Sequence[str],
        columns: NDArray[np.int64],
        scores: Floats,
        k: int,
    ) -> Ranking:
        """The ranking of sorted positions and scores, (n, w); those of -inf are left out."""
        columns = np.where(scores == -np.inf, -1, columns)[:, :k]
        room = ((0, 0), (0, k - columns.shape[1]))
        columns = np.pad(columns, room, constant_values=-1)
        scores = np.pad(scores[:, :k], room, constant_values=-np.inf)
        return cls(data, query_ids, columns, scores)

    @classmethod
    def of_run(
        cls, data: RetrievalData, run: Mapping[str, Mapping[str, float]], k: int = 100
    ) -> Ranking:
        """The ranking of a run, of any search engine, for the answered queries of the data. A score
        of nan, or a document that is not in the corpus, raises a ValueError."""

        def found(query: str) -> tuple[NDArray[np.int64], Floats]:
            scored = run.get(query, {})
            try:
                places = np.array([data.position[document] for document in scored], dtype=np.int64)
            except KeyError as error:
                raise InputError(
                    f"A run has the document {error} for the query {query!r}, which is not in the"
                    " corpus: give it the ids of the corpus, as strings."
                ) from None
            return places, np.array([*scored.values()], dtype=np.float64)

        return cls.of(data, data.query_ids, map(found, data.query_ids), k)

    @classmethod
    def joined(cls, data: RetrievalData, parts: Sequence[Ranking]) -> Ranking:
        """The ranking of the queries of data, each of which is in one of the parts."""
        rows = {query: (part, row) for part in parts for row, query in enumerate(part.query_ids)}
        chosen = [rows[query] for query in data.query_ids]
        columns = np.stack([part.columns[row] for part, row in chosen])
        scores = np.stack([part.scores[row] for part, row in chosen])
        return cls(data, data.query_ids, columns, scores)

    def __iter__(self) -> Iterator[str]:
        return iter(self.query_ids)

    def __len__(self) -> int:
        return len(self.query_ids)

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {query: row for row, query in enumerate(self.query_ids)}

    def __getitem__(self, query: str) -> dict[str, float]:
        row = self._rows[query]
        pairs = zip(self.columns[row].tolist(), self.scores[row].tolist(), strict=True)
        return {self.data.document_ids[place]: score for place, score in pairs if place >= 0}

    def first(self, query: str) -> str:
        """The id of the first document; empty if nothing was found."""
        return next(iter(self[query]), "")

    @property
    def has_answer(self) -> NDArray[np.bool_]:
        """Whether a document is relevant to each query, (n,)."""
        return np.array([query in self.data.relevant for query in self.query_ids], dtype=bool)

    @property
    def _relevant(self) -> list[dict[str, int]]:
        """Document id -> grade, of each query that has an answer."""
        judged = self.data.relevant
        return [judged[query] for query in self.query_ids if query in judged]

    @cached_property
    def gains(self) -> NDArray[np.int64]:
        """The grade of each document for its query, 0 if it is not relevant, (n, k)."""
        gains = np.zeros(self.columns.shape, dtype=np.int64)
        for row, query in enumerate(self.query_ids):
            for document, grade in self.data.relevant.get(query, {}).items():
                gains[row, self.columns[row] == self.data.position[document]] = grade
        return gains

    @cached_property
    def ndcg(self) -> Floats:
        """nDCG@10 of each query, nan without an answer, (n,)."""
        values = np.full(len(self), np.nan)
        values[self.has_answer] = ndcg(
            self.gains[self.has_answer], [grades.values() for grades in self._relevant]
        )
        return values

    @property
    def by_chance(self) -> Floats:
        """Mean nDCG@10 that the results of the other queries have for each query, nan without an
        answer, (n,)."""
        found = self.columns[self.has_answer, :10]
        discounts = np.broadcast_to(_discounts(found.shape[1]), found.shape)
        is_found = found >= 0
        number = len(self.data.document_ids)
        sums = np.bincount(found[is_found], discounts[is_found], minlength=number)  # (m,)
        ideal = _ideal([grades.values() for grades in self._relevant], 10)
        sums_of = [
            sum(grade * sums[self.data.position[document]] for document, grade in grades.items())
            for grades in self._relevant
        ]
        values = np.full(len(self), np.nan)
        values[self.has_answer] = np.array(sums_of) / ideal - self.ndcg[self.has_answer]
        return values / max(1, len(found) - 1)

    @property
    def mean(self) -> float:
        """Mean nDCG@10 of the queries that have an answer."""
        return float(np.nanmean(self.ndcg))

    def minus(self, before: Ranking, seed: int = 0) -> Difference:
        """The `judge` of nDCG@10 of this ranking minus that of another, of the same queries."""
        if list(self.query_ids) != list(before.query_ids):
            raise InputError("Two rankings can be compared on the same queries only.")
        answered = self.has_answer
        return judge((self.ndcg - before.ndcg)[answered], seed=seed)

    def __sub__(self, before: Ranking) -> Difference:
        return self.minus(before)

    def metrics(self, k: int) -> dict[str, Floats]:
        """nDCG@10, MRR@10, recall@k and MAP@k of each query that has an answer, (n,) each."""
        hits = self.gains[self.has_answer][:, :k] > 0
        number = np.array([len(grades) for grades in self._relevant])
        ranks = np.arange(1, hits.shape[1] + 1)
        precision = hits.cumsum(axis=1) / ranks
        return {
            "ndcg@10": self.ndcg[self.has_answer],
            "mrr@10": (hits / ranks)[:, :10].max(axis=1),
            f"recall@{k}": hits.sum(axis=1) / number,
            f"map@{k}": (hits * precision).sum(axis=1) / number.clip(max=k),
        }


def ndcg(gains: ArrayLike, relevant: Iterable[Collection[int]], k: int = 10) -> NDArray[np.float64]:
    """nDCG@k of every query with graded relevance: (n, >= k), n collections -> (n,) in [0, 1].

        sum_{i <= k} grade_i / log2(i + 1)  over the same sum with the highest grades first

    Args:
        gains: Grade of the document at each rank, best rank first; 0 for one that is not relevant.
            Booleans count as 1.
        relevant: Grades of all relevant documents of each query, at least one.
        k: Number of ranks that count.

    Example:
        >>> ndcg([[3, 0], [0, 1]], relevant=[[3], [1, 3]]).round(3)
        array([1.   , 0.174])

    Source: Järvelin and Kekäläinen, Cumulated Gain-Based Evaluation of IR Techniques, 2002, with
        linear gains, as in trec_eval, mteb and InformationRetrievalEvaluator.
    """
    ranked = np.asarray(gains, dtype=np.float64)[:, :k]
    return ranked @ _discounts(ranked.shape[1]) / _ideal(relevant, k)


def _discounts(number: int) -> Floats:
    return 1 / np.log2(np.arange(2, number + 2))


def _ideal(relevant: Iterable[Collection[int]], k: int) -> Floats:
    """The discounted gain of each query with the highest grades first, (n,)."""
    best = [sorted(grades, reverse=True)[:k] for grades in relevant]
    return np.array([np.dot(grades, _discounts(len(grades))) for grades in best])
