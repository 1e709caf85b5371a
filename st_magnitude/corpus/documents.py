"""Documents and their sections, from files of many kinds."""

from __future__ import annotations

import gzip
import hashlib
import os
import warnings
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from st_magnitude.corpus.chunking import CODE_SUFFIXES, fold, looks_like_code, suffix_of
from st_magnitude.corpus.formats import Section, parse_html, parse_markdown, parse_rst
from st_magnitude.data.beir import DataError, json_rows

__all__ = [
    "Document",
    "Documents",
    "Files",
    "Section",
    "document_source",
    "iterate_documents",
    "read_documents",
    "split_documents",
]

_MARKDOWN = frozenset({".md", ".markdown"})
_UNDERLINED = frozenset({".rst", ".txt", ".text"})
_HTML = frozenset({".html", ".htm", ".xhtml"})
_JSONL = frozenset({".jsonl", ".ndjson"})
_TEXT_SUFFIXES = _MARKDOWN | _UNDERLINED | _HTML | _JSONL


@dataclass(frozen=True)
class Document:
    """A text and what is known about it.

    Attributes:
        text: The whole text, including headings.
        name: Origin of the text, such as a path; its suffix may tell that the text is code.
        title: Title of the whole document.
        code: Whether the text is code; with None, :func:`looks_like_code` decides.
        sections: The text cut at its headings; empty if it has no headings.
    """

    text: str
    name: str = ""
    title: str | None = None
    code: bool | None = None
    sections: tuple[Section, ...] = ()

    @property
    def is_code(self) -> bool:
        """:attr:`code`, or the answer of :func:`looks_like_code` if that is None."""
        return looks_like_code(self.text, self.name) if self.code is None else self.code


Documents = str | Path | Dataset | IterableDataset | Iterable[str | Document | Mapping[str, Any]]


def read_documents(path: str | Path) -> Iterator[Document]:
    """Reads a text file, a JSONL file, or all of those in a folder and its subfolders, sorted by name.

    - ``.txt``, ``.md``, ``.rst``, ``.html`` and source code: one document per file. Headings cut a text into sections:
      those of Markdown (markdown-it-py), reStructuredText (docutils, for ``.txt`` too) and HTML (lxml). The text of a
      page is what a reader sees, without navigation, header and footer; other files keep their markup.
    - ``.jsonl``: one document per line, with the key ``text`` and optionally ``title`` and ``id``.
    - All of these may be compressed with gzip, as ``.txt.gz``.

    Hidden files and folders, files with other suffixes and blank texts are left out. Files of a folder that are binary
    or not UTF-8 are left out too, with one warning that counts them; such a file given by itself is an error. No file
    can make the reader open another one: directives that include files do nothing.

    Args:
        path: A file or a folder.

    Yields:
        Documents, one by one: a JSONL file or a folder may be larger than the memory.

    Raises:
        DataError: If there is no such file or folder, a folder holds no file of these kinds, a file cannot be read, or
            a line of a JSONL file is malformed; the message names file and line.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "tea.md").write_text("# Tea\\nBoil water.\\n\\n## Green tea\\nUse 80 degrees.\\n")
        >>> [document] = read_documents(folder)
        >>> document.name, document.title, document.sections[1]
        ('tea.md', 'Tea', Section(title='Green tea', text='Use 80 degrees.', level=2))
    """
    return iter(_find_files(path))  # this function is not a generator, so a wrong path is an error at once


@dataclass(frozen=True)
class Files:
    """Files that every iteration reads anew; cheap to send to a worker."""

    root: Path
    names: tuple[str, ...]
    strict: bool  # whether a file that cannot be read is an error

    def __iter__(self) -> Iterator[Document]:
        skipped: Counter[str] = Counter()
        for name in self.names:
            try:
                yield from _read_file(self.root / name, name)
            except _Unreadable as problem:
                if self.strict:
                    raise DataError(f"{self.root / name} is {problem}; convert it to UTF-8 text.") from None
                skipped[str(problem)] += 1
        if skipped:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(skipped.items()))
            warnings.warn(f"Left out {skipped.total():,} files of {self.root}: {reasons}.", stacklevel=2)


class _Unreadable(Exception):
    """The reason why a file is not text."""


def _find_files(path: str | Path) -> Files:
    path = Path(path)
    if path.is_file():
        return Files(path.parent, (path.name,), strict=True)
    if not path.is_dir():
        raise DataError(
            f"There is no file or folder {str(path)!r}. To use a text itself as a document, put it in a list: [text]."
        )
    names: list[str] = []
    others: Counter[str] = Counter()
    for folder, subfolders, files in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in files:
            if name.startswith("."):
                continue
            if suffix_of(name) in _TEXT_SUFFIXES | CODE_SUFFIXES:
                names.append(Path(folder, name).relative_to(path).as_posix())
            else:
                others[suffix_of(name)] += 1
    if not names:
        found = ", ".join(f"{number} {suffix or 'without suffix'}" for suffix, number in others.most_common(5))
        raise DataError(
            f"{str(path)!r} holds no file that can be read ({found or 'no files at all'}). Expected the suffixes "
            f"{', '.join(sorted(_TEXT_SUFFIXES))} or those of source code; rename the files, or pass their texts."
        )
    return Files(path, tuple(sorted(names)), strict=False)


