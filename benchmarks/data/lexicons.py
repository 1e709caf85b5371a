"""Real text from two Debian packages: a lemma or a headword searches for its definition.

- WordNet 3.0 (``wordnet-base``): training pairs by part of speech, a dev and a test task.
- FOLDOC, the Free On-line Dictionary of Computing (``dict-foldoc``): a task outside the domain of
  the training.

What is held out depends on the seed alone, and no requested size moves anything from one split to
another: a larger task begins with the queries of the smaller one. No lemma and no definition of dev
and test is trained on.

Licences: WordNet, the WordNet licence of Princeton University (free use and redistribution with its
notice); FOLDOC, the GNU Free Documentation License 1.1 or later. Both are read from the packages,
in a cache folder; nothing of their text is part of this repository, and nothing is redistributed.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import string
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.data.debian import fetch
from datasets import Dataset

from st_magnitude.data.beir import DataError
from st_magnitude.data.retrieval import RetrievalData


@dataclass(frozen=True)
class Entry:
    """One document and the names that it defines.

    Attributes:
        key: The id of the document.
        names: The lemmas of a synset, or the headwords of a dictionary entry.
        text: The definition.
        label: The lexicographer file of a synset (``noun.animal``), or the category of a dictionary
            entry.
    """

    key: str
    names: tuple[str, ...]
    text: str
    label: str


@dataclass
class Lexicons:
    """WordNet and FOLDOC.

    Attributes:
        train: Part of speech to columns ``anchor`` (a lemma) and ``positive`` (its definition).
            Given to the Trainer as they are, every batch is of one part of speech.
        dev: Held-out synsets, for choosing.
        test: Others, for the final figures.
        foldoc: Terms of computing.
    """

    train: dict[str, Dataset]
    dev: RetrievalData
    test: RetrievalData
    foldoc: RetrievalData


def build(
    seed: int = 0,
    *,
    num_foldoc_queries: int = 500,
    foldoc_corpus_size: int = 3000,
    **wordnet_sizes: int,
) -> Lexicons:
    """Fetch both packages if need be, and build everything.

    The seed is that of the split and of all sampling; ``wordnet_sizes`` are those of `wordnet`.
    """
    train, dev, test = wordnet(fetch("wordnet-base"), seed, **wordnet_sizes)
    sizes = {"num_queries": num_foldoc_queries, "corpus_size": foldoc_corpus_size}
    terms = foldoc(fetch("dict-foldoc"), seed, **sizes)
    return Lexicons(train, dev, test, terms)


# --- what both tasks share ------------------------------------------------------------------------


def chance(seed: int, *what: str) -> float:
    """A random number in [0, 1) that depends on nothing but the seed and the strings."""
    digest = hashlib.blake2b("\t".join([str(seed), *what]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _same(name: str) -> str:
    """Equal for names that differ in case, hyphens and spaces only."""
    return " ".join(name.casefold().replace("-", " ").replace("_", " ").split())


@lru_cache(maxsize=1000)  # a text is asked for once for each of its names
def _words(text: str) -> str:
    """The words alone, with a space before, between and after them."""
    return " ".join(["", *re.findall(r"[^\W_]+", text.casefold()), ""])


def leaks(name: str, text: str) -> bool:
    """Whether a text has the name in it, as words, whatever the case and the punctuation.

    Example:
        >>> leaks("sea lion", "a Sea-Lion eats fish"), leaks("lion", "a dandelion")
        (True, False)
    """
    return (words := _words(name)).isspace() or words in _words(text)


def _by_name(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    named: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        for name in dict.fromkeys(map(_same, entry.names)):
            named[name].append(entry)
    return named


def merge(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of the same words become one: the first of them, with the names of all."""
    merged: dict[str, Entry] = {}
    for entry in entries:
        first = merged.setdefault(_words(entry.text), entry)
        if first is not entry:
            names = tuple(dict.fromkeys(first.names + entry.names))
            merged[_words(entry.text)] = Entry(first.key, names, first.text, first.label)
    return list(merged.values())


