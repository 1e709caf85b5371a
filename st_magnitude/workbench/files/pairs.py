"""Pairs in a file, a data set or mappings, as splits that do not leak."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from itertools import combinations
from pathlib import Path
from typing import cast

from st_magnitude._checks import counted, in_range
from st_magnitude._files import moved_in, refuse_used_folder
from st_magnitude.data import beir
from st_magnitude.data.beir import DataError, canonical
from st_magnitude.data.documents import as_document, read_documents
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.workbench.files.columns import Pairs, read_pairs, roles_of
from st_magnitude.workbench.files.lines import LeftOut
from st_magnitude.workbench.files.rows import Source, num_held_out, read_columns
from st_magnitude.workbench.files.texts import holds_texts, neighbours, remarks

__all__ = ["Splits", "load_splits"]

logger = logging.getLogger(__name__)

Data = Source | RetrievalData | Mapping[str, RetrievalData]


class Splits(dict[str, RetrievalData]):
    """Splits of one data set by name, usually train, dev and test, over one corpus.

    ``splits["dev"]`` raises a DataError if there is no such split, ``splits.get("dev")`` is None.

    Attributes:
        notes: Sentences for the user: what was left out, how scores were read, how many queries
            there are.
        drawn: Names of the splits that were drawn at random.
        caveat: What the queries are, if nobody asked them: chunks of texts without labels.
    """

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name = name
        self.notes = notes
        self.drawn: set[str] = set()
        self.caveat = ""

    def __missing__(self, split: str) -> RetrievalData:
        raise DataError(f"{self.name} has no split {split!r}; its splits are {list(self)}.")

    def relevant_documents(self) -> set[str]:
        """Ids of the documents that are relevant to a query of any split."""
        return {d for data in self.values() for grades in data.relevant.values() for d in grades}

    def check_held_out(self, *splits: str | None, train: str = "train") -> None:
        """Refuses (DataError) splits that share queries with each other or with train."""
        names = [name for name in splits if name is not None and name in self]
        held_out = names if train in names or train not in self else [train, *names]
        for other, name in combinations(held_out, 2):
            known = self[other].asked
            texts = {canonical(text) for text in known.values()} - {""}
            asked = self[name].asked.items()
            both = sorted(q for q, text in asked if q in known or canonical(text) in texts)
            if both:
                raise DataError(
                    f"{len(both):,} queries of the {name} split are also in the {other} split, such"
                    f" as {both[0]!r}, by id or by text: figures on queries that were trained on,"
                    " or that chose a setting, are too high. Take them out of one of the two."
                )

    def keep_apart(self) -> None:
        """Keeps queries of dev and test out of the training rows of the splits before them."""
        later = {"dev": ["test"], "test": []}
        for name, data in self.items():
            others = later.get(name, ["dev", "test"])
            self[name] = data.apart_from(*(self.get(other) for other in others))

    def save(self, folder: str | Path) -> None:
        """Writes all splits as a new folder in BEIR's layout."""
        refuse_used_folder(folder)
        queries = {key: text for data in self.values() for key, text in data.queries.items()}
        first, data = next(iter(self.items()))
        with moved_in(Path(folder), last="qrels") as new:
            RetrievalData(queries, data.corpus, {}).save(new, first)
            for name, data in self.items():
                data.save_qrels(new / "qrels" / f"{name}.tsv")


