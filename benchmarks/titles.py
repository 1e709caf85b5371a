"""A retrieval task from pages: section titles ask for their chunks, for the studies on Python's documentation."""

from __future__ import annotations

import hashlib
import random
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.revela.documents import chunk, fold

_GENERIC_TITLES = """
abstract, acknowledgements, acknowledgments, acknowledgement, appendix, attributes, author, authors, background,
bibliography, bugs, changelog, changes, classes, conclusion, conclusions, constants, contents, contributing,
copyright, credits, description, discussion, example, examples, exceptions, external links, faq, footnotes,
functions, further reading, getting started, history, index, install, installation, introduction, license, links,
methods, miscellaneous, module contents, name, navigation, note, notes, options, overview, parameters, quick start,
quickstart, raises, reference, references, related work, requirements, results, return value, returns, see also,
sources, summary, synopsis, table of contents, test, tests, title, todo, untitled, usage
"""
_GENERIC = frozenset(name.strip() for name in _GENERIC_TITLES.split(","))
_NUMBERING = re.compile(r"^\d+\.(?:\d+\.?)*\s+(?=\D)")


@dataclass(frozen=True)
class Section:
    """A part of a page under its heading; subsections are sections of their own, and level 1 is the highest."""

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


def split_pages(pages: Iterable[Page], held_out: float, seed: int = 0) -> tuple[list[Page], list[Page]]:
    """Splits by page: a hash of its words and the seed decides, so equal texts are on one side.

    Additional pages do not move the others (unless one side would be empty); the share is met only on average.

    Example:
        >>> train, held_out = split_pages([Page(f"Text number {i}.") for i in range(100)], held_out=0.2)
        >>> len(train), len(held_out)
        (80, 20)
    """
    kept = [page for page in pages if page.text.strip()]
    ranks = [
        int.from_bytes(hashlib.blake2b(f"{seed} {fold(page.text)}".encode(), digest_size=8).digest(), "big")
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
    - Queries: titles of sections that have text of their own. Generic titles ("Introduction", "See also") and titles
      that occur more than once are left out. With ``max_queries``, a random sample; the corpus stays complete.
    - Relevant documents: the chunks of the section itself, without the chunks of its subsections, which have their own
      titles. A chunk that several sections share, such as a notice on every page, is relevant to no query.

    A page without sections counts as one section under its title; without a title, it is in the corpus only.

    Example:
        >>> pages = [
        ...     Page("", "tea", sections=(Section("Green tea", "Let it cool to 80 degrees."),)),
        ...     Page("", "bread", sections=(Section("Sourdough", "Feed it."), Section("See also", "Rye."))),
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
    pairs = [(title, {chunk_id for chunk_id in relevant if times[chunk_id] == 1}) for title, relevant in sections]
    pairs = [(title, relevant) for title, relevant in pairs if relevant and _asks(title)]
    repeated = Counter(fold(title) for title, _ in pairs)
    pairs = [(title, relevant) for title, relevant in pairs if repeated[fold(title)] == 1]
    if max_queries is not None and len(pairs) > max_queries:
        pairs = [pairs[i] for i in sorted(random.Random(seed).sample(range(len(pairs)), max_queries))]
    queries = {f"q{i}": title for i, (title, _) in enumerate(pairs)}
    return RetrievalData(queries, corpus, {f"q{i}": relevant for i, (_, relevant) in enumerate(pairs)})


def _asks(title: str) -> bool:
    """Whether a title tells its section from others and can serve as a query."""
    generic = title.casefold().strip(" .:") in _GENERIC
    return sum(map(str.isalpha, title)) >= 2 and len(title.split()) <= 25 and not generic


def _as_section(page: Page) -> Section:
    """A whole page as one section under its title, which is removed from the text if it is the first line."""
    title = " ".join((page.title or "").split())
    first, _, rest = page.text.lstrip().partition("\n")
    return Section(title, rest if title and fold(first) == fold(title) else page.text)
