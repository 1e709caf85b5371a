"""The three splits of a comparison: training pairs, queries that choose, and queries that are read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from st_magnitude.corpus.beir import DataError, RetrievalData, available_splits, load_beir
from st_magnitude.evaluation.task import JudgedTask

__all__ = ["Splits", "make_splits", "read_splits"]

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
        DataError: As `load_beir` and `make_splits` do.
    """
    splits = available_splits(folder)
    train = load_beir(folder, split if splits else None)
    dev, test = (load_beir(folder, name) if name in splits else None for name in (dev_split, test_split))
    return make_splits(train, dev, test, dev_queries=dev_queries, documents=documents, seed=seed)


def make_splits(
    train: RetrievalData | JudgedTask,
    dev: RetrievalData | JudgedTask | None = None,
    test: RetrievalData | JudgedTask | None = None,
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
    rest, given = _as_data(train), {"dev": dev, "test": test}
    tasks: dict[str, RetrievalData] = {}
    for name, task in given.items():
        if task is not None:
            tasks[name] = _as_data(task)
            continue
        queries = sorted(query for query in rest.queries if rest.relevant_docs.get(query))
        number = min(MOST_HELD_OUT, len(queries) // HELD_OUT)
        held_out = {queries[i] for i in rng.permutation(len(queries))[:number]}
        tasks[name] = _only(rest, held_out)
        rest = _only(rest, rest.queries.keys() - held_out)
        notes.append(f"There is no {name} split, so {number:,} of the training queries are held out for it.")
    for name, other in (("dev", rest), ("test", rest), ("test", tasks["dev"])):
        judged = {query for query, ids in other.relevant_docs.items() if ids}
        if both := sorted(query for query, ids in tasks[name].relevant_docs.items() if ids and query in judged):
            what = "trained on" if other is rest else "in the dev split"
            raise DataError(
                f"{len(both):,} queries of the {name} split are also {what}, such as {both[0]!r}; take them out of one."
            )
    for name, most in (("dev", dev_queries), ("test", None)):
        tasks[name] = _sampled(tasks[name], most, documents, rng)
        count = sum(bool(ids) for ids in tasks[name].relevant_docs.values())
        if not count:
            raise DataError(f"No query of the {name} split has a relevant document, so no model can be measured.")
        if all(len(ids) == len(tasks[name].corpus) for ids in tasks[name].relevant_docs.values() if ids):
            raise DataError(
                f"Every document of the {name} split is relevant to every query, so that all models rank alike; add "
                "documents that are not relevant."
            )
        if count < FEW_QUERIES:
            notes.append(
                f"The {name} split has {count} queries, on which differences of several hundredths of nDCG@10 are "
                f"noise. Use at least {FEW_QUERIES}, better some hundreds."
            )
    return Splits(rest, tasks["dev"], tasks["test"], tuple(notes))


def _as_data(task: RetrievalData | JudgedTask) -> RetrievalData:
    if isinstance(task, RetrievalData):
        return task
    relevant, negatives = (
        {query: set(ids) for query, ids in judged.items() if query in task.queries}
        for judged in (task.relevant, task.negatives)
    )
    return RetrievalData(dict(task.queries), dict(task.corpus), relevant, negatives)


def _only(data: RetrievalData, queries: set[str]) -> RetrievalData:
    """The same corpus with some of the queries."""
    kept = {query: text for query, text in data.queries.items() if query in queries}
    relevant, negatives = (
        {query: ids for query, ids in judged.items() if query in queries}
        for judged in (data.relevant_docs, data.negatives)
    )
    return RetrievalData(kept, data.corpus, relevant, negatives, data.name)


def _sampled(data: RetrievalData, most: int | None, documents: int, rng: np.random.Generator) -> RetrievalData:
    queries = sorted(query for query in data.queries if data.relevant_docs.get(query))
    data = _only(data, {queries[i] for i in rng.permutation(len(queries))[:most]})
    needed = {d for judged in (data.relevant_docs, data.negatives) for ids in judged.values() for d in ids}
    others = sorted(data.corpus.keys() - needed)
    needed |= {others[i] for i in rng.permutation(len(others))[: max(0, documents - len(needed))]}
    corpus = {document: text for document, text in data.corpus.items() if document in needed}
    return RetrievalData(data.queries, corpus, data.relevant_docs, data.negatives, data.name)
