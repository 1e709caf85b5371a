"""Real text from two Debian packages: a lemma or a headword searches for its definition.

    python benchmarks/data/lexicons.py [--cache FOLDER] [--seed 0]

- WordNet 3.0 (``wordnet-base``): training pairs by part of speech, a dev and a test task,
  definitions to cluster.
- FOLDOC, the Free On-line Dictionary of Computing (``dict-foldoc``): a task outside the domain of
  the training.

What is held out depends on the seed alone, and no requested size moves anything from one split to
another: a larger task begins with the queries of the smaller one. No lemma and no definition of dev
and test is trained on.

Licences: WordNet, the WordNet licence of Princeton University (free use and redistribution with its
    notice); FOLDOC,
the GNU Free Documentation License 1.1 or later. Both are read from the packages, in a cache folder;
nothing of their text is part of this repository, and nothing is redistributed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import string
import subprocess
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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


class WordNet(NamedTuple):
    """See :class:`Lexicons`."""

    train: dict[str, Dataset]
    dev: RetrievalData
    test: RetrievalData
    clustering: tuple[list[str], list[str]]


@dataclass
class Lexicons:
    """All of it.

    Attributes:
        train: Part of speech to columns ``anchor`` (a lemma) and ``positive`` (its definition).
            Given to the Trainer as they are, every batch is of one part of speech.
        dev: Held-out synsets, for choosing.
        test: Others, for the final figures.
        clustering: Definitions of the test split, and the lexicographer file of each.
        foldoc: Terms of computing.
    """

    train: dict[str, Dataset]
    dev: RetrievalData
    test: RetrievalData
    clustering: tuple[list[str], list[str]]
    foldoc: RetrievalData


def build(
    cache: str | Path | None = None,
    seed: int = 0,
    *,
    num_foldoc_queries: int = 500,
    foldoc_corpus_size: int = 3000,
    **wordnet_sizes: int,
) -> Lexicons:
    """Fetch both packages if need be, and build everything; the same packages and arguments give
    the same texts.

    Args:
        cache: See :func:`fetch`.
        seed: Seed for the split and for all sampling.
        num_foldoc_queries: Number of queries of the FOLDOC task.
        foldoc_corpus_size: Documents of the FOLDOC task.
        **wordnet_sizes: Those of :func:`wordnet`.

    Raises:
        DataError: If a package cannot be had or read, or a task is larger than what there is.
    """
    words = wordnet(fetch("wordnet-base", cache), seed, **wordnet_sizes)
    terms = foldoc(
        fetch("dict-foldoc", cache),
        seed,
        num_queries=num_foldoc_queries,
        corpus_size=foldoc_corpus_size,
    )
    return Lexicons(*words, terms)


# --------------------------------------------------------------------------------------------------
# Packages
# --------------------------------------------------------------------------------------------------

_CONTENTS = {
    "wordnet-base": tuple(
        f"usr/share/wordnet/data.{part}" for part in ("noun", "verb", "adj", "adv")
    ),
    "dict-foldoc": ("usr/share/dictd/foldoc.dict.dz", "usr/share/dictd/foldoc.index"),
}
_SYSTEM = Path("/")
_PATIENCE = (
    "-o",
    "Acquire::Retries=1",
    "-o",
    "Acquire::http::Timeout=30",
    "-o",
    "Acquire::https::Timeout=30",
)


def fetch(package: str, cache: str | Path | None = None) -> Path:
    """The folder that a Debian package is extracted in; downloaded once, and only where the system
    has it not.

    Args:
        package: Its name.
        cache: Holds ``PACKAGE/usr/share/...``; default: ``$ST_MAGNITUDE_CACHE``, else
            ``st_magnitude`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        DataError: If the package cannot be downloaded or extracted here, or the folder in the cache
            is not complete.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+", package):
        raise DataError(
            f"{package!r} is no name of a Debian package; those used here are"
            f" {', '.join(_CONTENTS)}."
        )
    cache = default_cache(cache)
    target, contents = cache / package, _CONTENTS.get(package, ())
    if target.is_dir():
        if missing := [name for name in contents if not (target / name).is_file()]:
            raise DataError(
                f"{target} has no {missing[0]}: remove that folder, and the package is fetched"
                " anew."
            )
        return target
    if contents and all((_SYSTEM / name).is_file() for name in contents):
        return _SYSTEM
    cache.mkdir(parents=True, exist_ok=True)
    # a rename makes it complete
    with tempfile.TemporaryDirectory(prefix=f".{package}-", dir=cache) as temporary:
        folder = Path(temporary)
        root = ("-o", "APT::Sandbox::User=root") if getattr(os, "geteuid", lambda: 1)() == 0 else ()
        _call(package, target, folder, "apt-get", "-qq", *_PATIENCE, *root, "download", package)
        for archive in sorted(folder.glob("*.deb"))[:1]:
            extract = ("dpkg", "-x") if shutil.which("dpkg") else ("dpkg-deb", "-x")
            _call(package, target, folder, *extract, archive.name, "extracted")
        if missing := [
            name for name in contents or ("",) if not (folder / "extracted" / name).exists()
        ]:
            raise _by_hand(package, target, f"it has no {missing[0] or 'archive'}")
        try:
            (folder / "extracted").rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    return target


def default_cache(cache: str | Path | None = None) -> Path:
    """The folder itself, or the one that stands in for None; see :func:`fetch`."""
    if cache is not None:
        return Path(cache)
    if folder := os.environ.get("ST_MAGNITUDE_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "st_magnitude"


def _call(package: str, target: Path, folder: Path, *command: str) -> None:
    """Run a tool in a folder; what it says is shown only when it fails."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
    except FileNotFoundError:
        raise _by_hand(package, target, f"there is no {command[0]} here") from None
    except subprocess.TimeoutExpired:
        raise _by_hand(package, target, f"{command[0]} did not end within 15 minutes") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not line.startswith("W:")]
        raise _by_hand(
            package, target, f"{command[0]} failed: {' '.join(said) or f'exit {done.returncode}'}"
        )


def _by_hand(package: str, target: Path, reason: str) -> DataError:
    return DataError(
        f"Cannot fetch the Debian package {package}: {reason}. By hand, where there are apt-get,"
        f" dpkg and a network: `apt-get download {package} && dpkg -x {package}_*.deb {target}`; or"
        f" point ST_MAGNITUDE_CACHE (or --cache) to a folder that has {package}/usr/share; or"
        f" install it: `apt-get install {package}`."
    )


# --------------------------------------------------------------------------------------------------
# What both tasks share
# --------------------------------------------------------------------------------------------------


def _rank(seed: int, *what: str) -> float:
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
        >>> leaks("sea lion", "kept with Sea-Lions; a sea-lion eats fish"), leaks("lion", "a dandelion")
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
    what: str = "entries",
) -> RetrievalData:
    """A task of names that search for what they mean: every document of the corpus that has the
    name is relevant.

    A name that occurs in a text that it belongs to is not used as a query, and neither is a name
    without two letters.

    Args:
        entries: Drawn from in the order of their random rank.
        num_queries: Names, each of another entry and different from one another.
        corpus_size: Their entries, and others.
        seed: Seed for the ranks.
        everything: Normalised name to entries that it must not stand in; default: those of entries.
        excluded: Normalised names that are no queries.
        what: What the entries are, for the error.

    Raises:
        DataError: If there are not so many queries or documents.
    """
    if not 1 <= num_queries <= corpus_size <= len(entries):
        raise DataError(
            f"{num_queries:,} queries over {corpus_size:,} documents were asked for, of"
            f" {len(entries):,} {what}: ask for at least one query, for no more queries than"
            " documents, and for no more documents than there are."
        )
    everything = _by_name(entries) if everything is None else everything
    ranked = sorted(entries, key=lambda entry: _rank(seed, "entry", entry.key))
    # normalised name to what it is written like, and whose it is
    asked: dict[str, tuple[str, Entry]] = {}
    for entry in ranked:
        if len(asked) == num_queries:
            break
        for name in sorted(entry.names, key=lambda name: _rank(seed, "name", entry.key, name)):
            same = _same(name)
            if same in asked or same in excluded or sum(map(str.isalpha, name)) < 2:
                continue
            if not any(leaks(name, other.text) for other in everything[same]):
                asked[same] = (name, entry)
                break
    if len(asked) < num_queries:
        raise DataError(
            f"{num_queries:,} queries were asked for, but of {len(ranked):,} {what} only"
            f" {len(asked):,} have a name of their own that does not stand in its text: ask for no"
            " more."
        )
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


# --------------------------------------------------------------------------------------------------
# WordNet
# --------------------------------------------------------------------------------------------------

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
_MIN_CLUSTER = 50


def wordnet(
    folder: str | Path,
    seed: int = 0,
    *,
    num_test_queries: int = 1000,
    corpus_size: int = 5000,
    num_dev_queries: int = 300,
    dev_corpus_size: int = 2500,
    cluster_size: int = 100,
) -> WordNet:
    """Build all that comes from WordNet; the arguments are those of :func:`build`.

    Train has every pair of a lemma and a definition that the lemma does not stand in, in random
    order. A lemma that has a sense in the dev or the test split is in no pair, and none of test is
    a query of dev.

    Args:
        folder: Holds ``usr/share/wordnet``.

    Raises:
        DataError: If a file is missing or malformed, or a task is larger than its split.
    """
    paths = [Path(folder, "usr/share/wordnet", f"data.{part}") for part in _PARTS]
    entries = merge(entry for path in paths for entry in synsets(_lines(path), str(path)))
    splits: dict[str, list[Entry]] = {"test": [], "dev": [], "train": []}
    for entry in entries:
        rank = _rank(seed, "split", entry.key)
        splits["test" if rank < _TEST else "dev" if rank < _TEST + _DEV else "train"].append(entry)
    everything, of_test = _by_name(entries), _by_name(splits["test"]).keys()
    test = retrieval(
        splits["test"],
        num_test_queries,
        corpus_size,
        seed,
        everything=everything,
        what="synsets of the test split",
    )
    dev = retrieval(
        splits["dev"],
        num_dev_queries,
        dev_corpus_size,
        seed,
        everything=everything,
        excluded=of_test,
        what="synsets of the dev split",
    )
    held_out = of_test | _by_name(splits["dev"]).keys()
    return WordNet(
        _pairs(splits["train"], held_out, seed),
        dev,
        test,
        _clusters(splits["test"], cluster_size, seed),
    )


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(f"There is no {path}: fetch('wordnet-base') returns a folder that has it.")
    return path.read_text(encoding="utf-8").splitlines()


def synsets(lines: Iterable[str], source: str = "line") -> Iterator[Entry]:
    """The synsets of a WordNet data file, wndb(5WN), whose definitions are worth searching for.

    Args:
        lines: Lines of the file.
        source: Its name, for the error.

    Raises:
        DataError: If a line is malformed.

    Example:
        >>> list(synsets(['00000042 05 n 02 sea_lion 0 Otary 1 000 | a seal with ears; "the otary barks"']))
        [Entry(key='00000042-n', names=('sea lion', 'Otary'), text='a seal with ears', label='noun.animal')]
    """
    for number, line in enumerate(lines, 1):
        if line.startswith("  ") or not line.strip():  # the licence
            continue
        head, bar, gloss = line.partition(" | ")
        try:
            offset, file, kind, count, *fields = head.split()
            lemmas = fields[: 2 * int(count, 16) : 2]
            label = _LEXICOGRAPHER_FILES[int(file)]
            if not bar or not lemmas or len(lemmas) != int(count, 16):
                raise ValueError
        except (ValueError, IndexError):
            raise DataError(
                f"{source}:{number} is no synset as wndb(5WN) has them: {line[:60]!r}. Expected"
                " WordNet 3.0's data.noun, data.verb, data.adj or data.adv."
            ) from None
        names = (
            lemma.removesuffix("(a)").removesuffix("(p)").removesuffix("(ip)").replace("_", " ")
            for lemma in lemmas
        )
        text = definition(gloss)
        if (
            len(_words(re.sub(r"\([^)]*\)", "", text) if "(" in text else text).split())
            >= _MIN_WORDS
        ):
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
                found[part].append((_rank(seed, "pair", entry.key, name), name, entry.text))
    return {
        part: Dataset.from_dict(
            {"anchor": [pair[1] for pair in rows], "positive": [pair[2] for pair in rows]}
        )
        for part, rows in ((part, sorted(pairs)) for part, pairs in found.items())
    }


def _clusters(entries: Iterable[Entry], size: int, seed: int) -> tuple[list[str], list[str]]:
    """Texts and labels of the noun and verb files that have enough members, in random order."""
    if size < 1:
        raise DataError(f"cluster_size must be at least 1, got {size}.")
    members: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: _rank(seed, "entry", entry.key)):
        members[entry.label].append(entry)
    chosen = [
        entry
        for label, found in members.items()
        if label.startswith(("noun.", "verb.")) and len(found) >= _MIN_CLUSTER
        for entry in found[:size]
    ]
    chosen.sort(key=lambda entry: _rank(seed, "cluster", entry.key))
    return [entry.text for entry in chosen], [entry.label for entry in chosen]


# --------------------------------------------------------------------------------------------------
# FOLDOC
# --------------------------------------------------------------------------------------------------

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
    """Build the task of computing terms: a headword searches for the beginning of its entry.

    Args:
        folder: Holds ``usr/share/dictd``.
        seed: Of all sampling.
        num_queries: Headwords, each of another entry.
        corpus_size: Their entries, and others.
        max_words: Number of words that a document is cut to.
        min_words: Smallest number of words; shorter documents are left out.

    Raises:
        DataError: If a file is missing or malformed, or there are not so many entries.
    """
    entries = []
    for offset, headwords, text in dictionary(Path(folder, "usr/share/dictd", "foldoc")):
        entry = foldoc_entry(f"foldoc-{offset}", headwords, text, max_words)
        if entry.label != "introduction" and len(re.findall(r"[^\W\d_]+", entry.text)) >= min_words:
            entries.append(entry)
    return retrieval(merge(entries), num_queries, corpus_size, seed, what="entries of FOLDOC")


def dictionary(base: Path) -> Iterator[tuple[int, list[str], str]]:
    """Offset, headwords and text of the entries of a dictd database, in their order, without those
    about itself.

    Args:
        base: The path of its files without ``.index`` and ``.dict.dz``.

    Raises:
        DataError: If a file is missing or malformed.
    """
    index, texts = base.with_name(f"{base.name}.index"), base.with_name(f"{base.name}.dict.dz")
    for path in (index, texts):
        if not path.is_file():
            raise DataError(
                f"There is no {path}: fetch('dict-foldoc') returns a folder that has it."
            )
    try:
        data = gzip.decompress(texts.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{texts} is damaged ({error}): remove the package's folder, and it is fetched anew."
        ) from None
    headwords: dict[tuple[int, int], list[str]] = defaultdict(list)
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), 1):
        try:
            word, *digits = line.split("\t")[:3]
            offset, length = map(dictd_number, digits)
            if offset + length > len(data):
                raise ValueError
        except (ValueError, KeyError):
            raise DataError(
                f"{index}:{number} is no headword, offset and length within the texts: {line!r}."
            ) from None
        if not word.startswith(("00-database", "00database")):
            headwords[offset, length].append(word)
    for (offset, length), words in sorted(headwords.items()):
        yield offset, words, data[offset : offset + length].decode("utf-8", "replace")


def dictd_number(digits: str) -> int:
    """A number as dictd's index has it: to the base 64, the most significant digit first.

    Raises:
        KeyError: If a character is not a digit.

    Example:
        >>> dictd_number("A"), dictd_number("BA"), dictd_number("K5")
        (0, 64, 697)
    """
    value = 0
    for digit in digits:
        value = 64 * value + _DIGITS[digit]
    return value


def foldoc_entry(key: str, headwords: Collection[str], text: str, max_words: int = 80) -> Entry:
    """The entry, its headwords as they are written, without marks, links, references, dates and
    code.

    Example:
        >>> text = "GNU\\nGnat\\n\\n   <tool> /gnoo/ (GNU) A {free}\\n   thing.\\n\\n   [{Some File}]\\n"
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


def _show(name: str, data: RetrievalData) -> None:
    print(f"\n{name}: {data}")
    for query in list(data.queries)[:3]:
        for document in sorted(data.relevant[query]):
            print(f"  {data.queries[query]} -> {data.corpus[document]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cache", help="a folder for the packages; default: $ST_MAGNITUDE_CACHE or ~/.cache"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.perf_counter()
    try:
        lexicons = build(arguments.cache, arguments.seed)
    except DataError as error:
        parser.exit(1, f"{error}\n")
    print(f"Built in {time.perf_counter() - began:.1f} s")
    for part, pairs in lexicons.train.items():
        print(f"\ntrain, {part}: {len(pairs):,} pairs")
        for row in pairs.select(range(min(3, len(pairs)))):
            print(f"  {row['anchor']} -> {row['positive']}")
    _show("dev", lexicons.dev)
    _show("test", lexicons.test)
    texts, labels = lexicons.clustering
    print(f"\nclustering: {len(texts):,} texts of {len(set(labels))} files")
    for text, label in list(zip(texts, labels, strict=True))[:3]:
        print(f"  {label}: {text}")
    _show("foldoc", lexicons.foldoc)


if __name__ == "__main__":
    main()
