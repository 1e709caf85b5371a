"""A retrieval task from documents alone: section titles ask for their chunks."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from st_magnitude.corpus.chunking import chunk, count_words, fold, sentences
from st_magnitude.corpus.documents import Document, Documents, iterate_documents
from st_magnitude.corpus.formats import Section, names
from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData

__all__ = ["TitleTask", "title_task"]


@dataclass(repr=False)
class TitleTask(RetrievalData):
    """A retrieval task from documents; ``kind`` says what asks: ``"titles"`` of sections or first ``"sentences"``."""

    kind: str = "titles"


_GENERIC = names(
    """
    abstract, acknowledgements, acknowledgments, acknowledgement, appendix, attributes, author, authors, background,
    bibliography, bugs, changelog, changes, classes, conclusion, conclusions, constants, contents, contributing,
    copyright, credits, description, discussion, example, examples, exceptions, external links, faq, footnotes,
    functions, further reading, getting started, history, index, install, installation, introduction, license, links,
    methods, miscellaneous, module contents, name, navigation, note, notes, options, overview, parameters, quick start,
    quickstart, raises, reference, references, related work, requirements, results, return value, returns, see also,
    sources, summary, synopsis, table of contents, test, tests, title, todo, untitled, usage
    """,
    separator=",",
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
    """Makes a retrieval task from documents: section titles ask for the chunks of their sections.

    - Corpus: the chunks of all documents, each once, without the title lines.
    - Queries: titles of sections that have text of their own. Generic titles ("Introduction", "See also") and titles
      that occur more than once are left out.
    - Relevant documents: the chunks of the section itself, without those of its subsections, which have their own
      titles. A chunk that several sections share, such as a notice on every page, is relevant to no query.

    A document without sections counts as one section under its title; without a title, it is in the corpus only.

    If there are no titles at all, the first sentence of each chunk of prose asks for the rest of the chunk
    (:attr:`TitleTask.kind` is ``"sentences"``). That task is easier and only good for comparing models.

    Args:
        documents: As for :func:`build_groups`; hold them out from training with :func:`split_documents`.
        max_words: Largest number of words in a chunk, see :func:`chunk`.
        max_queries: Number of queries in a random sample, if there are more; the corpus stays complete.
        kind: ``"titles"`` or ``"sentences"``, to allow only that kind of queries.
        seed: Seed for the sample.

    Raises:
        ValueError: If an argument is out of range.
        DataError: If there are no documents, or no queries of the kind.

    Example:
        >>> pages = [
        ...     Document("", "tea", sections=(Section("Green tea", "Let it cool to 80 degrees."),)),
        ...     Document("", "bread", sections=(Section("Sourdough", "Feed it."), Section("See also", "Rye."))),
        ... ]
        >>> task = title_task(pages)
        >>> task.queries, task.relevant, task.kind
        ({'q0': 'Green tea', 'q1': 'Sourdough'}, {'q0': {'tea#0': 1}, 'q1': {'bread#0': 1}}, 'titles')
    """
    if kind not in (None, "titles", "sentences"):
        raise ValueError(f"kind must be 'titles', 'sentences' or None, got {kind!r}.")
    if max_queries is not None and max_queries < 1:
        raise ValueError(f"max_queries must be at least 1, got {max_queries}.")
    kept = [document for document in iterate_documents(documents) if document.text.strip() or document.sections]
    if not kept:
        raise DataError("There are no documents, or all of them are empty; pass at least one text.")
    for attempt in ("titles", "sentences") if kind is None else (kind,):
        pairs, corpus = (_title_pairs if attempt == "titles" else _sentence_pairs)(kept, max_words)
        times = Counter(fold(query) for query, _ in pairs)
        pairs = [(query, relevant) for query, relevant in pairs if times[fold(query)] == 1]
        if pairs:
            break
    else:
        raise DataError(
            f"The {len(kept):,} documents give no queries from {kind or 'titles or sentences'}; pass documents with "
            "section titles that are not generic, or with chunks of two sentences or more."
        )
    if max_queries is not None and len(pairs) > max_queries:
        chosen = random.Random(seed).sample(range(len(pairs)), max_queries)
        pairs = [pairs[i] for i in sorted(chosen)]
    queries = {f"q{i}": query for i, (query, _) in enumerate(pairs)}
    relevant = {f"q{i}": relevant for i, (_, relevant) in enumerate(pairs)}
    return TitleTask(queries, corpus, relevant, kind=attempt)


class _Corpus:
    """Chunks by id, without duplicates."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, text: str) -> str:
        """The id of a text; a text that is already there keeps its id."""
        key = fold(text)
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
    """Whether a title tells its section from others, so that it can serve as a query."""
    generic = title.casefold().strip(" .:") in _GENERIC
    return sum(map(str.isalpha, title)) >= 2 and len(title.split()) <= 25 and not generic


def _as_section(document: Document) -> Section:
    """A whole document as one section under its title, which is removed from the text if it is the first line."""
    title = " ".join((document.title or "").split())
    first, _, rest = document.text.lstrip().partition("\n")
    return Section(title, rest if title and fold(first) == fold(title) else document.text)


def _sentence_pairs(documents: Sequence[Document], max_words: int) -> tuple[list[tuple[str, set[str]]], dict[str, str]]:
    corpus = _Corpus()
    pairs: list[tuple[str, set[str]]] = []
    for number, document in enumerate(documents):
        code = document.is_code
        for piece in chunk(document.text, max_words, code=code):
            spans = [] if code else list(sentences(piece, (0, len(piece))))
            query = " ".join(piece[slice(*spans[0])].split()) if len(spans) > 1 else ""
            if 4 <= count_words(query) <= 60:
                rest = corpus.add(_id_name(document, number), piece[spans[1][0] :])
                pairs.append((query, {rest}))
            else:
                corpus.add(_id_name(document, number), piece)
    return pairs, corpus.texts
