"""The three splits of a comparison: training pairs, queries that choose, and queries that are read once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from st_magnitude.data.beir import DataError, splits_of
from st_magnitude.data.retrieval import RetrievalData

__all__ = ["Splits", "make_splits", "read_splits"]

Value = TypeVar("Value")
FEW_QUERIES = 50
HELD_OUT, MOST_HELD_OUT = 5, 500  # one of five training queries, and not more than these


@dataclass(frozen=True)
class Splits:
    """Training data, and two disjoint search tasks; ``notes`` are sentences about what was held out or is small."""

    train: RetrievalData
    dev: RetrievalData
    test: RetrievalData
    notes: tuple[str, ...] = ()


def read_splits(
    folder: str | Path,
    split: str = "train",
    dev_split: str = "dev",
    test_split: str = "test",
    *,
    dev_queries: int = 500,
    documents: int = 5000,
    seed: int = 0,
) -> Splits:
    """Reads a folder in BEIR's layout; `make_splits` documents the rest.

    A folder with a single ``qrels.tsv`` has only training queries. A dev or test split that does not exist is held out.

    Raises:
        DataError: As `RetrievalData.from_beir` and `make_splits` do.
    """
    splits = splits_of(folder)
    train = RetrievalData.from_beir(folder, split if splits else None)
    dev, test = (RetrievalData.from_beir(folder, name) if name in splits else None for name in (dev_split, test_split))
    return make_splits(train, dev, test, dev_queries=dev_queries, documents=documents, seed=seed)


def make_splits(
    train: RetrievalData | RetrievalData,
    dev: RetrievalData | RetrievalData | None = None,
    test: RetrievalData | RetrievalData | None = None,
    *,
    dev_queries: int = 500,
    documents: int = 5000,
    seed: int = 0,
) -> Splits:
    """Checks the splits, holds out those that are missing, and samples large ones.

    Args:
        train: Data to train on.
        dev: Data that chooses; None: a fifth of the training queries, 500 at most, which are not trained on.
        test: Data that is read once; None: as for dev.
        dev_queries: Largest number of dev queries.
        documents: Largest number of documents of a search: those judged for its queries and a sample of the others.
        seed: Seed of the choices.

    Raises:
        DataError: If a query is in two splits, no dev query has a relevant document, or every document is relevant to
            every dev query, so that all models rank alike.
    """
    rng, notes = np.random.default_rng(seed), []
    rest, parts = _as_data(train), {}
    for name, task in (("dev", dev), ("test", test)):
        if task is None:
            queries = _judged(rest)
            number = min(MOST_HELD_OUT, len(queries) // HELD_OUT)
            held_out = {queries[i] for i in rng.permutation(len(queries))[:number]}
            parts[name] = _only(rest, held_out)
            rest = _only(rest, rest.queries.keys() - held_out)
            notes.append(f"There is no {name} split, so {number:,} of the training queries are held out for it.")
        else:
            parts[name] = _as_data(task)
    for name, other, where in (("dev", rest, "trained on"), ("test", rest, "trained on"), ("test", parts["dev"], "")):
        if both := sorted({*_judged(parts[name])} & {*_judged(other)}):
            what = f"queries of the {name} split are also {where or 'in the dev split'}"
            raise DataError(f"{len(both):,} {what}, such as {both[0]!r}; take them out of one.")
    for (name, part), most in zip(parts.items(), (dev_queries, None), strict=True):
        queries = _judged(part)
        if not queries:
            raise DataError(f"No query of the {name} split has a relevant document, so no model can be measured.")
        part = _only(part, {queries[i] for i in rng.permutation(len(queries))[:most]})
        needed = {d for judged in (part.relevant, part.negatives) for ids in judged.values() for d in ids}
        others = sorted(part.corpus.keys() - needed)
        needed |= {others[i] for i in rng.permutation(len(others))[: max(0, documents - len(needed))]}
        corpus = {document: text for document, text in part.corpus.items() if document in needed}
        if all(len(ids) == len(corpus) for ids in part.relevant.values()):
            raise DataError(
                f"Every document of the {name} split is relevant to every query, so that all models rank alike; add "
                "documents that are not relevant."
            )
        if len(part.queries) < FEW_QUERIES:
            notes.append(
                f"The {name} split has {len(part.queries)} queries, on which differences of several hundredths of "
                f"nDCG@10 are noise. Use at least {FEW_QUERIES}, better some hundreds."
            )
        parts[name] = replace(part, corpus=corpus)
    return Splits(rest, parts["dev"], parts["test"], tuple(notes))


def _judged(data: RetrievalData) -> list[str]:
    return sorted(query for query in data.queries if data.relevant.get(query))


def _as_data(task: RetrievalData | RetrievalData) -> RetrievalData:
    if isinstance(task, RetrievalData):
        return task
    relevant, negatives = (
        _some({query: set(ids) for query, ids in judged.items()}, task.queries)
        for judged in (task.relevant, task.negatives)
    )
    return RetrievalData(dict(task.queries), dict(task.corpus), relevant, negatives)


def _only(data: RetrievalData, queries: Collection[str]) -> RetrievalData:
    """The same corpus with some of the queries."""
    relevant, negatives = (_some(judged, queries) for judged in (data.relevant, data.negatives))
    return RetrievalData(_some(data.queries, queries), data.corpus, relevant, negatives, data.name)


def _some(of_queries: Mapping[str, Value], queries: Collection[str]) -> dict[str, Value]:
    return {query: value for query, value in of_queries.items() if query in queries}
