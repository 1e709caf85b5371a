"""Documents and their sections, from files of text, Markdown, reStructuredText, HTML and source code."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

from st_magnitude._checks import needs
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
_UNDERLINED = frozenset({".rst", ".txt", ".text"})
_HTML = frozenset({".html", ".htm", ".xhtml"})
_JSONL = frozenset({".jsonl", ".ndjson"})
_LANGUAGES = """
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cs .java .kt .kts .scala .groovy .go .rs .swift .js .jsx .mjs .cjs .ts
    .tsx .php .rb .pl .pm .lua .r .jl .m .mm .sh .bash .zsh .ps1 .sql .hs .ml .mli .fs .ex .exs .erl .clj .lisp .el
    .dart .f90 .f .asm .s .cu .cuh .proto .zig .nim .v .vhd .tcl
"""
_CODE = frozenset(_LANGUAGES.split())
_READ = _MARKDOWN | _UNDERLINED | _HTML | _JSONL | _CODE

Heading = tuple[int, int, str, int]  # index of its first line, of the line after it, title, level


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

# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def read_documents(path: str | Path) -> Iterator[Document]:
    """Reads a text file, a JSONL file, or all of those in a folder and its subfolders, sorted by name.

    - ``.txt``, ``.md``, ``.rst``, ``.html`` and source code: one document per file. Headings cut a text into sections:
      headings of Markdown (markdown-it-py), underlined titles (``.rst`` and ``.txt``), headings of HTML (lxml). The
      text of a page is what a reader sees, without navigation, header and footer; other files keep their markup.
    - ``.jsonl``: one document per line, with the key ``text`` and optionally ``title``, ``id`` and ``code`` (whether
      the text is source code).
    - All of these may be compressed with gzip, as ``.txt.gz``.

    Hidden files and folders, files with other suffixes and blank texts are left out. A folder's files that are not
    UTF-8 text are left out with a warning; such a file given by itself is an error.

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
    files = {file.relative_to(path): file for file in path.rglob("*") if _suffix_of(file) in _READ and file.is_file()}
    names = sorted(name for name in files if not any(part.startswith(".") for part in name.parts))
    if not names:
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file nor a folder with files of text, Markdown, reStructuredText, HTML, JSONL "
            "or source code. To use a text itself as a document, put it in a list: [text]."
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
    suffix = _suffix_of(path)
    try:
        text = (gzip.decompress if path.suffix.lower() == ".gz" else bytes)(path.read_bytes()).decode("utf-8-sig")
    except (UnicodeDecodeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _NotTextError(f"{path} is not UTF-8 text ({error}); convert it.") from None
    if "\0" in text:
        raise _NotTextError(f"{path} is not text: it has null bytes.")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if suffix in _JSONL:
        yield from _read_rows(text, path, name)
        return
    title: str | None = None
    sections: list[Section] = []
    if suffix in _HTML:
        title, text, sections = _parse_html(text)
    elif suffix in _MARKDOWN:
        text, sections = _parse_markdown(text)
    elif suffix in _UNDERLINED:
        text, sections = _parse_rst(text)
    if text.strip():
        titles = [section.title for section in sections if section.title and section.level == 1]
        yield Document(text, name, titles[0] if titles else title, suffix in _CODE, tuple(sections))


def _suffix_of(path: PurePath) -> str:
    return PurePath(path.name.lower().removesuffix(".gz")).suffix


def _read_rows(text: str, path: Path, name: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: is not valid JSON ({error}). Write one object per line.") from None
        document = _from_mapping(row, where, f"{name}:{number}")
        if document.text.strip():
            yield document


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


# ---------------------------------------------------------------------------------------------------------------------
# Sections
# ---------------------------------------------------------------------------------------------------------------------


def _sections(lines: Sequence[str], headings: Sequence[Heading], separator: str = "\n") -> list[Section]:
    """The sections before the first heading and after each heading; an empty list if there are no headings."""
    if not headings:
        return []
    highest = min(level for *_, level in headings)
    found = [Section("", trim_lines(separator.join(lines[: headings[0][0]])))]
    ends = [first for first, *_ in headings[1:]] + [len(lines)]
    for (_, after, title, level), end in zip(headings, ends, strict=True):
        text = trim_lines(separator.join(lines[after:end]))
        found.append(Section(" ".join(title.split()), text, level - highest + 1))
    return found if found[0].text else found[1:]


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?^---[ \t]*$\n?", re.M | re.S)
_ANCHOR = re.compile(r"\s*\{[#.:][^{}]*\}$")


def _parse_markdown(text: str) -> tuple[str, list[Section]]:
    """Text without front matter, and its sections; the Markdown of the text stays as it is."""
    with needs("Reading Markdown", "revela"):
        from markdown_it import MarkdownIt
    text = _FRONT_MATTER.sub("", text, count=1)
    inline = MarkdownIt("commonmark")
    tokens = MarkdownIt("commonmark").disable("inline").parse(text)  # only headings need their inline markup parsed
    headings = []
    for i, token in enumerate(tokens):
        if token.type == "heading_open" and not token.level and token.map:  # not in a quotation or a list
            parts = inline.parseInline(_ANCHOR.sub("", tokens[i + 1].content))[0].children or []
            kept = (part for part in parts if part.type != "html_inline")
            title = "".join(" " if part.type.endswith("break") else part.content for part in kept)
            if title.strip():
                headings.append((token.map[0], token.map[1], title, int(token.tag[1])))
    return text, _sections(text.split("\n"), headings)


_LABEL = re.compile(r"^\.\. _[^:\n]+:[ \t]*\n", re.M)
_RULE = re.compile(r"([!-/:-@\[-`{-~])\1{2,}\s*")
_ROLE = re.compile(r":[\w:+.-]+:(?=`)|`[!~]?|\s*<[^<>`]*>(?=`)|\*")  # markup in a title, such as :mod:`os`


def _parse_rst(text: str) -> tuple[str, list[Section]]:
    """Text without labels, and its sections, whose titles are underlined; its markup stays as it is."""
    text = _LABEL.sub("", text)
    lines = text.split("\n")
    styles: list[tuple[str, bool]] = []  # the first to occur is the highest level, as for docutils
    headings: list[Heading] = []
    end = 0  # of the last heading
    for i in range(1, len(lines)):
        title, rule = lines[i - 1].strip(), lines[i].rstrip()
        if i <= end or not title or _RULE.fullmatch(title) or not _RULE.fullmatch(rule):
            continue
        overlined = i - 2 >= end and lines[i - 2].rstrip() == rule
        first = i - 1 - overlined
        follows_text = first > end and lines[first - 1].strip() != ""
        indented = not overlined and lines[i - 1][0].isspace()
        if follows_text or indented or len(rule) < min(len(title), 4):  # docutils takes 4 characters for an underline
            continue
        if (rule[0], overlined) not in styles:
            styles.append((rule[0], overlined))
        end = i + 1
        headings.append((first, end, _ROLE.sub("", title), styles.index((rule[0], overlined)) + 1))
    return text, _sections(lines, headings)


_HIDDEN_TAGS = "script style nav footer header noscript template svg math button select textarea iframe"
_DROPPED = frozenset(_HIDDEN_TAGS.split())
_BLOCK_TAGS = """
    p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote figure figcaption address
    details summary form fieldset hr pre body html head h1 h2 h3 h4 h5 h6 title
"""
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_SEPARATORS = {"br": "\n", "td": " ", "th": " "}


def _parse_html(text: str) -> tuple[str | None, str, list[Section]]:
    """Title, text and sections of a page, without scripts, styles, navigation, headers, footers and hidden parts."""
    with needs("Reading HTML", "revela"):
        from lxml import etree
    parser = etree.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True)
    root = etree.fromstring(f"<html>{text}".encode(), parser)
    blocks: list[Any] = [root]  # the closest block of every open tag; None inside of what is dropped
    pieces: list[tuple[Any, str]] = []  # a block, and text in it
    for event, tag in etree.iterwalk(root, events=("start", "end")):
        if event == "start":
            block = blocks[-1]
            if block is not None and _is_dropped(tag):
                block = None
            elif block is not None and tag.tag in _BLOCKS and block.tag != "pre":
                block = tag
            blocks.append(block)
            pieces.append((block, _SEPARATORS.get(tag.tag, "") + _spaced(tag.text, block)))
        else:
            blocks.pop()
            pieces.append((blocks[-1], _spaced(tag.tail, blocks[-1])))
    title = ""
    paragraphs: list[str] = []
    headings: list[Heading] = []
    for block, group in groupby(pieces, key=lambda piece: piece[0]):
        if block is None:
            continue
        joined = "".join(part for _, part in group)
        if block.tag == "pre":
            joined = trim_lines(joined)
        else:
            joined = "\n".join(filter(None, (" ".join(line.split()) for line in joined.split("\n"))))
        if block.tag == "title":
            title = title or " ".join(joined.split())
        elif joined:
            if re.fullmatch("h[1-6]", block.tag):
                headings.append((len(paragraphs), len(paragraphs) + 1, joined, int(block.tag[1])))
            paragraphs.append(joined)
    return title or None, "\n\n".join(paragraphs), _sections(paragraphs, headings, "\n\n")


def _is_dropped(tag: Any) -> bool:
    return (
        tag.tag in _DROPPED
        or tag.get("role") in ("navigation", "search")
        or tag.get("aria-hidden") == "true"
        or "hidden" in tag.attrib
        or "headerlink" in tag.get("class", "").split()
    )


def _spaced(text: str | None, block: Any) -> str:
    """Text with single spaces for all white space, except in ``pre``."""
    return text or "" if block is not None and block.tag == "pre" else re.sub(r"\s+", " ", text or "")
