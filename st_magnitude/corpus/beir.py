"""Retrieval data: queries, a corpus and relevance judgments, in memory and in BEIR's folder layout.

A BEIR folder (*BEIR*, arXiv 2104.08663) holds::

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."}    one document per line
    queries.jsonl        {"_id": "q1", "text": "..."}                         one query per line
    qrels/<split>.tsv    query-id <tab> corpus-id <tab> score                 score > 0: relevant, else irrelevant

A single ``qrels.tsv`` instead of the folder ``qrels``, and TREC's four columns (query, iteration, document, score), are
read as well.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from st_magnitude._json import parse

__all__ = ["DataError", "RetrievalData", "available_splits", "load_beir", "save_beir", "save_qrels"]

_LAYOUT = "Expected BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv)."
_HEADER = ("query-id", "corpus-id", "score")
_SHOWN = 5  # largest number of problems of one file in an error message


class DataError(ValueError):
    """Data that cannot be used; the message says where the problem is and what to do."""


@dataclass(repr=False)
class RetrievalData:
    """A retrieval task.

    Attributes:
        queries: Query id -> text.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        negatives: Query id -> ids of documents that were judged not relevant (score 0 in the qrels).
        name: Name of the data for the model card; `load_beir` makes it of the folder and the split.

    Raises:
        DataError: If a judgment names an unknown query or document, or a pair is both relevant and negative.

    Example:
        >>> data = RetrievalData({"q": "what barks?"}, {"d1": "a dog", "d2": "a cat"}, {"q": {"d1"}}, {"q": {"d2"}})
        >>> data
        RetrievalData(1 queries, 2 documents, 1 relevant pairs, 1 judged negatives)
        >>> data.triplets(num_negatives=1)[0]
        {'anchor': 'what barks?', 'positive': 'a dog', 'negative_1': 'a cat'}
    """

    queries: dict[str, str]
    corpus: dict[str, str]
    relevant_docs: dict[str, set[str]]
    negatives: dict[str, set[str]] = field(default_factory=dict)
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("queries", "corpus"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise DataError(f"{name} is a {type(value).__name__}; pass a dict of id -> text.")
        self.relevant_docs, self.negatives = checked_judgments(self.corpus, self.relevant_docs, self.negatives)
        for name, judged in (("relevant_docs", self.relevant_docs), ("negatives", self.negatives)):
            if unknown := [query for query in judged if query not in self.queries]:
                raise DataError(f"{name} has the query {unknown[0]!r}, which is not in queries; add it or remove it.")

    def __repr__(self) -> str:
        return f"RetrievalData({self})"

    def __str__(self) -> str:
        relevant, negative = (sum(map(len, judged.values())) for judged in (self.relevant_docs, self.negatives))
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
        pairs = [
            (query, document) for query in sorted(self.relevant_docs) for document in sorted(self.relevant_docs[query])
        ]
        if not pairs:
            raise DataError("No query has a relevant document, so there is nothing to train on; fill relevant_docs.")
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
        relevant, judged = self.relevant_docs[query], sorted(self.negatives.get(query, ()))
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


def checked_judgments(
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    negatives: Mapping[str, Collection[str]],
) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Relevant documents and negatives as sets, which must lie in the corpus and be disjoint."""
    checked = []
    for name, judgments in (("relevant_docs", relevant_docs), ("negatives", negatives)):
        if not isinstance(judgments, Mapping):
            raise DataError(f"{name} is a {type(judgments).__name__}; pass a dict of query id -> set of document ids.")
        for query, ids in judgments.items():
            if isinstance(ids, str | Mapping) or not isinstance(ids, Collection):
                raise DataError(
                    f"{name}[{query!r}] is {ids!r}; pass a set of document ids (of graded judgments, those that count "
                    "as relevant)."
                )
        sets = {query: set(ids) for query, ids in judgments.items()}
        if unknown := sorted({str(d) for ids in sets.values() for d in ids - corpus.keys()}):
            raise DataError(
                f"{len(unknown)} document(s) of {name} are not in the corpus, such as {unknown[:3]}: add them to "
                f"corpus or drop them from {name}."
            )
        checked.append(sets)
    for query, ids in checked[1].items():
        if both := sorted(ids & checked[0].get(query, set())):
            raise DataError(f"{both[0]!r} is both relevant and a negative of the query {query!r}; keep one of the two.")
    return checked[0], checked[1]


