"""The columns of pairs by their role, and the pairs in the rows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from st_magnitude._checks import shown
from st_magnitude.data import beir
from st_magnitude.data.beir import DataError, canonical
from st_magnitude.data.documents import remarks
from st_magnitude.data.rows import PARTS, Row

HIGHEST_GRADE = 3  # whole scores up to it are grades
RELEVANT = 0.8  # of the highest score, where scores are no grades

# Names of columns without case, spaces and underscores, by role; the first with a match counts.
CLASSES = "category intent class labeltext"
_QUERIES = "query question anchor sentence1 sentencea text1"
_DOCUMENTS = "document doc passage answer positive pos context response sentence2 sentenceb text2"
ROLES: dict[str, tuple[str, ...]] = {
    "query": (_QUERIES, "prompt input instruction", "text"),
    "document": (_DOCUMENTS, "output completion", "text", CLASSES, "label"),
    "score": ("score label relevance similarity grade",),
    "split": ("split",),
    "negative": (),
}
NEGATIVE = r"(hard)?neg(ative)?s?\d*"
_HALF = re.compile("[\ud800-\udfff]")  # of a character in UTF-16


def choose_columns(rows: list[Row], given: str | Mapping[str, str] | None) -> dict[str, list[str]]:
    """The columns of each role."""
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    if isinstance(given, str):
        parts = (part.partition("=") for part in given.split(","))
        given = {role.strip(): column.strip() for role, _, column in parts}
    chosen = {role: [column] for role, column in (given or {}).items()}
    for role, (column,) in chosen.items():
        if role not in ROLES or column not in columns:
            raise DataError(
                f"columns has {role}={column}, but its roles are {', '.join(ROLES)}, and the"
                f" columns {', '.join(columns)}."
            )
    plain = {c: re.sub(r"[\W_]", "", c.casefold()) for c in columns if [c] not in chosen.values()}
    for role, choices in ROLES.items():
        for names in choices:
            found = [column for column, name in plain.items() if name in names.split()]
            if role in chosen or not found:
                continue
            if len(found) > 1:
                raise DataError(f"{' and '.join(found)} may be the {role}: choose {role}=NAME.")
            chosen[role] = found
            del plain[found[0]]
            if names == CLASSES:  # whose numbers are often next to them
                plain = {column: name for column, name in plain.items() if name != "label"}
    chosen.setdefault("negative", [c for c, name in plain.items() if re.fullmatch(NEGATIVE, name)])
    if not {"query", "document"} <= chosen.keys():
        left = [column for column in plain if column not in chosen["negative"]]
        query, document = (
            chosen[role][0] if role in chosen else left.pop(0) if left else "NAME"
            for role in ("query", "document")
        )
        listed = ", ".join(columns)[:300]
        text = f"{rows[0].where}: the columns are {listed}."
        if re.search(r"[.?!](, |$)|(\w+ ){3}", listed):
            raise DataError(f"{text} These seem to be texts: write a header, query,document.")
        choice = f"--columns query={query[:99]},document={document[:99]}"
        raise DataError(f"{text} Choose two, as {choice}.")
    return chosen


class Pair(NamedTuple):
    part: str | None
    key: str  # the canonical query
    query: str
    document: str
    grade: int | None  # None: not judged


def read_pairs(
    rows: list[Row], columns: Mapping[str, list[str]], threshold: float | None, notes: list[str]
) -> list[Pair]:
    empty: list[str] = []
    without = 0
    scored: list[tuple[str | None, str, str, float]] = []
    for row in rows:
        queries = _texts(row, columns["query"])
        documents = _texts(row, columns["document"])
        if not (queries and documents):
            empty.append(row.where)
            continue
        part = row.part
        score = 1.0
        for column in columns.get("split", ()):
            if column not in row.cells:  # of several files, some may have none
                without += 1
                continue
            part = PARTS.get(str(row.cells[column]).lower())
            if part is None:
                raise DataError(f"{row.where}: the {column} is not train, dev or test.")
        for column in columns.get("score", ()):
            score = beir.number(row.cells.get(column))
            if not math.isfinite(score):
                given = row.cells.get(column)
                raise DataError(f"{row.where}: the {column} is {shown(given)}; write a number.")
        negatives = _texts(row, columns["negative"])
        for query in queries:
            for text in documents:
                scored.append((part, query, text, score))
            for text in negatives:
                scored.append((part, query, text, 0.0))
    if empty:
        notes.append(f"Left out {len(empty):,} rows without text, the first at {empty[0]}.")
    if without:
        notes.append(f"{without:,} rows name no split: it is drawn, if the other rows have no dev.")
    scores = {score for _, _, _, score in scored}
    highest = max(scores, default=0.0)
    are_grades = highest <= HIGHEST_GRADE and all(score.is_integer() for score in scores)
    are_grades &= threshold is None or threshold > 0
    if threshold is None:
        threshold = 1.0 if are_grades else RELEVANT * highest
    if not scores or highest < threshold:
        raise DataError(
            f"{rows[0].where} and below: no document is relevant. {len(empty):,} rows have no text,"
            f" and the highest score is {highest:g}, below the threshold {threshold:g}."
        )
    if not scores <= {-1.0, 0.0, 1.0}:
        notes.append(
            f"The highest score is {highest:g}: a document is relevant from {threshold:g} on, and a"
            " negative at 0 and below. Choose another threshold if that is wrong."
        )

    notes += remarks({text for _, _, text, _ in scored})
    keys = {query: canonical(query) for query in {query for _, query, _, _ in scored}}
    grades: dict[float, int | None] = {score: None if score > 0 else 0 for score in scores}
    grades |= {x: int(x) if are_grades else 1 for x in scores if x >= threshold}
    return [Pair(part, keys[query], query, text, grades[x]) for part, query, text, x in scored]


def spell_names(pairs: list[Pair], notes: list[str]) -> list[Pair]:
    """The pairs with spaces for underscores, if all documents are names as lost_or_stolen_card."""
    names = {pair.document for pair in pairs}
    joined = sorted(name for name in names if "_" in name.strip("_"))
    if not joined or any(len(name.split()) > 1 for name in names):
        return pairs
    notes.append(f"Documents are names such as {joined[0]!r}: underscores are read as spaces.")
    return [Pair(*pair[:3], pair.document.replace("_", " "), pair.grade) for pair in pairs]


def _texts(row: Row, columns: Iterable[str]) -> list[str]:
    """The texts in some cells, each a string or a list of strings."""
    found: list[str] = []
    for column in columns:
        value = row.cells.get(column)
        for text in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(text, str):
                if not text.isascii() and _HALF.search(text):
                    raise DataError(f"{row.where}: the {column} is not Unicode: {shown(text)}.")
                if text.strip():
                    found.append(text)
            elif text is not None and text == text:  # nan, as pandas has it, is nothing
                raise DataError(f"{row.where}: the {column} is {shown(text)}; write a text.")
    return found