def retrieval(
    entries: Collection[Entry],
    num_queries: int,
    corpus_size: int,
    seed: int = 0,
    *,
    everything: Mapping[str, Collection[Entry]] | None = None,
    excluded: Collection[str] = (),
) -> RetrievalData:
    """A task of names that search for what they mean: all documents with the name are relevant.

    A name that occurs in a text that it belongs to is not used as a query, and neither is a name
    without two letters.

    Args:
        entries: Drawn from in the order of their random rank.
        num_queries: Names, each of another entry and different from one another.
        corpus_size: Their entries, and others.
        seed: Seed for the ranks.
        everything: Normalised name to entries that it must not stand in; default: those of entries.
        excluded: Normalised names that are no queries.

    Raises:
        DataError: If there are not so many queries or documents.
    """
    if not 1 <= num_queries <= corpus_size <= len(entries):
        sizes = f"{num_queries:,} queries over {corpus_size:,} documents"
        raise DataError(f"{sizes} cannot be had of {len(entries):,} entries: ask for fewer.")
    everything = _by_name(entries) if everything is None else everything
    ranked = sorted(entries, key=lambda entry: chance(seed, "entry", entry.key))
    # normalised name to what it is written like, and whose it is
    asked: dict[str, tuple[str, Entry]] = {}
    for entry in ranked:
        if len(asked) == num_queries:
            break
        for name in sorted(entry.names, key=lambda name: chance(seed, "name", entry.key, name)):
            same = _same(name)
            if same in asked or same in excluded or sum(map(str.isalpha, name)) < 2:
                continue
            if not any(leaks(name, other.text) for other in everything[same]):
                asked[same] = (name, entry)
                break
    if len(asked) < num_queries:
        raise DataError(f"Only {len(asked):,} of {num_queries:,} queries could be made of these.")
    chosen = {entry.key: entry for _, entry in asked.values()}
    for entry in ranked:
        if len(chosen) == corpus_size:
            break
        chosen.setdefault(entry.key, entry)
    corpus = [entry for entry in ranked if entry.key in chosen]
    named = _by_name(corpus)
    queries = {f"q-{entry.key}": name for name, entry in asked.values()}
    relevant = {
        query: {entry.key for entry in named[_same(name)]} for query, name in queries.items()
    }
    return RetrievalData(queries, {entry.key: entry.text for entry in corpus}, relevant)


# --- WordNet --------------------------------------------------------------------------------------

_PARTS = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
_NOUNS = (
    "Tops act animal artifact attribute body cognition communication event feeling food group"
    " location motive object person phenomenon plant possession process quantity relation shape"
    " state substance time"
)
_VERBS = (
    "body change cognition communication competition consumption contact creation emotion motion"
    " perception possession social stative weather"
)
_LEXICOGRAPHER_FILES = [  # by number: lexnames(5WN)
    *("adj.all", "adj.pert", "adv.all"),
    *(f"noun.{topic}" for topic in _NOUNS.split()),
    *(f"verb.{topic}" for topic in _VERBS.split()),
    "adj.ppl",
]
_BEFORE_EXAMPLES = (
    " as in e.g.",
    " e.g.",
    " as in the expression",
    " as in",
    " especially in the phrase",
)
_MIN_WORDS = 3  # a shorter text, such as "sea turtles", does not count as a definition
_TEST, _DEV = 0.08, 0.03  # shares of the synsets


def wordnet(
    folder: str | Path,
    seed: int = 0,
    *,
    num_test_queries: int = 1000,
    corpus_size: int = 5000,
    num_dev_queries: int = 300,
    dev_corpus_size: int = 2500,
) -> tuple[dict[str, Dataset], RetrievalData, RetrievalData]:
    """Train, dev and test from WordNet, of a folder that holds ``usr/share/wordnet``.

    Train has every pair of a lemma and a definition that the lemma does not stand in, in random
    order. A lemma that has a sense in the dev or the test split is in no pair, and none of test is
    a query of dev.
    """
    splits = wordnet_splits(folder, seed)
    everything, of_test = _by_name(chain(*splits.values())), _by_name(splits["test"]).keys()
    options: Any = {"seed": seed, "everything": everything}
    test = retrieval(splits["test"], num_test_queries, corpus_size, **options)
    options["excluded"] = of_test
    dev = retrieval(splits["dev"], num_dev_queries, dev_corpus_size, **options)
    held_out = of_test | _by_name(splits["dev"]).keys()
    train = _pairs(splits["train"], held_out, seed)
    return train, dev, test


def wordnet_splits(folder: str | Path, seed: int = 0) -> dict[str, list[Entry]]:
    """The synsets of train, dev and test, in the order of the files."""
    paths = [Path(folder, "usr/share/wordnet", f"data.{part}") for part in _PARTS]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    splits: dict[str, list[Entry]] = {"test": [], "dev": [], "train": []}
    for entry in merge(synsets(lines)):
        rank = chance(seed, "split", entry.key)
        splits["test" if rank < _TEST else "dev" if rank < _TEST + _DEV else "train"].append(entry)
    return splits