def load_splits(
    source: Data | Sequence[str | Path],
    *,
    columns: str | Mapping[str, str] | None = None,
    threshold: float | None = None,
    encoding: str | None = None,
    sheet: str | None = None,
    seed: int = 0,
    skip_empty: bool = False,
) -> Splits:
    """Splits of pairs of a query and a document, of a folder in BEIR's layout, or of
    `RetrievalData` by the names of their splits; data alone are train.

    Pairs are the rows of a file (CSV, TSV, JSONL, JSON, Parquet, xlsx), of a folder or a list of
    them, of a data set of the hub (``"name"`` or ``"name:split"``), of a Dataset or DatasetDict, of
    a data frame of pandas or polars, of a mapping of columns, or mappings. Of several files, one
    may have a column of splits, and the others then give those that it does not name:
    ``["mined.jsonl", "pairs.csv"]``. The columns have their usual names: query, question, anchor,
    sentence1, prompt or input; document, passage, answer, positive, context, sentence2, response or
    output; text and category. Optional are negative, negative_1, ... or lists of negatives, score
    or label, and split. The corpus is all documents of the source.

    A score of 0 is an explicit negative. Whole scores up to 3 are grades; of others, those from
    ``threshold`` on are relevant, by default from 80 % of the highest. Without dev or test, one
    query of ten is held out for it, at most 2,000. No query is in two splits, and none of dev or
    test is a text of a row of ``splits["train"].triplets()``. docs/cli.md says more.

    Texts without labels, which are a .txt or .md file, a folder of them, or rows with the column
    text alone, are cut into chunks: a chunk is a query, and its neighbours are what it should find.
    One document of ten is dev, and one test.

    Args:
        columns: Other names, ``{"query": "title", "document": "body"}`` or
            ``"query=title,document=body"``; roles are query, document, negative, score and split.
        threshold: The lowest score of a relevant document.
        encoding: That of files which are not UTF-8, by its name in Python, such as ``"cp1251"``.
        sheet: The sheet of spreadsheets; by default the first.
        seed: What is held out depends on it and on the texts, not on the order of the rows.
        skip_empty: Whether a folder in BEIR's layout may have judgments of empty and absent texts.
            They are left out and counted in the log; else they are an error.

    Raises:
        DataError: If the source cannot be read or has no pairs. The message names the line.

    Example:
        >>> rows = [{"question": f"What is {n} + 1?", "answer": str(n) + "!"} for n in range(20)]
        >>> splits = load_splits(rows)
        >>> {name: len(splits[name].queries) for name in splits}
        {'train': 16, 'dev': 2, 'test': 2}
        >>> splits.notes[0]
        '20 documents; queries: 16 in train, 2 in dev, 2 in test.'
    """
    if isinstance(source, Splits):
        return source
    given = {"train": source} if isinstance(source, RetrievalData) else source
    if isinstance(given, Mapping) and all(isinstance(x, RetrievalData) for x in given.values()):
        found = Splits("the data", [])
        found.update(cast(Mapping[str, RetrievalData], given))
        return found
    sources = _sources_of(cast(Source, given))
    source = sources[0]
    if isinstance(source, str | Path) and _is_layout(source):
        if any(given is not None for given in (columns, threshold, encoding, sheet)):
            raise DataError(
                f"{source} is BEIR's folder: columns, threshold, encoding and sheet are of pairs."
            )
        return _read_folder(Path(source), skip_empty)
    notes: list[str] = []
    documents = None
    if isinstance(source, str | Path) and holds_texts(Path(source)):
        documents = read_documents(source)
    else:
        tables = read_columns(sources, encoding, sheet, notes)
        if all(table.cells.keys() == {"text"} for table in tables):
            documents = (
                as_document({"text": text}, table.place(row))
                for table in tables
                for row, text in enumerate(table.cells["text"])
            )
    name = Path(source).stem if isinstance(source, str | Path) else "pairs"
    if documents is not None:
        tables = neighbours(documents, seed)
        name = f"neighbouring chunks of {name}"
    tables = [table for table in tables if table.num_rows]
    if not tables:
        raise DataError(f"{source if isinstance(source, str | Path) else name} has no rows.")
    roles = roles_of(tables, columns)
    if threshold is not None:
        in_range("threshold", threshold)
        if not any("score" in chosen for chosen in roles):
            raise DataError(f"threshold is {threshold}, but no column has scores.")
    pairs = read_pairs(tables, roles, threshold, notes)
    splits = _build(pairs, _assign(pairs, seed, notes), name, notes)
    splits.keep_apart()
    if documents is not None:
        splits.drawn = set()  # folds of queries would train on their documents
        splits.caveat = (
            "The texts have no labels: each query is a chunk, and its answers are the chunks next"
            " to it. For questions of people the difference can be another."
        )
    return splits


def _sources_of(source: Source | Sequence[str | Path]) -> Sequence[Source]:
    """One source, or several files of pairs."""
    if not isinstance(source, list | tuple) or len(source) < 2:
        return [cast(Source, source)]
    if not all(isinstance(path, str | Path) for path in source):
        return [cast(Source, source)]
    for path in map(Path, source):
        if _is_layout(path) or holds_texts(path):
            raise DataError(
                f"{path} is not a file of pairs: give it alone, or convert the others to its form."
            )
    return list(source)


def _is_layout(path: str | Path) -> bool:
    """Whether a path is a folder in BEIR's layout."""
    layout = ("corpus.jsonl", "corpus.jsonl.gz", "queries.jsonl", "qrels")
    return any(Path(path, name).exists() for name in layout)


def _read_folder(folder: Path, skip_empty: bool) -> Splits:
    """The splits of a folder in BEIR's layout."""
    names = beir.splits_of(folder)
    beir.check_layout(folder, names[0] if names else "train")
    corpus = beir.read_texts(folder / "corpus.jsonl")
    queries = beir.read_texts(folder / "queries.jsonl", of_queries=True)
    found = Splits(str(folder), remarks(corpus.values()))
    for name in names:
        path = folder / "qrels" / f"{name}.tsv"
        judged = beir.read_qrels(path, queries, corpus, skip_empty)
        asked = {query: text for query, text in queries.items() if query in judged}
        data = RetrievalData(asked, corpus, judged, name=f"{folder.resolve().name}, {name} split")
        if not data.relevant:
            raise DataError(f"{path}: no document is relevant, by a score above 0.")
        data.corpus = corpus  # one for all splits
        found[name] = data
    found.keep_apart()
    return found


