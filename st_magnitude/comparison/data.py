"""The three splits of a comparison: training pairs, dev queries that rank the candidates, and test queries."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude.comparison.config import LOSSES, CompareConfig
from st_magnitude.data.beir import refuse_shared, splits_of
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.finetune.run import is_uneven

__all__ = ["Splits", "make_splits"]

FEW_QUERIES = 50
HELD_OUT, MOST_HELD_OUT = 5, 500  # one of five training queries, and not more than these


@dataclass(frozen=True)
class Splits:
    """Training data, and two disjoint search tasks; ``notes`` are sentences about what was held out or is small."""

    train: RetrievalData
    dev: RetrievalData
    test: RetrievalData
    notes: tuple[str, ...] = ()


def make_splits(
    data: RetrievalData | str | Path,
    config: CompareConfig,
    dev: RetrievalData | None = None,
    test: RetrievalData | None = None,
) -> Splits:
    """Reads and checks the splits, holds out those that are missing, and samples large ones.

    Args:
        data: A folder in BEIR's layout, or data to train on.
        config: Names of the splits of a folder, largest numbers of dev queries and of documents, and a seed.
        dev: Data to rank candidates on; None: the split of a folder, or else a fifth of the training queries, 500 at
            most, which are not trained on.
        test: Data for the final figures; None: as for dev.

    Raises:
        DataError: If a query is in two splits, no query of a split has a relevant document, or every document is
            relevant to every query, which ranks all models alike.
    """
    if isinstance(data, str | Path):
        names = splits_of(data)
        read = partial(RetrievalData.from_beir, data, skip_empty=config.skip_empty)
        train = read(config.split if names else None)  # None: a single qrels.tsv
        dev, test = (
            given or (read(name) if name in names else None)
            for given, name in ((dev, config.dev_split), (test, config.test_split))
        )
    else:
        train = data
    rng, parts = np.random.default_rng(config.seed), {}
    notes: list[str] = []
    for name, part in (("dev", dev), ("test", test)):
        if part is None:
            queries = sorted(train.query_ids)
            number = min(MOST_HELD_OUT, len(queries) // HELD_OUT)
            held_out = {queries[i] for i in rng.permutation(len(queries))[:number]}
            part, train = _only(train, held_out), _only(train, train.queries.keys() - held_out)
            notes.append(f"There is no {name} split, so {number:,} of the training queries are held out for it.")
        parts[name] = part
    for name, other, of in (("dev", train, "train"), ("test", train, "train"), ("test", parts["dev"], "dev")):
        refuse_shared(parts[name].query_ids, other.query_ids, name, of)
    for (name, part), most in zip(parts.items(), (config.dev_queries, None), strict=True):
        queries = sorted(part.query_ids)
        part = _only(part, {queries[i] for i in rng.permutation(len(queries))[:most]})
        needed = {d for judged in (part.relevant, part.negatives) for ids in judged.values() for d in ids}
        others = sorted(part.corpus.keys() - needed)
        needed |= {others[i] for i in rng.permutation(len(others))[: max(0, config.documents - len(needed))]}
        if all(len(ids) == len(needed) for ids in part.relevant.values()):
            raise DataError(
                f"Every document of the {name} split is relevant to every query, which ranks all models alike; add "
                "documents that are not relevant."
            )
        if len(part.queries) < FEW_QUERIES:
            notes.append(
                f"The {name} split has {len(part.queries)} queries, on which differences of several hundredths of "
                f"nDCG@10 are noise. Use at least {FEW_QUERIES}, better some hundreds."
            )
        parts[name] = replace(part, corpus={d: text for d, text in part.corpus.items() if d in needed})
    positives = (train.corpus[document] for grades in train.relevant.values() for document in grades)
    if "cosine-prior" in (config.losses or LOSSES) and not is_uneven(positives):
        notes.append("All documents are equally often positives, where a prior changes nothing: no cosine-prior.")
    return Splits(train, parts["dev"], parts["test"], tuple(notes))


def _only(data: RetrievalData, chosen: Collection[str]) -> RetrievalData:
    """The same corpus with some of the queries."""

    def of(part: dict[str, Any]) -> dict[str, Any]:
        return {query: value for query, value in part.items() if query in chosen}

    return replace(data, queries=of(data.queries), relevant=of(data.relevant), negatives=of(data.negatives))
