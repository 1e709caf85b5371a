"""Documents from files of text or code, and chunks of whole sentences or blocks of code."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypedDict

from st_magnitude._checks import InputError, at_least, needs
from st_magnitude.data.beir import DataError

logger = logging.getLogger(__name__)

PROSE = (".md", ".markdown", ".txt", ".text", ".rst")
_LANGUAGES = """
    .py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cs .java .kt .kts .scala .groovy .go .rs .swift .js
    .jsx .mjs .cjs .ts .tsx .php .rb .pl .pm .lua .r .jl .m .mm .sh .bash .zsh .ps1 .sql .hs .ml
    .mli .fs .ex .exs .erl .clj .lisp .el .dart .f90 .f .asm .s .cu .cuh .proto .zig .nim .v .vhd
    .tcl
"""
_CODE = tuple(_LANGUAGES.split())

Documents = str | Path | Iterable[str | Mapping[str, object]]


class Document(TypedDict):
    text: str
    code: bool


def read_documents(path: str | Path) -> Iterator[Document]:
    """Reads a file of text, Markdown or code, or those of a folder and its subfolders, by name.

    A file is one document. Hidden files and blank texts are left out, and so are, with a warning, a
    folder's files of other kinds, such as PDF, and those that are not UTF-8.

    Raises:
        FileNotFoundError: If there is no such file or folder, or none of these files in it.
        DataError: If a file that was named is not UTF-8.
    """
    path = Path(path)
    files, others = files_of(path, PROSE + _CODE)
    if not files:
        raise FileNotFoundError(
            f"{str(path)!r} is neither a file of text, Markdown or source code nor a folder with "
            "such files. Pass a text itself in a list, [text], and a table as mappings with the "
            "key text, such as Dataset.from_json(path)."
        )
    if others:
        kinds = Counter(file.suffix.lower() or "(none)" for file in others).most_common(9)
        counts = ", ".join(f"{number:,} {kind}" for kind, number in kinds)
        logger.warning(
            f"Left out the files of {path} with other suffixes: {counts}. To train on them, convert"
            " them to text."
        )
    skipped = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8-sig")  # line ends become "\n"
        except UnicodeDecodeError:
            skipped.append(file.name)
            continue
        if text.strip():
            yield {"text": text, "code": file.suffix.lower() in _CODE}
    if skipped and path.is_file():
        raise DataError(f"{path} is not UTF-8; save the file as such.")
    if skipped:
        logger.warning(
            f"Left out {len(skipped):,} files of {path} that are not UTF-8, such as {skipped[0]}."
        )


def files_of(path: Path, suffixes: tuple[str, ...]) -> tuple[list[Path], list[Path]]:
    """The files of a folder and its subfolders that are not hidden, sorted: those with one of the
    suffixes, and the others. A file stands for itself."""
    files = [path]
    if not path.is_file():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in files if "/." not in f"/{file.relative_to(path).as_posix()}"]
    found = [file for file in files if file.name.lower().endswith(suffixes)]
    return found, [file for file in files if not file.name.lower().endswith(suffixes)]


def as_document(row: object, where: str) -> Document:
    if isinstance(row, str):
        return {"text": row, "code": False}
    if not isinstance(row, Mapping) or not isinstance(row.get("text"), str):
        found = sorted(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
        raise InputError(f"{where}: needs a string under the key 'text', but is {found}.")
    return {"text": row["text"], "code": bool(row.get("code"))}


Span = tuple[int, int]

# kana and ideographs, each of which is a word
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED_WORD = re.compile(rf"[{_UNSPACED}]")
_WORD = re.compile(rf"[{_UNSPACED}][\u3001-\u303f\uff00-\uff65]*|[^\s{_UNSPACED}]+")
# a list item, a heading, a row of a table
_ITEM = r"(?:[-*+•‣–][^\S\n]|\(?\d{1,3}[.)][^\S\n]|\#{1,6}[^\S\n]|\|)"
_PARAGRAPH_END = re.compile(rf"\n[^\S\n]*\n\s*|\n(?=[^\S\n]*{_ITEM})")
_UNSPACED_STOPS = "。！？｡」』”’）"


def chunk(text: str, max_words: int = 120, *, code: bool = False) -> list[str]:
    """Cuts a text into chunks of complete sentences, in order, without losing words.

    Chunks are slices of the text, as long as possible and never blank. The package sentencex finds
    the sentences; a blank line and the start of a list item end one too. A sentence of more than
    ``max_words`` is cut between lines, or between words where a line is too long. Code is cut
    between blocks at the margin, then at blank lines, then at lines.

    Args:
        max_words: Largest number of words in a chunk, of which an ideograph or a kana is one.

    Raises:
        ValueError: If ``max_words`` is below 1.

    Example:
        >>> chunk("Dr. Smith came at 3.15 p.m. with J. K. Jones. They left.", max_words=10)
        ['Dr. Smith came at 3.15 p.m. with J. K. Jones.', 'They left.']

    Source: Revela (Cai et al.), section 4.1.
    """
    at_least("max_words", max_words, 1)
    spans = _pack(text, (0, len(text)), _CODE_LEVELS if code else _PROSE_LEVELS, max_words)
    chunks = [trim_lines(text[a:b]) if code else text[a:b].strip() for a, b in spans]
    return [piece for piece in chunks if piece]


def _pack(
    text: str, whole: Span, levels: Sequence[Callable[[str, Span], Iterable[Span]]], max_words: int
) -> list[Span]:
    """Joins neighbouring units of the first level; the next level splits one that does not fit."""
    packed: list[Span] = []
    room = 0  # words that the last packed span could still take
    for unit in levels[0](text, whole):
        words = count_words(text[slice(*unit)])
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
            room = max_words - count_words(text[slice(*packed[-1])])
    return packed


def sentences(text: str, whole: Span) -> Iterator[Span]:
    """Spans of the sentences, without the whitespace after them."""
    with needs("Cutting text into sentences", "table"):
        from sentencex import get_sentence_boundaries  # type: ignore[attr-defined]
    for paragraph, end in _cut(_PARAGRAPH_END, text, whole):
        begin = paragraph
        # sentencex fails at some of the rarer whitespace
        spaced = re.sub(r"\s", " ", text[paragraph:end])
        for boundary in get_sentence_boundaries("en", spaced):
            stop = paragraph + boundary["end_index"]
            last = text[stop - 1]
            if stop < end and not last.isspace() and last not in _UNSPACED_STOPS:
                continue  # inside a word, such as os.Path
            if sentence := text[begin:stop].rstrip():
                yield begin, begin + len(sentence)
            begin = stop


def _cut(separator: re.Pattern[str], text: str, whole: Span) -> Iterator[Span]:
    """Spans between the matches of a pattern."""
    begin, end = whole
    for gap in separator.finditer(text, begin, end):
        if gap.start() > begin:
            yield begin, gap.start()
        begin = gap.end()
    if begin < end:
        yield begin, end


def split_words(text: str, whole: Span) -> Iterator[Span]:
    return (match.span() for match in _WORD.finditer(text, *whole))


def count_words(text: str) -> int:
    if text.isascii() or not _UNSPACED_WORD.search(text):
        return len(text.split())
    return sum(1 for _ in _WORD.finditer(text))


def first_half(text: str) -> str:
    """The first ceil(n / 2) of n words, with the whitespace before and between them."""
    words = list(split_words(text, (0, len(text))))
    return text[: words[(len(words) - 1) // 2][1]] if words else text


def trim_lines(text: str) -> str:
    """The text without blank lines around it; the indentation of its first line stays."""
    return re.sub(r"\A(?:[^\S\n]*\n)+", "", text).rstrip()


def fold(text: str) -> str:
    """A text in lower case with single spaces, by which equal chunks are found."""
    return " ".join(text.split()).casefold()


_BLANK_LINES = r"\n(?:[^\S\n]*\n)+"
_BLOCKS = partial(_cut, re.compile(_BLANK_LINES + r"(?!\s)"))  # which begin at the margin
_PARAGRAPHS = partial(_cut, re.compile(_BLANK_LINES))
_LINES = partial(_cut, re.compile(r"\n"))
_PROSE_LEVELS = (sentences, _LINES, split_words)
_CODE_LEVELS = (_BLOCKS, _PARAGRAPHS, _LINES, split_words)
