"""HTML pages with their sections, whose titles ask for their chunks: Python's documentation."""

from __future__ import annotations

import hashlib
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from lxml import etree

from st_magnitude.data.documents import chunk, fold, trim_lines
from st_magnitude.data.retrieval import RetrievalData

_GENERIC_TITLES = """
abstract, acknowledgements, acknowledgments, acknowledgement, appendix, attributes, author,
authors, background, bibliography, bugs, changelog, changes, classes, conclusion, conclusions,
constants, contents, contributing, copyright, credits, description, discussion, example, examples,
exceptions, external links, faq, footnotes, functions, further reading, getting started, history,
index, install, installation, introduction, license, links, methods, miscellaneous, module
contents, name, navigation, note, notes, options, overview, parameters, quick start, quickstart,
raises, reference, references, related work, requirements, results, return value, returns, see
also, sources, summary, synopsis, table of contents, test, tests, title, todo, untitled, usage
"""
_GENERIC = frozenset(" ".join(_GENERIC_TITLES.split()).split(", "))
_NUMBERING = re.compile(r"^\d+\.(?:\d+\.?)*\s+(?=\D)")


@dataclass(frozen=True)
class Section:
    """A part of a page under its heading; subsections are sections of their own, and level 1 is the
    highest."""

    title: str
    text: str
    level: int = 1


@dataclass(frozen=True)
class Page:
    """The text of a page, with its headings, and its parts."""

    text: str
    name: str = ""
    title: str | None = None
    sections: tuple[Section, ...] = ()


def split_pages(
    pages: Iterable[Page], held_out: float, seed: int = 0
) -> tuple[list[Page], list[Page]]:
    """Splits by page: a hash of its words and the seed decides, so equal texts are on one side.

    Additional pages do not move the others (unless one side would be empty); the share is met only
    on average.

    Example:
        >>> pages = [Page(f"Text number {i}.") for i in range(100)]
        >>> train, held_out = split_pages(pages, held_out=0.2)
        >>> len(train), len(held_out)
        (80, 20)
    """
    kept = [page for page in pages if page.text.strip()]
    ranks = [
        int.from_bytes(
            hashlib.blake2b(f"{seed} {fold(page.text)}".encode(), digest_size=8).digest(), "big"
        )
        for page in kept
    ]
    distinct = sorted(set(ranks))
    limit = distinct[min(max(bisect_left(distinct, held_out * 2**64), 1), len(distinct) - 1)]
    train = [page for page, rank in zip(kept, ranks, strict=True) if rank >= limit]
    return train, [page for page, rank in zip(kept, ranks, strict=True) if rank < limit]


def title_task(
    pages: Iterable[Page], *, max_words: int, max_queries: int | None = None, seed: int = 0
) -> RetrievalData:
    """Makes a retrieval task from pages: section titles ask for the chunks of their sections.

    - Corpus: the chunks of all pages, each once, without the title lines.
    - Queries: titles of sections that have text of their own. Generic titles ("Introduction", "See
      also") and titles that occur more than once are left out. With ``max_queries``, a random
      sample; the corpus stays complete.
    - Relevant documents: the chunks of the section itself, without the chunks of its subsections,
      which have their own titles. A chunk that several sections share, such as a notice on every
      page, is relevant to no query.

    A page without sections counts as one section under its title; without a title, it is in the
    corpus only.

    Example:
        >>> pages = [
        ...     Page("", "tea", sections=(Section("Green tea", "Let it cool to 80 degrees."),)),
        ...     Page("", "bread", sections=(Section("Sourdough", "Feed it."), Section("Note", ""))),
        ... ]
        >>> task = title_task(pages, max_words=120)
        >>> task.queries, task.relevant
        ({'q0': 'Green tea', 'q1': 'Sourdough'}, {'q0': {'tea#0': 1}, 'q1': {'bread#0': 1}})
    """
    corpus: dict[str, str] = {}
    ids: dict[str, str] = {}  # of a chunk by its words: a text that is already there keeps its id
    numbers: Counter[str] = Counter()
    sections: list[tuple[str, set[str]]] = []  # a title and the ids of its chunks
    for page in pages:
        name = " ".join(page.name.split())
        for section in page.sections or (_as_section(page),):
            relevant = set()
            for piece in chunk(section.text, max_words):
                if (key := fold(piece)) not in ids:
                    ids[key] = f"{name}#{numbers[name]}"
                    numbers[name] += 1
                    corpus[ids[key]] = piece
                relevant.add(ids[key])
            sections.append((_NUMBERING.sub("", section.title, count=1), relevant))
    times = Counter(chain.from_iterable(relevant for _, relevant in sections))
    pairs = [
        (title, {chunk_id for chunk_id in relevant if times[chunk_id] == 1})
        for title, relevant in sections
    ]
    pairs = [(title, relevant) for title, relevant in pairs if relevant and _asks(title)]
    repeated = Counter(fold(title) for title, _ in pairs)
    pairs = [(title, relevant) for title, relevant in pairs if repeated[fold(title)] == 1]
    if max_queries is not None and len(pairs) > max_queries:
        pairs = [
            pairs[i] for i in sorted(random.Random(seed).sample(range(len(pairs)), max_queries))
        ]
    queries = {f"q{i}": title for i, (title, _) in enumerate(pairs)}
    return RetrievalData(
        queries, corpus, {f"q{i}": relevant for i, (_, relevant) in enumerate(pairs)}
    )