def _assign(pairs: Pairs, seed: int, notes: list[str]) -> dict[str, str]:
    """The split of each canonical query: the given one, or drawn by a hash of it."""
    order = {None: 0, "train": 0, "dev": 1, "test": 2}
    part_of = dict.fromkeys(pairs.keys, "train")
    placed = [*zip(pairs.parts, pairs.keys, strict=True)]
    for part, key in placed:
        if order[part] > order[part_of[key]]:
            part_of[key] = str(part)
    trained = {key for part, key in placed if part == "train"}
    moved = sum(order[part_of[key]] > order[part] for part, key in placed)
    if moved and any(pairs.parts):
        said = f"Moved {counted(moved, 'pair')} to the later split, where the query is as well."
        notes.append(LeftOut(said))
    longest = 2 * max(map(len, part_of))  # of a document that may be a query
    judged = [*zip(pairs.keys, pairs.documents, pairs.grades, strict=True)]
    texts = {text for _, text, grade in judged if grade is not None and len(text) <= longest}
    documents = set(map(canonical, texts))

    def by_hash(key: str) -> tuple[bool, bytes]:
        return key in documents, hashlib.sha256(f"{seed} {key}".encode()).digest()

    asked = {key for key, _, grade in judged if grade and part_of[key] == "train"}
    number = num_held_out(len(asked))
    # of several files, some may name the split of their rows
    free = nsmallest(2 * number, asked - trained or asked, key=by_hash)
    given = {*part_of.values()}
    for part in ("test", "dev"):
        if part not in given:
            part_of |= dict.fromkeys(free[:number], part)
            free = free[number:]
    return part_of


def _build(pairs: Pairs, part_of: Mapping[str, str], name: str, notes: list[str]) -> Splits:
    """The splits of the pairs, over the documents of all."""
    texts = dict.fromkeys(pairs.queries)
    queries = {text: f"q{i}" for i, text in enumerate(texts)}  # text -> id
    texts = dict.fromkeys(pairs.documents)
    # a query and a document of one text have one id
    documents = {text: queries.get(text, f"d{i}") for i, text in enumerate(texts)}
    if len(documents) == 1 or all(not math.isnan(beir.number(text)) for text in documents):
        raise DataError(
            f"All documents are {'one' if len(documents) == 1 else 'numbers'}, such as"
            f" {pairs.documents[0][:99]!r}, so there is nothing to search: choose another column,"
            " with --columns document=NAME, or add one with the names of what the numbers stand"
            " for, called category."
        )
    judged: dict[str, dict[str, int]] = {}
    asked: dict[str, dict[str, str]] = {"train": {}, "dev": {}, "test": {}}  # id -> text
    contradictions = 0
    for _, key, query, text, grade in zip(*pairs, strict=True):
        if grade is not None:
            part = part_of[key]
            asked[part][queries[query]] = query
            document = documents[text]
            grades = judged.setdefault(queries[query], {})
            before = grades.get(document, grade)
            contradictions += (before > 0) != (grade > 0)
            grades[document] = max(before, grade)
    if contradictions:
        said = counted(contradictions, "negative")
        notes.append(LeftOut(f"Left out {said} with another row that calls it relevant."))
    corpus = {key: text for text, key in documents.items()}
    data = RetrievalData(asked["train"] | asked["dev"] | asked["test"], corpus, judged)
    splits = Splits(name, notes)
    splits.drawn = {"dev", "test"} - {*pairs.parts}
    for part, of_part in asked.items():
        if of_part:
            splits[part] = data.only(of_part)
            splits[part].name = f"{name}, {part} split"
    counts = ", ".join(f"{len(of_part):,} in {part}" for part, of_part in asked.items() if of_part)
    notes.append(f"{counted(len(corpus), 'document')}; queries: {counts}.")
    same = sum(query in grades for query, grades in data.relevant.items())
    if same == sum(map(len, data.relevant.values())):
        raise DataError(
            f"In all {same:,} pairs the document is the query, which any search finds, so nothing"
            " can be judged: choose another column, with --columns document=NAME."
        )
    if same:
        said = f"In {counted(same, 'pair')} the document is the query, which any search finds."
        notes.append(LeftOut(f"{said} They raise the figures: leave them out."))
    return splits
