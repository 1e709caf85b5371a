"""Documents and their sections, from files of many kinds."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import warnings
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from st_magnitude._json import parse
from st_magnitude.corpus.beir import DataError
from st_magnitude.corpus.chunking import CODE_SUFFIXES, STARTS_ITEM, fold, looks_like_code, names, suffix_of, trim_lines

__all__ = [
    "Document",
    "Documents",
    "Files",
    "Section",
    "document_source",
    "iterate_documents",
    "plain_title",
    "read_documents",
    "split_documents",
]

_TEXT_SUFFIXES = names(".txt .text .md .markdown .rst .html .htm .xhtml .jsonl .ndjson")


@dataclass(frozen=True)
class Section:
    """A part of a document under its own heading.

    Attributes:
        title: The heading as plain text; empty for what stands before the first one.
        text: What follows the heading, up to the next heading of any level: subsections are sections of their own.
        level: 1 for the highest heading of the document.
    """

    title: str
    text: str
    level: int = 1


@dataclass(frozen=True)
class Document:
    """A text and what is known about it.

    Attributes:
        text: All of it, headings included.
        name: Where it is from, such as a path; its ending may tell that it is code.
        title: The title of the whole.
        code: Whether it is code; None: :func:`looks_like_code` decides.
        sections: The text cut at its headings; empty if it has none.
    """

    text: str
    name: str = ""
    title: str | None = None
    code: bool | None = None
    sections: tuple[Section, ...] = ()

    @property
    def is_code(self) -> bool:
        """:attr:`code`, or what :func:`looks_like_code` says."""
        return looks_like_code(self.text, self.name) if self.code is None else self.code


Documents = str | Path | Dataset | IterableDataset | Iterable[str | Document | Mapping[str, Any]]


# ---------------------------------------------------------------------------------------------------------------------
# Documents
# ---------------------------------------------------------------------------------------------------------------------


def read_documents(path: str | Path) -> Iterator[Document]:
    """Read a text file, a JSONL file, or all of those in a folder and its subfolders, in the order of their names.

    - ``.txt``, ``.md``, ``.rst``, ``.html`` and source code: one document a file. Headings cut a text into sections
      (``#`` and underlines in Markdown, underlines in ``.rst`` and ``.txt``, ``h1`` to ``h6`` in HTML). HTML is read as
      text: without scripts, styles, navigation, header and footer, ``pre`` as it stands.
    - ``.jsonl``: one document a line, with the keys ``text`` and, if there are any, ``title`` and ``id``.
    - Each of them compressed by gzip, as ``.txt.gz``.

    Hidden files and folders, files with other endings and blank texts are left out. Files of a folder that are binary
    or not UTF-8 are left out too, with one warning that counts them; given by themselves, they are errors.

    Args:
        path: A file or a folder.

    Yields:
        Documents, one by one: a JSONL file or a folder may be larger than the memory.

    Raises:
        DataError: If there is no such file or folder, a folder has nothing to read, a file cannot be read, or a line of
            a JSONL file is malformed; the message names file and line.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "tea.md").write_text("# Tea\\nBoil water.\\n\\n## Green tea\\nUse 80 degrees.\\n")
        >>> [document] = read_documents(folder)
        >>> document.name, document.title, document.sections[1]
        ('tea.md', 'Tea', Section(title='Green tea', text='Use 80 degrees.', level=2))
    """
    return iter(_find_files(path))  # not a generator, so that a wrong path is an error at once


@dataclass(frozen=True)
class Files:
    """Files that are read anew whenever they are iterated over; cheap to send to a worker."""

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
                    raise DataError(f"{self.root / name} is {problem}: convert it to UTF-8 text.") from None
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
            f"There is no file or folder {str(path)!r}. To use this text as a document, put it in a list: [text]."
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
        found = ", ".join(f"{number} {suffix or 'without'}" for suffix, number in others.most_common(5)) or "none"
        raise DataError(
            f"There is nothing to read in {str(path)!r} (files by ending: {found}). "
            f"Expected {', '.join(sorted(_TEXT_SUFFIXES))} or source code; rename the files, or pass them one by one."
        )
    return Files(path, tuple(sorted(names)), strict=False)


def _read_file(path: Path, name: str) -> Iterator[Document]:
    suffix = suffix_of(name)
    if suffix in (".jsonl", ".ndjson"):
        yield from _read_jsonl(path, name)
        return
    text = _read_text(path)
    title: str | None = None
    sections: list[Section] = []
    if suffix in (".html", ".htm", ".xhtml"):
        title, text, sections = _parse_html(text)
    elif suffix in (".md", ".markdown"):
        text, sections = _parse_markdown(text)
    elif suffix in (".rst", ".txt", ".text"):
        text, sections = _parse_underlines(text)
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
    remedy = 'Write one object a line, such as {"text": "...", "title": "optional", "id": "optional"}.'
    for number, raw in enumerate(_lines(path), start=1):
        where = f"{path}, line {number}:"
        try:
            line = raw.decode("utf-8").removeprefix("\ufeff")
            row = parse(line) if line.strip() else {"text": ""}
        except UnicodeDecodeError:
            raise DataError(f"{where} is not UTF-8; save the file in that encoding.") from None
        except ValueError as error:
            raise DataError(f"{where} is broken JSON ({error}). {remedy}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is {type(row).__name__}, not an object. {remedy}")
        document = _from_mapping(row, where, f"{name}:{number}")
        if document.text.strip():
            yield document


def _from_mapping(row: Mapping[str, Any], where: str, name: str) -> Document:
    text, title = row.get("text"), row.get("title") or None
    if "text" not in row:
        raise DataError(f"{where} has no 'text'; it has {sorted(map(str, row))}. Rename the key that holds the text.")
    if not isinstance(text, str) or not isinstance(title, str | None):
        wrong, value = ("title", title) if isinstance(text, str) else ("text", text)
        raise DataError(
            f"{where} has a {wrong} that is {type(value).__name__}, not a string; quote it or drop the row."
        )
    name = name if row.get("id") is None else str(row["id"])
    return Document(text, name, title, row["code"] if isinstance(row.get("code"), bool) else None)


def iterate_documents(documents: Documents) -> Iterator[Document]:
    """Documents from whatever holds them; blank ones included."""
    for number, item in enumerate(document_source(documents)):
        if isinstance(item, Document):
            yield item
        elif isinstance(item, str):
            yield Document(item, f"document {number}")
        elif isinstance(item, Mapping):
            if "chunks" in item and "text" not in item:
                raise DataError("The documents are groups already ('chunks'): train on them as they are.")
            yield _from_mapping(item, f"documents[{number}]", f"document {number}")
        else:
            raise DataError(
                f"documents[{number}] is {type(item).__name__}: pass strings, Documents, or mappings with a 'text'."
            )


def document_source(documents: Documents) -> Iterable[Any]:
    """What yields the documents: checked, and files found, but nothing read."""
    if isinstance(documents, str | Path):
        return _find_files(documents)
    if isinstance(documents, DatasetDict | IterableDatasetDict):
        raise DataError(f"documents has the splits {sorted(map(str, documents))}: pass one of them.")
    if isinstance(documents, Mapping):
        raise DataError("documents is one mapping: pass a list of texts, or of mappings that have a 'text'.")
    if isinstance(documents, Dataset | IterableDataset):
        columns = documents.column_names
        if columns is not None and "text" not in columns:
            remedy = (
                "its rows are groups already: train on them as they are"
                if "chunks" in columns
                else f"rename the one that holds the texts: documents.rename_column({columns[0]!r}, 'text')"
            )
            raise DataError(f"documents has the columns {columns} and no 'text': {remedy}.")
        if columns is not None:  # other columns may be large, such as images
            return documents.select_columns([name for name in ("text", "title", "id", "code") if name in columns])
        return documents
    if not isinstance(documents, Iterable):
        raise DataError(
            f"documents is {type(documents).__name__}: pass a path, a datasets.Dataset, or an iterable of texts."
        )
    return documents


def split_documents(
    documents: Documents, held_out: float = 0.1, seed: int = 0
) -> tuple[list[Document], list[Document]]:
    """Split by document, so that nothing held out is trained on.

    The side of a document follows from a hash of its words and the seed: equal texts are on the same side, and further
    documents do not move the others (unless one side would be empty). Hence the share is met in the mean only.

    Args:
        documents: As for :func:`build_groups`; they are all read into memory.
        held_out: The share to hold out, between 0 and 1.
        seed: Another seed gives another split.

    Returns:
        The documents to train on and those held out, both in the order given, without blank ones.

    Raises:
        ValueError: If ``held_out`` is not between 0 and 1.
        DataError: If there are fewer than two different documents.

    Example:
        >>> train, held_out = split_documents([f"Text number {i}." for i in range(100)], held_out=0.2)
        >>> len(train), len(held_out)
        (80, 20)
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}.")
    kept = [document for document in iterate_documents(documents) if document.text.strip()]
    ranks = [
        int.from_bytes(hashlib.blake2b(f"{seed} {fold(document.text)}".encode(), digest_size=8).digest(), "big")
        for document in kept
    ]
    distinct = sorted(set(ranks))
    if len(distinct) < 2:
        raise DataError(
            f"{len(distinct)} different documents cannot be split: pass more, such as a folder instead of a file, "
            "or a list of the parts of a long text."
        )
    number = min(max(bisect_left(distinct, held_out * 2**64), 1), len(distinct) - 1)
    limit = distinct[number]
    train = [document for document, rank in zip(kept, ranks, strict=True) if rank >= limit]
    return train, [document for document, rank in zip(kept, ranks, strict=True) if rank < limit]


