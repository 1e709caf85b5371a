"""Queries that equal a training query up to a word, of which figures say little about new ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
    """The near copies of training queries among the queries that judge."""

    number: int = 0
    over: str = ""  # name of another search
    others: Difference | None = None  # to that one on the other queries, if copies are many

    def __str__(self) -> str:
        if not self.number:
            return ""
        said = f"Up to a word, training rows hold {self.number:,} of these queries"
        if self.others is None:
            return f"{said}."
        others = f"on the {self.others.queries:,} others, the change is {self.others}"
        return f"{said}; {others} against {self.over}."

    @classmethod
    def of(cls, system: System, other: System, copies: Collection[str], seed: int = 0) -> Copies:
        """The near copies, by their ids, among the queries of a system, and its difference to
        another one on the queries that are none."""
        ranking = system.ranking
        is_copy = np.array([query in copies for query in ranking.query_ids])
        number = int(is_copy.sum())
        is_other = ~is_copy & ranking.has_answer
        if number <= MANY * len(is_copy) or not is_other.any():
            return cls(number)
        differences = (ranking.ndcg - other.ranking.ndcg)[is_other]
        return cls(number, other.name, judge(differences, seed=seed))


NO_COPIES = Copies()


def near_copies(train: RetrievalData, asked: RetrievalData) -> set[str]:
    """Ids of the queries that equal a training query up to a word or a letter."""
    index: dict[int, list[str]] = {}
    by_text: dict[str, list[str]] = {}
    for query, text in asked.asked.items():
        by_text.setdefault(canonical(text), []).append(query)
    for text in by_text:
        for key in _keys(text):
            index.setdefault(key, []).append(text)
    known = set(index)
    found: set[str] = set()  # texts
    for text in {*map(canonical, train.asked.values())}:
        for key in known.intersection(_keys(text)):
            for other in index[key]:
                if other not in found and SequenceMatcher(None, text, other).ratio() >= NEAR_RATIO:
                    found.add(other)
    return {query for text in found for query in by_text[text]}


def _keys(text: str) -> list[int]:
    """Hashes of the words of a text, and of all its words but one."""
    words: Sequence[str] = text.split()
    words = words if len(words) > 2 else text  # without spaces
    if len(words) > NEAR_WORDS:
        return []
    hashes = [*map(hash, words)]
    total = sum(hashes)
    return [total, *map(total.__sub__, hashes)]
