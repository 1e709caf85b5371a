"""Result, the base class of what a measurement returns, and Table, which shows it."""

from __future__ import annotations

import json
import math
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._files import written

UNSAVED = {"saved": False}  # metadata of a field that JSON does not have

# Characters that a terminal obeys: controls, and those that turn the direction of what follows
_COMMANDS = re.compile("[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text in one line as a terminal may show it: what the terminal would obey is escaped.

    Example:
        >>> print(printable("red\\x1b[31m tea"))
        red\\x1b[31m tea
    """
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], re.sub(r"\s", " ", text))


def _width(text: str) -> int:
    """The columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return wide + sum(not unicodedata.combining(letter) for letter in text)


def _units(text: str) -> list[str]:
    """The parts that lines do not break: spaces, words, numbers and single wide letters."""
    parted = (f"\0{letter}\0" if _width(letter) == 2 else letter for letter in text)
    return re.findall(" +|[^ \0]+", "".join(parted))


def _lines_of(text: str, width: int, indent: str = "") -> list[str]:
    """A text in lines of at most so many columns, as far as its words allow it."""
    lines = [""]
    spaces = ""
    for unit in _units(printable(text)):
        if unit.isspace():
            spaces = unit
            continue
        if lines[-1].strip() and _width(lines[-1] + spaces + unit) > width:
            lines.append(indent)
            spaces = ""
        lines[-1] += spaces + unit
        spaces = ""
    return lines


def to_plain(value: object) -> Any:
    """Nested values as plain JSON values. NaN becomes None, infinities strings.

    Example:
        >>> to_plain({"a": np.array([1.0, np.nan, -np.inf]), "b": (True, 2)})
        {'a': [1.0, None, '-inf'], 'b': [True, 2]}
    """
    if isinstance(value, Result):
        return value.to_dict()
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        if math.isfinite(value):
            return float(value)
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, Path) else value


def _plain_fields(value: Any) -> dict[str, Any]:
    kept = (f.name for f in fields(value) if f.metadata != UNSAVED)
    return {name: to_plain(getattr(value, name)) for name in kept}


def cell(value: object) -> str:
    """A value in a table: floats with four places, "-" for None and NaN."""
    if value is None or (isinstance(value, (float, np.floating)) and math.isnan(value)):
        return "-"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (float, np.floating)):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)


def wrap(text: str, width: int | None = None) -> str:
    """Breaks lines between words, and indents what follows a bullet.

    Example:
        >>> print(wrap("- Do: store the norm of each document next to its bits.", width=40))
        - Do: store the norm of each document
          next to its bits.
    """
    width = width or shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        indent = 2 if line.startswith("-") else len(line) - len(line.lstrip())
        lines += _lines_of(line, width, " " * indent)
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """The first words of a text, with dots where there are more.

    Example:
        >>> shortened("Bees make honey  of nectar.", 24)
        'Bees make honey of ...'
    """
    plain = " ".join(text.split())
    if len(plain) <= width and _width(plain) <= width:
        return plain
    return f"{_lines_of(plain[: width + 1], width - 4)[0][:width]} ..."


@dataclass(frozen=True)
class Table:
    """Rows under named columns, as text for a terminal and as Markdown.

    A title goes above the table and a note below it; `cell` says how values are shown.

    Example:
        >>> table = Table(["model", "nDCG@10"], [["pretrained", 0.434], ["cosine", 0.538]])
        >>> print(table.to_markdown())
        | model | nDCG@10 |
        | --- | ---: |
        | pretrained | 0.4340 |
        | cosine | 0.5380 |
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    note: str = ""

    @property
    def is_number(self) -> list[bool]:
        """Whether each column holds numbers, which are aligned to the right."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.columns)
        return [any(column) and not any(isinstance(x, str) for x in column) for column in columns]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, width: int | None = None) -> str:
        """The table as text, with cells broken between words at the width of the terminal.

        Words and numbers stay whole: a table of many columns may be wider.
        """
        width = width or shutil.get_terminal_size().columns
        shown = [[printable(cell(value)) for value in row] for row in self.rows]
        rows = [list(self.columns), *shown]
        widths = []
        words = []  # the longest word of each column
        for column in zip(*rows, strict=True):
            widths.append(max(map(_width, column)))
            words.append(max(_width(unit) for text in column for unit in _units(text) or [""]))
        while sum(widths) + 2 * len(widths) - 2 > width and widths != words:
            loose = (i for i in range(len(widths)) if widths[i] > words[i])
            # numbers are broken last
            widths[max(loose, key=lambda i: (not self.is_number[i], widths[i]))] -= 1
        grid = [line for row in rows for line in self._lines(row, widths)]
        title, note = (wrap(text, width) for text in (self.title, self.note))
        return "\n".join(part for part in (title, *grid, note) if part)

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """The lines of a row, with each cell broken at the width of its column."""
        sized = zip(row, widths, strict=True)
        cells = [_lines_of(text, max(width, 1)) for text, width in sized]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = zip(parts, widths, self.is_number, strict=True)
            padded = []
            for part, n, is_right in aligned:
                spaces = " " * (n - _width(part))
                padded.append(spaces + part if is_right else part + spaces)
            yield "  ".join(padded).rstrip()

    def to_markdown(self) -> str:
        """The table in Markdown."""
        lines = [[*self.columns], ["---:" if is_number else "---" for is_number in self.is_number]]
        lines += [[cell(value).replace("|", r"\|") for value in row] for row in self.rows]
        grid = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return "\n\n".join(part for part in (self.title, grid, self.note) if part)


class Result:
    """The base class of results: dataclasses that are printed as their `tables`."""

    def tables(self) -> Iterable[Table | str]:
        """Tables and paragraphs, the most important one first."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return _plain_fields(self)

    def save(self, path: str | Path) -> Path:
        """Writes `to_dict` as a JSON file, with its folder, and returns the path."""
        with written(path) as file:
            json.dump(self.to_dict(), file, ensure_ascii=False, indent=1, allow_nan=False)
        return Path(path)

    def to_markdown(self) -> str:
        """The tables and paragraphs in Markdown."""
        shown = (part if isinstance(part, str) else part.to_markdown() for part in self.tables())
        return "\n\n".join(shown)

    def __str__(self) -> str:
        return "\n\n".join(self._shown()) or repr(self)

    def most_important_last(self) -> str:
        """The tables and paragraphs for a terminal, which shows the last lines of an output."""
        return "\n\n".join(reversed(self._shown()))

    def _shown(self) -> list[str]:
        return [wrap(part) if isinstance(part, str) else part.to_text() for part in self.tables()]