def available_splits(folder: str | Path) -> list[str]:
    """Sorted names of the splits of a BEIR folder; empty if it has no ``qrels/`` but a single ``qrels.tsv``.

    Raises:
        DataError: If there is no such folder.
    """
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    return sorted(path.stem for path in Path(folder, "qrels").glob("*.tsv"))


def load_beir(folder: str | Path, split: str | None = None) -> RetrievalData:
    """Reads and checks a BEIR folder.

    A title and its text are joined by a space. With a split, only the queries that are judged in it are kept; without
    a split, all queries and the judgments of all splits.

    Args:
        folder: A folder with corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv).
        split: One of :func:`available_splits`; all of them by default.

    Raises:
        DataError: If a file is missing, a line is malformed, an id is unknown or used twice, a text is empty, or no
            document is relevant. The message names file and line of at most five problems per file.
    """
    folder = Path(folder)
    splits = available_splits(folder)
    if split is not None and split not in splits:
        raise DataError(f"{folder} has no qrels/{split}.tsv; its splits are {splits}. {_LAYOUT}")
    names = [f"qrels/{name}.tsv" for name in (splits if split is None else [split])] or ["qrels.tsv"]
    for name in ("corpus.jsonl", "queries.jsonl", *names):
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no {name}. {_LAYOUT}")

    problems = Problems(folder)
    corpus = _read_texts("corpus.jsonl", problems)
    queries = _read_texts("queries.jsonl", problems)
    problems.raise_if_any()  # before the qrels are read, where every broken document would be an unknown id
    judged: dict[tuple[str, str], bool] = {}
    for name in names:
        _read_qrels(name, queries, corpus, judged, problems)
    problems.raise_if_any()
    if not any(judged.values()):
        raise DataError(
            f"{', '.join(names)} in {folder}: no document is relevant to a query. Give relevant ones a score above 0."
        )

    relevant: dict[str, set[str]] = {}
    negatives: dict[str, set[str]] = {}
    for (query, document), is_relevant in judged.items():
        (relevant if is_relevant else negatives).setdefault(query, set()).add(document)
    if split is not None:
        queries = {query: text for query, text in queries.items() if query in relevant or query in negatives}
    name = folder.resolve().name + ("" if split is None else f", {split} split")
    return RetrievalData(queries, corpus, relevant, negatives, name)


def save_beir(data: RetrievalData, folder: str | Path, split: str = "test") -> None:
    """Writes corpus.jsonl, queries.jsonl and qrels/<split>.tsv, which :func:`load_beir` reads, and replaces old ones.

    Raises:
        DataError: If an id contains a tab or a line break, which qrels cannot hold, or the split is not a file name.
    """
    if not is_file_name(split):
        raise DataError(f"The split {split!r} must be usable as a file name; leave out slashes.")
    for identifier in (*data.queries, *data.corpus):
        if set("\t\r\n") & set(identifier):
            raise DataError(
                f"The id {identifier!r} has a tab or a line break, which a qrels file cannot hold; rename it."
            )
    folder = Path(folder)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, texts in (("corpus.jsonl", data.corpus), ("queries.jsonl", data.queries)):
        rows = (json.dumps({"_id": key, "text": text}, ensure_ascii=False) for key, text in texts.items())
        _write_lines(folder / name, rows)
    save_qrels(data, folder / "qrels" / f"{split}.tsv")


def save_qrels(data: RetrievalData, path: str | Path) -> None:
    """Writes the judgments alone: one more split of a folder that has the queries and the corpus."""
    judgments = [
        f"{query}\t{document}\t{score}"
        for score, judged in ((1, data.relevant_docs), (0, data.negatives))
        for query, documents in judged.items()
        for document in sorted(documents)
    ]
    _write_lines(Path(path), ["\t".join(_HEADER), *judgments])


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly inside a folder, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


