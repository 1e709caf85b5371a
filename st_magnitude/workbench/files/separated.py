"""CSV and its like, which other readers guess: ``datasets`` and pandas take "NA" and "null" for
nothing and split wrongly at other separators than commas, ``csv.Sniffer`` where a cell has quotes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from itertools import islice
from pathlib import Path
from typing import Literal

from st_magnitude._checks import counted, shown
from st_magnitude.data.beir import DataError

_RULE = re.compile(r"[-: ]*")  # below the header of a table in Markdown, or nothing
Line = tuple[int, int, tuple[str, ...]]  # where it begins, where the next does, and its cells


def lines_of(path: Path, text: str, notes: list[str]) -> list[Line]:
    """The rows of a file that are not blank, of which the first is the header."""
    limit = csv.field_size_limit(2**31 - 1)  # characters of a cell; 131,072 by default
    try:
        mark = _separator(path, text)
        if mark == "\t":
            lines = _parse_tabs(path, text, notes)
        else:
            lines = _parse(path, text, mark, csv.QUOTE_MINIMAL)
    finally:
        csv.field_size_limit(limit)
    spans = [end - begin for begin, end, _ in lines]
    if (most := max(spans)) > 1:
        number = counted(len(lines) - spans.count(1), "row")
        where = f"the longest of {most:,} at line {lines[spans.index(most)][0]:,}"
        notes.append(f"{path}: {number} of several lines, {where}.")
    return lines


def _separator(path: Path, text: str) -> str:
    """Tab, comma, semicolon or pipe: the one with which most rows are as wide as the header."""
    found: list[tuple[float, int, str]] = []
    for mark in "\t,;|":
        reader = csv.reader(io.StringIO(text[: 2**20], newline=""), delimiter=mark)
        widths = [len(cells) for cells in islice(reader, 1000) if cells]
        if widths and widths[0] > 1:
            found.append((widths.count(widths[0]) / len(widths), widths[0], mark))
    first = text.strip().splitlines()[:1]
    if not found and first != ["text"]:  # without labels
        raise DataError(
            f"{path}: the first line, {shown(first[0])}, has one column. Take out what is above the"
            " header, or separate columns by comma, semicolon or tab."
            if first
            else f"{path} is empty; write a header, query,document, and rows."
        )
    return max(found)[2] if found else ","


def _parse_tabs(path: Path, text: str, notes: list[str]) -> list[Line]:
    """Rows with tabs. A quote is a part of the text, unless quotes change no row or a cell holds a
    tab or a line break."""
    quoted: list[Line] = []
    with contextlib.suppress(DataError):
        quoted = _parse(path, text, "\t", csv.QUOTE_MINIMAL)
    try:
        plain = _parse(path, text, "\t", csv.QUOTE_NONE)
    except DataError:
        if quoted:
            return quoted
        raise
    if len(quoted) == len(plain):
        return quoted
    notes.append(f"{path}: quotes were read as they stand.")
    return plain


def _parse(path: Path, text: str, mark: str, quoting: Literal[0, 3]) -> list[Line]:
    """The rows that are not blank, with the lines where they begin. If the header has a space after
    each separator, no cell begins or ends with one."""
    lines = io.StringIO(text, newline="").readlines()
    header = next(filter(str.strip, lines), "").strip().strip(mark)
    skips = header.count(mark) == header.count(f"{mark} ") > 0
    rows: list[Line] = []
    wrong: list[int] = []  # lines where a cell begins that is not closed
    begins = 0
    while begins < len(lines):
        start = begins
        left = map(lines.__getitem__, range(start, len(lines)))
        reader = csv.reader(
            left, delimiter=mark, strict=True, quoting=quoting, skipinitialspace=skips
        )
        try:
            for cells in reader:
                ends = start + reader.line_num
                if not _RULE.fullmatch("".join(cells)):
                    # a tuple, which the garbage collector can forget
                    row = tuple(map(str.strip, cells)) if skips else tuple(cells)
                    rows.append((begins + 1, ends + 1, row))
                begins = ends
        except csv.Error:
            wrong.append(begins + 1)
            begins += 1
    if wrong:
        others = f", nor does one on {len(wrong) - 1:,} other lines" if len(wrong) > 1 else ""
        raise DataError(
            f"{path}, line {wrong[0]}: a cell in double quotes does not end as it should{others}."
            ' Close it, and write a quote inside as "".'
        )
    width = len(rows[0][2])
    for number, _, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path}, line {number}: has {len(row)} columns, but the header has {width}. Put"
                f" cells that contain {mark!r} into double quotes."
            )
    return rows
