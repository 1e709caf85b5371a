"""The three splits of a comparison: training pairs, dev queries that rank the candidates, and test queries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from st_magnitude.comparison.config import CompareConfig
from st_magnitude.data.beir import splits_of
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.data.splits import refuse_shared

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


def read_splits(folder: str | Path, config: CompareConfig) -> Splits:
    """Reads a folder in BEIR's layout. A split that does not exist is held out, as by `make_splits`."""
    names = splits_of(folder)
    train = RetrievalData.from_beir(folder, config.split if names else None, config.skip_empty)
    wanted = (config.dev_split, config.test_split)
    dev, test = (RetrievalData.from_beir(folder, name, config.skip_empty) if name in names else None for name in wanted)
    return make_splits(train, config, dev, test)


def make_splits(
    train: RetrievalData, config: CompareConfig, dev: RetrievalData | None = None, test: RetrievalData | None = None
) -> Splits:
    """Checks the splits, holds out those that are missing, and samples large ones.

    Args:
        train: Data to train on.
        config: Settings, of which the largest numbers of dev queries and of documents, and the seed, count here.
        dev: Data to rank candidates on; None: a fifth of the training queries, 500 at most, which are not trained on.
        test: Data for the final figures; None: as for dev.

    Raises:
        DataError: If a query is in two splits, no query of a split has a relevant document, or every document is
            relevant to every query, which ranks all models alike.
    """
    rng, notes, parts = np.random.default_rng(config.seed), [], {}
    for name, data in (("dev", dev), ("test", test)):
        if data is None:
            queries = sorted(train.query_ids)
            number = min(MOST_HELD_OUT, len(queries) // HELD_OUT)
            held_out = {queries[i] for i in rng.permutation(len(queries))[:number]}
            data, train = _only(train, held_out), _only(train, train.queries.keys() - held_out)
            notes.append(f"There is no {name} split, so {number:,} of the training queries are held out for it.")
        parts[name] = data
    for name, other, of in (("dev", train, "train"), ("test", train, "train"), ("test", parts["dev"], "dev")):
        refuse_shared(parts[name].query_ids, other.query_ids, name, of)
    for (name, data), most in zip(parts.items(), (config.dev_queries, None), strict=True):
        queries = sorted(data.query_ids)
        data = _only(data, {queries[i] for i in rng.permutation(len(queries))[:most]})
        needed = {d for judged in (data.relevant, data.negatives) for ids in judged.values() for d in ids}
        others = sorted(data.corpus.keys() - needed)
        needed |= {others[i] for i in rng.permutation(len(others))[: max(0, config.documents - len(needed))]}
        if all(len(ids) == len(needed) for ids in data.relevant.values()):
            raise DataError(
                f"Every document of the {name} split is relevant to every query, which ranks all models alike; add "
                "documents that are not relevant."
            )
        if len(data.queries) < FEW_QUERIES:
            notes.append(
                f"The {name} split has {len(data.queries)} queries, on which differences of several hundredths of "
                f"nDCG@10 are noise. Use at least {FEW_QUERIES}, better some hundreds."
            )
        parts[name] = replace(data, corpus={d: text for d, text in data.corpus.items() if d in needed})
    return Splits(train, parts["dev"], parts["test"], tuple(notes))


def _only(data: RetrievalData, queries: Collection[str]) -> RetrievalData:
    """The same corpus with some of the queries."""
    texts, relevant, negatives = (
        {query: value for query, value in part.items() if query in queries}
        for part in (data.queries, data.relevant, data.negatives)
    )
    return replace(data, queries=texts, relevant=relevant, negatives=negatives)
