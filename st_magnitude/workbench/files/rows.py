"""The columns of files, data sets, data frames and mappings, and the places of their rows."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath

import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from pyarrow import ArrowException, parquet

from st_magnitude._checks import counted, needs, shown
from st_magnitude.data.beir import DataError, json_lines, unique
from st_magnitude.data.documents import files_of
from st_magnitude.workbench.files.separated import lines_of

_LINES = (".csv", ".tsv", ".jsonl", ".ndjson")
SUFFIXES = (*_LINES, *(f"{suffix}.gz" for suffix in _LINES), ".parquet")
OTHER_SUFFIXES = (".json", ".json.gz", ".xlsx", ".zip")  # which folders have for much else
MOST_HELD_OUT = 2000  # of a split that is drawn
# the words by which `datasets` knows a split
PARTS = dict.fromkeys(("train", "training"), "train")
PARTS |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
PARTS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
WRONG = "\ufffd"  # what stands for bytes that are no letter
Rows = Iterable[Mapping[str, object]]
# pandas, polars and pyarrow have tables with ``__arrow_c_stream__``
Source = str | Path | Dataset | DatasetDict | Rows | Mapping[str, Iterable[object]]

_ROWS = "pass rows, such as [{'query': q, 'document': d} for q, d in pairs]"
_QUERY = 'sqlite3 -header -csv DATABASE "select query, document from pairs" > pairs.csv'
_CONVERT = {".sql": f"sqlite3 DATABASE < FILE && {_QUERY}", ".db": _QUERY, ".sqlite": _QUERY}
_TEXT = r"(large_)?string(_view)?"
# columns of Parquet whose cells are texts, lists of texts or numbers
_CELL = rf"{_TEXT}|(large_)?list<\w+: {_TEXT}.*|dictionary<values={_TEXT},.*|null|bool|u?int\d+"
_CELL += r"|float|double|halffloat|decimal.*"


class LeftOut(str):
    """A note on what was left out, moved or read otherwise than it stands."""


@dataclass(frozen=True)
class Columns:
    cells: Mapping[str, Sequence[object]]  # of every row, None where it has none
    source: str  # the file, or what else has the rows, for messages
    place: Callable[[int], str]  # of a row by its number
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
            notes.append(LeftOut(f"Left out {name}, which by its name is no split."))
            continue
        if isinstance(table, Path):
            columns = _read_file(table, notes)
        else:
            columns = _columns_of(table, f"{name} split" if name else "", notes)
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
        notes.append(LeftOut(f"Files of {path} that are not pairs, and are left out: {number}."))
    return found


def _table(
    names: Sequence[str],
    columns: Iterable[Sequence[object]],
    source: str,
    place: Callable[[int], str],
    notes: list[str],
) -> Columns:
    """The columns under the names of a header, whatever the table was read from."""
    _refuse_twice(names, source)
    of = f"{source}: " if source else ""
    pairs = list(zip(names, columns, strict=True))
    cells = {name: column for name, column in pairs if name.strip()}
    unnamed = chain.from_iterable(column for name, column in pairs if not name.strip())
    if number := sum(cell not in ("", None) for cell in unnamed):
        what = f"{counted(number, 'cell')} in columns without a name"
        notes.append(LeftOut(f"{of}left out {what}."))
    first = next(iter(cells), "")
    repeats = {
        row
        for row, cell in enumerate(cells.get(first, ()))
        if cell == first and all(column[row] == name for name, column in cells.items())
    }
    if not repeats or len(cells) < 2:
        return Columns(cells, source, place)
    notes.append(LeftOut(f"{of}left out {counted(len(repeats), 'row')} with the header again."))
    kept = [row for row in range(len(cells[first])) if row not in repeats]
    cells = {name: [column[row] for row in kept] for name, column in cells.items()}
    return Columns(cells, source, lambda row: place(kept[row]))


def _refuse_twice(names: Sequence[str], source: str) -> None:
    if twice := [name for name in names if name.strip() and names.count(name) > 1]:
        raise DataError(f"{source}: the header has the name {shown(twice[0])} twice; rename one.")


def _columns_of(data: object, source: str, notes: list[str]) -> Columns:
    """The columns of a data set, a data frame, a mapping or mappings, with the names of classes."""
    place = partial("{} {}".format, f"{source}, row" if source else "row")
    if isinstance(data, Mapping) and all(isinstance(x, list | tuple) for x in data.values()):
        if len({*map(len, data.values())}) > 1:
            raise DataError("The columns of the mapping differ in length; fill them up.")
        return _table([*map(str, data)], data.values(), source, place, notes)
    features = getattr(data, "features", None) or {}
    classes = {name: x.names for name, x in features.items() if isinstance(x, ClassLabel)}
    cells: dict[str, Sequence[object]]
    try:
        if isinstance(data, Dataset):
            cells = data.to_dict()  # type: ignore[assignment]
        elif hasattr(data, "__arrow_c_stream__"):
            table = pyarrow.table(data)
            _refuse_twice(table.column_names, source or "the table")
            cells = table.to_pydict()
        else:
            cells = _by_column(list(data) if isinstance(data, Iterable) else [data], place)
    except (ArrowException, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"The table is not read ({said_by(error)}); {_ROWS}.") from None
    for name, names in classes.items():
        name_of: dict[object, str] = dict(enumerate(names))
        cells[name] = [name_of.get(number) for number in cells[name]]
    return _table([*cells], cells.values(), source, place, notes)


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
        return _read_json_lines(path, raw, notes)
    if name.endswith(".json"):
        return _read_json(path, raw, notes)
    if name.endswith(".xlsx"):
        return _read_sheet(path, raw, notes)
    lines = lines_of(path, _decode(path, raw, notes), notes)
    return _under_header([(begin, cells) for begin, _, cells in lines], str(path), "line", notes)


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


def _read_json_lines(path: Path, raw: bytes, notes: list[str]) -> Columns:
    lines = dict(json_lines(path, raw))
    place = list(lines).__getitem__
    cells = _by_column(list(lines.values()), place)
    return _table([*cells], cells.values(), str(path), place, notes)


def _read_json(path: Path, raw: bytes, notes: list[str]) -> Columns:
    """An array of rows, or lines."""
    try:
        rows = json.loads(_decode(path, raw, notes), object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError):
        return _read_json_lines(path, raw, notes)
    except DataError as error:
        raise DataError(f"{path}: {error}.") from None
    if not isinstance(rows, list):
        fields = rows if isinstance(rows, dict) else {}
        key = next((key for key in fields if isinstance(fields[key], list)), "KEY")
        how = f"jq -c '.{key}[]' {path} > pairs.jsonl"
        raise DataError(f"{path} is no array of rows, but {shown(rows)}. Convert it by {how}.")
    return _columns_of(rows, str(path), notes)


def _read_parquet(path: Path, notes: list[str]) -> Columns:
    try:  # not by the cache of `datasets`, which may have the rows of an older file
        schema = parquet.read_schema(path)
        _refuse_twice(schema.names, str(path))
        names = [field.name for field in schema if re.fullmatch(_CELL, str(field.type))]
        table = Dataset(parquet.read_table(path, columns=names))
    except DataError:
        raise
    except (ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} is not read as Parquet ({said_by(error)}).") from None
    if others := sorted({*schema.names} - {*names}):
        notes.append(f"Columns of {path} without texts or numbers are left out: {shown(others)}.")
    return _columns_of(table, str(path), notes)


def _read_sheet(path: Path, raw: bytes, notes: list[str]) -> Columns:
    """The first sheet of a spreadsheet, as texts. Blank rows do not count."""
    with needs("Reading a spreadsheet", "excel"):
        import openpyxl  # noqa: F401
    from pandas import DataFrame, read_excel

    try:
        sheets: Mapping[str, DataFrame] = read_excel(
            io.BytesIO(raw),
            sheet_name=None,
            header=None,
            dtype=str,
            keep_default_na=False,
            engine="openpyxl",  # others want packages of their own for an .xls that is named .xlsx
        )
    except Exception as error:  # of zipfile, XML and openpyxl, by what is damaged
        raise DataError(f"{path} is not read as xlsx ({error}); save it as CSV UTF-8.") from None
    source = str(path)
    if len(sheets) > 1:
        source = f"{path}, first of {len(sheets)} sheets"
        notes.append(LeftOut(f"Read the first of {len(sheets)} sheets of {path}."))
    sheet = next(iter(sheets.values())).itertuples(index=False, name=None)
    rows = [(number, cells) for number, cells in enumerate(sheet, start=1) if any(cells)]
    return _under_header(rows, source, "row", notes)


def _under_header(
    rows: Sequence[tuple[int, tuple[str, ...]]], source: str, kind: str, notes: list[str]
) -> Columns:
    """The columns of numbered rows, of which the first is the header."""
    if not rows:
        return Columns({}, source, str)
    (_, header), *body = rows
    columns = list(zip(*(cells for _, cells in body), strict=True)) or [()] * len(header)
    return _table(header, columns, source, lambda row: f"{source}, {kind} {body[row][0]}", notes)


def encoding_of(start: bytes) -> str:
    """UTF-16, by its mark or by the first letter, which is a plain one; else UTF-8."""
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    if start[:2].count(0) == 1:
        return "utf-16-be" if start[0] == 0 else "utf-16-le"
    return "utf-8-sig"


def _decode(path: Path, raw: bytes, notes: list[str]) -> str:
    """The text of a file. In UTF-8, single bytes that are wrong are replaced; a file that has as
    many of them as right letters beyond ASCII is cp1252."""
    encoding = encoding_of(raw)
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + len(re.findall(rb"\r\n?|\n", raw[: error.start]))
    text = raw.decode(encoding, "replace")
    wrong = text.count(WRONG)
    how = f"with {counted(wrong, 'wrong byte')} replaced by {WRONG}"
    if encoding == "utf-8-sig" and 2 * wrong > len(re.findall(r"[^\x00-\x7f]", text)):
        with contextlib.suppress(UnicodeDecodeError):
            text = raw.decode("cp1252")
            how = "as cp1252 (Windows, Western European)"
    name = encoding.upper().removesuffix("-SIG")
    notes.append(LeftOut(f"{path}, line {line:,}: is not {name}; the file was read {how}."))
    return text
