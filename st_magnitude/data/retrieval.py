"""RetrievalData: queries, a corpus and relevance judgments, in memory and in BEIR's folder layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset

from st_magnitude.data import beir
from st_magnitude.data.beir import DataError

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_magnitude.data.task import EncodedTask

__all__ = ["DataError", "RetrievalData"]

Judgments = Mapping[str, Collection[str] | Mapping[str, int]]


@dataclass(repr=False)
class RetrievalData:
    """Queries, a corpus and judgments: what every measurement of this package takes.

    Args:
        queries: Query id -> text.
        corpus: Document id -> text.
        relevant: Query id -> ids of its relevant documents, or document id -> grade. Grades above 0 are the gains of
            nDCG, as in trec_eval and mteb; a document with a grade of 0 or less joins ``negatives``. The attribute
            maps query id -> document id -> grade, which is 1 for documents given without one; queries without a
            relevant document are not in it.
        negatives: Query id -> ids of documents that were judged not relevant (score 0 in the qrels).
        name: Name of the data, for the model card and for titles; `from_beir` makes it of the folder and the split.

    Raises:
        DataError: If queries or corpus are not a mapping, a judgment names an unknown query or document, or a document
            is both relevant to a query and a negative of it.

    Example:
        >>> data = RetrievalData(
        ...     {"q": "what barks?"}, {"d1": "a dog", "d2": "a cat", "d3": "a seal"}, {"q": {"d1": 2, "d2": 0, "d3": 1}}
        ... )
        >>> data
        RetrievalData(1 queries, 3 documents, 2 relevant pairs, 1 judged negatives)
        >>> data.relevant, data.negatives
        ({'q': {'d1': 2, 'd3': 1}}, {'q': {'d2'}})
        >>> data.triplets(num_negatives=1, seed=1)[0]
        {'anchor': 'what barks?', 'positive': 'a dog', 'negative_1': 'a cat'}
    """

    queries: dict[str, str]
    corpus: dict[str, str]
    relevant: dict[str, dict[str, int]]
    negatives: dict[str, set[str]] = field(default_factory=dict)
    name: str = field(default="", compare=False)

    if TYPE_CHECKING:  # more kinds of judgments are read than kept

        def __init__(
            self,
            queries: Mapping[str, str],
            corpus: Mapping[str, str],
            relevant: Judgments,
            negatives: Mapping[str, Collection[str]] = ...,
            name: str = "",
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("queries", "corpus"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise DataError(f"{name} is a {type(value).__name__}; pass a dict of id -> text.")
        relevant, negatives = (self._judgments(name) for name in ("relevant", "negatives"))
        self.negatives = {query: set(ids) for query, ids in negatives.items()}
        self.relevant = {}
        for query, grades in relevant.items():
            positive = {document: int(grade) for document, grade in grades.items() if grade > 0}
            if positive:
                self.relevant[query] = positive
            if zeros := grades.keys() - positive.keys():
                self.negatives[query] = self.negatives.get(query, set()) | zeros
            if both := sorted(positive.keys() & self.negatives.get(query, set())):
                raise DataError(
                    f"{both[0]!r} is both relevant and a negative of the query {query!r}; keep one of the two."
                )

    def _judgments(self, name: str) -> dict[str, dict[str, int]]:
        """Query id -> document id -> grade, 1 where none is given."""
        given = getattr(self, name)
        if not isinstance(given, Mapping):
            raise DataError(f"{name} is a {type(given).__name__}; pass a dict of query id -> set of document ids.")
        found: dict[str, dict[str, int]] = {}
        for query, ids in given.items():
            if isinstance(ids, str) or not isinstance(ids, Collection):
                raise DataError(f"{name}[{query!r}] is {ids!r}; pass a set of document ids, or a dict of id -> grade.")
            found[query] = dict(ids) if isinstance(ids, Mapping) else dict.fromkeys(ids, 1)
        if unknown := [query for query in found if query not in self.queries]:
            raise DataError(f"{name} has the query {unknown[0]!r}, which is not in queries; add it or remove it.")
        if missing := sorted({str(d) for ids in found.values() for d in ids.keys() - self.corpus.keys()}):
            raise DataError(
                f"{len(missing)} document(s) of {name} are not in the corpus, such as {missing[:3]}: add them to "
                f"corpus or drop them from {name}."
            )
        return found

    @classmethod
    def from_beir(cls, folder: str | Path, split: str | None = None, skip_empty: bool = False) -> RetrievalData:
        """Reads and checks a folder in BEIR's layout (see `st_magnitude.data.beir`).

        A title and its text are joined by a space. With a split, only the queries that are judged in it are kept;
        without a split, all queries and the judgments of all splits.

        Args:
            folder: A folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv).
            split: The name of a split; all of them by default.
            skip_empty: Whether to leave out empty texts and their judgments, which are an error otherwise.

        Raises:
            DataError: If a file is missing, a line is malformed, an id is unknown or used twice, a text is empty, or no
                document is relevant. The message names the file and the line.
        """
        folder = Path(folder)
        names = beir.qrels_of(folder, split)
        corpus, queries = (beir.read_texts(folder / name, skip_empty) for name in ("corpus.jsonl", "queries.jsonl"))
        judged: dict[tuple[str, str], int] = {}
        for name in names:
            beir.read_qrels(folder / name, queries, corpus, judged)
        relevant: dict[str, dict[str, int]] = {}
        for (query, document), grade in judged.items():
            if queries[query] and corpus[document]:
                relevant.setdefault(query, {})[document] = grade
        if not any(grade > 0 for grades in relevant.values() for grade in grades.values()):
            raise DataError(
                f"{', '.join(names)} in {folder}: no document is relevant to a query. Give relevant documents a score "
                "above 0."
            )
        queries = {query: text for query, text in queries.items() if text and (split is None or query in relevant)}
        corpus = {document: text for document, text in corpus.items() if text}
        name = folder.resolve().name + ("" if split is None else f", {split} split")
        return cls(queries, corpus, relevant, name=name)

    @classmethod
    def from_dataset(cls, rows: Dataset, name: str = "") -> RetrievalData:
        """Makes retrieval data of training rows: a query, a relevant document and any number of negatives.

        The first column holds the queries, the second their relevant documents, and all others negatives, as for a
        ranking loss. Equal texts are one query or one document, whose id is the number of the text among its kind. The
        corpus is all documents of the rows.

        Raises:
            DataError: If the rows have fewer than two columns of texts, or a text is relevant in one row and a negative
                of the same query in another.

        Example:
            >>> rows = Dataset.from_dict({"anchor": ["what barks?", "what purrs?"], "positive": ["a dog", "a cat"]})
            >>> RetrievalData.from_dataset(rows).relevant
            {'q0': {'d0': 1}, 'q1': {'d1': 1}}
        """
        columns = rows.column_names
        if len(columns) < 2 or not all(isinstance(rows[0][column], str) for column in columns):
            raise DataError(f"The rows have the columns {columns}; pass a query, a relevant document and negatives.")
        queries: dict[str, str] = {}  # text -> id
        corpus: dict[str, str] = {}
        relevant: dict[str, dict[str, int]] = {}
        negatives: dict[str, set[str]] = {}
        for row in rows:
            query, positive, *others = (row[column] for column in columns)
            key = queries.setdefault(query, f"q{len(queries)}")
            relevant.setdefault(key, {})[corpus.setdefault(positive, f"d{len(corpus)}")] = 1
            negatives.setdefault(key, set()).update(corpus.setdefault(text, f"d{len(corpus)}") for text in others)
        texts, documents = ({key: text for text, key in found.items()} for found in (queries, corpus))
        return cls(texts, documents, relevant, {key: ids for key, ids in negatives.items() if ids}, name)

    def save(self, folder: str | Path, split: str = "test") -> None:
        """Writes corpus.jsonl, queries.jsonl and qrels/<split>.tsv, which `from_beir` reads, and replaces old files.

        Raises:
            DataError: If an id contains a tab or a line break, which qrels cannot hold, or the split is not a file
                name.
        """
        if not beir.is_file_name(split):
            raise DataError(f"The split {split!r} must be usable as a file name; leave out slashes.")
        for identifier in (*self.queries, *self.corpus):
            if set("\t\r\n") & set(identifier):
                raise DataError(
                    f"The id {identifier!r} has a tab or a line break, which a qrels file cannot hold; rename it."
                )
        folder = Path(folder)
        (folder / "qrels").mkdir(parents=True, exist_ok=True)
        beir.write_texts(folder / "corpus.jsonl", self.corpus)
        beir.write_texts(folder / "queries.jsonl", self.queries)
        self.save_qrels(folder / "qrels" / f"{split}.tsv")

    def save_qrels(self, path: str | Path) -> None:
        """Writes the judgments alone: one more split of a folder that has the queries and the corpus."""
        rows = [(q, d, grade) for q, grades in self.relevant.items() for d, grade in sorted(grades.items())]
        rows += [(q, d, 0) for q, documents in self.negatives.items() for d in sorted(documents)]
        beir.write_lines(Path(path), ["\t".join(beir.HEADER), *("\t".join(map(str, row)) for row in rows)])

    @cached_property
    def query_ids(self) -> list[str]:
        """The queries with a relevant document, in the given order; the others do not count, as elsewhere.

        Raises:
            DataError: If there is none.
        """
        found = [query for query in self.queries if self.relevant.get(query)]
        if not found:
            raise DataError(
                f"None of the {len(self.queries)} queries has a relevant document: relevant maps query ids to sets of "
                f"document ids. Its keys start with {list(self.relevant)[:3]}, those of queries with "
                f"{list(self.queries)[:3]}."
            )
        return found

    @cached_property
    def document_ids(self) -> list[str]:
        """All documents in the order of their ids: the lower index of two is the lower id."""
        return sorted(self.corpus)

    @cached_property
    def columns(self) -> list[dict[int, int]]:
        """For every query of ``query_ids``, the positions in ``document_ids`` of its relevant documents -> grades."""
        position = {document: column for column, document in enumerate(self.document_ids)}
        return [
            dict(sorted((position[document], grade) for document, grade in self.relevant[query].items()))
            for query in self.query_ids
        ]

    def log_prior(self, smoothing: float = 1.0) -> dict[str, float]:
        """The logarithm of the prior of every document of the corpus, from the judgments.

            p(d) = (n(d) + smoothing) / (sum_d' n(d') + smoothing · N)

        n(d) is the number of queries to which d is relevant, whatever the grade, and N the number of documents.

        Args:
            smoothing: Additive smoothing, above 0, so a document that is relevant to no query has a prior as well.

        Raises:
            ValueError: If smoothing is not a finite number above 0.

        Example:
            >>> data = RetrievalData({"q": "?", "r": "?"}, {"a": "x", "b": "y"}, {"q": {"a"}, "r": {"a"}})
            >>> {document: round(math.exp(log_p), 2) for document, log_p in data.log_prior().items()}
            {'a': 0.75, 'b': 0.25}
        """
        if not (smoothing > 0 and math.isfinite(smoothing)):
            raise ValueError(f"smoothing must be a finite number above 0, got {smoothing}.")
        counts = Counter(document for grades in self.relevant.values() for document in grades)
        log_total = math.log(counts.total() + smoothing * len(self.corpus))
        return {document: math.log(counts[document] + smoothing) - log_total for document in self.corpus}

    def encode(self, model: SentenceTransformer, **encode: Any) -> EncodedTask:
        """Encodes the queries that count and the corpus; `st_magnitude.data.task.encode_texts` has the options."""
        from st_magnitude.data.task import encode_texts

        judged = {query: self.queries[query] for query in self.query_ids}
        return replace(encode_texts(model, judged, self.corpus, **encode), columns=self.columns)

    def __repr__(self) -> str:
        return f"RetrievalData({self})"

    def __str__(self) -> str:
        relevant = sum(map(len, self.relevant.values()))
        negative = sum(map(len, self.negatives.values()))
        return (
            f"{len(self.queries):,} queries, {len(self.corpus):,} documents, {relevant:,} relevant pairs, "
            f"{negative:,} judged negatives"
        )

    def triplets(self, num_negatives: int, seed: int = 0) -> Dataset:
        """Training rows, one for each pair of a query and a relevant document; the seed alone decides their order.

        The columns are ``anchor``, ``positive``, ``negative_1``, ..., ``negative_n`` with n = ``num_negatives``. The
        negatives of a row are distinct documents, drawn from the judged negatives of the query and, if these are too
        few, from all documents that are not relevant to it.

        Raises:
            DataError: If no query has a relevant document, or the corpus has too few others.
            ValueError: If num_negatives is below 0.
        """
        if num_negatives < 0:
            raise ValueError(f"num_negatives must be at least 0, got {num_negatives}.")
        rng = np.random.default_rng(seed)
        pairs = [(query, document) for query in sorted(self.relevant) for document in sorted(self.relevant[query])]
        if not pairs:
            raise DataError("No query has a relevant document, so there is nothing to train on; fill relevant.")
        columns: dict[str, list[str]] = {"anchor": [], "positive": []}
        columns |= {f"negative_{i + 1}": [] for i in range(num_negatives)}
        documents = list(self.corpus)
        for index in rng.permutation(len(pairs)):
            query, positive = pairs[index]
            row = [self.queries[query], self.corpus[positive]]
            row += [self.corpus[negative] for negative in self._draw_negatives(query, num_negatives, documents, rng)]
            for column, text in zip(columns.values(), row, strict=True):
                column.append(text)
        return Dataset.from_dict(columns)

    def _draw_negatives(self, query: str, number: int, documents: list[str], rng: np.random.Generator) -> list[str]:
        relevant, judged = self.relevant[query], sorted(self.negatives.get(query, ()))
        if len(documents) - len(relevant) < number:
            raise DataError(
                f"The query {query!r} has {len(documents) - len(relevant)} documents that are not relevant to it, but "
                f"num_negatives is {number}; lower it or enlarge the corpus."
            )
        drawn = [judged[i] for i in rng.permutation(len(judged))[:number]]
        while len(drawn) < number:
            candidate = documents[rng.integers(len(documents))]
            if candidate not in relevant and candidate not in drawn:
                drawn.append(candidate)
        return drawn
