"""The role of each column, and the pairs of all rows."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from st_magnitude._checks import counted, did_you_mean, shown
from st_magnitude.data import beir
from st_magnitude.data.beir import DataError, canonical
from st_magnitude.workbench.files.lines import LeftOut
from st_magnitude.workbench.files.rows import PARTS, Columns
from st_magnitude.workbench.files.texts import remarks

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
_BOOLEANS = {"true": 1, "false": 0}
_HALF = re.compile("[\ud800-\udfff]")  # of a character in UTF-16


def roles_of(
    tables: list[Columns], given: str | Mapping[str, str] | None
) -> list[dict[str, list[str]]]:
    """The columns of each role in every table. Tables with other columns have others, as far as
    they have a query and a document of their own."""
    if isinstance(given, str):
        if "=" not in given:
            raise DataError(f"columns is {given}, without roles: write query=NAME,document=NAME.")
        parts = (part.partition("=") for part in given.split(","))
        given = {role.strip(): column.strip() for role, _, column in parts}
    given = given or {}
    if len({frozenset(table.cells) for table in tables}) == 1:
        return [_choose_columns(tables, given)] * len(tables)
    known = {column for table in tables for column in table.cells}
    found = []
    for table in tables:
        its_own = {role: x for role, x in given.items() if x in table.cells or x not in known}
        try:
            found.append(_choose_columns([table], its_own))
        except DataError:
            found.append(_choose_columns(tables, given))
    return found


def _choose_columns(tables: list[Columns], given: Mapping[str, str]) -> dict[str, list[str]]:
    """The columns of each role."""
    columns = list(dict.fromkeys(chain.from_iterable(table.cells for table in tables)))
    chosen = {role: [column] for role, column in given.items()}
    for role, (column,) in chosen.items():
        for one, what, known in ((role, "roles", ROLES), (column, "columns", columns)):
            if one not in known:
                raise DataError(
                    f"columns has {role}={column}, but the {what} are {', '.join(known)}."
                    f"{did_you_mean(one, known)}"
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
    if missing := [role for role in ("query", "document") if role not in chosen]:
        longest = sorted(plain, key=lambda column: -_num_words(tables, column))[: len(missing)]
        left = [*sorted(longest, key=columns.index), "NAME", "NAME"]
        advice = {role: x[0] for role, x in chosen.items() if x}
        advice |= dict(zip(missing, left, strict=False))
        named = ",".join(f"{role}={advice[role]}" for role in ("query", "document"))
        source = f"{tables[0].source}: " if tables[0].source else ""
        raise DataError(
            f"{source}the columns are {', '.join(columns)[:300]}. If this is the header, name two"
            f" of them, as --columns {shown(named)[1:-1]}; if not, write one above it."
        )
    return chosen


def _num_words(tables: list[Columns], column: str) -> int:
    return sum(len(str(cell).split()) for table in tables for cell in table.column(column))


class Pairs(NamedTuple):
    """A query, a document and what is said of them, column by column, each (n,)."""

    parts: list[str | None]
    keys: list[str]  # the canonical queries
    queries: list[str]
    documents: list[str]
    grades: list[int | None]  # None: not judged


def read_pairs(
    tables: list[Columns],
    roles: list[dict[str, list[str]]],
    threshold: float | None,
    notes: list[str],
) -> Pairs:
    pairs = Pairs([], [], [], [], [])
    given: list[float] = []  # the scores
    empty: list[str] = []
    for table, columns in zip(tables, roles, strict=True):
        first = len(pairs.documents)
        _add_pairs(table, columns, pairs, given, empty, notes)
        pairs.documents[first:] = _spelled(pairs.documents[first:])
    if empty:
        number = counted(len(empty), "row")
        notes.append(LeftOut(f"Left out {number} without text, the first at {empty[0]}."))
    scores = set(given)
    highest = max(scores, default=0.0)
    are_grades = highest <= HIGHEST_GRADE and all(score.is_integer() for score in scores)
    are_grades &= threshold is None or threshold > 0
    if threshold is None:
        threshold = 1.0 if are_grades else RELEVANT * highest
    if not scores or highest < threshold:
        raise DataError(
            f"{tables[0].place(0)} and below: no document is relevant. Of the rows,"
            f" {len(empty):,} have no text, and the highest score is {highest:g}, below the"
            f" threshold {threshold:g}."
        )
    if not scores <= {-1.0, 0.0, 1.0}:
        notes.append(
            f"The highest score is {highest:g}: a document is relevant from {threshold:g} on, and a"
            " negative at 0 and below. Choose another threshold if that is wrong."
        )
    notes += remarks({*pairs.documents})
    keys = {query: canonical(query) for query in {*pairs.queries}}
    pairs.keys.extend(map(keys.__getitem__, pairs.queries))
    grades: dict[float, int | None] = {score: None if score > 0 else 0 for score in scores}
    grades |= {x: int(x) if are_grades else 1 for x in scores if x >= threshold}
    pairs.grades.extend(map(grades.__getitem__, given))
    return pairs


def _add_pairs(
    table: Columns,
    columns: Mapping[str, list[str]],
    pairs: Pairs,
    scores: list[float],
    empty: list[str],
    notes: list[str],
) -> None:
    """Adds the pairs of a table, their scores, and the places of rows without text."""
    roles = [_texts(table, columns[role], notes) for role in ("query", "document", "negative")]
    named = [(name, table.column(name)) for name in columns.get("split", ())]
    scored = [(name, table.column(name)) for name in columns.get("score", ())]
    for row, (queries, documents, negatives) in enumerate(zip(*roles, strict=True)):
        if not (queries and documents):
            empty.append(table.place(row))
            continue
        part = table.part
        for name, cells in named:
            part = part if cells[row] is None else PARTS.get(str(cells[row]).strip().lower(), "")
            if part == "":
                given = shown(cells[row])
                raise DataError(
                    f"{table.place(row)}: the {name} {given} is not train, dev or test."
                )
        score = 1.0
        for name, cells in scored:
            score = beir.number(_BOOLEANS.get(str(cells[row]).lower(), cells[row]))
            if not math.isfinite(score):
                given = shown(cells[row])
                raise DataError(f"{table.place(row)}: the {name} is {given}; write a number.")
        for query in queries:
            number = len(documents) + len(negatives)
            pairs.parts.extend([part] * number)
            pairs.queries.extend([query] * number)
            pairs.documents.extend((*documents, *negatives))
            scores.extend([score] * len(documents) + [0.0] * len(negatives))


def _spelled(documents: list[str]) -> list[str]:
    """The documents with spaces for underscores, if all are names as lost_or_stolen_card."""
    if any(len(name.split()) > 1 for name in {*documents}):
        return documents
    return [name.replace("_", " ") for name in documents]


def _texts(table: Columns, columns: Iterable[str], notes: list[str]) -> list[tuple[str, ...]]:
    """The texts of each row in some columns."""
    found: list[tuple[str, ...]] = [()] * table.num_rows
    for name in columns:
        cells = table.column(name)
        if lists := _lists(cells):
            notes.append(LeftOut(f"Each text of the lists in the column {name} counts by itself."))
            cells = lists
        texts = [
            # the first takes less time
            (cell,)
            if type(cell) is str and cell.isascii() and not cell.isspace() and cell
            else _texts_of(cell, table, row, name)
            for row, cell in enumerate(cells)
        ]
        found = [a + b for a, b in zip(found, texts, strict=True)] if any(found) else texts
    return found


def _lists(cells: Sequence[object]) -> list[object]:
    """The lists that all cells spell, in JSON or as Python and numpy print them; else nothing."""
    found: list[object] = []
    for cell in cells:
        if not isinstance(cell, str) or (cell and (cell[0], cell[-1]) != ("[", "]")):
            return []
        try:
            found.append(json.loads(cell or "[]"))
        except ValueError:
            with_commas = re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", cell)  # of numpy
            try:
                found.append(ast.literal_eval(with_commas))
            except (ValueError, SyntaxError):
                return []
    return found


def _texts_of(cell: object, table: Columns, row: int, column: str) -> tuple[str, ...]:
    """The texts of a cell, which is a string or a list of strings."""
    found: list[str] = []
    for text in cell if isinstance(cell, (list, tuple)) else (cell,):
        if isinstance(text, str):
            if not text.isascii() and _HALF.search(text):
                raise DataError(f"{table.place(row)}: the {column} is not Unicode: {shown(text)}.")
            if text.strip():
                found.append(text)
        elif text is not None and text == text:  # nan, as pandas has it, is nothing
            raise DataError(f"{table.place(row)}: the {column} is {shown(text)}; write a text.")
    return tuple(found)
