"""RetrievalData: queries, a corpus and judgments, in memory and in BEIR's folder layout."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from st_magnitude._checks import counted, shown
from st_magnitude.data import beir
from st_magnitude.data.beir import DataError, Keys, keys_of, whole_grade

if TYPE_CHECKING:  # commands read their data before they load what trains
    from datasets import Dataset

__all__ = ["DataError", "RetrievalData"]

Judgments = Mapping[str, Collection[str] | Mapping[str, int]]


@dataclass(repr=False, init=False)
class RetrievalData:
    """Queries, a corpus and judgments: the data that every measurement of this package takes.

    A document with the id and the text of a query is the query itself, unless it is judged for this
    query at any grade. It never counts for this query: a search does not return it, and no row has
    it as a negative. Its text may have a title before the query's.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text.
        relevant: Query id -> ids of its relevant documents, or document id -> grade. Grades above 0
            are the gains of nDCG, as in trec_eval and mteb; a document with a grade of 0 or less
            joins ``negatives``. Grades are whole numbers. No ids say that no document answers the
            query. The attribute has a grade for every document, 1 where none is given, and no query
            without a relevant document.
        negatives: Query id -> ids of documents that were judged not relevant (score 0 in the
            qrels). The attribute has no ids for a query that no document answers.
        name: Name of the data, for the model card and for titles.
        held_out: Hashes of the texts that no row of `triplets` may hold (see `apart_from`), (n,).

    Raises:
        DataError: If an id or a text is not a string, a judgment names an unknown query or
            document, a grade is not a whole number, or a document is both relevant to a query and a
            negative of it.

    Example:
        >>> data = RetrievalData(
        ...     {"q": "what barks?"},
        ...     {"d1": "a dog", "d2": "a cat", "d3": "a seal"},
        ...     {"q": {"d1": 2, "d2": 0, "d3": 1}},
        ... )
        >>> data
        RetrievalData(1 query, 3 documents, 2 relevant pairs, 1 explicit negative)
        >>> data.relevant, data.negatives
        ({'q': {'d1': 2, 'd3': 1}}, {'q': {'d2'}})
    """

    queries: dict[str, str]
    corpus: dict[str, str]
    relevant: dict[str, dict[str, int]]
    negatives: dict[str, set[str]]
    name: str = field(compare=False)
    held_out: Keys = field(compare=False)

    def __init__(
        self,
        queries: Mapping[str, str],
        corpus: Mapping[str, str],
        relevant: Judgments,
        negatives: Mapping[str, Collection[str]] | None = None,
        name: str = "",
        held_out: Keys | None = None,
    ) -> None:
        self.queries = dict(queries)
        self.corpus = dict(corpus)
        self.name = name
        self.held_out = keys_of(()) if held_out is None else held_out
        for of, texts in (("queries", self.queries), ("corpus", self.corpus)):
            kinds = {*map(type, texts), *map(type, texts.values())}
            for key, text in texts.items() if kinds - {str} else ():
                if not (isinstance(key, str) and isinstance(text, str)):
                    raise DataError(
                        f"{of} has {shown(key)}: {shown(text)}; ids and texts are strings."
                    )
        judged = self._graded("negatives", negatives or {})
        self.negatives = {query: set(grades) for query, grades in judged.items()}
        self.relevant = self._graded("relevant", relevant)
        for query, grades in self.relevant.items():
            refused = {document for document, grade in grades.items() if grade <= 0}
            if refused or not grades:
                self.negatives.setdefault(query, set()).update(refused)
            for document in refused:
                del grades[document]
            if both := sorted(grades.keys() & self.negatives.get(query, ())):
                raise DataError(
                    f"{both[0]!r} is both relevant and a negative of the query {query!r}; keep one."
                )
        self.relevant = {query: grades for query, grades in self.relevant.items() if grades}
        self.negatives = {
            q: ids for q, ids in self.negatives.items() if ids or q not in self.relevant
        }

    def _graded(self, name: str, judgments: Judgments) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for query, ids in judgments.items():
            where = f"{name}[{query!r}]"
            if query not in self.queries:
                raise DataError(
                    f"{name} has the query {query!r}, which is not in queries"
                    f"{beir.other_spelling(query, self.queries)}; add it."
                )
            if isinstance(ids, str):
                raise DataError(f"{where} is {ids!r}; pass a set of document ids, or id -> grade.")
            grades = ids if isinstance(ids, Mapping) else dict.fromkeys(ids, 1)
            found[query] = {document: whole_grade(x, where) for document, x in grades.items()}
        named = {document for grades in found.values() for document in grades}
        if missing := sorted(named - self.corpus.keys(), key=str):
            raise DataError(
                f"{len(missing)} document(s) of {name} are not in the corpus, such as {missing[:3]}"
                f"{beir.other_spelling(missing[0], self.corpus)}: add them to corpus or drop them"
                f" from {name}."
            )
        return found

    def save(self, folder: str | Path, split: str = "test") -> None:
        """Writes corpus.jsonl, queries.jsonl and qrels/<split>.tsv, and replaces old files.

        Raises:
            DataError: If an id contains a line break, or the split is not a file name.
        """
        if split in ("", ".", "..") or set(split) & set("/\\\0"):
            raise DataError(f"The split {split!r} is not usable as a file name; change it.")
        for key in (*self.queries, *self.corpus):
            if set("\r\n") & set(key):
                raise DataError(f"The id {key!r} has a line break, as no qrels can; rename it.")
        folder = Path(folder)
        beir.write_texts(folder / "corpus.jsonl", self.corpus)
        beir.write_texts(folder / "queries.jsonl", self.queries)
        self.save_qrels(folder / "qrels" / f"{split}.tsv")

    def save_qrels(self, path: str | Path) -> None:
        """Writes the judgments alone, as one more split of a folder."""
        beir.write_qrels(Path(path), self.relevant, self.negatives)

    @cached_property
    def own(self) -> frozenset[str]:
        """Queries that are also documents, by id and text, and are not judged for themselves."""
        own = set()
        for query in self.queries.keys() & self.corpus.keys():
            text = self.queries[query]
            document = self.corpus[query]
            judged = {*self.relevant.get(query, ()), *self.negatives.get(query, ())}
            if f" {document}".endswith(f" {text}") and query not in judged:
                own.add(query)
        return frozenset(own)

    @cached_property
    def query_ids(self) -> list[str]:
        """The queries with a relevant document, in the given order; the others do not count.

        Raises:
            DataError: If there is none.
        """
        if not self.relevant:
            raise DataError(f"None of the {len(self.queries)} queries has a relevant document.")
        return [query for query in self.queries if query in self.relevant]

    @property
    def asked(self) -> dict[str, str]:
        """Query id -> text of the queries of ``query_ids``."""
        return {query: self.queries[query] for query in self.query_ids}

    @property
    def digest(self) -> str:
        """SHA-256 of texts and judgments, by which a resumed run recognises its data."""
        rows: list[tuple[str, ...]] = [*self.queries.items(), *self.corpus.items()]
        for query, grades in self.relevant.items():
            rows += [(query, document, str(grade)) for document, grade in sorted(grades.items())]
        rows += [(query, *sorted(ids)) for query, ids in self.negatives.items()]
        sha = hashlib.sha256()
        for text in (text for row in rows for text in row):
            sha.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))
        return sha.hexdigest()

    @cached_property
    def document_ids(self) -> list[str]:
        """All documents in the order of their ids."""
        return sorted(self.corpus)

    @cached_property
    def is_relevant(self) -> NDArray[np.bool_]:
        """Whether each document of ``document_ids`` is relevant to a query, (m,)."""
        answers = set().union(*self.relevant.values())
        return np.array([document in answers for document in self.document_ids], dtype=bool)

    @cached_property
    def position(self) -> dict[str, int]:
        """Document id -> its position in ``document_ids``."""
        return {document: column for column, document in enumerate(self.document_ids)}

    def own_columns(self, queries: Iterable[str]) -> NDArray[np.int64]:
        """For each query, the position in ``document_ids`` of itself, or -1: (n,)."""
        columns = [self.position[query] if query in self.own else -1 for query in queries]
        return np.array(columns, dtype=np.int64)

    def only(self, chosen: Collection[str]) -> RetrievalData:
        """The same corpus with some of the queries, by their ids."""
        return self._asking(
            {query: text for query, text in self.queries.items() if query in chosen},
            {query: ids for query, ids in self.relevant.items() if query in chosen},
            {query: ids for query, ids in self.negatives.items() if query in chosen},
        )

    def asking(self, questions: Collection[str]) -> RetrievalData:
        """The same corpus with other queries, which are their own ids, and without judgments."""
        return self._asking({question: question for question in questions}, {}, {})

    def _asking(
        self,
        queries: dict[str, str],
        relevant: dict[str, dict[str, int]],
        negatives: dict[str, set[str]],
    ) -> RetrievalData:
        other = copy.copy(self)
        # the same corpus in its order; all else that was computed depends on the queries
        kept = {*(x.name for x in fields(self)), "document_ids", "position"}
        for name in vars(self).keys() - kept:
            delattr(other, name)
        other.queries = queries
        other.relevant = relevant
        other.negatives = negatives
        return other

    def apart_from(self, *others: RetrievalData | None) -> RetrievalData:
        """The same data, whose training rows hold no query of the others.

        `triplets` then leaves out the pairs of which a text is such a query, in any spelling, and
        draws no such negative. The judgments stay as they are. Queries without a judgment do not
        count.
        """
        asked = []
        for data in filter(None, others):
            judged = data.relevant.keys() | data.negatives.keys()
            asked.append(keys_of(text for query, text in data.queries.items() if query in judged))
        apart = copy.copy(self)  # with the same corpus
        apart.held_out = np.unique(np.concatenate([self.held_out, *asked]))
        return apart

    def joined(self, other: RetrievalData) -> RetrievalData:
        """The queries, documents and judgments of both; texts of one id must be equal.

        What is held out from both stays so.
        """
        for mine, theirs in ((self.queries, other.queries), (self.corpus, other.corpus)):
            for key in mine.keys() & theirs.keys():
                if mine[key] != theirs[key]:
                    raise DataError(f"{key!r} is the id of two texts; rename one of them.")
        return replace(
            self,
            queries=self.queries | other.queries,
            corpus=self.corpus | other.corpus,
            relevant=self.relevant | other.relevant,
            negatives=self.negatives | other.negatives,
            held_out=np.intersect1d(self.held_out, other.held_out),
        )

    def log_prior(self) -> dict[str, float]:
        """The logarithm of the prior of every document of the corpus, from the judgments.

            p(d) = (n(d) + 1) / (sum_d' n(d') + N)

        n(d) is the number of queries to which d is relevant, whatever the grade, and N the number
        of documents.

        Example:
            >>> judged = {"q": {"a"}, "r": {"a"}}
            >>> data = RetrievalData({"q": "?", "r": "?"}, {"a": "x", "b": "y"}, judged)
            >>> {id: round(math.exp(log_p), 2) for id, log_p in data.log_prior().items()}
            {'a': 0.75, 'b': 0.25}
        """
        counts = Counter(document for grades in self.relevant.values() for document in grades)
        log_total = math.log(counts.total() + len(self.corpus))
        return {d: math.log(counts[d] + 1) - log_total for d in self.corpus}

    def __repr__(self) -> str:
        return f"RetrievalData({self})"

    def __str__(self) -> str:
        pairs = sum(map(len, self.relevant.values()))
        counts = {"query": len(self.queries), "document": len(self.corpus), "relevant pair": pairs}
        parts = [counted(number, noun) for noun, number in counts.items()]
        if negatives := sum(map(len, self.negatives.values())):
            parts.append(counted(negatives, "explicit negative"))
        if self.relevant and (others := len(self.queries) - len(self.relevant)):
            parts.append(f"{counted(others, 'query')} without a relevant document")
        if self.own:
            parts.append(f"{counted(len(self.own), 'document')} left out for their own queries")
        return ", ".join(parts)

    def triplets(self, num_negatives: int, seed: int = 0) -> Dataset:
        """Training rows, one for each pair of a query and a relevant document, in random order.

        The columns are ``anchor``, ``positive``, ``negative_1``, ..., ``negative_n``. The negatives
        of a row are distinct documents, drawn from the judged negatives of the query and, if these
        are too few, from all documents that are not relevant to it. No text of a row is held out.

        Raises:
            DataError: If no pair of a query and a relevant document is left, or the corpus has too
                few others.
        """
        from datasets import Dataset

        rng = np.random.default_rng(seed)
        documents = self._not_held_out(self.corpus)
        free = set(documents)
        queries = sorted(self._not_held_out(self.asked))
        pairs = [
            (query, d) for query in queries for d in sorted(self.relevant[query].keys() & free)
        ]
        if not pairs:
            raise DataError(
                f"Each of the {len(self.query_ids):,} queries is also a query of dev, of test or of"
                " other data that are held out for a measurement, or all its documents are: there"
                " is nothing to train on. Take them out of one of the two."
            )
        rows = []
        for query, relevant in (pairs[index] for index in rng.permutation(len(pairs))):
            drawn = self._draw_negatives(query, num_negatives, documents, free, rng)
            chosen = [relevant, *drawn]
            rows.append([self.queries[query], *(self.corpus[document] for document in chosen)])
        names = ["anchor", "positive", *(f"negative_{i + 1}" for i in range(num_negatives))]
        return Dataset.from_dict(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))

    def _not_held_out(self, texts: Mapping[str, str]) -> list[str]:
        """The ids of texts that may be part of a training row."""
        if not len(self.held_out):
            return list(texts)
        is_held_out = np.isin(keys_of(texts.values()), self.held_out)
        return [key for key, held in zip(texts, is_held_out, strict=True) if not held]

    def _draw_negatives(
        self,
        query: str,
        number: int,
        documents: list[str],
        free: set[str],
        rng: np.random.Generator,
    ) -> list[str]:
        """Ids of distinct documents, of which ``free`` is the set, the judged ones first."""
        relevant = {*self.relevant[query], *({query} & self.own)}
        if (others := len(documents) - len(relevant & free)) < number:
            raise DataError(
                f"The query {query!r} has {others} documents that are not relevant to it, but"
                f" num_negatives is {number}; lower it or enlarge the corpus."
            )
        judged = sorted(free.intersection(self.negatives.get(query, ())))
        drawn = [judged[i] for i in rng.permutation(len(judged))[:number]]
        while len(drawn) < number:
            candidate = documents[rng.integers(len(documents))]
            if candidate not in relevant and candidate not in drawn:
                drawn.append(candidate)
        return drawn