# ---------------------------------------------------------------------------------------------------------------------
# Headings
# ---------------------------------------------------------------------------------------------------------------------

_TITLE_MARKUP = (
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
    (re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)"), r"\1"),  # [text](target)
    (re.compile(r"\s*\{[#.:][^{}]*\}"), ""),  # {#anchor}
    (re.compile(r":[\w:+-]+:(?=`)"), ""),  # :role:
    (re.compile(r"`+[~!]?([^`<]*?)(?:\s*<[^<>`]*>)?`+_{0,2}"), r"\1"),  # `code`, `text <target>`_
    (re.compile(r"\\([^\w\s])"), r"\1"),
    (re.compile(r"(?<!\w)(\*{1,3}|_{2,3})(?=\S)(.+?)(?<=\S)\1(?!\w)"), r"\2"),
    (re.compile(r"[¶\uf0c1]"), ""),
    (re.compile(r"\s+"), " "),
)


def plain_title(title: str) -> str:
    title = title[:300]  # some patterns take quadratic time
    for pattern, replacement in _TITLE_MARKUP:
        title = pattern.sub(replacement, title)
    return title.strip()


Heading = tuple[int, int, str, int]  # first line, line after it, title, level


def _cut_at(lines: Sequence[str], headings: Sequence[Heading], separator: str = "\n") -> list[Section]:
    """What lies before the first heading and after each; nothing if there are none. The highest heading is level 1."""
    if not headings:
        return []
    ends = [first for first, *_ in headings[1:]] + [len(lines)]
    highest = min(level for *_, level in headings)
    sections = [Section("", trim_lines(separator.join(lines[: headings[0][0]])))]
    for (_, after, title, level), end in zip(headings, ends, strict=True):
        text = trim_lines(separator.join(lines[after:end]))
        sections.append(Section(plain_title(title), text, level - highest + 1))
    return sections if sections[0].text else sections[1:]


