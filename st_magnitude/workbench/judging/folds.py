"""Folds of queries, each of which is held out once."""

from __future__ import annotations

import hashlib
import re

from st_magnitude._checks import counted
from st_magnitude.data.beir import canonical
from st_magnitude.data.retrieval import RetrievalData

DEFAULT_FOLDS = 5
FEWEST = 10  # different queries that can decide what to deploy


def folds_of(data: RetrievalData, number: int, seed: int) -> list[set[str]]:
    """Ids of the queries with an answer, in folds. Queries with the same text are in one fold."""

    def place(key: str) -> str:
        return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()

    by_text: dict[str, list[str]] = {}
    for query, text in data.asked.items():
        by_text.setdefault(canonical(text), []).append(query)
    folds: list[set[str]] = [set() for _ in range(number)]
    for index, key in enumerate(sorted(by_text, key=place)):
        folds[index % number].update(by_text[key])
    return folds


def number_of_different(data: RetrievalData) -> int:
    """The number of different queries with an answer."""
    return len(set(map(canonical, data.asked.values())))


def split_of(data: RetrievalData) -> str:
    """The name of the split, "held-out" for data without one."""
    named = re.search(r", (.+) split$", data.name)
    return named[1] if named else "held-out"


def where(data: RetrievalData) -> str:
    """How many queries of which split judge, as "998 dev queries"."""
    return counted(len(data.query_ids), f"{split_of(data)} query")
