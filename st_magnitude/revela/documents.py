"""Documents and their sections, from files of text, Markdown and source code, and JSON lines."""

from __future__ import annotations

import hashlib
import re
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from st_magnitude._checks import needs
from st_magnitude.data.beir import json_lines
from st_magnitude.revela.chunks import fold, trim_lines

__all__ = [
    "Document",
    "Documents",
    "Section",
    "iterate_documents",
    "read_documents",
    "split_documents",
]

_MARKDOWN = frozenset({".md", ".markdown"})
_PLAIN = frozenset({".txt", ".text", ".rst"})
_JSONL = frozenset({".jsonl", ".ndjson"})
_LANGUAGES = """
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cs .java .kt .kts .scala .groovy .go .rs .swift .js .jsx .mjs .cjs .ts
    .tsx .php .rb .pl .pm .lua .r .jl .m .mm .sh .bash .zsh .ps1 .sql .hs .ml .mli .fs .ex .exs .erl .clj .lisp .el
    .dart .f90 .f .asm .s .cu .cuh .proto .zig .nim .v .vhd .tcl
"""
_CODE = frozenset(_LANGUAGES.split())
_READ = _MARKDOWN | _PLAIN | _JSONL | _CODE


@dataclass(frozen=True)
class Section:
    """A part of a document under its own heading.

    Attributes:
        title: The heading as plain text; empty for the part before the first heading.
        text: The text up to the next heading of any level. Subsections are sections of their own.
        level: Level of the heading; 1 is the highest in the document.
    """

    title: str
    text: str
    level: int = 1


@dataclass(frozen=True)
class Document:
    """A text and what is known about it.

    Attributes:
        text: The whole text, including headings.
        name: Origin of the text, such as a path.
        title: Title of the whole document.
        code: Whether the text is source code, which is cut into blocks instead of sentences.
        sections: The text cut at its headings; empty if it has no headings.
    """

    text: str
    name: str = ""
    title: str | None = None
    code: bool = False
    sections: tuple[Section, ...] = ()


Documents = str | Path | Iterable[str | Document | Mapping[str, Any]]


def read_documents(path: str | Path) -> Iterator[Document]:
    """Reads a text file, a JSONL file, or all of those in a folder and its subfolders, sorted by name.

    - ``.txt``, ``.rst``, ``.md`` and source code: one document per file. The headings of Markdown cut it into sections.
    - ``.jsonl``: one document per line, with the key ``text`` and optionally ``title``, ``id`` and ``code`` (whether
      the text is source code).

    Hidden files and folders, files with other suffixes and blank texts are left out. A folder's files that are not
    UTF-8 text are left out with a warning; such a file given by itself is an error. For HTML, PDF and other formats,
    convert to Markdown or JSONL first, with pandoc or trafilatura for example.

    Args:
        path: A file or a folder.

    Yields:
        Documents, one by one: a folder may be larger than the memory.

    Raises:
        FileNotFoundError: If there is no such file or folder, or the folder holds no file of these kinds.
        ValueError: If a file is not UTF-8 text, or a line of a JSONL file is malformed.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "tea.md").write_text("# Tea\\nBoil water.\\n\\n## Green tea\\nUse 80 degrees.\\n")
        >>> [document] = read_documents(folder)
        >>> document.name, document.title, document.sections[1]
        ('tea.md', 'Tea', Section(title='Green tea', text='Use 80 degrees.', level=2))
    """
    path = Path(path)
    if path.is_file():
        return _read_file(path, path.name)
    files = (file for file in path.rglob("*") if file.suffix.lower() in _READ and file.is_file())
    names = sorted(file.relative_to(path) for file in files)
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not names:
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder with files of text, Markdown, JSONL or source code. To use "
            "a text itself as a document, put it in a list: [text]."
        )
    return _read_folder(path, [name.as_posix() for name in names])


def _read_folder(folder: Path, names: Iterable[str]) -> Iterator[Document]:
    skipped = []
    for name in names:
        try:
            yield from _read_file(folder / name, name)
        except _NotTextError:
            skipped.append(name)
    if skipped:
        warnings.warn(
            f"Left out {len(skipped):,} files of {folder} that are not UTF-8 text, such as {skipped[0]}.", stacklevel=2
        )


