"""The columns of files, data sets, data frames and mappings, and the places of their rows.

CSV is read here because other readers guess: ``datasets`` and pandas take "NA" and "null" for
nothing and split wrongly at other separators than commas, ``csv.Sniffer`` where a cell has quotes.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Literal

import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from pyarrow import ArrowException, parquet

from st_magnitude._checks import needs, shown
from st_magnitude.data.beir import DataError, json_lines
from st_magnitude.data.documents import files_of

_LINES = (".csv", ".tsv", ".jsonl", ".ndjson")
SUFFIXES = (*_LINES, *(f"{suffix}.gz" for suffix in _LINES), ".parquet")
OTHER_SUFFIXES = (".json", ".json.gz", ".xlsx", ".zip")  # which folders have for much else
MOST_HELD_OUT = 2000  # of a split that is drawn
# the words by which `datasets` knows a split
PARTS = dict.fromkeys(("train", "training"), "train")
PARTS |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
PARTS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
Rows = Iterable[Mapping[str, object]]
Line = tuple[int, int, tuple[str, ...]]  # where it begins, where the next does, and its cells
# pandas, polars and pyarrow have tables with ``__arrow_c_stream__``
Source = str | Path | Dataset | DatasetDict | Rows | Mapping[str, Iterable[object]]

_ROWS = "pass rows, such as [{'query': q, 'document': d} for q, d in pairs]"
_QUERY = 'sqlite3 -header -csv DATABASE "select query, document from pairs" > pairs.csv'
_CONVERT = {".sql": f"sqlite3 DATABASE < FILE && {_QUERY}", ".db": _QUERY, ".sqlite": _QUERY}
_TEXT = r"(large_)?string(_view)?"
# columns of Parquet whose cells are texts, lists of texts or numbers
_CELL = rf"{_TEXT}|(large_)?list<\w+: {_TEXT}.*|dictionary<values={_TEXT},.*|null|bool|u?int\d+"
_CELL += r"|float|double|halffloat|decimal.*"


@dataclass(frozen=True)
class Columns:
    cells: Mapping[str, Sequence[object]]  # of every row, None where it has none
    place: Callable[[int], str]  # of a row by its number, for messages
    part: str | None = None  # the split that the source gives the rows

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.cells.values()), ()))

    def column(self, name: str) -> Sequence[object]:
        """The cells of a column; of several tables, some may not have it."""
        return self.cells.get(name) or [None] * self.num_rows


def num_held_out(number: int) -> int:
    """How many of so many queries or documents are dev, and how many test: a tenth, at most."""
    return min(max(number // 10, int(number > 2)), MOST_HELD_OUT)


def read_columns(sources: Sequence[Source], notes: list[str]) -> list[Columns]:
    """The columns of paths, or of a name on the hub, a data set, a data frame or mappings.

    Adds to the notes what the user should know.
    """
    found = []
    tables = [table for source in sources for table in _tables(source, notes).items()]
    parts = {name: _part_of(name) for name, _ in tables}
    named = {*parts.values()} - {None}
    has_splits = len(named) > 1
    if not has_splits and (alone := named - {"train"}):
        notes.append(f"Only the {alone.pop()} split is named, so splits are drawn from all rows.")
    for name, table in tables:
        if has_splits and parts[name] is None:
            notes.append(f"Left out {name}, which by its name is no split.")
            continue
        if isinstance(table, Path):
            columns = _read_file(table, notes)
        else:
            columns = _columns_of(table, f"{name} split, row" if name else "row")
        found.append(replace(columns, part=parts[name] if has_splits else None))
    return found


def _part_of(name: str) -> str | None:
    """The split that the name of a file says, or else that of its folder."""
    for place in reversed(PurePosixPath(name.lower()).parts):
        if found := {PARTS[word] for word in re.split(r"[\W_\d]+", place) if word in PARTS}:
            return found.pop() if len(found) == 1 else None
    return None


def _tables(source: Source, notes: list[str]) -> Mapping[str, object]:
    """The files or objects that have rows, by their names."""
    if isinstance(source, str | Path) and Path(source).exists():
        path = Path(source)
        root = path if path.is_dir() else path.parent
        return {x.relative_to(root).as_posix(): x for x in _files_of_tables(path, notes)}
    if isinstance(source, str | Path):
        source = _from_hub(source.as_posix() if isinstance(source, Path) else source)
    if isinstance(source, Mapping):
        columns = [x for x in source.values() if isinstance(x, list | tuple)]
        has_rows = any(isinstance(x, Mapping) for cells in columns for x in cells[:1])
        if has_rows or len(columns) < len(source):
            return {str(name): data for name, data in source.items()}
    return {"": source}


def _from_hub(name: str) -> Source:
    """The data set NAME or NAME:SPLIT."""
    path, _, split = name.partition(":")
    if name.endswith(SUFFIXES) or name.startswith((".", "/", "~")):
        raise DataError(f"There is no file or folder {name!r}.")
    try:
        return load_dataset(path, split=split or None)
    except Exception as error:  # of many kinds, by what is wrong with its files
        raise DataError(
            f"There is no file or folder {name!r}, and the hub gives no data set of this name"
            f" ({said_by(error)})."
        ) from error


def _files_of_tables(path: Path, notes: list[str]) -> list[Path]:
    found, others = files_of(path, SUFFIXES)
    if not found:
        found, others = files_of(path, OTHER_SUFFIXES)
    if not found:
        known = [file.suffix.lower() for file in others if file.suffix.lower() in _CONVERT]
        how = _CONVERT[known[0]] if known else "pandas: TABLE.to_csv('pairs.csv', index=False)"
        raise DataError(
            f"{path} is neither pairs in CSV, TSV, JSONL, JSON, Parquet or xlsx nor BEIR's folder."
            f" Convert it, as with {how}."
        )
    if others:
        number = f"{len(others):,}, such as {others[0].name}"
        notes.append(f"Files of {path} that are not pairs, and are left out: {number}.")
    return found


def _columns_of(data: object, of: str) -> Columns:
    """The columns of a data set, a data frame, a mapping or mappings, with the names of classes."""
    place = partial("{} {}".format, of)
    if isinstance(data, Mapping) and all(isinstance(x, list | tuple) for x in data.values()):
        if len({*map(len, data.values())}) > 1:
            raise DataError("The columns of the mapping differ in length; fill them up.")
        return Columns({str(name): column for name, column in data.items()}, place)
    features = getattr(data, "features", None) or {}
    classes = {name: x.names for name, x in features.items() if isinstance(x, ClassLabel)}
    cells: dict[str, Sequence[object]]
    try:
        if isinstance(data, Dataset):
            cells = data.to_dict()  # type: ignore[assignment]
        elif hasattr(data, "__arrow_c_stream__"):
            cells = pyarrow.table(data).to_pydict()
        else:
            cells = _by_column(list(data) if isinstance(data, Iterable) else [data], place)
    except (ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The table is not read ({said_by(error)}); {_ROWS}.") from None
    for name, names in classes.items():
        name_of: dict[object, str] = dict(enumerate(names))
        cells[name] = [name_of.get(number) for number in cells[name]]
    return Columns(cells, place)


def _by_column(rows: Sequence[object], place: Callable[[int], str]) -> dict[str, Sequence[object]]:
    """The cells of mappings."""
    known: list[Mapping[str, object]] = []
    for i, row in enumerate(rows):
        if not isinstance(row, (dict, Mapping)):  # the first takes less time
            raise DataError(f"{place(i)}: is not a mapping of texts, but {shown(row)}; {_ROWS}.")
        known.append(row)
    names = dict.fromkeys(chain.from_iterable(known))
    return {name: [row.get(name) for row in known] for name in names}


def said_by(error: Exception) -> str:
    """The message of another package in one line."""
    return " ".join(str(error).split())[:300]


def _read_file(path: Path, notes: list[str]) -> Columns:
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, notes)
    name, raw = _content(path)
    if name.endswith((".jsonl", ".ndjson")):
        return _read_json_lines(path, raw)
    if name.endswith(".json"):
        return _read_json(path, raw, notes)
    if name.endswith(".xlsx"):
        return _read_sheet(path, raw, notes)
    return _read_csv(path, _decode(path, raw, notes), notes)


def _content(path: Path) -> tuple[str, bytes]:
    """The name of a table in lower case, and its bytes, both without what packs them."""
    name, raw = path.name.lower(), path.read_bytes()
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                inside = [x for x in archive.namelist() if not x.startswith("__MACOSX")]
                kinds = tuple({*SUFFIXES, *OTHER_SUFFIXES} - {".zip", ".parquet"})
                tables = [x for x in inside if x.lower().endswith(kinds)]
                if len(tables) != 1:
                    raise DataError(f"{path} holds {len(tables)} tables; unpack it into a folder.")
                name, raw = tables[0].lower(), archive.read(tables[0])
        return name.removesuffix(".gz"), gzip.decompress(raw) if name.endswith(".gz") else raw
    except (EOFError, OSError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again.") from None


def _read_json_lines(path: Path, raw: bytes) -> Columns:
    lines = dict(json_lines(path, raw))
    place = list(lines).__getitem__
    return Columns(_by_column(list(lines.values()), place), place)


def _read_json(path: Path, raw: bytes, notes: list[str]) -> Columns:
    """An array of rows, or lines."""
    try:
        rows = json.loads(_decode(path, raw, notes))
    except (ValueError, RecursionError):
        return _read_json_lines(path, raw)
    if not isinstance(rows, list):
        fields = rows if isinstance(rows, dict) else {}
        key = next((key for key in fields if isinstance(fields[key], list)), "KEY")
        how = f"jq -c '.{key}[]' {path} > pairs.jsonl"
        raise DataError(f"{path} is no array of rows, but {shown(rows)}. Convert it by {how}.")
    return _columns_of(rows, f"{path}, row")


def _read_parquet(path: Path, notes: list[str]) -> Columns:
    try:  # not by the cache of `datasets`, which may have the rows of an older file
        schema = parquet.read_schema(path)
        names = [field.name for field in schema if re.fullmatch(_CELL, str(field.type))]
        table = Dataset(parquet.read_table(path, columns=names))
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not read as Parquet ({said_by(error)}).") from None
    if others := sorted({*schema.names} - {*names}):
        notes.append(f"Columns of {path} without texts or numbers are left out: {shown(others)}.")
    return _columns_of(table, f"{path}, row")


def _read_sheet(path: Path, raw: bytes, notes: list[str]) -> Columns:
    """The first sheet of a spreadsheet, as texts."""
    with needs("Reading a spreadsheet", "excel"):
        import openpyxl  # noqa: F401
    from pandas import read_excel

    try:
        sheets: Mapping[str, object] = read_excel(
            io.BytesIO(raw), sheet_name=None, dtype=str, keep_default_na=False
        )
    except Exception as error:  # of zipfile, XML and openpyxl, by what is damaged
        raise DataError(f"{path} is not read as xlsx ({error}); save it as CSV UTF-8.") from None
    if len(sheets) > 1:
        notes.append(f"Read the first of {len(sheets)} sheets of {path}.")
    return _columns_of(next(iter(sheets.values())), f"{path}, row")


def _read_csv(path: Path, text: str, notes: list[str]) -> Columns:
    named = re.match(r"sep=.(\r\n|\r|\n)", text, re.IGNORECASE)  # for Excel
    text = text[named.end() :] if named else text
    limit = csv.field_size_limit(2**31 - 1)  # characters of a cell; 131,072 by default
    try:
        mark = _separator(path, text)
        if mark == "\t":
            lines = _parse_tabs(path, text, 1 + bool(named), notes)
        else:
            lines = _parse(path, text, mark, csv.QUOTE_MINIMAL, 1 + bool(named))
    finally:
        csv.field_size_limit(limit)
    spans = [end - begin for begin, end, _ in lines]
    if (most := max(spans)) > 1:
        number = len(lines) - spans.count(1)
        where = f"the longest of {most:,} at line {lines[spans.index(most)][0]:,}"
        notes.append(f"{path}: {number:,} rows span several lines, {where}.")
    header = lines[0][2]
    names = [name for name in header if name.strip()]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path}: the header has the name {shown(twice[0])} twice; rename one.")
    begins = [begin for begin, _, cells in lines if cells != header]
    rows = [cells for *_, cells in lines if cells != header]
    if repeats := len(lines) - 1 - len(rows):
        notes.append(f"{path}: left out {repeats:,} rows that repeat the header.")
    columns = list(zip(header, zip(*rows, strict=True), strict=bool(rows)))
    if unnamed := sum(
        cell != "" for name, column in columns if not name.strip() for cell in column
    ):
        notes.append(f"{path}: left out {unnamed:,} cells in columns without a name.")
    cells = {name: column for name, column in columns if name.strip()}
    return Columns(cells, lambda row: f"{path}, line {begins[row]}")


def _decode(path: Path, raw: bytes, notes: list[str]) -> str:
    wide = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    encoding = wide.get(raw[:2], "utf-8-sig")
    if raw[:2].count(0) == 1:  # without a mark; the first letter is of the header
        encoding = "utf-16-be" if raw[0] == 0 else "utf-16-le"
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError:
        try:
            text = raw.decode("cp1252")
        except UnicodeDecodeError:
            raise DataError(f"{path} is neither UTF-8 nor cp1252; save it as UTF-8.") from None
    notes.append(f"{path} is not UTF-8 and was read as cp1252 (Windows, Western European).")
    return text


def _separator(path: Path, text: str) -> str:
    """Tab, comma, semicolon or pipe: the one with which most rows are as wide as the header."""
    found: list[tuple[float, int, str]] = []
    for mark in "\t,;|":
        reader = csv.reader(io.StringIO(text[: 2**20], newline=""), delimiter=mark)
        widths = [len(cells) for cells in islice(reader, 1000) if cells]
        if widths and widths[0] > 1:
            found.append((widths.count(widths[0]) / len(widths), widths[0], mark))
    if not found and text.splitlines()[:1] == ["text"]:  # without labels
        return ","
    if not found:
        raise DataError(f"{path}: has one column; separate several by comma, semicolon or tab.")
    return max(found)[2]


def _parse_tabs(path: Path, text: str, line: int, notes: list[str]) -> list[Line]:
    """Rows with tabs. A quote is a part of the text, unless quotes change no row or a cell holds a
    tab or a line break."""
    quoted: list[Line] = []
    with contextlib.suppress(DataError):
        quoted = _parse(path, text, "\t", csv.QUOTE_MINIMAL, line)
    try:
        plain = _parse(path, text, "\t", csv.QUOTE_NONE, line)
    except DataError:
        if quoted:
            return quoted
        raise
    if len(quoted) == len(plain):
        return quoted
    notes.append(f"{path}: quotes were read as they stand.")
    return plain


def _parse(path: Path, text: str, mark: str, quoting: Literal[0, 3], line: int) -> list[Line]:
    """The rows that are not blank, with the lines where they begin."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True, quoting=quoting)
    rows: list[Line] = []
    begins = line
    try:
        for cells in reader:
            ends = line + reader.line_num
            if cells:
                rows.append((begins, ends, tuple(cells)))  # which the garbage collector can forget
            begins = ends
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begins}: a cell in double quotes does not end as it should ({error})."
            ' Close it, and write a quote inside as "".'
        ) from None
    width = len(rows[0][2])
    for number, _, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path}, line {number}: has {len(row)} columns, but the header has {width}. Put"
                f" cells that contain {mark!r} into double quotes."
            )
    return rows
