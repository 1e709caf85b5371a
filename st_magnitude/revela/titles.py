"""A retrieval task from documents alone: section titles ask for their chunks."""

from __future__ import annotations

import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.revela.chunks import chunk, count_words, fold, sentences
from st_magnitude.revela.documents import Document, Documents, Section, iterate_documents

__all__ = ["title_task"]

logger = logging.getLogger(__name__)

Pairs = list[tuple[str, set[str]]]  # a query and the ids of its chunks

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


def title_task(
    documents: Documents, *, max_words: int = 120, max_queries: int | None = None, seed: int = 0
) -> RetrievalData:
    """Makes a retrieval task from documents: section titles ask for the chunks of their sections.

    - Corpus: the chunks of all documents, each once, without the title lines.
    - Queries: titles of sections that have text of their own. Generic titles ("Introduction", "See also") and titles
      that occur more than once are left out.
    - Relevant documents: the chunks of the section itself, without the chunks of its subsections, which have their own
      titles. A chunk that several sections share, such as a notice on every page, is relevant to no query.

    A document without sections counts as one section under its title; without a title, it is in the corpus only.

    If there are no titles at all, the first sentence of each chunk of prose asks for the rest of the chunk, with a
    warning: this task is easier and only good for comparing models.

    Args:
        documents: As for :func:`build_groups`; hold them out from training with :func:`split_documents`.
        max_words: Largest number of words in a chunk, see :func:`chunk`.
        max_queries: Number of queries in a random sample, if there are more; the corpus stays complete.
        seed: Seed for the sample.

    Raises:
        ValueError: If the documents give no queries.

    Example:
        >>> pages = [
        ...     Document("", "tea", sections=(Section("Green tea", "Let it cool to 80 degrees."),)),
        ...     Document("", "bread", sections=(Section("Sourdough", "Feed it."), Section("See also", "Rye."))),
        ... ]
        >>> task = title_task(pages)
        >>> task.queries, task.relevant
        ({'q0': 'Green tea', 'q1': 'Sourdough'}, {'q0': {'tea#0': 1}, 'q1': {'bread#0': 1}})
    """
    kept = list(iterate_documents(documents))
    pairs, corpus = _title_pairs(kept, max_words)
    if not pairs:
        logger.warning(
            "The documents have no section titles; first sentences ask for the rest of their chunks instead."
        )
        pairs, corpus = _sentence_pairs(kept, max_words)
    if not pairs:
        raise ValueError(
            f"The {len(kept):,} documents give no queries; pass documents with section titles that are not generic, or "
            "with chunks of two sentences or more."
        )
    if max_queries is not None and len(pairs) > max_queries:
        chosen = random.Random(seed).sample(range(len(pairs)), max_queries)
        pairs = [pairs[i] for i in sorted(chosen)]
    queries = {f"q{i}": query for i, (query, _) in enumerate(pairs)}
    return RetrievalData(queries, corpus, {f"q{i}": relevant for i, (_, relevant) in enumerate(pairs)})


class _Corpus:
    """Chunks by id, without duplicates."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def add(self, document: Document, number: int, text: str) -> str:
        """The id of a text; a text that is already there keeps its id."""
        key = fold(text)
        if key not in self._ids:
            name = " ".join(document.name.split()) or f"document {number}"
            self._ids[key] = f"{name}#{self._numbers[name]}"
            self._numbers[name] += 1
            self.texts[self._ids[key]] = text
        return self._ids[key]


def _distinct(pairs: Pairs) -> Pairs:
    times = Counter(fold(query) for query, _ in pairs)
    return [(query, relevant) for query, relevant in pairs if times[fold(query)] == 1]


def _title_pairs(documents: Sequence[Document], max_words: int) -> tuple[Pairs, dict[str, str]]:
    corpus = _Corpus()
    sections: Pairs = []
    for number, document in enumerate(documents):
        for section in document.sections or (_as_section(document),):
            pieces = chunk(section.text, max_words, code=document.code)
            relevant = {corpus.add(document, number, piece) for piece in pieces}
            sections.append((_NUMBERING.sub("", section.title, count=1), relevant))
    times = Counter(chain.from_iterable(relevant for _, relevant in sections))
    pairs = [(title, {chunk_id for chunk_id in relevant if times[chunk_id] == 1}) for title, relevant in sections]
    return _distinct([(title, relevant) for title, relevant in pairs if relevant and _asks(title)]), corpus.texts


def _asks(title: str) -> bool:
    """Whether a title tells its section from others and can serve as a query."""
    generic = title.casefold().strip(" .:") in _GENERIC
    return sum(map(str.isalpha, title)) >= 2 and len(title.split()) <= 25 and not generic


def _as_section(document: Document) -> Section:
    """A whole document as one section under its title, which is removed from the text if it is the first line."""
    title = " ".join((document.title or "").split())
    first, _, rest = document.text.lstrip().partition("\n")
    return Section(title, rest if title and fold(first) == fold(title) else document.text)


def _sentence_pairs(documents: Sequence[Document], max_words: int) -> tuple[Pairs, dict[str, str]]:
    corpus = _Corpus()
    pairs: Pairs = []
    for number, document in enumerate(documents):
        for piece in chunk(document.text, max_words, code=document.code):
            spans = [] if document.code else list(sentences(piece, (0, len(piece))))
            query = " ".join(piece[slice(*spans[0])].split()) if len(spans) > 1 else ""
            if 4 <= count_words(query) <= 60:
                pairs.append((query, {corpus.add(document, number, piece[spans[1][0] :])}))
            else:
                corpus.add(document, number, piece)
    return _distinct(pairs), corpus.texts
