"""Who trains and who judges, decided once."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input

from st_magnitude._checks import InputError, counted
from st_magnitude.data.beir import canonical
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.workbench.files.pairs import Splits
from st_magnitude.workbench.judging.folds import (
    DEFAULT_FOLDS,
    FEWEST,
    folds_of,
    number_of_different,
)
from st_magnitude.workbench.memory import unread, unread_split

__all__ = ["Exam"]

DEPTH = 100  # documents of every search for each query
MOST_QUERIES = 5_000  # with more, one split shows small gains as well
NEAR_RATIO = 0.9  # edit ratio of near copies
NEAR_WORDS = 32  # most words of them
MOST_HELD_OUT = 500  # queries, and at most one of DEFAULT_FOLDS


@dataclass(frozen=True)
class Exam:
    """Data to train on, and queries that no row of them holds and no model has read, as far as the
    folders of the models know (`st_magnitude.workbench.memory`)."""

    train: RetrievalData
    judged: RetrievalData | None = None  # None: nobody judges
    folds: Sequence[set[str]] = ()  # ids of the queries that judge, if they are those of train
    choose: RetrievalData | None = None  # ranks candidates
    confirm: RetrievalData | None = None  # measured once, with what is deployed
    answers: Collection[str] = ()  # ids of documents that answer a query of any split
    notes: tuple[str, ...] = ()  # sentences for the user
    seed: int = 0  # of the folds

    @classmethod
    def of(
        cls,
        splits: Splits,
        model: SentenceTransformer,
        *folders: str,
        train: str = "train",
        judge: str = "dev",
        choose: str | None = None,
        confirm: str | None = None,
        folds: int | None = None,
        usual: int = DEFAULT_FOLDS,
        most: int | None = None,
        seed: int = 0,
    ) -> Exam:
        """The exam of a model, of which only the kind counts. No query judges that a model of the
        folders has read: its own, if it has one, and those of others next to it.

        Where the split that judges is missing or was drawn at random, folds of the training queries
        judge, by default for a static table, and for all models if there are at most ``most``
        queries: ``folds`` of them, or as many as is ``usual``. With ``choose``, queries are held
        out for any other split that is missing.

        Raises:
            DataError: If splits share queries, a model was trained on all queries of one, there is
                one document, or fewer than ten queries are left to judge in a file without a split
                for it.
            InputError: If there are fewer queries than folds, or several processes for folds.
        """
        notes: list[str] = []
        training = splits[train]
        name = judged = chooses = None
        if judge in splits and judge != train:
            name, judged = unread_split(splits, judge, *folders)
        if confirm is not None and confirm == name:
            said = f"--confirm {confirm} is left out, as the {name} split judges the model already."
            notes.append(said)
            confirm = None
        splits.check_held_out(choose, name, confirm, train=train)
        if choose is not None and choose in splits:
            chooses = unread(splits[choose], *folders)
        elif choose is not None:
            training, chooses = _held_out(training, choose, folders, seed, notes)
        in_folds: list[set[str]] = []
        if judged is None or (name == judge and judge in splits.drawn):
            whole = training if judged is None else training.joined(splits[judge])
            if most is None:
                most = MOST_QUERIES if has_static_embedding_input(model) else 0
            rest, in_folds = _in_folds(whole, most, folders, folds, usual, seed)
            if in_folds and (choose is not None or judged is not None):
                which = f"of {train} and {judge}" if choose is None else f"outside of {choose}"
                notes.append(
                    f"The {len(rest.query_ids):,} queries {which} judge the result, by"
                    " cross-validation."
                )
            if in_folds:
                training, judged = whole, rest
        if judged is None and choose is not None:
            training, judged = _held_out(training, judge, folders, seed, notes)
        is_ours = folds != 0 and (bool(in_folds) or name is None or name in splits.drawn)
        number = FEWEST if judged is None else number_of_different(judged)
        if is_ours and number < FEWEST:
            raise DataError(
                f"Only {counted(number, 'query')} can judge, and fewer than {FEWEST} decide"
                " nothing: add rows."
            )
        confirmed = None if confirm is None else unread(splits[confirm], *folders)
        training = training.apart_from(chooses, None if in_folds else judged, confirmed)
        if len((judged or training).corpus) < 2:
            raise DataError("The corpus has one document: there is nothing to tell apart.")
        answers = {
            document
            for data in splits.values()
            for document in set().union(*data.relevant.values())
            if training.corpus.get(document) == data.corpus[document]
        }
        return cls(training, judged, in_folds, chooses, confirmed, answers, tuple(notes), seed)

    def in_folds(self, number: int | None = None) -> Sequence[set[str]]:
        """The folds, or so many others of the same queries if there are any."""
        if not self.folds or number is None or number == len(self.folds):
            return self.folds
        return folds_of(cast(RetrievalData, self.judged), number, self.seed)

    def papers(self, number: int | None = None) -> Iterator[tuple[RetrievalData, RetrievalData]]:
        """The data to train on and the queries that judge, for each fold if there are any."""
        if not self.folds and self.judged is not None:
            yield self.train, self.judged
        for fold in self.in_folds(number):
            asked = cast(RetrievalData, self.judged).only(fold)
            yield self.train.only(self.train.queries.keys() - fold).apart_from(asked), asked

    @cached_property
    def near_copies(self) -> set[str]:
        """Ids of the queries that judge or confirm, and equal a training query up to a word."""
        papers = [*self.papers(), (self.train, self.confirm)]
        return set().union(*(near_copies(train, asked) for train, asked in papers if asked))


def _in_folds(
    data: RetrievalData,
    most: int,
    folders: Sequence[str],
    wanted: int | None,
    usual: int,
    seed: int,
) -> tuple[RetrievalData, list[set[str]]]:
    """The queries that no model has read, and their folds, if there are any."""
    is_alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if wanted and not is_alone:
        raise InputError(f"{wanted} folds train one after another: start one process.")
    if wanted == 0 or not is_alone or (wanted is None and not most):
        return data, []
    data = unread(data, *folders)
    different = number_of_different(data) if data.relevant else 0
    if wanted is None and not 2 * DEFAULT_FOLDS <= different <= most:
        return data, []
    number = wanted or usual
    if not 2 <= number <= different:
        raise InputError(
            f"folds is {number}; give at least 2, and at most the number of different queries with"
            f" an answer that the model was not trained on, which are {different:,}."
        )
    return data, folds_of(data, number, seed)


def _held_out(
    data: RetrievalData,
    name: str,
    folders: Sequence[str],
    seed: int,
    notes: list[str],
) -> tuple[RetrievalData, RetrievalData]:
    """The data without a part of the queries that no model has read, and this part, as a split."""
    number = max(DEFAULT_FOLDS, math.ceil(len(data.queries) / MOST_HELD_OUT))
    part = data.only(folds_of(unread(data, *folders), number, seed)[0])
    part = replace(part, name=f"{data.name.partition(', ')[0]}, {name} split")
    said = f"There is no {name} split: {len(part.query_ids):,} training queries are held out."
    notes.append(said)
    return data.only(data.queries.keys() - part.queries.keys()), part


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