class Problems:
    """Problems in the files of a folder, by file name, which are raised as one DataError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found: dict[str, list[str]] = {}

    def add(self, name: str, line: int, what: str) -> None:
        self.found.setdefault(name, []).append(f"{name}, line {line}: {what}")

    def raise_if_any(self) -> None:
        shown: list[str] = []
        for name, problems in self.found.items():
            shown += problems[:_SHOWN]
            if len(problems) > _SHOWN:
                shown.append(f"{name}: and {len(problems) - _SHOWN:,} more")
        if shown:
            raise DataError("\n  ".join([f"The data in {self.folder} cannot be used:", *shown]))

    def lines(self, name: str) -> Iterator[tuple[int, str]]:
        """Numbered non-blank lines of a UTF-8 file. Lines that cannot be decoded are added to the problems."""
        with (self.folder / name).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
                except UnicodeDecodeError:
                    self.add(name, number, "is not UTF-8; save the file in this encoding")
                    continue
                if line.strip():
                    yield number, line


def _read_texts(name: str, problems: Problems) -> dict[str, str]:
    """Id to text from a .jsonl file."""
    texts: dict[str, str] = {}
    first_line: dict[str, int] = {}
    for number, key, text in numbered_texts(name, problems):
        if key in first_line:
            problems.add(name, number, f"repeats the id {key!r} of line {first_line[key]}; make ids unique")
        texts[key] = text
        first_line.setdefault(key, number)
    if not texts and name not in problems.found:
        problems.add(name, 1, "the file is empty; write one JSON object per line")
    return texts


def numbered_texts(name: str, problems: Problems, ids: tuple[str, ...] = ("_id",)) -> Iterator[tuple[int, str, str]]:
    """Line number, id and text of the valid lines of a .jsonl file; the others are added to the problems."""
    for number, line in problems.lines(name):
        try:
            row = parse(line)
        except ValueError as error:
            problems.add(name, number, f"is not valid JSON ({error}); write one object per line")
            continue
        try:
            yield number, *id_and_text(row, ids)
        except DataError as error:
            problems.add(name, number, str(error))


def json_rows(lines: Iterable[bytes], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a .jsonl file that is not blank."""
    for number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8").removeprefix("\ufeff")
            if not line.strip():
                continue
            row = parse(line)
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is not UTF-8; save the file in this encoding.") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: is not valid JSON ({error}). Write one object per line.") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: is a {type(row).__name__}, not an object with named fields.")
        yield number, row


def id_and_text(row: Any, ids: tuple[str, ...] = ("_id",)) -> tuple[str, str]:
    """Id and text of a row; title and text are joined by a space."""
    if not isinstance(row, dict):
        raise DataError(f'is a {type(row).__name__}, not an object like {{"_id": "1", "text": "..."}}')
    name = next((name for name in ids if row.get(name) is not None), ids[0])
    if missing := [key for key in (name, "text") if row.get(key) is None]:
        raise DataError(f"has no {missing[0]!r}; it has {sorted(row)}. Add the key")
    if isinstance(row[name], bool) or not isinstance(row[name], str | int):
        raise DataError(f"has an {name} of type {type(row[name]).__name__}; write a string or a whole number")
    key, title, text = str(row[name]), row.get("title") or "", row["text"]
    if not isinstance(text, str) or not isinstance(title, str):
        raise DataError(f"{key!r} has a title or text that is not a string; quote it")
    if not (title + text).strip():
        raise DataError(f"{key!r} has an empty text; write one, or remove the line and its judgments")
    return key, f"{title} {text}" if title else text


def _read_qrels(
    name: str,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    judged: dict[tuple[str, str], bool],
    problems: Problems,
) -> None:
    """Adds the judgments of a qrels file to ``judged``: (query id, document id) to whether the document is relevant."""
    for number, line in problems.lines(name):
        columns = line.split("\t") if "\t" in line else line.split()
        if number == 1 and columns[-1].lower() == "score":
            continue
        if len(columns) not in (3, 4):
            problems.add(name, number, f"has {len(columns)} columns, not 3: {', '.join(_HEADER)}, separated by tabs")
            continue
        query, document, score = columns[0], columns[-2], columns[-1]
        for identifier, known, where in ((query, queries, "queries.jsonl"), (document, corpus, "corpus.jsonl")):
            if identifier not in known:
                problems.add(name, number, f"{identifier!r} is not in {where}; add it there or remove this line")
        try:
            relevant = int(score) > 0
        except ValueError:
            problems.add(name, number, f"the score {score!r} is not an integer; use 1 for relevant, 0 for not")
            continue
        if judged.setdefault((query, document), relevant) != relevant:
            problems.add(
                name, number, f"contradicts an earlier line about {document!r} and {query!r}; keep one of them"
            )
