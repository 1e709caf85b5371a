"""Files in BEIR's layout, read line by line. An error names the file and the line.

::

    corpus.jsonl         {"_id": "d1", "title": "optional", "text": "..."}    one document per line
    queries.jsonl        {"_id": "q1", "text": "..."}                         one query per line
    qrels/<split>.tsv    query-id <tab> corpus-id <tab> score      score > 0: relevant

An empty corpus-id with score 0 says that no document answers the query. Ids are quoted as in csv
files. TREC's four columns (query, iteration, document, score) and compressed texts
(``corpus.jsonl.gz``) are read as well.

Source: Thakur et al. 2021, BEIR, arXiv 2104.08663.
"""

from __future__ import annotations

import csv
import gzip
import json
import logging
import math
import zlib
from collections.abc import Iterator, Mapping
from itertools import combinations
from pathlib import Path

_LAYOUT = "Expected BEIR's layout: corpus.jsonl, queries.jsonl and qrels/<split>.tsv."
HEADER = ("query-id", "corpus-id", "score")

logger = logging.getLogger(__name__)


class DataError(ValueError):
    """Data that cannot be used; the message says where the problem is and what to do."""


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The non-blank lines of a file in UTF-8, which may end in .gz, each with its place."""
    path = path if path.is_file() else path.with_name(f"{path.name}.gz")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    line = raw.decode("utf-8").removeprefix("\ufeff").rstrip("\r\n")
                except UnicodeDecodeError:
                    raise DataError(f"{where}: is not UTF-8; save the file as such.") from None
                if line.strip():
                    yield where, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again.") from None


def json_lines(path: Path) -> Iterator[tuple[str, object]]:
    """The values of a .jsonl file, each with its place."""
    for where, line in _lines(path):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: is not valid JSON ({error}); write one a line.") from None
        yield where, value


def splits_of(folder: str | Path) -> list[str]:
    if not Path(folder).is_dir():
        raise DataError(f"There is no folder {str(folder)!r}. {_LAYOUT}")
    names = (path.stem for path in Path(folder, "qrels").glob("*.tsv"))
    return sorted(name for name in names if not name.startswith("."))  # macOS writes ._dev.tsv


def check_held_out(folder: str | Path, *splits: str | None) -> None:
    """Refuses splits of a folder that share queries with each other or with train."""
    folder, given = Path(folder), [split for split in splits if split is not None]
    for split in given:
        check_layout(folder, split)
    texts = read_texts(folder / "queries.jsonl", may_be_empty=True)
    asked = [
        (split, {query: texts.get(query, "") for query, _ in _relevant_pairs(folder, split)})
        for split in (given if "train" in given else ["train", *given])
    ]
    for (other, others), (split, queries) in combinations(asked, 2):
        refuse_shared(queries, others, split, other)


def refuse_shared(
    queries: Mapping[str, str], others: Mapping[str, str], split: str, other: str
) -> None:
    """Refuses two splits, query id -> text, that share queries by id or by text."""
    texts = {folded(text) for text in others.values()} - {""}
    both = sorted(q for q, text in queries.items() if q in others or folded(text) in texts)
    if both:
        raise DataError(
            f"{len(both):,} queries of the {split} split are also in the {other} split, such as"
            f" {both[0]!r}, by id or by text: figures on queries that were trained on, or that"
            " chose a setting, are too high. Take them out of one of the two."
        )


def folded(text: str) -> str:
    """A text without upper case and further spaces: two queries with one key are one query."""
    return " ".join(text.casefold().split())


def relevant_documents(folder: str | Path) -> set[str]:
    """Ids of the documents that are relevant to a query of any split."""
    pairs = (pair for split in splits_of(folder) for pair in _relevant_pairs(Path(folder), split))
    return {document for _, document in pairs}


def _relevant_pairs(folder: Path, split: str) -> Iterator[tuple[str, str]]:
    path = folder / "qrels" / f"{split}.tsv"
    for _, (query, *columns) in _rows(path) if path.is_file() else ():
        # reading the data says what is wrong with other lines
        if len(columns) > 1 and _number(columns[-1]) > 0:
            yield query, columns[-2]


def check_layout(folder: Path, split: str) -> None:
    if split not in (splits := splits_of(folder)):
        raise DataError(f"{folder} has no qrels/{split}.tsv; its splits are {splits}. {_LAYOUT}")
    for name in ("corpus.jsonl", "queries.jsonl"):
        if not (folder / name).is_file() and not (folder / f"{name}.gz").is_file():
            raise DataError(f"{folder} has no {name}. {_LAYOUT}")


def read_texts(path: Path, may_be_empty: bool) -> dict[str, str]:
    """Id to text of a .jsonl file, without empty texts."""
    texts: dict[str, str] = {}
    for where, row in json_lines(path):
        key, text = _id_and_text(row, where)
        if key in texts:
            raise DataError(f"{where}: repeats the id {key!r}; make ids unique.")
        if not text and not may_be_empty:
            raise DataError(f"{where}: {key!r} has an empty text; write one, or pass --skip-empty.")
        texts[key] = text
    found = {key: text for key, text in texts.items() if text}
    if empty := len(texts) - len(found):
        logger.warning(f"{path}: {empty:,} empty texts were left out.")
    return found


def _id_and_text(row: object, where: str) -> tuple[str, str]:
    fields = row if isinstance(row, dict) else {}
    key, title, text = fields.get("_id"), fields.get("title") or "", fields.get("text")
    if key is None or not isinstance(text, str) or not isinstance(title, str):
        example = '{"_id": "1", "title": "optional", "text": "..."}'
        raise DataError(f"{where}: is not an object like {example}, but {str(row)[:99]}.")
    text = f"{title} {text}" if title else text
    try:
        f"{key}{text}".encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {key!r} is not Unicode; remove half a character.") from None
    return str(key), text if text.strip() else ""


def read_qrels(
    path: Path, queries: Mapping[str, str], corpus: Mapping[str, str], skip_missing: bool = False
) -> dict[str, dict[str, int]]:
    """The judgments of a file: query id to document id to the grade.

    The first line is a header if its last column is no number and its first no query.
    """
    judged: dict[str, dict[str, int]] = {}
    missing = 0
    for number, (where, columns) in enumerate(_rows(path)):
        query, score = columns[0], columns[-1]
        if number == 0 and query not in queries and math.isnan(_number(score)):
            continue
        if len(columns) not in (3, 4):
            named = ", ".join(HEADER)
            raise DataError(f"{where}: has {len(columns)} columns, not 3, with tabs: {named}.")
        document, grade = columns[-2], whole_grade(score, where)
        is_known = query in queries and (document in corpus or not (document or grade))
        if not is_known and skip_missing:
            missing += 1
            continue
        if not is_known:
            absent = (document, "corpus.jsonl") if query in queries else (query, "queries.jsonl")
            raise DataError(
                f"{where}: {absent[0]!r} is not in {absent[1]}; add it there, remove this line, or"
                " leave such lines out with --skip-empty."
            )
        grades = judged.setdefault(query, {})
        if document and grades.setdefault(document, grade) != grade:
            raise DataError(
                f"{where}: contradicts an earlier line about {document!r} and {query!r}; keep one."
            )
    if missing:
        logger.warning(f"{missing:,} judgments of texts that are empty or absent were left out.")
    return judged


def _rows(path: Path) -> Iterator[tuple[str, list[str]]]:
    for where, line in _lines(path):
        yield where, next(csv.reader([line], delimiter="\t")) if "\t" in line else line.split()


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def whole_grade(grade: str | float, where: str) -> int:
    """A grade as an int, after a check that it is a whole number, such as 1, 1.0 or "1"."""
    number = _number(grade)
    if not number.is_integer():
        raise DataError(
            f"{where}: the score {grade!r} is not a whole number; use 1 or more for relevant, 0 for"
            " not. Grades that are all multiplied by one number leave nDCG as it is."
        )
    return int(number)
