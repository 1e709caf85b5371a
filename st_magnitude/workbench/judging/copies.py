"""Queries that equal a training query up to a word, of which figures say little about new ones."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np

from st_magnitude.data.beir import canonical
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import Difference, judge
from st_magnitude.workbench.judging.choice import System

__all__ = ["NO_COPIES", "Copies", "near_copies"]

MANY = 0.05  # share of near copies, above which the others are judged alone as well
NEAR_RATIO = 0.9  # edit ratio of near copies
NEAR_WORDS = 32  # most words of them


@dataclass(frozen=True)
class Copies:
    """How many of the queries that judge are near copies of training queries; and where these are
    many, the difference on the others."""

    number: int
    others: Difference | None = None
    over: str = ""  # name of the other search

    @classmethod
    def of(cls, after: System, before: System, copies: Collection[str], seed: int) -> Copies:
        """The near copies, by their ids, among the queries of two searches."""
        ranking = after.ranking
        is_copy = np.array([query in copies for query in ranking.query_ids])
        differences = (ranking.ndcg - before.ranking.ndcg)[~is_copy & ranking.has_answer]
        if is_copy.sum() <= MANY * len(is_copy) or not len(differences):
            return cls(int(is_copy.sum()))
        return cls(int(is_copy.sum()), judge(differences, seed=seed), before.name)

    def __str__(self) -> str:
        if not self.number:
            return ""
        said = f"Up to a word, training rows hold {self.number:,} of these queries"
        if self.others is None:
            return f"{said}."
        said += f"; on the {self.others.queries:,} others, the change is {self.others}"
        return f"{said} against {self.over}."


NO_COPIES = Copies(0)


def near_copies(train: RetrievalData, asked: RetrievalData) -> set[str]:
    """Ids of the queries that equal a training query up to a word or a letter."""
    texts = {query: canonical(text) for query, text in asked.asked.items()}
    index: dict[int, list[str]] = {}
    for query, text in texts.items():
        for key in _keys(text):
            index.setdefault(key, []).append(query)
    found: set[str] = set()
    for text in {*map(canonical, train.asked.values())}:
        near = {query for key in _keys(text) for query in index.get(key, ())} - found
        found |= {q for q in near if SequenceMatcher(None, text, texts[q]).ratio() >= NEAR_RATIO}
    return found


def _keys(text: str) -> set[int]:
    """Hashes of the words of a text, and of all its words but one."""
    words = text.split()
    hashes = [*map(hash, words if len(words) > 2 else text)]  # of characters without spaces
    total = sum(hashes)
    return {total, *map(total.__sub__, hashes)} if len(hashes) <= NEAR_WORDS else set()