def _read_file(path: Path, name: str) -> Iterator[Document]:
    suffix = suffix_of(name)
    if suffix in _JSONL:
        yield from _read_jsonl(path, name)
        return
    text = _read_text(path)
    title: str | None = None
    sections: list[Section] = []
    if suffix in _HTML:
        title, text, sections = parse_html(text)
    elif suffix in _MARKDOWN:
        text, sections = parse_markdown(text)
    elif suffix in _UNDERLINED:
        text, sections = parse_rst(text)
    if text.strip():
        titles = [section.title for section in sections if section.title and section.level == 1]
        title = titles[0] if titles else title
        yield Document(text, name, title, True if suffix in CODE_SUFFIXES else None, tuple(sections))


def _read_text(path: Path) -> str:
    data = b"".join(_lines(path))
    if b"\0" in data:
        raise _Unreadable("UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise _Unreadable("not UTF-8") from None


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise _Unreadable(f"unreadable ({type(error).__name__})") from None


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    for number, row in json_rows(_lines(path), path):
        document = _from_mapping(row, f"{path}, line {number}:", f"{name}:{number}")
        if document.text.strip():
            yield document


def _from_mapping(row: Mapping[str, Any], where: str, name: str) -> Document:
    text, title = row.get("text"), row.get("title") or None
    if "text" not in row:
        raise DataError(f"{where} has no 'text'; it has {sorted(map(str, row))}. Rename the key that holds the text.")
    if not isinstance(text, str) or not isinstance(title, str | None):
        wrong, value = ("title", title) if isinstance(text, str) else ("text", text)
        raise DataError(
            f"{where} has a {wrong} of type {type(value).__name__}, not a string; quote it or remove the row."
        )
    name = name if row.get("id") is None else str(row["id"])
    return Document(text, name, title, row["code"] if isinstance(row.get("code"), bool) else None)


def iterate_documents(documents: Documents) -> Iterator[Document]:
    """Documents from any source, including blank ones."""
    for number, item in enumerate(document_source(documents)):
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            yield Document(item, f"document {number}")
        elif isinstance(item, Mapping):
            if "chunks" in item and "text" not in item:
                raise DataError("The documents are groups already (they have 'chunks'); train on them as they are.")
            yield _from_mapping(item, f"documents[{number}]", f"document {number}")
        else:
            raise DataError(
                f"documents[{number}] is of type {type(item).__name__}; pass strings, Documents, or mappings with a "
                "'text'."
            )


def document_source(documents: Documents) -> Iterable[Any]:
    """An iterable over the documents. Its kind is checked and files are found, but nothing is read yet."""
    if isinstance(documents, str | Path):
        return _find_files(documents)
    if isinstance(documents, DatasetDict | IterableDatasetDict):
        raise DataError(f"documents has the splits {sorted(map(str, documents))}; pass one of them.")
    if isinstance(documents, Mapping):
        raise DataError("documents is one mapping; pass a list of texts, or of mappings that have a 'text'.")
    if isinstance(documents, Dataset | IterableDataset):
        columns = documents.column_names
        if columns is not None and "text" not in columns:
            remedy = (
                "its rows are groups already, so train on them as they are"
                if "chunks" in columns
                else f"rename the column that holds the texts: documents.rename_column({columns[0]!r}, 'text')"
            )
            raise DataError(f"documents has the columns {columns} and no 'text'; {remedy}.")
        if columns is not None:  # other columns may be large, such as images
            return documents.select_columns([name for name in ("text", "title", "id", "code") if name in columns])
        return documents
    if not isinstance(documents, Iterable):
        raise DataError(
            f"documents is of type {type(documents).__name__}; pass a path, a datasets.Dataset or an iterable of texts."
        )
    return documents


def split_documents(
    documents: Documents, held_out: float = 0.1, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Splits by document, so that training sees nothing of what is held out.

    A hash of the words of a document and the seed decides its side. Therefore equal texts are on the same side, and
    additional documents do not move the others (unless one side would be empty); the share is met only on average.

    Args:
        documents: As for :func:`build_groups`; all of them are read into memory.
        held_out: Share to hold out, between 0 and 1.
        seed: Seed for the split.

    Returns:
        The documents to train on and those held out, both in the given order and without blank documents.

    Raises:
        ValueError: If ``held_out`` is not between 0 and 1.
        DataError: If there are fewer than two different documents.

    Example:
        >>> train, held_out = split_documents([f"Text number {i}." for i in range(100)], held_out=0.2)
        >>> len(train), len(held_out)
        (80, 20)
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be between 0 and 1, got {held_out}.")
    kept = [document for document in iterate_documents(documents) if document.text.strip()]
    ranks = [
        int.from_bytes(hashlib.blake2b(f"{seed} {fold(document.text)}".encode(), digest_size=8).digest(), "big")
        for document in kept
    ]
    distinct = sorted(set(ranks))
    if len(distinct) < 2:
        raise DataError(
            f"{len(distinct)} different documents cannot be split; pass more, such as a folder instead of a file, or a "
            "list of the parts of a long text."
        )
    number = min(max(bisect_left(distinct, held_out * 2**64), 1), len(distinct) - 1)
    limit = distinct[number]
    train = [document for document, rank in zip(kept, ranks, strict=True) if rank >= limit]
    return train, [document for document, rank in zip(kept, ranks, strict=True) if rank < limit]