def _asks(title: str) -> bool:
    """Whether a title tells its section from others and can serve as a query."""
    generic = title.casefold().strip(" .:") in _GENERIC
    return sum(map(str.isalpha, title)) >= 2 and len(title.split()) <= 25 and not generic


def _as_section(page: Page) -> Section:
    """A whole page as one section under its title, which is removed from the text if it is the
    first line."""
    title = " ".join((page.title or "").split())
    first, _, rest = page.text.lstrip().partition("\n")
    return Section(title, rest if title and fold(first) == fold(title) else page.text)


# --- reading --------------------------------------------------------------------------------------

_HIDDEN_TAGS = (
    "script style nav footer header noscript template svg math button select textarea iframe"
)
_DROPPED = frozenset(_HIDDEN_TAGS.split())
_BLOCK_TAGS = """
    p div section article main aside ul ol li dl dt dd table tr thead tbody caption blockquote
    figure figcaption address details summary form fieldset hr pre body html head h1 h2 h3 h4
    h5 h6 title
"""
_BLOCKS = frozenset(_BLOCK_TAGS.split())
_SEPARATORS = {"br": "\n", "td": " ", "th": " "}


def parse(text: str) -> tuple[str | None, str, list[Section]]:
    """Title, text and sections of a page, without scripts, styles, navigation, headers, footers and
    hidden parts."""
    parser = etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True
    )
    root = etree.fromstring(f"<html>{text}".encode(), parser)
    # the closest block of every open tag; None inside of what is dropped
    blocks: list[Any] = [root]
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
    headings: list[tuple[int, str, int]] = []  # place, title, level
    for block, group in groupby(pieces, key=lambda piece: piece[0]):
        if block is None:
            continue
        joined = "".join(part for _, part in group)
        if block.tag == "pre":
            joined = trim_lines(joined)
        else:
            joined = "\n".join(
                filter(None, (" ".join(line.split()) for line in joined.split("\n")))
            )
        if block.tag == "title":
            title = title or " ".join(joined.split())
        elif joined:
            if re.fullmatch("h[1-6]", block.tag):
                headings.append((len(paragraphs), joined, int(block.tag[1])))
            paragraphs.append(joined)
    return title or None, "\n\n".join(paragraphs), _sections(paragraphs, headings)


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
    return (
        text or "" if block is not None and block.tag == "pre" else re.sub(r"\s+", " ", text or "")
    )


def read_pages(folder: str | Path) -> Iterator[Page]:
    """The pages of a folder and its subfolders, sorted by name."""
    folder = Path(folder)
    names = sorted(file.relative_to(folder) for file in folder.rglob("*.html"))
    for name in names:
        if any(part.startswith(".") for part in name.parts):
            continue
        title, text, sections = parse((folder / name).read_text(encoding="utf-8-sig"))
        if text.strip():
            highest = [
                section.title for section in sections if section.title and section.level == 1
            ]
            yield Page(
                text, name.as_posix(), highest[0] if highest else title, sections=tuple(sections)
            )


def _sections(paragraphs: list[str], headings: list[tuple[int, str, int]]) -> list[Section]:
    """The sections before the first heading and after each heading; an empty list if there are no
    headings."""
    if not headings:
        return []
    highest = min(level for *_, level in headings)
    found = [Section("", trim_lines("\n\n".join(paragraphs[: headings[0][0]])))]
    ends = [first for first, *_ in headings[1:]] + [len(paragraphs)]
    for (first, title, level), end in zip(headings, ends, strict=True):
        text = trim_lines("\n\n".join(paragraphs[first + 1 : end]))
        found.append(Section(" ".join(title.split()), text, level - highest + 1))
    return found if found[0].text else found[1:]
