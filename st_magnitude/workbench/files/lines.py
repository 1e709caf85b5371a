"""The text of a file, and the rows of CSV and its like.

Other readers guess: ``datasets`` and pandas take "NA" and "null" for nothing and split wrongly at
other separators than commas, ``csv.Sniffer`` where a cell has quotes.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import re
from itertools import islice
from pathlib import Path
from typing import Literal

from charset_normalizer import from_bytes

from st_magnitude._checks import counted, shown
from st_magnitude.data.beir import DataError

WRONG = "\ufffd"  # what stands for bytes that are no letter
# Encodings that people use, of which a sample is in one. Others fit by chance.
_KNOWN = """cp1252 cp1250 cp1251 cp1253 cp1254 cp1255 cp1256 cp1257 cp1258 cp874 cp932 cp949 gb18030
    big5 euc_jp koi8_r koi8_u cp866 cp850 cp852 iso8859_2 iso8859_5 mac_roman mac_cyrillic"""
_RULE = re.compile(r"[-: ]*")  # below the header of a table in Markdown, or nothing
Line = tuple[int, int, tuple[str, ...]]  # where it begins, where the next does, and its cells


class LeftOut(str):
    """A note on what was left out, moved or read otherwise than it stands."""


def encoding_of(start: bytes) -> str:
    """UTF-32 or UTF-16, by its mark or by the first letter, which is a plain one; else UTF-8."""
    if start[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if start[:2].count(0) == 1:
        return "utf-16-be" if start[0] == 0 else "utf-16-le"
    return "utf-8-sig"


def decoded(path: Path, raw: bytes, notes: list[str]) -> str:
    """The text of a file. In UTF-8, single bytes that are wrong are replaced.

    Raises:
        DataError: If a file has as many of them as right letters beyond ASCII. No program can tell
            the encodings of one byte a letter apart for sure, and a text that is misread is judged
            as any other: the user has to name its encoding.
    """
    encoding = encoding_of(raw)
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + len(re.findall(rb"\r\n?|\n", raw[: error.start]))
    text = raw.decode(encoding, "replace")
    wrong = text.count(WRONG)
    if encoding == "utf-8-sig" and 2 * wrong > len(re.findall(r"[^\x00-\x7f]", text)):
        raise DataError(f"{path} is not UTF-8. {_readings(raw)}")
    name = encoding.upper().removesuffix("-SIG")
    how = f"with {counted(wrong, 'wrong byte')} replaced by {WRONG}"
    notes.append(LeftOut(f"{path}, line {line:,}: is not {name}; the file was read {how}."))
    return text


def _readings(raw: bytes) -> str:
    """How a text reads in the encodings that it may be in."""
    lines = (line for line in raw.splitlines() if not line.isascii())
    sample = b"\n".join(islice(lines, 200))
    guesses = [match.encoding for match in from_bytes(sample, cp_isolation=_KNOWN.split())]
    with contextlib.suppress(UnicodeDecodeError):
        sample.decode("cp1252")
        guesses.insert(0, "cp1252")
    names = list(dict.fromkeys(guesses))[:4]
    if not names:
        return "Name its encoding with --encoding NAME."
    found = re.finditer(rb"[^\x00-\x7f]+", sample)
    cuts = (sample[max(0, part.start() - 20) : part.end() + 20] for part in found)
    read = [[cut.decode(name, "ignore") for name in names] for cut in cuts]
    best = max(read, key=lambda texts: len({*texts}))  # the first where most encodings differ
    samples = ", ".join(f"as {x} {shown(text)}" for x, text in zip(names, best, strict=True))
    return f"It reads {samples}. Name the one that reads right: --encoding NAME."


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
