"""Texts that are no lexicons: Debian's package descriptions, and Python's documentation.

Both are made from what the package manager of Debian fetches (debian.py).
"""

from __future__ import annotations

import random

from benchmarks.data.debian import package_descriptions
from benchmarks.studies.cells import DATA, SEED, Data
from benchmarks.studies.revela import texts as documentation
from datasets import Dataset

from st_magnitude.data.retrieval import RetrievalData

TEXTS = {  # the name of the data and of its test, to what the page calls it
    "wordnet": "WordNet",
    "docstrings": "docstrings",
    "packages": "package descriptions",
    "sections": "Python's documentation",
}
SHARED = 12  # words: descriptions that begin with the same ones are of one source package


def different(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those with a short description of their own, of at least 3 words, and a beginning of the long
    one of their own.

    Example:
        >>> long = " ".join(str(i) for i in range(30))
        >>> found = different([("a tool to count", long), ("its data", long), ("a tool", "other")])
        >>> [short for short, _ in found]
        ['a tool to count']
    """
    seen: set[str] = set()
    kept = []
    for short, long in entries:
        keys = {short.lower(), " ".join(long.split()[:SHARED])}
        if len(short.split()) >= 3 and len(long.split()) >= 2 * SHARED and not keys & seen:
            seen |= keys
            kept.append((short, long))
    return kept


def packages() -> Data:
    """A short description asks for its long one: 1,000 over 5,000, dev 300 over 3,000."""
    entries = different(package_descriptions())
    entries = random.Random(SEED).sample(entries, len(entries))
    test, dev, train = entries[:5000], entries[5000:8000], entries[8000:]

    def task(part: list[tuple[str, str]], number: int) -> RetrievalData:
        corpus = {f"d{i}": long for i, (_, long) in enumerate(part)}
        queries = {f"q{i}": short for i, (short, _) in enumerate(part[:number])}
        return RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(number)})

    rows = Dataset.from_dict(
        dict(zip(("anchor", "positive"), map(list, zip(*train, strict=True)), strict=True))
    )
    return Data(rows, task(dev, 300), {"packages": task(test, 1000)})


def sections() -> Data:
    """The first half of a chunk asks for the next chunk; dev and test are titles of other pages'
    sections."""
    found = documentation.data()
    return Data(documentation.half_rows(found.pairs), found.dev, {"sections": found.test})


DATA |= {"packages": packages, "sections": sections}
