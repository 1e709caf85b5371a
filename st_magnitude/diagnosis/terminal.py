"""A diagnosis as text for a terminal of 80 columns."""

from __future__ import annotations

import io
import re
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from st_magnitude.diagnosis.findings import Diagnosis
from st_magnitude.diagnosis.sections import Section, Table, facts, sections

__all__ = ["is_numeric", "page"]

WIDTH = 80


def page(d: Diagnosis, verbose: bool) -> str:
    """The summary and the recommendations, followed by all measurements if ``verbose`` is set."""
    recommendations, *measurements = sections(d, details=False)
    parts = [_paragraph(facts(d)), "\n".join(_paragraph(line, "- ") for line in recommendations.bullets)]
    return "\n\n".join([*parts, *map(_section, [recommendations, *(measurements if verbose else [])])])


def is_numeric(column: list[str]) -> bool:
    """Whether a column holds numbers, which stand to the right.

    Example:
        >>> is_numeric(["1.5 x", "", "undefined"]), is_numeric(["0", "384 x int8"])
        (True, False)
    """
    return any(column) and all(
        re.fullmatch(r"([-+]?[\d.,]+(e[-+]\d+)? ?[%x]?|undefined|-?infinite|)", c) for c in column
    )


def _section(section: Section) -> str:
    parts = [f"{section.title}\n{'=' * len(section.title)}", *map(_paragraph, section.notes)]
    parts += [f"{_paragraph(table.caption)}\n{_table(table)}" for table in section.tables]
    parts += [str(recommendation) for recommendation in section.recommendations]
    parts += map(_paragraph, section.remarks)
    return "\n\n".join(parts)


def _paragraph(text: str, bullet: str = "") -> str:
    indent = " " * len(bullet)
    return textwrap.fill(text, WIDTH, initial_indent=bullet, subsequent_indent=indent, break_long_words=False)


def _table(table: Table) -> str:
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, (name, *cells) in enumerate(zip(table.header, *table.rows, strict=True)):
        # Headers and texts wrap, numbers do not. The first column names the rows, even by numbers.
        width = max(map(len, [*cells, *name.split()])) if is_numeric(cells) else None
        shown.add_column(Text(name), justify="right" if width and i else "left", min_width=width, overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    file = io.StringIO()
    # In a notebook, rich would display the table at once instead of writing it to the file.
    console = Console(
        file=file, width=WIDTH, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False
    )
    console.print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())
