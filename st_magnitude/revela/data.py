"""Raw text to groups of chunks, and groups to batches, for Revela (arXiv 2506.16552).

One row of the data set is one group: chunks that are contextually related (section 4.1 of the paper). A loss sees whole
groups, so a trainer may shuffle rows as it likes::

    documents = read_documents("docs/")                     # or texts, a datasets.Dataset, rows of a JSONL file
    train, held_out = split_documents(documents)
    groups = build_groups(train)                            # columns: chunks, code
    task = title_task(held_out)                             # section titles -> chunks: a retrieval task for free
    collator = GroupCollator(model.preprocess, lm_tokenizer)

Rows of single chunks would be mixed by the trainer's shuffling, which is the paper's "random" ablation: 3.9 nDCG@10
instead of 33.6 (Table 3).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import re
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, Features, IterableDataset, IterableDatasetDict, Value
from datasets import Sequence as ListOf
from tqdm import tqdm

from st_magnitude.data import DataError, RetrievalData

__all__ = [
    "Document",
    "GroupCollator",
    "Section",
    "TitleTask",
    "build_groups",
    "chunk",
    "looks_like_code",
    "read_documents",
    "split_documents",
    "title_task",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split("|" if "|" in text else None))


_FEATURES = Features({"chunks": ListOf(Value("string")), "code": ListOf(Value("bool"))})  # type: ignore[arg-type]
_TEXT_SUFFIXES = _names(".txt .text .md .markdown .rst .html .htm .xhtml .jsonl .ndjson")
_CODE_SUFFIXES = _names(
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cs .java .kt .kts .scala .groovy .go .rs .swift .js .jsx .mjs .cjs .ts"
    " .tsx .php .rb .pl .pm .lua .r .jl .m .mm .sh .bash .zsh .ps1 .sql .hs .ml .mli .fs .ex .exs .erl .clj .lisp .el"
    " .dart .f90 .f .asm .s .cu .cuh .proto .zig .nim .v .vhd .tcl"
)


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
# Chunks
# ---------------------------------------------------------------------------------------------------------------------

Span = tuple[int, int]
Level = Callable[[str, Span], Iterable[Span]]

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"  # kana and ideographs: each is a word
_UNSPACED_WORD = re.compile(rf"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}][\u3001-\u303f\uff00-\uff65]*|[^\s{_UNSPACED}]+")
_ITEM = r"(?:[-*+•‣–][^\S\n]|\(?\d{1,3}[.)][^\S\n]|\#{1,6}[^\S\n]|\|)"  # a list item, a heading, a row of a table
_STARTS_ITEM = re.compile(_ITEM)
_GAP = re.compile(
    rf"""(?<![.!?…])(?P<stop>[.!?…]+)(?P<close>["'”’»)\]*_`]*)(?P<space>\s+)
    |(?P<unspaced>[。！？｡]+[」』”’）]*)\s*
    |\n[^\S\n]*\n\s*
    |\n(?=[^\S\n]*{_ITEM})""",
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[^\s(\[\"'“‘]+$")
_ACRONYM = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")  # "U.S", its last dot being the stop
_OPENING_WORD = re.compile(
    r"(?:The|It|In|He|She|They|This|These|That|Those|A|An|But|And|We|You|I|However|As|At|On|When|After|If|For|There)\b"
)
_ABBREVIATIONS = _names(  # in any case
    "fig figs eq eqs sect ch chap vol vols nos p pp ed eds ref refs approx ca cf vs viz al e.g i.e eg ie resp incl excl"
)
_ABBREVIATED_NAMES = _names(  # "Ms. Jones", but not "in 10 ms. Then"
    "Mr Mrs Ms Mx Dr Prof St Gen Col Lt Sgt Capt Cmdr Rev Hon Sen Rep Gov Pres Messrs Mt Ft Dept Univ Jan Feb Mar Apr "
    "Jun Jul Aug Sep Sept Oct Nov Dec Sec"
)


def chunk(text: str, max_words: int = 120, *, code: bool | None = None) -> list[str]:
    """Cut a text into chunks of complete sentences (Revela, section 4.1), in order, losing nothing but blanks.

    Chunks are slices of the text, as long as possible: line breaks and indentation stay as they are inside of a chunk.
    A sentence ends at a stop (not after an abbreviation or an initial), at a blank line and before a list item. One
    longer than ``max_words`` is cut between lines, or between words where a line is too long; its last piece may share
    a chunk with the sentences after it. Code is cut between blocks at the margin, then at blank lines, then at lines.

    Args:
        text: Any text.
        max_words: At most so many words a chunk. Words are separated by whitespace; an ideograph or a kana is one word.
        code: Whether it is code; None: :func:`looks_like_code` decides.

    Returns:
        The chunks, none of them blank; an empty list for a blank text.

    Raises:
        ValueError: If ``max_words`` is below 1.

    Example:
        >>> chunk("Dr. Smith came at 3.15 p.m. with J. K. Jones. Nobody saw them. They left.", max_words=12)
        ['Dr. Smith came at 3.15 p.m. with J. K. Jones.', 'Nobody saw them. They left.']
        >>> chunk("def f(x):\\n    return x + 1\\n\\ndef g(x):\\n    return 2 * x\\n", max_words=7)
        ['def f(x):\\n    return x + 1', 'def g(x):\\n    return 2 * x']
    """
    if max_words < 1:
        raise ValueError(f"max_words must be at least 1, got {max_words}.")
    if code is None:
        code = looks_like_code(text)
    levels = _CODE_LEVELS if code else _PROSE_LEVELS
    spans = _pack(text, (0, len(text)), levels, max_words)
    chunks = [_trim_lines(text[a:b]) if code else text[a:b].strip() for a, b in spans]
    return [piece for piece in chunks if piece]


def _pack(
    text: str, whole: Span, levels: Sequence[Callable[[str, Span], Iterable[Span]]], max_words: int
) -> list[Span]:
    """Neighbouring units of the first level joined while they fit; a unit that does not fit is packed at the next."""
    packed: list[Span] = []
    room = 0  # words that the last packed span could still take
    for unit in levels[0](text, whole):
        words = _count_words(text[slice(*unit)])
        if not words:
            continue
        if words <= room:
            packed[-1] = (packed[-1][0], unit[1])
            room -= words
        elif words <= max_words:
            packed.append(unit)
            room = max_words - words
        else:
            packed += _pack(text, unit, levels[1:], max_words)
            room = max_words - _count_words(text[slice(*packed[-1])])
    return packed


def _sentences(text: str, whole: Span) -> Iterator[Span]:
    begin, end = whole
    for gap in _GAP.finditer(text, begin, end):
        if gap["stop"] and not _ends_sentence(text, begin, gap, end):
            continue
        stop = gap.end("close") if gap["stop"] else gap.end("unspaced") if gap["unspaced"] else gap.start()
        if stop > begin:
            yield begin, stop
        begin = max(begin, gap.end())
    if begin < end:
        yield begin, end


def _ends_sentence(text: str, begin: int, gap: re.Match[str], end: int) -> bool:
    if gap.end() >= end or gap["space"].count("\n") > 1:
        return True
    if "\n" in gap["space"] and _STARTS_ITEM.match(text, gap.end()):
        return True
    following = text[gap.end()]
    if following.islower() or following in ",;:)]}":
        return False
    if gap["stop"] != ".":
        return True
    last = _LAST_WORD.search(text[max(begin, gap.start() - 24) : gap.start()])
    if last is None:
        return True
    word = last[0]
    if (
        word.lower() in _ABBREVIATIONS
        or word in _ABBREVIATED_NAMES
        or (len(word) == 1 and word.isupper() and word != "I")
    ):
        return False
    if word == "No":  # "No. 5", but not "No. It is."
        return not following.isdigit()
    if _ACRONYM.fullmatch(word):  # "the U.S. Army", but not "in the U.S. The law"
        return _OPENING_WORD.match(text, gap.end()) is not None
    if word.isdigit() and len(word) <= 3:  # "1. Introduction" on its own line, but not "in room 12. Then"
        before = text[max(begin, gap.start() - 24) : gap.start() - len(word)]
        return before.rpartition("\n")[2].strip() != ""
    return True


def _cut(separator: re.Pattern[str], at_margin: bool, text: str, whole: Span) -> Iterator[Span]:
    """Between the matches of a pattern; at the margin: of those which a blank does not follow."""
    begin, end = whole
    for gap in separator.finditer(text, begin, end):
        if at_margin and text[gap.end() : gap.end() + 1].isspace():
            continue
        if gap.start() > begin:
            yield begin, gap.start()
        begin = gap.end()
    if begin < end:
        yield begin, end


def _words(text: str, whole: Span) -> Iterator[Span]:
    return (match.span() for match in _WORD.finditer(text, *whole))


def _count_words(text: str) -> int:
    if text.isascii() or not _UNSPACED_WORD.search(text):
        return len(text.split())
    return sum(1 for _ in _WORD.finditer(text))


_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_LINES = partial(_cut, re.compile(r"\n"), False)
_PROSE_LEVELS: tuple[Level, ...] = (_sentences, _LINES, _words)
_CODE_LEVELS: tuple[Level, ...] = (
    partial(_cut, _BLANK_LINES, True),
    partial(_cut, _BLANK_LINES, False),
    _LINES,
    _words,
)


def _trim_lines(text: str) -> str:
    """Without blank lines around, and with the indentation of the first line."""
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()


def _fold(text: str) -> str:
    """What makes two chunks equal: words without case and blanks."""
    return " ".join(text.split()).casefold()


_SYNTAX = re.compile(
    r"""[{};]\s*$                                                   # C and its heirs
    |^\s*[)\]}]+[,;:]?\s*$
    |^\s*(?:def|class|if|elif|else|for|while|try|except|finally|with|async\ def|match|case)\b.*:\s*(?:\#.*)?$
    |^\s*(?:import\ [\w.]+(?:\ as\ \w+)?(?:,\ [\w.]+)*|from\ [\w.]+\ import\ .+|package\ \S+)\s*$
    |^\s*(?:return|yield|raise|throw|assert|await|del|global|pass|break|continue)\b(?:\s+[^.]*[\w\])"'])?\s*$
    |^\s*@\w[\w.]*(?:\(.*\))?\s*$
    |^\s*(?:(?:const|let|var|auto|val|mut|int|float|double|char|bool|String|local|my)\s+)?[\w.$\[\]"'*]+(?:\s*,\s*[\w.$]+)*
      (?::\s*[\w.\[\], |]+)?\s*(?:[-+*/|&^%:]|//|<<|>>)?=(?!=)\s*\S
    |^\s*[\w.$:>-]+\(.*\)?[,;]?\s*$
    |^\s*(?:public|private|protected|static|func|fn|fun|function|struct|enum|interface|impl|void|export|extern)\b.*[({;]\s*$
    |^\s*(?:SELECT|INSERT\ INTO|UPDATE|DELETE\ FROM|CREATE\ TABLE|ALTER\ TABLE|FROM|WHERE|GROUP\ BY|ORDER\ BY|JOIN)\b
      .*[\w,*);=]\s*$
    |^\s*(?:fi|done|esac|then|do|end|endif|begin)\s*;?$
    |^\#\s*(?:include|define|undef|if|ifdef|ifndef|else|elif|endif|pragma)\b
    |[=!]==?\s.*[)\w\]]$|=>\s*\S*$|->\s*[\w\[\]., |]+:?$|&&|\|\|""",
    re.VERBOSE,
)
_COMMENT = re.compile(r"^\s*(?:#|//|/\*|\*(?:\s|/|$)|--\s|;;|%)")
_PROSE_WORDS = re.compile(r"[^\W\d_]{2,}[,.;:!?)]*(?:\s+\(?[^\W\d_]+(?:['’-][^\W\d_]+)*[,.;:!?)]*){2}")


def looks_like_code(text: str, name: str = "") -> bool:
    """Whether a document is code rather than prose.

    The ending of the name decides if it is one of a programming language. Otherwise lines are counted: those with the
    syntax of a programming language (of Python, the C family, SQL, shells) against those that read as prose; comments
    count for neither. A text about code with some examples in it is prose.

    Args:
        text: The document; its first 400 lines are looked at.
        name: A file name, if it has one.

    Example:
        >>> looks_like_code("import os\\n\\ndef size(path):\\n    return os.stat(path).st_size\\n")
        True
        >>> looks_like_code("Import duties rise.\\nReturn to the harbour; for sailors, it is home.")
        False
        >>> looks_like_code("whatever", "setup.py")
        True
    """
    if _suffix(name) in _CODE_SUFFIXES:
        return True
    syntax = prose = 0
    for line in islice(filter(str.strip, text[:40_000].split("\n")), 400):
        line = line[:300]  # some patterns take quadratic time
        if _SYNTAX.search(line):
            syntax += 1
        elif not _COMMENT.match(line) and _PROSE_WORDS.search(line):
            prose += 1
    return syntax > prose


def _suffix(name: str) -> str:
    return os.path.splitext(name.lower().removesuffix(".gz"))[1]


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
class _Files:
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


def _find_files(path: str | Path) -> _Files:
    path = Path(path)
    if path.is_file():
        return _Files(path.parent, (path.name,), strict=True)
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
            if _suffix(name) in _TEXT_SUFFIXES | _CODE_SUFFIXES:
                names.append(Path(folder, name).relative_to(path).as_posix())
            else:
                others[_suffix(name)] += 1
    if not names:
        found = ", ".join(f"{number} {suffix or 'without'}" for suffix, number in others.most_common(5)) or "none"
        raise DataError(
            f"There is nothing to read in {str(path)!r} (files by ending: {found}). "
            f"Expected {', '.join(sorted(_TEXT_SUFFIXES))} or source code; rename the files, or pass them one by one."
        )
    return _Files(path, tuple(sorted(names)), strict=False)


def _read_file(path: Path, name: str) -> Iterator[Document]:
    suffix = _suffix(name)
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
        yield Document(text, name, title, True if suffix in _CODE_SUFFIXES else None, tuple(sections))


def _read_text(path: Path) -> str:
    try:
        with _open(path) as file:
            data = file.read()
    except (OSError, EOFError) as error:
        raise _Unreadable(f"unreadable ({type(error).__name__})") from None
    if b"\0" in data:
        raise _Unreadable("UTF-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        raise _Unreadable("not UTF-8") from None


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.name.lower().endswith(".gz") else path.open("rb")


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    remedy = 'Write one object a line, such as {"text": "...", "title": "optional", "id": "optional"}.'
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}:"
            try:
                line = raw.decode("utf-8").removeprefix("\ufeff")
                row = json.loads(line) if line.strip() else {"text": ""}
            except UnicodeDecodeError:
                raise DataError(f"{where} is not UTF-8; save the file in that encoding.") from None
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is broken JSON ({error.msg}, column {error.colno}). {remedy}") from None
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


def _iterate(documents: Documents) -> Iterator[Document]:
    """Documents from whatever holds them; blank ones included."""
    for number, item in enumerate(_source(documents)):
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


def _source(documents: Documents) -> Iterable[Any]:
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
    kept = [document for document in _iterate(documents) if document.text.strip()]
    ranks = [
        int.from_bytes(hashlib.blake2b(f"{seed} {_fold(document.text)}".encode(), digest_size=8).digest(), "big")
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


def _plain_title(title: str) -> str:
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
    sections = [Section("", _trim_lines(separator.join(lines[: headings[0][0]])))]
    for (_, after, title, level), end in zip(headings, ends, strict=True):
        text = _trim_lines(separator.join(lines[after:end]))
        sections.append(Section(_plain_title(title), text, level - highest + 1))
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
    if not text or lines[i].startswith(("    ", "\t", ">", "|")) or _STARTS_ITEM.match(text):
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


_DROPPED = _names("script style nav footer header noscript template svg math button select textarea iframe")
_BLOCKS = _names(
    "p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote figure figcaption"
    " address details summary form fieldset hr pre body html head h1 h2 h3 h4 h5 h6 title"
)
_HEADING = re.compile(r"h([1-6])")
_VOID = _names("area base br col embed hr img input link meta source track wbr")


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

    def close(self) -> None:
        super().close()
        self._close_block()

    def _close_block(self) -> None:
        text = "".join(self._text)
        self._text = []
        if self._pre:
            text = _trim_lines(text)
        else:
            text = "\n".join(filter(None, (" ".join(line.split()) for line in text.split("\n"))))
        if not text:
            return
        if self._level < 0:
            self.title = self.title or _plain_title(text)
        else:
            self.blocks.append((self._level, text))


def _parse_html(text: str) -> tuple[str | None, str, list[Section]]:
    parser = _HTMLText()
    parser.feed(text)
    parser.close()
    blocks = [(level, _plain_title(block) if level else block) for level, block in parser.blocks]
    headings = [(i, i + 1, block, level) for i, (level, block) in enumerate(blocks) if level and block]
    paragraphs = [block for _, block in blocks]
    return parser.title or None, "\n\n".join(paragraphs), _cut_at(paragraphs, headings, "\n\n")


# ---------------------------------------------------------------------------------------------------------------------
# Groups
# ---------------------------------------------------------------------------------------------------------------------

Chunk = tuple[str, bool]  # the text, and whether its document is code


@dataclass(frozen=True)
class _Settings:
    group_size: int
    max_words: int
    interleave: int
    min_words: int


def build_groups(
    documents: Documents,
    *,
    group_size: int = 16,
    max_words: int = 120,
    interleave: int = 2,
    min_words: int = 5,
    shuffle_documents: bool = False,
    shuffle_chunks: bool = False,
    seed: int = 0,
    streaming: bool = False,
    num_shards: int = 1,
    progress: bool = True,
) -> Dataset | IterableDataset:
    """Groups of chunks to train on: one row, one group (Revela, section 4.1).

    The chunks of ``interleave`` documents at a time are put in the order d11, d21, ..., dn1, d12, d22, ..., and the
    sequence of all chunks is cut into groups; a group spans documents where these are short. Two equal chunks (by
    their words, in any case) are never in one group: the second waits for the next one.

    Args:
        documents: A path (see :func:`read_documents`), a ``datasets`` data set with the column ``text``, or an iterable
            of strings, :class:`Document` objects or mappings with a ``text``.
        group_size: Chunks a group, B in the paper.
        max_words: See :func:`chunk`.
        interleave: n, the number of documents whose chunks alternate; the paper's example (Fig. 7) has 2.
        min_words: Shorter chunks are left out.
        shuffle_documents: Shuffle the documents first. By default neighbours stay neighbours.
        shuffle_chunks: The paper's "random" ablation (section 5.2): all chunks in a random order. It ruins training.
        seed: Of both kinds of shuffling.
        streaming: Return an ``IterableDataset`` that reads, chunks and groups while it is iterated over, in bounded
            memory; its rows are those of the other data set if there is one shard. A trainer needs ``max_steps`` then,
            and under DDP ``accelerator_config={"dispatch_batches": False}``.
        num_shards: With streaming, the number of parts that are grouped on their own, for as many workers.
        progress: Show a progress bar when it takes long.

    Returns:
        Columns ``chunks`` (a list of ``group_size`` strings; the last group may have fewer, but at least 2, or else it
        is left out) and ``code`` (a list of as many bools, decided for each document).

    Raises:
        ValueError: If a number is out of range, or a kind of shuffling is combined with streaming.
        DataError: If there are no documents, all are blank, no chunk has ``min_words`` words, fewer than 2 different
            chunks are left, or something cannot be read.

    Example:
        >>> cats, dogs = "Cats purr a lot. Cats sleep all day.", "Dogs bark at night. Dogs run very fast."
        >>> groups = build_groups([cats, dogs], group_size=3, max_words=4, min_words=1)
        >>> groups[0]
        {'chunks': ['Cats purr a lot.', 'Dogs bark at night.', 'Cats sleep all day.'], 'code': [False, False, False]}
        >>> len(groups)  # one chunk would have been left for a second group
        1
    """
    for name, value, least in (
        ("group_size", group_size, 2),
        ("max_words", max_words, 1),
        ("interleave", interleave, 1),
        ("min_words", min_words, 1),
        ("num_shards", num_shards, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    if min_words > max_words:
        raise ValueError(f"min_words is {min_words}, above max_words ({max_words}): no chunk would be left; lower it.")
    if streaming and (shuffle_documents or shuffle_chunks):
        raise ValueError(
            "Shuffling needs all documents in memory, which streaming avoids. Use streaming=False, or shuffle the "
            "documents before: IterableDataset.shuffle(seed=..., buffer_size=...)."
        )
    if num_shards > 1 and not streaming:
        raise ValueError(f"num_shards={num_shards} is for streaming=True; leave it out.")
    settings = _Settings(group_size, max_words, interleave, min_words)
    source = _source(documents)
    if streaming:
        shards = _shards(source, num_shards)
        return IterableDataset.from_generator(
            _stream_rows, features=_FEATURES, gen_kwargs={"shards": shards, "settings": settings}
        )

    counts: Counter[str] = Counter()
    rng = random.Random(seed)
    items: Iterable[Document] = _iterate(source)
    if shuffle_documents:
        items = rng.sample(kept := list(items), len(kept))
    items = tqdm(items, desc="Chunking", unit=" documents", disable=not progress, delay=2)
    chunked = _chunk_documents(items, settings, counts)
    ordered: Iterable[Chunk]
    if shuffle_chunks:
        ordered = rng.sample(together := list(chain.from_iterable(chunked)), len(together))
    else:
        ordered = _interleave(chunked, interleave)
    rows = [_columns(row) for row in _group(ordered, group_size)]
    counts["groups"] = len(rows)
    _check_counts(counts, settings)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in _FEATURES}, features=_FEATURES)


def _columns(group: Sequence[Chunk]) -> dict[str, list[Any]]:
    return {"chunks": [text for text, _ in group], "code": [code for _, code in group]}


def _shards(source: Iterable[Any], number: int) -> list[Iterable[Any]]:
    """Parts of the source, each of which can be iterated over again and again."""
    if isinstance(source, Iterator):
        raise DataError(
            f"A {type(source).__name__} is used up after one epoch: for streaming, pass a path, a list, or "
            "datasets.IterableDataset.from_generator(your_function)."
        )
    if number == 1:
        return [source]
    if isinstance(source, IterableDataset):
        if source.num_shards < number:
            raise ValueError(f"num_shards={number}, but documents has {source.num_shards} shards: lower it.")
        return [source.shard(number, i) for i in range(number)]
    units = source.names if isinstance(source, _Files) else source
    if not isinstance(units, Sequence | Dataset):
        raise ValueError(f"A {type(source).__name__} cannot be split into {number} shards: leave num_shards at 1.")
    if len(units) < number:
        raise ValueError(f"num_shards={number}, but there are {len(units)} documents or files: lower it.")
    if isinstance(units, Dataset):
        return [units.shard(number, i, contiguous=True) for i in range(number)]
    parts = [units[len(units) * i // number : len(units) * (i + 1) // number] for i in range(number)]
    return [_Files(source.root, tuple(part), source.strict) if isinstance(source, _Files) else part for part in parts]


def _stream_rows(shards: Sequence[Iterable[Any]], settings: _Settings) -> Iterator[dict[str, list[Any]]]:
    for shard in shards:
        counts: Counter[str] = Counter()
        chunked = _chunk_documents(_iterate(shard), settings, counts)
        for row in _group(_interleave(chunked, settings.interleave), settings.group_size):
            counts["groups"] += 1
            yield _columns(row)
        _check_counts(counts, settings)


def _chunk_documents(documents: Iterable[Document], settings: _Settings, counts: Counter[str]) -> Iterator[list[Chunk]]:
    for document in documents:
        counts["documents"] += 1
        if not document.text.strip():
            counts["blank"] += 1
            continue
        code = document.is_code
        pieces = chunk(document.text, settings.max_words, code=code)
        kept: list[Chunk] = [(piece, code) for piece in pieces if _count_words(piece) >= settings.min_words]
        counts["chunks"] += len(pieces)
        counts["short"] += len(pieces) - len(kept)
        if kept:
            yield kept


def _interleave(documents: Iterable[list[Chunk]], number: int) -> Iterator[Chunk]:
    """d11, d21, ..., dn1, d12, d22, ... of every n documents."""
    remaining = iter(documents)
    while window := list(islice(remaining, number)):
        for row in zip_longest(*window):
            yield from (piece for piece in row if piece is not None)


def _group(chunks: Iterable[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Cut a sequence into groups without equal chunks; one that is in the group already waits for the next.

    At the start of a group those that wait come first, each once. So fewer than two groups of different chunks ever
    wait, however often one repeats: memory is bounded.
    """
    remaining = iter(chunks)
    waiting: dict[str, tuple[Chunk, int]] = {}  # by folded text, with the number of copies
    while True:
        group: dict[str, Chunk] = {}
        for key in list(islice(waiting, size)):
            group[key], copies = waiting.pop(key)
            if copies > 1:
                waiting[key] = (group[key], copies - 1)
        while len(group) < size and (piece := next(remaining, None)) is not None:
            key = _fold(piece[0])
            if key in group:
                waiting[key] = (piece, waiting[key][1] + 1 if key in waiting else 1)
            else:
                group[key] = piece
        if len(group) < 2:  # neither different chunks that wait nor further ones
            return
        yield list(group.values())


def _check_counts(counts: Counter[str], settings: _Settings) -> None:
    documents, chunks, short = counts["documents"], counts["chunks"], counts["short"]
    if not documents:
        raise DataError("There are no documents: pass at least one text.")
    if counts["blank"] == documents:
        raise DataError(f"All of the {documents:,} texts are empty: check what is read into 'text'.")
    if short == chunks:
        raise DataError(
            f"None of the {chunks:,} chunks has {settings.min_words} words: lower min_words, or pass longer texts."
        )
    if not counts["groups"]:
        raise DataError(
            f"A group needs at least 2 different chunks, and the {documents:,} documents have fewer: pass more text, "
            f"or lower max_words (it is {settings.max_words})."
        )
    if short > chunks / 2:
        warnings.warn(
            f"{short:,} of {chunks:,} chunks have fewer than {settings.min_words} words and are left out; "
            "lower min_words to keep them.",
            stacklevel=3,
        )


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


class GroupCollator:
    """Groups to a batch of three sets of features: query, passage and language model.

    Pass it as ``data_collator`` to a ``SentenceTransformerTrainer``, whose ``collect_features`` splits the batch into
    [query, passage, lm] for the loss. n groups of B_1, ..., B_n chunks give N = B_1 + ... + B_n texts, row by row:

    - ``query_*``: what ``preprocess`` makes of the query texts under ``prefixes[0]``: ``query_input_ids`` (N, L), ...
    - ``passage_*``: the same of the whole chunks under ``prefixes[1]``.
    - ``lm_input_ids``, ``lm_attention_mask`` (N, L): the chunks without prefix, padded on the right.
    - ``lm_group`` (N,): the number of a chunk's group in this batch.

    The query text is the first half of the chunk, as in REPLUG, and the whole chunk if it is code (section 4.1).

    Args:
        preprocess: ``SentenceTransformer.preprocess`` of the retriever.
        lm_tokenizer: The language model's tokenizer; it stays as it is. Without a pad token, its eos token pads.
        prefixes: Of queries and passages.
        query_part: ``"half"``: the first half of the words (rounded up) of prose, all of code; ``"full"``: all of both.
        max_length: At most so many tokens a text, the prefix included; models that cannot truncate see all.

    Raises:
        ValueError: If ``query_part`` or ``max_length`` is out of range, or the tokenizer has nothing to pad with.

    Example:
        >>> collator = GroupCollator(model.preprocess, lm_tokenizer)  # doctest: +SKIP
        >>> batch = collator([groups[0], groups[1]])  # doctest: +SKIP
        >>> batch["lm_group"].bincount()  # doctest: +SKIP
        tensor([16, 16])
    """

    def __init__(
        self,
        preprocess: Callable[..., Mapping[str, Any]],
        lm_tokenizer: Any,
        *,
        prefixes: tuple[str, str] = ("Query: ", "Passage: "),
        query_part: str = "half",
        max_length: int = 160,
    ) -> None:
        if query_part not in ("half", "full"):
            raise ValueError(f"query_part must be 'half' or 'full', got {query_part!r}.")
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {max_length}.")
        if isinstance(prefixes, str) or len(prefixes) != 2:
            raise ValueError(f"prefixes must be two strings, of queries and of passages, got {prefixes!r}.")
        pad = lm_tokenizer.pad_token_id
        if pad is None:
            pad = lm_tokenizer.eos_token_id
        if pad is None:
            raise ValueError(
                "The tokenizer of the language model has neither a pad nor an eos token: set lm_tokenizer.pad_token."
            )
        self.preprocess = preprocess
        self.lm_tokenizer = lm_tokenizer
        self.prefixes = prefixes
        self.query_part = query_part
        self.max_length = max_length
        self.valid_label_columns: list[str] = []  # the trainer asks for it; groups have no labels
        self._pad = int(pad)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The batch of rows with ``chunks`` and perhaps ``code``; other columns are ignored.

        Raises:
            DataError: If a row is not a group.
        """
        for number, row in enumerate(features):
            chunks = row.get("chunks")
            if not isinstance(chunks, list | tuple) or len(chunks) < 2 or not all(isinstance(c, str) for c in chunks):
                found = "no 'chunks'" if chunks is None else f"chunks={repr(chunks)[:80]}"
                raise DataError(
                    f"Row {number} of the batch has {found} (its columns: {sorted(map(str, row))}). One row must be "
                    "one group: 'chunks', a list of at least two strings, as build_groups makes it. Rows of single "
                    "chunks would be mixed by the trainer, which ruins training."
                )
        code = [row.get("code") or [False] * len(row["chunks"]) for row in features]
        return self.texts_to_batch([list(row["chunks"]) for row in features], code)

    def texts_to_batch(self, chunks: list[list[str]], code: list[list[bool]] | None = None) -> dict[str, Any]:
        """The batch of n groups of texts.

        Args:
            chunks: One list a group.
            code: Of the same shape: whether a chunk is code. Default: none is.

        Raises:
            DataError: If ``code`` has another shape.
        """
        sizes = [len(group) for group in chunks]
        if code is not None and [len(group) for group in code] != sizes:
            raise DataError(f"code has {[len(group) for group in code]} values a group, chunks {sizes}: one a chunk.")
        texts = list(chain.from_iterable(chunks))
        is_code = list(chain.from_iterable(code)) if code is not None else [False] * len(texts)
        whole = self.query_part == "full"
        queries = [
            text if whole or whole_code else _first_half(text) for text, whole_code in zip(texts, is_code, strict=True)
        ]
        batch: dict[str, Any] = {}
        for name, inputs, prefix in (("query", queries, self.prefixes[0]), ("passage", texts, self.prefixes[1])):
            batch |= {f"{name}_{key}": value for key, value in self._retriever_features(inputs, prefix).items()}
        batch["lm_input_ids"], batch["lm_attention_mask"] = self._lm_features(texts)
        batch["lm_group"] = torch.repeat_interleave(torch.tensor(sizes))
        return batch

    def _retriever_features(self, texts: list[str], prefix: str) -> Mapping[str, Any]:
        try:
            return self.preprocess(texts, prompt=prefix, max_length=self.max_length)
        except TypeError:  # a module of the user's own may know no length
            return self.preprocess(texts, prompt=prefix)

    def _lm_features(self, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        side = getattr(self.lm_tokenizer, "truncation_side", "right")
        try:
            self.lm_tokenizer.truncation_side = "right"  # which is no argument of the call
            ids = self.lm_tokenizer(texts, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        finally:
            self.lm_tokenizer.truncation_side = side
        lengths = torch.tensor([len(row) for row in ids])
        width = int(lengths.max())
        input_ids = torch.tensor([[*row, *[self._pad] * (width - len(row))] for row in ids])  # (N, L)
        return input_ids, (torch.arange(width) < lengths[:, None]).long()  # both (N, L)


def _first_half(text: str) -> str:
    """The first ceil(n / 2) of n words, with the whitespace before and between them."""
    words = list(_words(text, (0, len(text))))
    return text[: words[(len(words) - 1) // 2][1]] if words else text


# ---------------------------------------------------------------------------------------------------------------------
# A retrieval task
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(repr=False)
class TitleTask(RetrievalData):
    """A retrieval task made from documents alone.

    Attributes:
        kind: ``"titles"``: queries are section titles; ``"sentences"``: queries are first sentences of chunks.
    """

    kind: str = "titles"


_GENERIC = _names(
    "abstract|acknowledgements|acknowledgments|acknowledgement|appendix|attributes|author|authors|background|"
    "bibliography|bugs|changelog|changes|classes|conclusion|conclusions|constants|contents|contributing|copyright|"
    "credits|description|discussion|example|examples|exceptions|external links|faq|footnotes|functions|"
    "further reading|getting started|history|index|install|installation|introduction|license|links|methods|"
    "miscellaneous|module contents|name|navigation|note|notes|options|overview|parameters|quick start|quickstart|"
    "raises|reference|references|related work|requirements|results|return value|returns|see also|sources|summary|"
    "synopsis|table of contents|test|tests|title|todo|untitled|usage"
)
_NUMBERING = re.compile(r"^\d+\.(?:\d+\.?)*\s+(?=\D)")


def title_task(
    documents: Documents,
    *,
    max_words: int = 120,
    max_queries: int | None = None,
    kind: str | None = None,
    seed: int = 0,
) -> TitleTask:
    """A retrieval task from documents: section titles ask for the chunks of their sections.

    - Corpus: the chunks of all documents, each once; the title lines are not in them.
    - Queries: titles of sections with some text of their own. Generic ones ("Introduction", "See also"), and titles
      that occur more than once, are left out.
    - Relevant: the chunks of the section itself, without its subsections, whose own titles ask for them. A chunk that
      several sections share, such as a notice on every page, is relevant to none.

    Documents without sections count as one section under their title; without a title, they are in the corpus only.

    If there are no titles at all, the first sentence of each chunk of prose asks for the rest of the chunk
    (:attr:`TitleTask.kind` is ``"sentences"``). That is an easier task, good for comparing models, no more.

    Args:
        documents: As for :func:`build_groups`; hold them out from training with :func:`split_documents`.
        max_words: See :func:`chunk`.
        max_queries: Keep a random sample of so many queries; the corpus stays.
        kind: Insist on ``"titles"`` or ``"sentences"``.
        seed: Of the sample.

    Raises:
        ValueError: If an argument is out of range.
        DataError: If there are no documents, or no queries of the kind.

    Example:
        >>> pages = [
        ...     Document("", "tea", sections=(Section("Green tea", "Let it cool to 80 degrees."),)),
        ...     Document("", "bread", sections=(Section("Sourdough", "Feed it."), Section("See also", "Rye."))),
        ... ]
        >>> task = title_task(pages)
        >>> task.queries, task.relevant_docs, task.kind
        ({'q0': 'Green tea', 'q1': 'Sourdough'}, {'q0': {'tea#0'}, 'q1': {'bread#0'}}, 'titles')
    """
    if kind not in (None, "titles", "sentences"):
        raise ValueError(f"kind must be 'titles', 'sentences' or None, got {kind!r}.")
    if max_queries is not None and max_queries < 1:
        raise ValueError(f"max_queries must be at least 1, got {max_queries}.")
    kept = [document for document in _iterate(documents) if document.text.strip() or document.sections]
    if not kept:
        raise DataError("There are no documents, or all of them are empty: pass at least one text.")
    for attempt in ("titles", "sentences") if kind is None else (kind,):
        pairs, corpus = (_title_pairs if attempt == "titles" else _sentence_pairs)(kept, max_words)
        times = Counter(_fold(query) for query, _ in pairs)
        pairs = [(query, relevant) for query, relevant in pairs if times[_fold(query)] == 1]
        if pairs:
            break
    else:
        raise DataError(
            f"The {len(kept):,} documents give no queries by {kind or 'titles or sentences'}: pass documents with "
            "section titles that are not generic, or with chunks of two sentences or more."
        )
    if max_queries is not None and len(pairs) > max_queries:
        chosen = random.Random(seed).sample(range(len(pairs)), max_queries)
        pairs = [pairs[i] for i in sorted(chosen)]
    queries = {f"q{i}": query for i, (query, _) in enumerate(pairs)}
    relevant_docs = {f"q{i}": relevant for i, (_, relevant) in enumerate(pairs)}
    return TitleTask(queries, corpus, relevant_docs, kind=attempt)


class _Corpus:
    """Chunks by id, equal ones once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, text: str) -> str:
        """The id of the text, a new one unless it is known."""
        key = _fold(text)
        if key not in self._ids:
            self._ids[key] = f"{name}#{self._numbers[name]}"
            self._numbers[name] += 1
            self.texts[self._ids[key]] = text
        return self._ids[key]


def _id_name(document: Document, number: int) -> str:
    return " ".join(document.name.split()) or f"document {number}"


def _title_pairs(documents: Sequence[Document], max_words: int) -> tuple[list[tuple[str, set[str]]], dict[str, str]]:
    corpus = _Corpus()
    sections: list[tuple[str, set[str]]] = []
    for number, document in enumerate(documents):
        code = document.is_code
        for section in document.sections or (_as_section(document),):
            pieces = chunk(section.text, max_words, code=code)
            relevant = {corpus.add(_id_name(document, number), piece) for piece in pieces}
            sections.append((_NUMBERING.sub("", section.title, count=1), relevant))
    times = Counter(chain.from_iterable(relevant for _, relevant in sections))
    pairs = [(title, {chunk_id for chunk_id in relevant if times[chunk_id] == 1}) for title, relevant in sections]
    return [(title, relevant) for title, relevant in pairs if relevant and _asks(title)], corpus.texts


def _asks(title: str) -> bool:
    """Whether a title says what its section is about, and no other is likely to have."""
    generic = title.casefold().strip(" .:") in _GENERIC
    return sum(map(str.isalpha, title)) >= 2 and len(title.split()) <= 25 and not generic


def _as_section(document: Document) -> Section:
    """All of a document under its title, which may be its first line as well."""
    title = _plain_title(document.title or "")
    first, _, rest = document.text.lstrip().partition("\n")
    return Section(title, rest if title and _fold(first) == _fold(title) else document.text)


def _sentence_pairs(documents: Sequence[Document], max_words: int) -> tuple[list[tuple[str, set[str]]], dict[str, str]]:
    corpus = _Corpus()
    pairs: list[tuple[str, set[str]]] = []
    for number, document in enumerate(documents):
        code = document.is_code
        for piece in chunk(document.text, max_words, code=code):
            spans = [] if code else list(_sentences(piece, (0, len(piece))))
            query = " ".join(piece[slice(*spans[0])].split()) if len(spans) > 1 else ""
            if 4 <= _count_words(query) <= 60:
                rest = corpus.add(_id_name(document, number), piece[spans[1][0] :])
                pairs.append((query, {rest}))
            else:
                corpus.add(_id_name(document, number), piece)
    return pairs, corpus.texts
