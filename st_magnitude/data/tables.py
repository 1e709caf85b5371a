"""Rows of CSV, TSV, JSONL and Parquet files, of data sets and of mappings, with their places.

CSV is read here because other readers guess: ``datasets`` and pandas take "NA" and "null" for
nothing and split wrongly at other separators than commas, ``csv.Sniffer`` where a cell has quotes.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from datasets import ClassLabel, Dataset, DatasetDict, load_dataset
from pyarrow import ArrowException, parquet

from st_magnitude.data.beir import DataError, json_lines

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
PARTS = {"training": "train", "validation": "dev", "valid": "dev", "val": "dev"}
PARTS |= {part: part for part in ("train", "dev", "test")}
Cells = Mapping[str, object]
Source = str | Path | Dataset | DatasetDict | Iterable[Cells]


class Row(NamedTuple):
    where: str
    part: str | None  # the split that the source gives it
    cells: Cells


def num_held_out(number: int) -> int:
    """How many of so many queries or documents are dev, and how many test: a tenth."""
    return max(number // 10, int(number > 2))


def read_rows(source: Source, notes: list[str]) -> Iterator[Row]:
    """The rows of a path, a name on the hub, a Dataset, a DatasetDict or mappings.

    Adds to the notes what the user should know.
    """
    if isinstance(source, str | Path) and not Path(source).exists():
        source = _from_hub(source.as_posix() if isinstance(source, Path) else source)
    tables: dict[str, Iterable[tuple[str, object]]]
    if isinstance(source, str | Path):
        tables = {str(path): _read_file(path, notes) for path in _tables_of(Path(source), notes)}
    elif isinstance(source, DatasetDict):
        tables = {str(name): _rows_of(data, f"{name} split, row") for name, data in source.items()}
    elif isinstance(source, Dataset):
        tables = {"": _rows_of(source, "row")}
    else:
        tables = {"": ((f"row {i}", cells) for i, cells in enumerate(source))}
    parts = {name: PARTS.get(re.split(r"[\W_]", Path(name).name.lower())[0]) for name in tables}
    has_splits = len({*parts.values()} - {None}) > 1
    for name, rows in tables.items():
        if has_splits and parts[name] is None:
            notes.append(f"Left out {name}, which by its name is no split.")
            continue
        for where, cells in rows:
            if not isinstance(cells, Mapping):
                raise DataError(f"{where}: is not a mapping of texts, but {str(cells)[:99]!r}.")
            yield Row(where, parts[name] if has_splits else None, cells)


def _from_hub(name: str) -> Dataset | DatasetDict:
    """The data set NAME or NAME:SPLIT."""
    path, _, split = name.partition(":")
    if name.endswith(SUFFIXES) or name.startswith((".", "/", "~")):
        raise DataError(f"There is no file or folder {name!r}.")
    try:
        return load_dataset(path, split=split or None)
    except Exception as error:  # of many kinds, by what is wrong with its files
        raise DataError(
            f"There is no file or folder {name!r}, and the hub gives no data set of this name"
            f" ({' '.join(str(error).split())[:300]})."
        ) from error


def files_of(path: Path, suffixes: Collection[str]) -> tuple[list[Path], list[Path]]:
    """The files of a folder and its subfolders that are not hidden, sorted: those with one of the
    suffixes, and the others. A file stands for itself."""
    files = [path]
    if not path.is_file():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in files if "/." not in f"/{file.relative_to(path).as_posix()}"]
    found = [file for file in files if file.suffix.lower() in suffixes]
    return found, [file for file in files if file.suffix.lower() not in suffixes]


def _tables_of(path: Path, notes: list[str]) -> list[Path]:
    found, others = files_of(path, SUFFIXES)
    if not found:
        raise DataError(f"{path} is neither pairs in CSV, TSV, JSONL or Parquet nor BEIR's folder.")
    if others:
        number = f"{len(others):,}, such as {others[0].name}"
        notes.append(f"Files of {path} that are not pairs, and are left out: {number}.")
    return found


def _rows_of(data: Dataset, of: str) -> Iterator[tuple[str, Cells]]:
    """The rows of a Dataset, with the names of classes."""
    classes = {name: x.names for name, x in data.features.items() if isinstance(x, ClassLabel)}
    for i, cells in enumerate(data.to_list()):
        for column, names in classes.items():
            number = cells[column]
            cells[column] = names[number] if number in range(len(names)) else None
        yield f"{of} {i}", cells


def _read_file(path: Path, notes: list[str]) -> Iterator[tuple[str, object]]:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        yield from json_lines(path)
    elif suffix == ".parquet":
        try:  # not by the cache of `datasets`, which may have the rows of an older file
            table = Dataset(parquet.read_table(path))
        except (ArrowException, OSError) as error:
            raise DataError(f"{path} is not read as Parquet ({error}).") from None
        yield from _rows_of(table, f"{path}, row")
    else:
        yield from _read_csv(path, notes)


def _read_csv(path: Path, notes: list[str]) -> Iterator[tuple[str, Cells]]:
    text = _decode(path, notes)
    named = re.match(r"sep=.(\r\n|\r|\n)", text, re.IGNORECASE)  # for Excel
    text = text[named.end() :] if named else text
    limit = csv.field_size_limit(2**31 - 1)  # characters of a cell; 131,072 by default
    try:
        mark = _separator(path, text)
        try:
            rows = _parse(path, text, mark, csv.QUOTE_MINIMAL, 1 + bool(named))
        except DataError:
            if mark != "\t":
                raise
            # many tables with tabs have quotes of the texts and no line breaks
            rows = _parse(path, text, mark, csv.QUOTE_NONE, 1 + bool(named))
            notes.append(f"{path}: quotes were read as they stand.")
    finally:
        csv.field_size_limit(limit)
    (_, header), *others = rows
    if len(set(header)) < len(header):
        raise DataError(f"{path}: the header {header} has a name twice; rename one.")
    for line, cells in others:
        yield f"{path}, line {line}", dict(zip(header, cells, strict=True))


def _decode(path: Path, notes: list[str]) -> str:
    raw = path.read_bytes()
    is_wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return raw.decode("utf-16" if is_wide else "utf-8-sig")
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


def _parse(
    path: Path, text: str, mark: str, quoting: Literal[0, 3], line: int
) -> list[tuple[int, tuple[str, ...]]]:
    """The rows that are not blank, with the lines where they begin."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, strict=True, quoting=quoting)
    rows: list[tuple[int, tuple[str, ...]]] = []
    begins = line
    try:
        for cells in reader:
            if cells:
                rows.append((begins, tuple(cells)))  # which the garbage collector can forget
            begins = line + reader.line_num
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begins}: a cell in double quotes does not end as it should ({error})."
            ' Close it, and write a quote inside as "".'
        ) from None
    width = len(rows[0][1])
    for number, row in rows:
        if len(row) != width:
            raise DataError(
                f"{path}, line {number}: has {len(row)} columns, but the header has {width}. Put"
                f" cells that contain {mark!r} into double quotes."
            )
    return rows
