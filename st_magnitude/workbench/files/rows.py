"""The columns of files, data sets, data frames and mappings, and the places of their rows."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath

import pyarrow
from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from pyarrow import ArrowException, parquet

from st_magnitude._checks import needs, shown
from st_magnitude.data.beir import DataError, json_lines, unique
from st_magnitude.data.documents import files_of
from st_magnitude.workbench.files.lines import LeftOut, decoded, lines_of

_LINES = (".csv", ".tsv", ".jsonl", ".ndjson")
SUFFIXES = (*_LINES, *(f"{suffix}.gz" for suffix in _LINES), ".parquet")
OTHER_SUFFIXES = (".json", ".json.gz", ".xlsx")  # which folders have for much else
MOST_HELD_OUT = 2000  # of a split that is drawn
# the words by which `datasets` knows a split
PARTS = dict.fromkeys(("train", "training"), "train")
PARTS |= dict.fromkeys(("dev", "validation", "valid", "val"), "dev")
PARTS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
Rows = Iterable[Mapping[str, object]]
# pandas, polars and pyarrow have tables with ``__arrow_c_stream__``
Source = str | Path | Dataset | DatasetDict | Rows | Mapping[str, Iterable[object]]

_ROWS = "pass rows, such as [{'query': q, 'document': d} for q, d in pairs]"
_TEXT = r"(large_)?string(_view)?"
# columns of Parquet whose cells are texts, lists of texts or numbers
_CELL = rf"{_TEXT}|(large_)?list<\w+: {_TEXT}.*|dictionary<values={_TEXT},.*|null|bool|u?int\d+"
_CELL += r"|float|double|halffloat|decimal.*"


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


def read_columns(
    sources: Sequence[Source], encoding: str | None, sheet: str | None, notes: list[str]
) -> list[Columns]:
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
            columns = _read_file(table, encoding, sheet, notes)
        else:
            columns = _columns_of(table, f"{name} split" if name else "")
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
        raise DataError(
            f"{path} is neither pairs in CSV, TSV, JSONL, JSON, Parquet or xlsx nor BEIR's folder."
            " Convert it, as with pandas: TABLE.to_csv('pairs.csv', index=False)."
        )
    if others:
        number = f"{len(others):,}, such as {others[0].name}"
        notes.append(LeftOut(f"Files of {path} that are not pairs, and are left out: {number}."))
    return found


def _table(
    names: Iterable[str],
    columns: Iterable[Sequence[object]],
    source: str,
    place: Callable[[int], str],
) -> Columns:
    """The columns under the names of a header, whatever the table was read from."""
    names = [name.strip() for name in names]
    _refuse_twice(names, source)
    cells = dict(zip(names, columns, strict=True))
    cells.pop("", None)
    return Columns(cells, source, place)


def _refuse_twice(names: Sequence[str], source: str) -> None:
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataError(f"{source}: the header has the name {shown(twice[0])} twice; rename one.")


def _columns_of(data: object, source: str, first: int = 0) -> Columns:
    """The columns of a data set, a data frame, a mapping or mappings, with the names of classes.
    Rows are counted from ``first``, which is 1 in files."""

    def place(row: int) -> str:
        return f"{source}, row {row + first}" if source else f"row {row + first}"

    if isinstance(data, Mapping) and all(isinstance(x, list | tuple) for x in data.values()):
        if len({*map(len, data.values())}) > 1:
            raise DataError("The columns of the mapping differ in length; fill them up.")
        return _table([*map(str, data)], data.values(), source, place)
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
    return _table([*cells], cells.values(), source, place)


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


def _read_file(path: Path, encoding: str | None, sheet: str | None, notes: list[str]) -> Columns:
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, notes)
    name, raw = _content(path)
    if name.endswith(".xlsx"):
        return _read_sheet(path, raw, sheet, notes)
    if encoding is not None:
        try:
            raw = raw.decode(encoding).encode()
        except (LookupError, UnicodeError) as error:
            raise DataError(f"{path} is not read with --encoding {encoding} ({error}).") from None
    if name.endswith((".jsonl", ".ndjson")):
        return _read_json_lines(path, raw)
    text = decoded(path, raw, notes)
    if name.endswith(".json"):
        return _read_json(path, text)
    lines = lines_of(path, text, notes)
    return _under_header([(begin, cells) for begin, _, cells in lines], str(path), "line")


def _content(path: Path) -> tuple[str, bytes]:
    """The name of a table in lower case, and its bytes, both without what packs them."""
    name = path.name.lower()
    raw = path.read_bytes()
    if not name.endswith(".gz"):
        return name, raw
    try:
        return name.removesuffix(".gz"), gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked ({error}); fetch it again.") from None


def _read_json_lines(path: Path, raw: bytes) -> Columns:
    lines = dict(json_lines(path, raw))
    place = list(lines).__getitem__
    cells = _by_column(list(lines.values()), place)
    return _table([*cells], cells.values(), str(path), place)


def _read_json(path: Path, text: str) -> Columns:
    """An array of rows, or lines."""
    try:
        rows = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError):
        return _read_json_lines(path, text.encode(errors="surrogatepass"))
    except DataError as error:
        raise DataError(f"{path}: {error}.") from None
    if isinstance(rows, list):
        return _columns_of(rows, str(path), first=1)
    raise DataError(
        f"{path} is no array of rows, but {shown(rows)}. Convert it, as with pandas:"
        " TABLE.to_json('pairs.json', orient='records')."
    )


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
    others = sorted({*schema.names} - {*names})
    if others:
        notes.append(f"Columns of {path} without texts or numbers are left out: {shown(others)}.")
    return _columns_of(table, str(path), first=1)


def _read_sheet(path: Path, raw: bytes, chosen: str | None, notes: list[str]) -> Columns:
    """A sheet of a spreadsheet, by default the first. Numbers are read as texts, and dates as they
    are. Blank rows do not count."""
    with needs("Reading a spreadsheet", "excel"):
        import openpyxl
    try:
        book = openpyxl.load_workbook(io.BytesIO(raw), data_only=True)
        sheets = {sheet.title: _rows_of_cells(sheet.values) for sheet in book.worksheets}
    except Exception as error:  # of zipfile, XML and openpyxl, by what is damaged
        raise DataError(f"{path} is not read as xlsx ({error}); save it as CSV UTF-8.") from None
    chosen = chosen or next(iter(sheets))
    source = f"{path}, sheet {chosen!r} of {shown([*sheets])}"
    if chosen not in sheets:
        raise DataError(f"{path} has no sheet {chosen!r}, but {', '.join(sheets)[:300]}.")
    if len(sheets) > 1:
        notes.append(LeftOut(f"Read {source}; --sheet NAME chooses another one."))
    return _under_header(sheets[chosen], source, "row")


def _rows_of_cells(rows: Iterable[Sequence[object]]) -> list[tuple[int, tuple[object, ...]]]:
    """The rows that are not blank, numbered."""
    as_texts = (tuple(str(x) if isinstance(x, (int, float)) else x for x in row) for row in rows)
    return [(number, row) for number, row in enumerate(as_texts, start=1) if any(row)]


def _under_header(
    rows: Sequence[tuple[int, tuple[object, ...]]], source: str, kind: str
) -> Columns:
    """The columns of numbered rows, of which the first is the header."""
    if not rows:
        return Columns({}, source, str)
    (_, header), *body = rows
    columns = list(zip(*(cells for _, cells in body), strict=True)) or [()] * len(header)
    names = ["" if name is None else str(name) for name in header]
    return _table(names, columns, source, lambda row: f"{source}, {kind} {body[row][0]}")
