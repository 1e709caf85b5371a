"""Retrieval data: queries, a corpus and who answers what, in memory and in BEIR's folder layout.

A BEIR folder (*BEIR*, arXiv 2104.08663) holds::

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."}    one document a line
    queries.jsonl        {"_id": "q1", "text": "..."}                         one query a line
    qrels/<split>.tsv    query-id <tab> corpus-id <tab> score                 score > 0: relevant, else irrelevant

A single ``qrels.tsv`` beside them and TREC's four columns (query, iteration, document, score) are read as well.
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

__all__ = ["DataError", "RetrievalData", "available_splits", "load_beir", "save_beir"]

_LAYOUT = "Expected corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv), as BEIR has them."
_HEADER = ("query-id", "corpus-id", "score")
_SHOWN = 5  # problems of one file that a message spells out


class DataError(ValueError):
    """Data that cannot be trained or evaluated on; the message names the place and the remedy."""


@dataclass(repr=False)
class RetrievalData:
    """A retrieval task.

    Attributes:
        queries: Query id to text.
        corpus: Document id to text.
        relevant_docs: Query id to the ids of its relevant documents.
        negatives: Query id to the ids of documents judged not relevant to it (score 0 in the qrels).
        name: Name of the data, for the model card; `load_beir` makes it of the folder and the split.

    Raises:
        DataError: If a judgement names an unknown query or document, or calls a pair both relevant and not.

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
        for name in ("queries", "corpus", "relevant_docs", "negatives"):
            if not isinstance(given := getattr(self, name), Mapping):
                values = "text" if name in ("queries", "corpus") else "set of document ids"
                raise DataError(f"{name} is a {type(given).__name__}; pass a dict of id -> {values}.")
        for name in ("relevant_docs", "negatives"):
            setattr(self, name, {query: _as_set(name, query, ids) for query, ids in getattr(self, name).items()})
        for name, judged in (("relevant_docs", self.relevant_docs), ("negatives", self.negatives)):
            for query, documents in judged.items():
                if query not in self.queries:
                    raise DataError(f"{name} judges the query {query!r}, which is not in queries: add it or drop it.")
                if unknown := sorted(documents - self.corpus.keys()):
                    raise DataError(f"{name}[{query!r}] has {unknown[0]!r}, which is not in corpus: add it or drop it.")
        for query, documents in self.negatives.items():
            if both := sorted(documents & self.relevant_docs.get(query, set())):
                raise DataError(
                    f"{both[0]!r} is both relevant and a negative of the query {query!r}: keep one of them."
                )

    def __repr__(self) -> str:
        relevant, negative = (sum(map(len, judged.values())) for judged in (self.relevant_docs, self.negatives))
        return (
            f"RetrievalData({len(self.queries):,} queries, {len(self.corpus):,} documents, "
            f"{relevant:,} relevant pairs, {negative:,} judged negatives)"
        )

    def triplets(self, num_negatives: int, seed: int = 0) -> Dataset:
        """Training rows: one for each (query, relevant document), in an order that depends on the seed alone.

        The negatives of a row are distinct documents: drawn from the query's own judged negatives, topped up with
        random documents that are not relevant to it.

        Args:
            num_negatives: The number n of negative columns.
            seed: Of the draw and of the row order.

        Returns:
            Columns ``anchor``, ``positive``, ``negative_1``, ..., ``negative_n``.

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
            raise DataError("No query has a relevant document: there is nothing to train on. Fill relevant_docs.")
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
                f"The query {query!r} has {len(documents) - len(relevant)} documents that are not relevant to it, "
                f"{number} negatives were asked for: lower num_negatives or enlarge the corpus."
            )
        drawn = [judged[i] for i in rng.permutation(len(judged))[:number]]
        while len(drawn) < number:
            candidate = documents[rng.integers(len(documents))]
            if candidate not in relevant and candidate not in drawn:
                drawn.append(candidate)
        return drawn


def _as_set(name: str, query: str, documents: Any) -> set[str]:
    if isinstance(documents, str | Mapping) or not isinstance(documents, Collection):
        raise DataError(f"{name}[{query!r}] is {documents!r}; pass a set of document ids.")
    return set(documents)


def available_splits(folder: str | Path) -> list[str]:
    """Names of the splits of a BEIR folder, sorted; empty when it has no ``qrels/`` (a single ``qrels.tsv``).

    Raises:
        DataError: If there is no such folder.
    """
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    return sorted(path.stem for path in Path(folder, "qrels").glob("*.tsv"))


def load_beir(folder: str | Path, split: str | None = None) -> RetrievalData:
    """Read and check a BEIR folder.

    A title and its text are joined by a space. With a split, only the queries judged in it are kept; without,
    all queries and the judgements of all splits.

    Args:
        folder: Holds corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv).
        split: A name of :func:`available_splits`.

    Raises:
        DataError: If a file is missing, a line is malformed, an id unknown or used twice, a text empty, or nothing
            relevant. The message names file and line, at most five a file.
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
    problems.raise_if_any()  # before the qrels, where every broken document would show up as an unknown id
    judged: dict[tuple[str, str], bool] = {}
    for name in names:
        _read_qrels(name, queries, corpus, judged, problems)
    problems.raise_if_any()
    if not any(judged.values()):
        raise DataError(
            f"{', '.join(names)} in {folder}: no document is relevant to a query. Give one a score above 0."
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
    """Write corpus.jsonl, queries.jsonl and qrels/<split>.tsv, replacing what is there; :func:`load_beir` reads them.

    Raises:
        DataError: If an id has a tab or a line break in it, which the qrels cannot hold, or the split is no file name.
    """
    if not is_file_name(split):
        raise DataError(f"The split {split!r} is to be the name of a file: leave out slashes.")
    for identifier in (*data.queries, *data.corpus):
        if set("\t\r\n") & set(identifier):
            raise DataError(f"The id {identifier!r} holds a tab or a line break, which a qrels file cannot: rename it.")
    folder = Path(folder)
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, texts in (("corpus.jsonl", data.corpus), ("queries.jsonl", data.queries)):
        rows = (json.dumps({"_id": key, "text": text}, ensure_ascii=False) for key, text in texts.items())
        _write_lines(folder / name, rows)
    judgements = [
        f"{query}\t{document}\t{score}"
        for score, judged in ((1, data.relevant_docs), (0, data.negatives))
        for query, documents in judged.items()
        for document in sorted(documents)
    ]
    _write_lines(folder / "qrels" / f"{split}.tsv", ["\t".join(_HEADER), *judgements])


def is_file_name(name: str) -> bool:
    """Whether a file of this name lies in the folder that it is put into, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


class Problems:
    """What is wrong in the files of a folder, by file name, raised as one DataError."""

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
        """Numbered non-blank lines of a UTF-8 file; the others are problems."""
        with (self.folder / name).open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
                except UnicodeDecodeError:
                    self.add(name, number, "is not UTF-8; save the file in that encoding")
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
        problems.add(name, 1, "the file is empty; write one JSON object a line")
    return texts


def numbered_texts(name: str, problems: Problems, ids: tuple[str, ...] = ("_id",)) -> Iterator[tuple[int, str, str]]:
    """Line number, id and text of the good lines of a .jsonl file; the others are problems."""
    for number, line in problems.lines(name):
        try:
            row = parse(line)
        except ValueError as error:
            problems.add(name, number, f"is broken JSON ({error}); write one object a line")
            continue
        try:
            yield number, *id_and_text(row, ids)
        except DataError as error:
            problems.add(name, number, str(error))


def id_and_text(row: Any, ids: tuple[str, ...] = ("_id",)) -> tuple[str, str]:
    """Of a row with an id under the first of these names that it has; title and text are joined by a space.

    Raises:
        DataError: Says what is wrong with the row, and leaves it to the caller to say where it is.
    """
    if not isinstance(row, dict):
        raise DataError(f'is {type(row).__name__}, not an object like {{"_id": "1", "text": "..."}}')
    name = next((name for name in ids if row.get(name) is not None), ids[0])
    if missing := [key for key in (name, "text") if row.get(key) is None]:
        raise DataError(f"has no {missing[0]!r}; it has {sorted(row)}. Add the key")
    if isinstance(row[name], bool) or not isinstance(row[name], str | int):
        raise DataError(f"has an {name} that is {type(row[name]).__name__}, not a string or a whole number; write one")
    key, title, text = str(row[name]), row.get("title") or "", row["text"]
    if not isinstance(text, str) or not isinstance(title, str):
        raise DataError(f"{key!r} has a title or text that is not a string; quote it")
    if not (title + text).strip():
        raise DataError(f"{key!r} has an empty text; write one, or remove the line and its judgements")
    return key, f"{title} {text}" if title else text


def _read_qrels(
    name: str,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    judged: dict[tuple[str, str], bool],
    problems: Problems,
) -> None:
    """Add the judgements of a qrels file to ``judged``: (query id, document id) to whether it is relevant."""
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
            problems.add(name, number, f"judges {document!r} for {query!r} against an earlier line; keep one of them")