def synsets(lines: Iterable[str]) -> Iterator[Entry]:
    """The synsets of a WordNet data file, wndb(5WN), whose definitions are worth searching for.

    Example:
        >>> line = '00000042 05 n 02 sea_lion 0 Otary 1 000 | a seal with ears; "the otary barks"'
        >>> (entry,) = synsets([line])
        >>> entry.key, entry.names, entry.text, entry.label
        ('00000042-n', ('sea lion', 'Otary'), 'a seal with ears', 'noun.animal')
    """
    for line in lines:
        if line.startswith("  ") or not line.strip():  # the licence
            continue
        head, _, gloss = line.partition(" | ")
        offset, file, kind, count, *fields = head.split()
        lemmas = fields[: 2 * int(count, 16) : 2]
        names = (re.sub(r"\((?:a|p|ip)\)$", "", lemma).replace("_", " ") for lemma in lemmas)
        text = definition(gloss)
        bare = re.sub(r"\([^)]*\)", "", text)
        if len(_words(bare).split()) >= _MIN_WORDS:
            label = _LEXICOGRAPHER_FILES[int(file)]
            yield Entry(f"{offset}-{kind}", tuple(dict.fromkeys(names)), text, label)


def definition(gloss: str) -> str:
    """A gloss without its examples.

    Example:
        >>> definition('(of bread) hard and dry; no longer fresh; "stale rolls"; "a stale loaf"')
        '(of bread) hard and dry; no longer fresh'
    """
    text = gloss.partition('"')[0]
    if text.count("(") > text.count(")"):  # (e.g., "so")
        text = text[: text.rindex("(")]
    text = text.rstrip(" ;:,")
    for phrase in _BEFORE_EXAMPLES:
        text = text.removesuffix(phrase).rstrip(" ;:,")
    return text.lstrip().replace("`", "'")


def _pairs(entries: Iterable[Entry], held_out: Collection[str], seed: int) -> dict[str, Dataset]:
    """Part of speech to its pairs."""
    found: dict[str, list[tuple[float, str, str]]] = {part: [] for part in _PARTS.values()}
    for entry in entries:
        for name in entry.names:
            if _same(name) not in held_out and not leaks(name, entry.text):
                part = _PARTS[entry.label.partition(".")[0]]
                found[part].append((chance(seed, "pair", entry.key, name), name, entry.text))
    rows = {part: sorted(pairs) for part, pairs in found.items()}
    columns = {part: list(zip(*pairs, strict=True))[1:] for part, pairs in rows.items()}
    return {
        part: Dataset.from_dict({"anchor": a, "positive": b}) for part, (a, b) in columns.items()
    }


# --- FOLDOC ---------------------------------------------------------------------------------------

_DIGITS = {
    digit: value
    for value, digit in enumerate(string.ascii_uppercase + string.ascii_lowercase + "0123456789+/")
}
_LINK = re.compile(
    r"\{([^{}]*?)\s*\((?:https?|ftp|news|rfc|mailto|gopher|telnet|about|file)\b:?[^{}]*\)\s*\}",
    re.I,
)
_CATEGORY = re.compile(r"<([a-z][^<>@]*)> ?", re.I)
_SPOKEN = r"(?:\([^()/]*\) )?\(?/[^/]*[^/\s]/\)?"
_ALSO_SPOKEN = rf"(?:,?(?: (?:or|and|\*not\*|sometimes))* {_SPOKEN})*"
_SENSE = re.compile(
    rf"(?P<number>(?:\d+\. )?)(?:{_CATEGORY.pattern})*(?:{_SPOKEN}{_ALSO_SPOKEN} )?", re.I
)
_REFERENCE = re.compile(  # to the end of its paragraph
    r"(?:^|(?<=[.;)] ))(?:(?:e-?mail|telephone|tel|fax|ftp|telnet|home|usenet newsgroups?|mailing"
    r" list|"
    r"unix manual page|latest version|filename extension):|"
    r"(?:not to be confused|see|see also|compare|contrast|cf)\b(?=[^.]*\.?$)).*$",
    re.I,
)
_DATE = re.compile(r"\(\d{4}-\d\d(?:-\d\d)?\)\.?")


