"""Does merging with the base keep what fine-tuning forgets, more than fewer steps or small rates?

    python benchmarks/studies/merging/merging.py [--seeds 3]

paraphrase-MiniLM-L3-v2 with a frozen token table is trained on docstrings with Cosine, with a
negative that is never relevant in each row, and merged with its base by `stm.merge_with_base`.
Every weight is measured on docstrings, and on WordNet and FOLDOC as other domains: 150 queries over
300 documents each. Fewer steps and smaller rates are trained too, and compared with the point of
the curve of weights that has the same nDCG@10 in its own domain.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.debian import fetch
from benchmarks.data.docstrings import docstring_task
from benchmarks.data.lexicons import foldoc, wordnet
from benchmarks.data.search_tasks import shrink
from benchmarks.studies.cells import (
    BASES,
    SEED,
    Cell,
    Figures,
    Store,
    asked,
    how_of,
    objective,
    packed,
    unpacked,
)
from benchmarks.studies.estimates import in_points, markdown, paired
from benchmarks.studies.models import train
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

DOMAINS = ("docstrings", "wordnet", "foldoc")
STEPS, RATE = 40, 3e-4
MAIN = Cell("L3frozen", "docstrings", "cosine", 0, STEPS, 16, RATE)
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
ALTERNATIVES = {
    "half of the steps": {"steps": STEPS // 2},
    "a quarter of the steps": {"steps": STEPS // 4},
    "half of the rate": {"rate": RATE / 2},
    "a quarter of the rate": {"rate": RATE / 4},
}
CELLS = Store(Path(__file__).parent / "cells")
Tasks = tuple[Any, dict[str, RetrievalData], dict[str, RetrievalData]]
Curves = list[NDArray[np.float64]]


@lru_cache(maxsize=1)
def tasks() -> Tasks:
    """Rows to train on, dev and tests by domain."""
    sizes = {"num_test_queries": 400, "corpus_size": 1500}
    sizes |= {"num_dev_queries": 200, "dev_corpus_size": 800}
    _, words_dev, words_test = wordnet(fetch("wordnet-base"), SEED, **sizes)
    calls = docstring_task()
    computing = foldoc(fetch("dict-foldoc"), SEED, num_queries=300, corpus_size=1000)
    tests = {"docstrings": calls.test, "wordnet": words_test, "foldoc": computing}
    dev = {"docstrings": calls.dev, "wordnet": words_dev}

    def small(tasks: dict[str, RetrievalData]) -> dict[str, RetrievalData]:
        return {name: shrink(task, 150, 300, SEED) for name, task in tasks.items()}

    return calls.train.triplets(1, SEED), small(dev), small(tests)


def trained(cell: Cell) -> SentenceTransformer:
    """The model after training."""
    torch.manual_seed(cell.seed)
    model = stm.prepare(BASES[cell.base](), cell.loss)
    train(model, objective(model, cell), tasks()[0], cell.seed, **how_of(cell))
    return model.eval()


def measure(cell: Cell) -> Figures:
    """nDCG@10 of every query, of an alternative or at every weight of a main cell."""
    model = trained(cell)
    _, dev, tests = tasks()
    sets = {f"dev {name}": dev[name] for name in ("docstrings", "wordnet")} | tests
    weights = WEIGHTS if replace(cell, seed=0) == MAIN else (1.0,)
    first, *keep = sets.values()
    base = BASES[cell.base]()
    merge = stm.merge_with_base(model, base, first, keep, weights, np.inf)
    ndcg = {name: [packed(x) for x in rows] for name, rows in zip(sets, merge.ndcg, strict=True)}
    return {"settings": asdict(cell), "matched": {"weights": weights, "ndcg": ndcg}}


# --- tables ---------------------------------------------------------------------------------------


def curve(cell: Cell, name: str) -> NDArray[np.float64]:
    """nDCG@10 of every query by seed and weight, (S, W, n)."""
    found = [x["matched"]["ndcg"][name] for x in CELLS.of_seeds(cell).values()]
    return np.array([[unpacked(row) for row in rows] for rows in found])


def difference(after: Curves, before: Curves) -> str:
    """The mean over data sets of (S, n) figures less others, with its interval."""
    return paired([x - y for x, y in zip(after, before, strict=True)]).show()


def curve_table() -> list[str]:
    """nDCG@10 in points by weight, and what each weight gains over the trained model."""
    rows = []
    curves = [curve(MAIN, domain) for domain in DOMAINS]
    last = [x[:, -1] for x in curves]
    for i, weight in enumerate(WEIGHTS):
        here = [x[:, i] for x in curves]
        gains = [difference(here[:1], last[:1]), difference(here[1:], last[1:])]
        rows.append([f"{weight:g}", *map(in_points, here), *(gains if weight < 1 else ["", ""])])
    head = ["weight", "docstrings", "WordNet", "FOLDOC", "gain in docstrings", "gain in the others"]
    return markdown(head, rows, "r")


def alternative_table() -> list[str]:
    """Fewer steps and smaller rates, each next to the first point of the curve as good as it."""
    rows = []
    own, *others = (curve(MAIN, domain) for domain in DOMAINS)
    means = own.mean(axis=(0, 2))
    for how, change in ALTERNATIVES.items():
        instead = replace(MAIN, **change)
        there, *elsewhere = (curve(instead, domain)[:, 0] for domain in DOMAINS)
        row = [how, in_points(there), in_points([x.mean() for x in elsewhere])]
        if (found := crossing(means, float(there.mean()))) is None:
            rows.append([*row, "none", ""])
            continue
        i, share = found
        merged = [(1 - share) * x[:, i] + share * x[:, i + 1] for x in others]
        weight = (1 - share) * WEIGHTS[i] + share * WEIGHTS[i + 1]
        rows.append([*row, f"{weight:.2f}", difference(merged, elsewhere)])
    head = ["instead", "docstrings", "the others", "weight as good", "merging over it, others"]
    return markdown(head, rows)


def crossing(curve: NDArray[np.float64], value: float) -> tuple[int, float] | None:
    """The first segment of a curve that reaches a value, and where on it; None if none does.

    Example:
        >>> crossing(np.array([1.0, 3.0, 2.0]), 2.5), crossing(np.array([1.0, 3.0, 2.0]), 4.0)
        ((0, 0.75), None)
    """
    for i, (start, end) in enumerate(pairwise(curve)):
        if min(start, end) <= value <= max(start, end):
            return i, float((value - start) / (end - start))
    return None


TABLES = {"merging": curve_table, "instead of merging": alternative_table}

if __name__ == "__main__":
    for seed in range(asked(__doc__).seeds):
        cells = [replace(MAIN, seed=seed, **how) for how in ({}, *ALTERNATIVES.values())]
        CELLS.run(measure, cells)
