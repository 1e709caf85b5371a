"""Files in BEIR's layout, read line by line. An error names the file and the line.

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
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_LAYOUT = "Expected BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or qrels.tsv)."
HEADER = ("query-id", "corpus-id", "score")


class DataError(ValueError):
    """Data that cannot be used; the message says where the problem is and what to do."""


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The non-blank lines of a UTF-8 file, each with its place for messages; the file may also end in .gz."""
    path = path if path.is_file() else path.with_name(f"{path.name}.gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise DataError(f"{where}: is not UTF-8; save the file in this encoding.") from None
                if line.strip():
                    yield where, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again.") from None


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """The values of a .jsonl file, which may end in .gz instead, each with its place for messages."""
    for where, line in _lines(path):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: is not valid JSON ({error}); write one object per line.") from None
        yield where, value


def splits_of(folder: str | Path) -> list[str]:
    """Sorted names of the splits of a folder; empty if it has no ``qrels/`` but a single ``qrels.tsv``."""
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    return sorted(path.stem for path in Path(folder, "qrels").glob("*.tsv"))


def check_held_out(folder: str | Path, split: str, *others: str | None) -> None:
    """Refuses a split of a folder that shares queries with others; splits that do not exist are passed over."""
    queries = _judged(Path(folder), split)
    for other in others:
        if other not in (None, split):
            refuse_shared(queries, _judged(Path(folder), other), split, other)


def refuse_shared(queries: Collection[str], others: Collection[str], split: str, other: str) -> None:
    """Refuses two splits that share queries; the message has their number and the first of them."""
    if both := sorted({*queries} & {*others}):
        raise DataError(
            f"{len(both):,} queries of the {split} split are also in the {other} split, such as {both[0]!r}: figures "
            "on queries that were trained on, or that chose a setting, are too high. Take them out of one of the two."
        )


def _judged(folder: Path, split: str) -> set[str]:
    """Ids of the queries that have a relevant document in a split."""
    path = folder / "qrels" / f"{split}.tsv"
    rows = (_columns(line) for _, line in _lines(path)) if path.is_file() else ()
    # Reading the data says what is wrong with other lines.
    return {row[0] for row in rows if len(row) > 2 and row[-1].isdecimal() and int(row[-1]) > 0}


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


def read_texts(path: Path, may_be_empty: bool) -> dict[str, str]:
    """Id to text of a .jsonl file."""
    texts: dict[str, str] = {}
    for where, row in json_lines(path):
        key, text = id_and_text(row, where, may_be_empty=may_be_empty)
        if key in texts:
            raise DataError(f"{where}: repeats the id {key!r}; make ids unique.")
        texts[key] = text
    if not texts:
        raise DataError(f"{path} is empty; write one JSON object per line.")
    return texts


def id_and_text(row: Any, where: str, ids: tuple[str, ...] = ("_id",), may_be_empty: bool = False) -> tuple[str, str]:
    """Id and text of a row; title and text are joined by a space."""
    if not isinstance(row, dict):
        raise DataError(f'{where}: is a {type(row).__name__}, not an object like {{"_id": "1", "text": "..."}}.')
    name = next((name for name in ids if row.get(name) is not None), ids[0])
    if missing := [key for key in (name, "text") if row.get(key) is None]:
        raise DataError(f"{where}: has no {missing[0]!r}; it has {sorted(row)}. Add the key.")
    key, title, text = str(row[name]), row.get("title") or "", row["text"]
    if not isinstance(text, str) or not isinstance(title, str):
        raise DataError(f"{where}: {key!r} has a title or text that is not a string; quote it.")
    text = f"{title} {text}" if title else text
    if text.strip():
        return key, text
    if may_be_empty:
        return key, ""
    raise DataError(f"{where}: {key!r} has an empty text; write one, or leave such texts out with --skip-empty.")


def read_qrels(
    paths: Iterable[Path], queries: Mapping[str, str], corpus: Mapping[str, str]
) -> dict[str, dict[str, int]]:
    """The judgments of qrels files: query id to document id to the grade."""
    judged: dict[str, dict[str, int]] = {}
    for number, (where, line) in (numbered for path in paths for numbered in enumerate(_lines(path))):
        columns = _columns(line)
        if number == 0 and columns[-1].lower() == "score":
            continue
        if len(columns) not in (3, 4):
            raise DataError(f"{where}: has {len(columns)} columns, not 3: {', '.join(HEADER)}, separated by tabs.")
        query, document, score = columns[0], columns[-2], columns[-1]
        for identifier, known, name in ((query, queries, "queries.jsonl"), (document, corpus, "corpus.jsonl")):
            if identifier not in known:
                raise DataError(f"{where}: {identifier!r} is not in {name}; add it there or remove this line.")
        try:
            grade = int(score)
        except ValueError:
            message = f"{where}: the score {score!r} is not an integer; use 1 or more for relevant, 0 for not."
            raise DataError(message) from None
        if judged.setdefault(query, {}).setdefault(document, grade) != grade:
            raise DataError(f"{where}: contradicts an earlier line about {document!r} and {query!r}; keep one of them.")
    return judged


def _columns(line: str) -> list[str]:
    return line.split("\t") if "\t" in line else line.split()


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file directly inside a folder, on any system."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in lines)