class _NotTextError(ValueError):
    pass


def _read_file(path: Path, name: str) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix in _JSONL:
        for where, row in json_lines(path):
            document = _from_mapping(row, where, f"{name}:{where.rsplit(' ', 1)[1]}")
            if document.text.strip():
                yield document
        return
    try:
        text = path.read_text(encoding="utf-8-sig")  # line ends become "\n"
    except UnicodeDecodeError as error:
        raise _NotTextError(f"{path} is not UTF-8 text ({error}); convert it.") from None
    if "\0" in text:
        raise _NotTextError(f"{path} is not text: it has null bytes.")
    sections: list[Section] = []
    if suffix in _MARKDOWN:
        text, sections = _parse_markdown(text)
    if text.strip():
        titles = [section.title for section in sections if section.title and section.level == 1]
        yield Document(text, name, titles[0] if titles else None, suffix in _CODE, tuple(sections))


def _from_mapping(row: Any, where: str, name: str) -> Document:
    if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: needs a string under the key 'text', but is {found}.")
    name = name if row.get("id") is None else str(row["id"])
    return Document(row["text"], name, row.get("title") or None, bool(row.get("code")))


def iterate_documents(documents: Documents) -> Iterator[Document]:
    """Documents from any source: a path, or an iterable of strings, documents or mappings with a ``text``."""
    if isinstance(documents, str | Path):
        yield from read_documents(documents)
        return
    for number, item in enumerate(documents):
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            yield Document(item, f"document {number}")
        else:
            yield _from_mapping(item, f"documents[{number}]", f"document {number}")


def split_documents(
    documents: Documents, held_out: float = 0.1, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Splits by document, so training sees nothing of what is held out.

    A hash of the words of a document and the seed decides its side. Therefore equal texts are on the same side, and
    additional documents do not move the others (unless one side would be empty); the share is met only on average.

    Args:
        documents: As for :func:`build_groups`; all of them are read into memory.
        held_out: Share to hold out, between 0 and 1.
        seed: Seed for the split.

    Returns:
        The documents to train on and the held-out documents, both in the given order and without blank documents.

    Raises:
        ValueError: If ``held_out`` is not between 0 and 1, or there are fewer than two different documents.

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
        raise ValueError(
            f"{len(distinct)} different documents cannot be split; pass more, such as a folder instead of a file, or a "
            "list of the parts of a long text."
        )
    limit = distinct[min(max(bisect_left(distinct, held_out * 2**64), 1), len(distinct) - 1)]
    train = [document for document, rank in zip(kept, ranks, strict=True) if rank >= limit]
    return train, [document for document, rank in zip(kept, ranks, strict=True) if rank < limit]


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?^---[ \t]*$\n?", re.M | re.S)
_ANCHOR = re.compile(r"\s*\{[#.:][^{}]*\}$")


def _parse_markdown(text: str) -> tuple[str, list[Section]]:
    """Text without front matter, and its sections; the Markdown of the text stays as it is."""
    with needs("Reading Markdown", "revela"):
        from markdown_it import MarkdownIt
    text = _FRONT_MATTER.sub("", text, count=1)
    inline = MarkdownIt("commonmark")
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)  # only headings need their inline markup parsed
    headings: list[tuple[int, int, str, int]] = []  # first line, line after the heading, title, level
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and not token.level and token.map:  # not in a quotation or a list
            parts = inline.parseInline(_ANCHOR.sub("", tokens[i + 1].content))[0].children or []
            kept = (part for part in parts if part.type != "html_inline")
            title = "".join(" " if part.type.endswith("break") else part.content for part in kept)
            if title.strip():
                headings.append((token.map[0], token.map[1], " ".join(title.split()), int(token.tag[1])))
    if not headings:
        return text, []
    lines = text.split("\n")
    highest = min(level for *_, level in headings)
    before = trim_lines("\n".join(lines[: headings[0][0]]))
    sections = [Section("", before)] if before else []
    ends = [first for first, *_ in headings[1:]] + [len(lines)]
    for (_, after, title, level), end in zip(headings, ends, strict=True):
        sections.append(Section(title, trim_lines("\n".join(lines[after:end])), level - highest + 1))
    return text, sections