def foldoc(
    folder: str | Path,
    seed: int = 0,
    *,
    num_queries: int = 500,
    corpus_size: int = 3000,
    max_words: int = 80,
    min_words: int = 8,
) -> RetrievalData:
    """A headword of FOLDOC searches for the beginning of its entry, of so many words at most.

    The folder holds ``usr/share/dictd``; entries of fewer than ``min_words`` are left out.
    """
    entries = []
    for offset, headwords, text in dictionary(Path(folder, "usr/share/dictd", "foldoc")):
        entry = foldoc_entry(f"foldoc-{offset}", headwords, text, max_words)
        if entry.label != "introduction" and len(re.findall(r"[^\W\d_]+", entry.text)) >= min_words:
            entries.append(entry)
    return retrieval(merge(entries), num_queries, corpus_size, seed)


def dictionary(base: Path) -> Iterator[tuple[int, list[str], str]]:
    """Offset, headwords and text of the entries of a dictd database, without those about itself.

    Args:
        base: The path of its files without ``.index`` and ``.dict.dz``.
    """
    data = gzip.decompress(base.with_name(f"{base.name}.dict.dz").read_bytes())
    headwords: dict[tuple[int, int], list[str]] = defaultdict(list)
    index = base.with_name(f"{base.name}.index").read_text(encoding="utf-8")
    for line in index.splitlines():
        word, *digits = line.split("\t")[:3]
        offset, length = map(dictd_number, digits)
        if not word.startswith(("00-database", "00database")):
            headwords[offset, length].append(word)
    for (offset, length), words in sorted(headwords.items()):
        yield offset, words, data[offset : offset + length].decode("utf-8", "replace")


def dictd_number(digits: str) -> int:
    """A number as dictd's index has it: to the base 64, the most significant digit first.

    Example:
        >>> dictd_number("A"), dictd_number("BA"), dictd_number("K5")
        (0, 64, 697)
    """
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS[digit]
    return value


def foldoc_entry(key: str, headwords: Collection[str], text: str, max_words: int = 80) -> Entry:
    """The entry, without marks, links, references, dates and code; headwords as they are written.

    Example:
        >>> text = "GNU\\nGnat\\n\\n   <tool> /gnoo/ (GNU) A {free}\\n   thing.\\n\\n   [{File}]\\n"
        >>> foldoc_entry("1", ["gnu", "gnat"], text)
        Entry(key='1', names=('GNU', 'Gnat'), text='A free thing.', label='tool')
    """
    text = re.sub(r"\s*\n\s*\n\(", " (", text)  # a link that was too long for its line
    head, *paragraphs = re.split(r"\n\s*?\n", text.strip("\n"))
    written = {
        line.casefold(): line for line in (" ".join(line.split()) for line in head.splitlines())
    }
    names = tuple(dict.fromkeys(written.get(word.casefold(), word) for word in headwords))
    indents = [len(paragraph) - len(paragraph.lstrip(" ")) for paragraph in paragraphs]
    # else code
    prose = [
        p for p, indent in zip(paragraphs, indents, strict=True) if indent <= max(3, indents[0])
    ]
    lines = [" ".join(paragraph.split()) for paragraph in prose]
    category = _CATEGORY.match(lines[0]) if lines else None
    words = " ".join(_unmarked(line, {"", *map(_same, names)}) for line in lines).split()
    return Entry(
        key, names, " ".join(words[:max_words]), category[1].partition(",")[0] if category else ""
    )


def _unmarked(line: str, known: set[str]) -> str:
    """A paragraph; empty when it has nothing but references."""
    if not re.search(r"\w", _LINK.sub("", line)):
        return ""
    line = re.sub(r"\{([^{}]*)\}", r"\1", _LINK.sub(r"\1", line))
    # [Jargon File]
    line = re.sub(r"\[\?\]|(?:^|(?<=[\s(]))\[[^\[\]]*\](?:[.,](?=\s|$))?", "", line)
    line = _DATE.sub("", re.sub(r"<\S+@\S+>|<https?://\S+>", "", line)).strip()
    for _ in range(2):
        sense = _SENSE.match(line)
        line = sense["number"] + line[sense.end() :] if sense else line
        alias = re.match(r"\(([^()]*)\)\s*", line)
        if (
            alias
            and {_same(name.strip('" ')) for name in re.split(r",|\bor\b", alias[1], flags=re.I)}
            <= known
        ):
            line = line[alias.end() :]
    line = re.sub(r"(?<!\w)__(\S(?:.*?\S)?)__(?!\w)", r"\1", _REFERENCE.sub("", line))
    line = re.sub(r"^[,.;] |\s+(?=[,.;](?:\s|$))", "", " ".join(line.split()))
    return re.sub(r"(?<=[^.]\.)\.(?!\S)", "", line) if re.search(r"\w", line) else ""
