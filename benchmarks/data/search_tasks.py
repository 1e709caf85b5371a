"""The data of the magnitude study: two training sets, and seven search tasks in and out of domain.

- wordnet: a lemma asks for its definitions (held-out synsets);
- docstrings: what an object is for asks for its description, and its other sections never answer;
- foldoc: a headword of computing asks for its entry;
- man pages: the short description asks how the DESCRIPTION of the page begins;
- python docs: a section title asks for the chunks of the section;
- hubs: a lemma asks for the definition of its hypernym: one document answers many queries.

The training sets are the other synsets of WordNet (in-batch negatives only) and the docstrings of
other packages (each query with an explicit negative that is never relevant). The Python
documentation is used without its library reference, because the docstrings of the standard library
share its wording. All texts come from packages of Debian and from the installed Python packages.
"""

from __future__ import annotations

import gzip
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from benchmarks.data.debian import fetch
from benchmarks.data.docstrings import docstring_task
from benchmarks.data.lexicons import (
    Entry,
    foldoc,
    leaks,
    merge,
    retrieval,
    synsets,
    wordnet,
)
from benchmarks.data.python_docs import read_pages, title_task
from datasets import Dataset

from st_magnitude.data.retrieval import RetrievalData

# of all data: the seeds of the study are those of training, and every model answers the same
# queries
SEED = 0
TRAIN_SETS = ("wordnet", "docstrings")


@dataclass
class Suite:
    """All data of the study.

    Attributes:
        train: Name to rows, or to rows by part of speech (batches are then homogeneous).
        dev: By the same names, for every choice.
        tests: Name to task, for the figures.
    """

    train: dict[str, Dataset | dict[str, Dataset]]
    dev: dict[str, RetrievalData]
    tests: dict[str, RetrievalData]

    def shrunk(self, num_queries: int, corpus_size: int) -> Suite:
        """Smaller tasks for a slow model; the same training data."""

        def small(tasks: dict[str, RetrievalData]) -> dict[str, RetrievalData]:
            return {name: shrink(x, num_queries, corpus_size, SEED) for name, x in tasks.items()}

        return Suite(self.train, small(self.dev), small(self.tests))


def build_suite() -> Suite:
    """Fetch what is missing and build everything."""
    sizes = {"num_test_queries": 400, "corpus_size": 1500}
    sizes |= {"num_dev_queries": 200, "dev_corpus_size": 800}
    lemmas, dev, test = wordnet(fetch("wordnet-base"), SEED, **sizes)
    calls = docstring_task()
    html = fetch("python3.11-doc") / "usr/share/doc/python3.11/html"
    chapters = ("tutorial", "howto", "faq", "reference", "using", "extending")
    pages = chain.from_iterable(read_pages(html / chapter) for chapter in chapters)
    tests = {
        "wordnet": test,
        "docstrings": calls.test,
        "foldoc": foldoc(fetch("dict-foldoc"), SEED, num_queries=300, corpus_size=1000),
        "man pages": man_pages([fetch(package) for package in ("manpages", "manpages-dev")]),
        "python docs": shrink(title_task(pages, max_words=60), 300, 1200, SEED, most=4),
        "hubs": hubs(fetch("wordnet-base"), set(test.corpus)),
    }
    train: dict[str, Dataset | dict[str, Dataset]] = {
        "wordnet": lemmas,
        "docstrings": calls.train.triplets(1, SEED),
    }
    return Suite(train, {"wordnet": dev, "docstrings": calls.dev}, tests)


# --- smaller tasks --------------------------------------------------------------------------------