_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*")
_SETEXT = re.compile(r" {0,3}(=+|-{2,})[ \t]*")


def _parse_markdown(text: str) -> tuple[str, list[Section]]:
    lines = text.split("\n")
    if lines[0].strip() == "---" and "---" in (rest := [line.strip() for line in lines[1:200]]):
        lines = lines[rest.index("---") + 2 :]  # front matter
    headings: list[Heading] = []
    fence = ""
    for i, line in enumerate(lines):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
                fence = ""
        elif mark:
            fence = mark[1]
        elif (atx := _ATX.fullmatch(line[:300])) and atx[2]:
            headings.append((i, i + 1, atx[2], len(atx[1])))
        elif (setext := _SETEXT.fullmatch(line)) and i and _is_paragraph(lines, i - 1):
            headings.append((i - 1, i + 1, lines[i - 1], 1 if setext[1][0] == "=" else 2))
    return "\n".join(lines), _cut_at(lines, headings)


def _is_paragraph(lines: Sequence[str], i: int) -> bool:
    """Whether a line is a paragraph of one line, which an underline makes a heading."""
    text = lines[i].strip()
    if not text or lines[i].startswith(("    ", "\t", ">", "|")) or STARTS_ITEM.match(text):
        return False
    return i == 0 or not lines[i - 1].strip() or bool(_ATX.fullmatch(lines[i - 1]))


