"""Files in BEIR's layout, read line by line. A problem in a file names the file and the line.

::

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."}    one document per line
    queries.jsonl        {"_id": "q1", "text": "..."}                         one query per line
    qrels/<split>.tsv    query-id <tab> corpus-id <tab> score                 score > 0: relevant, else irrelevant

A single ``qrels.tsv`` instead of the folder ``qrels``, TREC's four columns (query, iteration, document, score) and
compressed texts (``corpus.jsonl.gz``) are read as well.

Source: Thakur et al. 2021, BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "HEADER",
    "DataError",
    "Problems",
    "id_and_text",
    "is_file_name",
    "json_rows",
    "numbered_texts",
    "qrels_of",
    "read_qrels",
    "read_texts",
    "splits_of",
    "write_lines",
]

_LAYOUT = "Expected BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv)."
HEADER = ("query-id", "corpus-id", "score")
_SHOWN = 5  # largest number of problems of one file in an error message


class DataError(ValueError):
    """Data that cannot be used; the message says where the problem is and what to do."""


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
        """Numbered non-blank lines of a UTF-8 file, which may end in .gz instead."""
        path = self.folder / name
        compressed = path.with_name(f"{path.name}.gz")
        with path.open("rb") if path.is_file() else gzip.open(compressed) as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
                except UnicodeDecodeError:
                    self.add(name, number, "is not UTF-8; save the file in this encoding")
                    continue
                if line.strip():
                    yield number, line


def splits_of(folder: str | Path) -> list[str]:
    """Sorted names of the splits of a folder; empty if it has no ``qrels/`` but a single ``qrels.tsv``.

    Raises:
        DataError: If there is no such folder.
    """
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    return sorted(path.stem for path in Path(folder, "qrels").glob("*.tsv"))


def qrels_of(folder: Path, split: str | None) -> list[str]:
    """The names of the files with the judgments of a split, or of all splits, after a check that all files exist."""
    splits = splits_of(folder)
    if split is not None and split not in splits:
        raise DataError(f"{folder} has no qrels/{split}.tsv; its splits are {splits}. {_LAYOUT}")
    names = [f"qrels/{name}.tsv" for name in (splits if split is None else [split])] or ["qrels.tsv"]
    for name in ("corpus.jsonl", "queries.jsonl", *names):
        if not (folder / name).is_file() and not (folder / f"{name}.gz").is_file():
            raise DataError(f"{folder} has no {name}. {_LAYOUT}")
    return names


def read_texts(name: str, problems: Problems, skip_empty: bool) -> dict[str, str]:
    """Id to text of a .jsonl file. With ``skip_empty``, an empty text stays empty instead of being a problem."""
    texts: dict[str, str] = {}
    first_line: dict[str, int] = {}
    for number, key, text in numbered_texts(name, problems, skip_empty=skip_empty):
        if key in first_line:
            problems.add(name, number, f"repeats the id {key!r} of line {first_line[key]}; make ids unique")
        texts[key] = text
        first_line.setdefault(key, number)
    if not texts and name not in problems.found:
        problems.add(name, 1, "the file is empty; write one JSON object per line")
    return texts


def numbered_texts(
    name: str, problems: Problems, ids: tuple[str, ...] = ("_id",), skip_empty: bool = False
) -> Iterator[tuple[int, str, str]]:
    """Line number, id and text of the valid lines of a .jsonl file; the others are added to the problems."""
    for number, line in problems.lines(name):
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.add(name, number, f"is not valid JSON ({error}); write one object per line")
            continue
        try:
            yield number, *id_and_text(row, ids, skip_empty)
        except DataError as error:
            problems.add(name, number, str(error))


def json_rows(lines: Iterable[bytes], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line of a .jsonl file that is not blank."""
    for number, raw in enumerate(lines, start=1):
        try:
            line = raw.decode("utf-8").removeprefix("\ufeff")
            if not line.strip():
                continue
            row = json.loads(line)
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: is not UTF-8; save the file in this encoding.") from None
        except ValueError as error:
            raise DataError(f"{path}, line {number}: is not valid JSON ({error}). Write one object per line.") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: is a {type(row).__name__}, not an object with named fields.")
        yield number, row


def id_and_text(row: Any, ids: tuple[str, ...] = ("_id",), may_be_empty: bool = False) -> tuple[str, str]:
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
        if may_be_empty:
            return key, ""
        raise DataError(f"{key!r} has an empty text; write one, or leave such texts out with --skip-empty")
    return key, f"{title} {text}" if title else text


def read_qrels(
    name: str,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    judged: dict[tuple[str, str], int],
    problems: Problems,
) -> None:
    """Adds the judgments of a qrels file to ``judged``: (query id, document id) to the grade."""
    for number, line in problems.lines(name):
        columns = line.split("\t") if "\t" in line else line.split()
        if number == 1 and columns[-1].lower() == "score":
            continue
        if len(columns) not in (3, 4):
            problems.add(name, number, f"has {len(columns)} columns, not 3: {', '.join(HEADER)}, separated by tabs")
            continue
        query, document, score = columns[0], columns[-2], columns[-1]
        for identifier, known, where in ((query, queries, "queries.jsonl"), (document, corpus, "corpus.jsonl")):
            if identifier not in known:
                problems.add(name, number, f"{identifier!r} is not in {where}; add it there or remove this line")
        try:
            grade = int(score)
        except ValueError:
            problems.add(name, number, f"the score {score!r} is not an integer; use 1 or more for relevant, 0 for not")
            continue
        if judged.setdefault((query, document), grade) != grade:
            problems.add(
                name, number, f"contradicts an earlier line about {document!r} and {query!r}; keep one of them"
            )


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly inside a folder, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)


def write_texts(path: Path, texts: Mapping[str, str]) -> None:
    """Writes id to text as a .jsonl file."""
    write_lines(path, (json.dumps({"_id": key, "text": text}, ensure_ascii=False) for key, text in texts.items()))