def shrink(
    task: RetrievalData, num_queries: int, corpus_size: int, seed: int, most: int | None = None
) -> RetrievalData:
    """A sample of the queries with all that is relevant to them, and other documents.

    There may be fewer queries: as many as leave half of the corpus to others. With ``most``, those
    that have more relevant documents are left out.

    Example:
        >>> corpus = {f"d{i}": str(i) for i in range(9)}
        >>> relevant = {"a": {"d1"}, "b": {"d2"}}
        >>> task = RetrievalData({"a": "?", "b": "!"}, corpus, relevant, {"a": {"d3"}})
        >>> shrink(task, 1, 4, seed=0)
        RetrievalData(1 query, 4 documents, 1 relevant pair)
    """
    rng = random.Random(seed)
    queries: dict[str, str] = {}
    kept: set[str] = set()
    for query in rng.sample(sorted(task.queries), len(task.queries)):
        wanted = set(task.relevant.get(query, ()))
        if (
            0 < len(wanted) <= (most or len(wanted))
            and len(queries) < num_queries
            and len(kept | wanted) <= corpus_size // 2
        ):
            queries[query], kept = task.queries[query], kept | wanted
    others = [document for document in sorted(task.corpus) if document not in kept]
    kept |= set(rng.sample(others, min(len(others), corpus_size - len(kept))))
    return RetrievalData(
        queries,
        {document: text for document, text in task.corpus.items() if document in kept},
        {query: task.relevant[query] for query in queries},
        {query: found for query in queries if (found := task.negatives.get(query, set()) & kept)},
    )


def answers_only(task: RetrievalData) -> RetrievalData:
    """The same queries over the documents that are relevant to one of them.

    Example:
        >>> answers_only(RetrievalData({"q": "?"}, {"a": "yes", "b": "no"}, {"q": {"a"}}))
        RetrievalData(1 query, 1 document, 1 relevant pair)
    """
    answers = set().union(*task.relevant.values())
    corpus = {document: text for document, text in task.corpus.items() if document in answers}
    return RetrievalData(task.queries, corpus, task.relevant)


# --- man pages ------------------------------------------------------------------------------------


def man_pages(
    folders: Iterable[Path], num_queries: int = 300, corpus_size: int = 1000
) -> RetrievalData:
    """The short description of a manual page searches for the beginning of its DESCRIPTION."""
    files = sorted(
        path for folder in folders for path in Path(folder, "usr/share/man").glob("man[1-8]/*.gz")
    )
    entries = []
    for path in files:
        page = man_page(gzip.decompress(path.read_bytes()).decode("utf-8", "replace"))
        if page is not None and len(page[1].split()) >= 8:
            entries.append(
                Entry(path.name.removesuffix(".gz"), (page[0],), page[1], path.parent.name)
            )
    return retrieval(merge(entries), num_queries, corpus_size, SEED)


_PARAGRAPH = {"PP", "P", "LP", "TP", "IP", "SS", "RS", "RE", "HP", "TQ"}
_FONTS = {"B", "I", "SM", "SB"}
_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
_DISPLAYS = {"nf": "fi", "EX": "EE", "TS": "TE"}
_ESCAPES = (
    (re.compile(r'\\".*'), ""),
    (re.compile(r"\\f(?:\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&|^%/,:c]"), ""),
    (re.compile(r"\\\((?:aq|cq|oq)|\\\[aq\]"), "'"),
    (re.compile(r"\\\((?:dq|lq|rq)"), '"'),
    (re.compile(r"\\\((?:em|en)"), "-"),
    (re.compile(r"\\\(..|\\\[[^\]]*\]|\\\*(?:\(..|\[[^\]]*\]|.)"), ""),
    (re.compile(r"\\[ ~0]"), " "),
    (re.compile(r"\\e|\\\\"), r"\\"),
    (re.compile(r"\\(.)"), r"\1"),
)


def man_page(source: str, max_words: int = 60) -> tuple[str, str] | None:
    r"""Short description and the beginning of the DESCRIPTION as plain text; None for a link to
    another page.

    Example:
        >>> head = ".SH NAME\nqsort \\- sort an array\n.SH DESCRIPTION\n"
        >>> man_page(f"{head}The\n.BR qsort ()\nfunction sorts.")
        ('sort an array', 'The qsort() function sorts.')
    """
    sections: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in source.splitlines():
        if line.startswith(".SH"):
            name = _plain(line[3:]).strip(' "').upper()
        elif not line.startswith(('.\\"', "'")):
            sections[name].append(line)
    _, dash, title = " ".join(filter(None, map(_roff_line, sections["NAME"]))).partition(" - ")
    words = _paragraphs(sections["DESCRIPTION"]).split()
    return (title.strip(), " ".join(words[:max_words])) if dash and words else None