_LABEL = re.compile(r"^\.\. _[^:\n]+:[ \t]*\n", re.M)
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}[ \t]*")


def _parse_underlines(text: str) -> tuple[str, list[Section]]:
    """Headings of reStructuredText: a line that is underlined over its full length, perhaps with a line above it too.

    The level of a style (its sign, with or without a line above) is the order of its first use, as docutils has it.
    """
    text = _LABEL.sub("", text)
    lines = text.split("\n")
    headings: list[Heading] = []
    styles: list[tuple[str, bool]] = []
    for i in range(1, len(lines)):
        rule = _UNDERLINE.fullmatch(lines[i])
        title = lines[i - 1].strip()
        if not rule or len(title) < 2 or len(lines[i].rstrip()) < len(title) or _UNDERLINE.fullmatch(lines[i - 1]):
            continue
        above = lines[i - 2].rstrip() if i > 1 else ""
        over = above == lines[i].rstrip()
        if (above and not over) or (not over and lines[i - 1][0].isspace()):
            continue
        style = (rule[1], over)
        if style not in styles:
            styles.append(style)
        headings.append((i - 1 - over, i + 1, title, styles.index(style) + 1))
    return text, _cut_at(lines, headings)


_DROPPED = names("script style nav footer header noscript template svg math button select textarea iframe")
_BLOCKS = names(
    "p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote figure figcaption"
    " address details summary form fieldset hr pre body html head h1 h2 h3 h4 h5 h6 title"
)
_HEADING = re.compile(r"h([1-6])")
_VOID = names("area base br col embed hr img input link meta source track wbr")


class _HTMLText(HTMLParser):
    """Blocks of text in the order of the page: (level of a heading or 0, text)."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[int, str]] = []
        self.title = ""
        self._text: list[str] = []
        self._level = self._pre = 0
        self._dropped: list[str] = []  # open elements from the dropped one on

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._dropped:
            if tag == self._dropped[0]:
                self._dropped.append(tag)
            return
        values = {key: value or "" for key, value in attrs}
        if tag in _VOID:
            if tag == "br":
                self._text.append("\n")
            elif tag == "hr":
                self._close_block()
        elif (
            tag in _DROPPED
            or values.get("role") in ("navigation", "search")
            or values.get("aria-hidden") == "true"
            or "hidden" in values
            or "headerlink" in values.get("class", "").split()
        ):
            self._dropped = [tag]
        elif tag in _BLOCKS:
            self._close_block()
            if heading := _HEADING.fullmatch(tag):
                self._level = int(heading[1])
            elif tag == "title":
                self._level = -1
            elif tag == "pre":
                self._pre += 1
        elif tag in ("td", "th"):
            self._text.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _VOID:  # others are open in HTML, slash or not; in XHTML they are empty
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._dropped:
            if tag == self._dropped[0]:
                self._dropped.pop()
        elif tag in _BLOCKS:
            self._close_block()
            self._level = 0
            if tag == "pre":
                self._pre = max(self._pre - 1, 0)

    def handle_data(self, data: str) -> None:
        if not self._dropped:
            self._text.append(data if self._pre else re.sub(r"\s+", " ", data))

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        # "<![if IE]>": a comment to a browser; older releases of Python raise an AssertionError at most of them
        return self.parse_bogus_comment(i, bool(report))

    def close(self) -> None:
        super().close()
        self._close_block()

    def _close_block(self) -> None:
        text = "".join(self._text)
        self._text = []
        if self._pre:
            text = trim_lines(text)
        else:
            text = "\n".join(filter(None, (" ".join(line.split()) for line in text.split("\n"))))
        if not text:
            return
        if self._level < 0:
            self.title = self.title or plain_title(text)
        else:
            self.blocks.append((self._level, text))


def _parse_html(text: str) -> tuple[str | None, str, list[Section]]:
    parser = _HTMLText()
    parser.feed(text)
    parser.close()
    blocks = [(level, plain_title(block) if level else block) for level, block in parser.blocks]
    headings = [(i, i + 1, block, level) for i, (level, block) in enumerate(blocks) if level and block]
    paragraphs = [block for _, block in blocks]
    return parser.title or None, "\n\n".join(paragraphs), _cut_at(paragraphs, headings, "\n\n")
