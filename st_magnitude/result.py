"""Result, the base class of what a measurement returns, and Table, which shows it."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._files import written

# Words and numbers stay whole.
_lines_of = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)


def to_plain(value: object) -> Any:
    """Nested values as plain JSON values. NaN becomes None, infinities strings.

    Example:
        >>> to_plain({"a": np.array([1.0, np.nan, -np.inf]), "b": (True, 2)})
        {'a': [1.0, None, '-inf'], 'b': [True, 2]}
    """
    if is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in fields(value)}
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
    """Breaks lines between words, and indents what follows a bullet or a [name].

    Example:
        >>> print(wrap("- Do: store the norm of each document next to its bits.", width=40))
        - Do: store the norm of each document
          next to its bits.
    """
    width = width or shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        indent = {"-": 2, "[": 5}.get(line[:1], len(line) - len(line.lstrip()))
        lines += _lines_of(line, width, subsequent_indent=" " * indent) or [""]
    return "\n".join(lines)


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
        rows = [list(self.columns), *([cell(value) for value in row] for row in self.rows)]
        widths = []
        words = []  # the longest word of each column
        for column in zip(*rows, strict=True):
            widths.append(max(map(len, column)))
            words.append(max(len(word) for text in column for word in text.split() or [""]))
        while sum(widths) + 2 * len(widths) - 2 > width and widths != words:
            loose = (i for i in range(len(widths)) if widths[i] > words[i])
            # numbers are broken last
            widths[max(loose, key=lambda i: (not self.is_number[i], widths[i]))] -= 1
        grid = [line for row in rows for line in self._lines(row, widths)]
        title = textwrap.fill(self.title, width)
        note = textwrap.fill(self.note, width)
        return "\n".join(part for part in (title, *grid, note) if part)

    def _lines(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        """The lines of a row, with each cell broken at the width of its column."""
        sized = zip(row, widths, strict=True)
        cells = [_lines_of(text, max(width, 1)) for text, width in sized]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = zip(parts, widths, self.is_number, strict=True)
            padded = (part.rjust(n) if right else part.ljust(n) for part, n, right in aligned)
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
        given = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {
            name: value.to_dict() if isinstance(value, Result) else to_plain(value)
            for name, value in given.items()
        }

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
        shown = (wrap(part) if isinstance(part, str) else part.to_text() for part in self.tables())
        return "\n\n".join(shown) or repr(self)