def _paragraphs(lines: Iterable[str]) -> str:
    """The prose of a section: what stands in displays, tables and code is left out."""
    found: list[str] = []
    until: str | None = None
    for line in lines:
        macro = line[1:].split(" ", 1)[0] if line.startswith(".") else ""
        if until is not None:
            until = None if macro == until else until
        elif macro in _DISPLAYS:
            until = _DISPLAYS[macro]
        else:
            found.append(_roff_line(line))
    return " ".join(" ".join(found).split())


def _roff_line(line: str) -> str:
    if not line.startswith("."):
        return _plain(line)
    macro, _, rest = line[1:].partition(" ")
    if macro not in _FONTS | _ALTERNATING:
        return ""
    pieces = ["".join(piece) for piece in re.findall(r'"((?:[^"]|"")*)"|((?:\\ |\S)+)', rest)]
    return _plain(("" if macro in _ALTERNATING else " ").join(pieces))


def _plain(text: str) -> str:
    for pattern, replacement in _ESCAPES:
        text = pattern.sub(replacement, text)
    return text


# --- documents that answer many queries -----------------------------------------------------------


def hubs(
    folder: Path,
    held_out: set[str],
    num_queries: int = 360,
    corpus_size: int = 600,
    per_hub: tuple[int, int] = (4, 12),
) -> RetrievalData:
    """Lemmas search for the definition of their direct hypernym, a noun that the training has not
    seen.

    Args:
        folder: Holds ``usr/share/wordnet``.
        held_out: Synsets that may be documents.
        num_queries: At most so many.
        corpus_size: The hypernyms, and others that are above none of the queries.
        per_hub: Fewest and most queries of one document.
    """
    lines = (folder / "usr/share/wordnet/data.noun").read_text(encoding="utf-8").splitlines()
    entries = {entry.key: entry for entry in synsets(lines)}
    above = hypernyms(lines)
    below: dict[str, list[str]] = defaultdict(list)
    for key, parents in above.items():
        if len(parents) == 1 and key in entries and parents[0] in held_out:
            below[parents[0]].append(key)
    rng = random.Random(SEED)
    queries: dict[str, str] = {}
    relevant: dict[str, set[str]] = {}
    asked: set[str] = set()
    for hub in rng.sample(sorted(below), len(below)):
        names = {}
        for key in rng.sample(sorted(below[hub]), len(below[hub])):
            name = entries[key].names[0]
            if name not in asked and not leaks(name, entries[hub].text):
                names[f"q-{key}"] = name
        chosen = dict(list(names.items())[: per_hub[1]])
        if len(chosen) >= per_hub[0] and len(queries) + len(chosen) <= num_queries:
            queries |= chosen
            asked |= set(chosen.values())
            relevant |= {query: {hub} for query in chosen}
    answers = set().union(*relevant.values())
    related = set(
        chain.from_iterable(ancestors(query.removeprefix("q-"), above) for query in queries)
    )
    others = sorted(key for key in held_out if key in entries and key not in related)
    kept = sorted(answers) + rng.sample(others, min(len(others), corpus_size - len(answers)))
    return RetrievalData(queries, {key: entries[key].text for key in kept}, relevant)


def hypernyms(lines: Iterable[str]) -> dict[str, list[str]]:
    """Synset to its direct hypernyms, of a WordNet data file, wndb(5WN).

    Example:
        >>> hypernyms(['00000002 05 n 01 seal 0 002 @ 00000001 n 0000 ~ 00000003 n 0000 | text'])
        {'00000002-n': ['00000001-n']}
    """
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("  ") or not line.strip():  # the licence
            continue
        offset, _, kind, count, *fields = line.partition(" | ")[0].split()
        fields = fields[2 * int(count, 16) :]
        pointers = [fields[1 + 4 * i : 5 + 4 * i] for i in range(int(fields[0]))]
        found[f"{offset}-{kind}"] = [
            f"{to}-{part}" for sign, to, part, _ in pointers if sign in ("@", "@i")
        ]
    return found


def ancestors(key: str, above: Mapping[str, list[str]]) -> Iterator[str]:
    """All synsets above one.

    Example:
        >>> sorted(ancestors("c", {"c": ["b"], "b": ["a"]}))
        ['a', 'b']
    """
    seen: set[str] = set()
    todo = list(above.get(key, []))
    while todo:
        parent = todo.pop()
        if parent not in seen:
            seen.add(parent)
            todo += above.get(parent, [])
            yield parent
