"""Does merging with the base keep what fine-tuning forgets, more than fewer steps or small rates?

    python benchmarks/studies/merging/merging.py [--seeds 3]

paraphrase-MiniLM-L3-v2 with a frozen token table is trained on docstrings with Cosine, with a
negative that is never relevant in each row, and its parameters are averaged with those of its base.
Every weight is measured on docstrings, and on WordNet and FOLDOC as other domains: 150 queries over
300 documents each. Fewer steps and smaller rates are trained too, and compared with the point of
the curve of weights that has the same nDCG@10 in its own domain.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from benchmarks.data.docstrings import docstring_task
from benchmarks.data.lexicons import build
from benchmarks.data.search_tasks import shrink
from benchmarks.studies import cells
from benchmarks.studies.cells import BASES, SEED, Cell
from benchmarks.studies.estimates import in_points, markdown, paired
from benchmarks.studies.models import train
from benchmarks.studies.store import Figures, Store, packed, unpacked
from numpy.typing import NDArray

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
CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


@lru_cache(maxsize=1)
def tasks() -> dict[str, RetrievalData]:
    """The dev split of docstrings, and the tests by domain."""
    sizes = {"num_test_queries": 400, "corpus_size": 1500, "num_dev_queries": 200}
    sizes |= {"dev_corpus_size": 800, "num_foldoc_queries": 300, "foldoc_corpus_size": 1000}
    words, calls = build(seed=SEED, **sizes), docstring_task()
    found = {"dev docstrings": calls.dev, "docstrings": calls.test}
    found |= {"wordnet": words.test, "foldoc": words.foldoc}
    return {name: shrink(task, 150, 300, SEED) for name, task in found.items()}


def measure(cell: Cell) -> Figures:
    """nDCG@10 of every query, of an alternative or at every weight of a main cell."""
    torch.manual_seed(cell.seed)
    model = stm.prepare(BASES[cell.base](), cell.loss)
    rows = docstring_task().train.triplets(1, SEED)
    start = cells.weights_of(model)
    train(model, cells.objective(model, cell), rows, cell.seed, **cells.how_of(cell))
    end = cells.weights_of(model.eval())
    weights = WEIGHTS if replace(cell, seed=0) == MAIN else (1.0,)
    ndcg: dict[str, list[str]] = {name: [] for name in tasks()}
    for weight in weights:
        model.load_state_dict({name: torch.lerp(start[name], end[name], weight) for name in end})
        for name, task in tasks().items():
            encoded = cells.encode(model, task)
            ndcg[name].append(packed(encoded.ndcg(encoded.top(stm.COSINE))))
    return {"matched": {"weights": weights, "ndcg": ndcg}}


# --- tables ---------------------------------------------------------------------------------------


def curve(cell: Cell, name: str) -> NDArray[np.float64]:
    """nDCG@10 of every query by seed and weight, (S, W, n)."""
    found = [x["matched"]["ndcg"][name] for x in CELLS.of_seeds(cell).values()]
    return np.array([[unpacked(row) for row in rows] for rows in found])


def curve_table() -> list[str]:
    """nDCG@10 in points by weight, and what each weight gains over the trained model."""
    rows = []
    curves = [curve(MAIN, domain) for domain in DOMAINS]
    for i, weight in enumerate(WEIGHTS):
        own, *others = (x[:, i] - x[:, -1] for x in curves)
        gains = [paired([own]).show(), paired(others).show()] if weight < 1 else ["", ""]
        rows.append([f"{weight:g}", *(in_points(x[:, i]) for x in curves), *gains])
    head = ["weight", "docstrings", "WordNet", "FOLDOC", "gain in docstrings", "gain in the others"]
    return markdown(head, rows, "r")


def alternative_table() -> list[str]:
    """Fewer steps and smaller rates, each next to the first point of the curve as good as it."""
    rows = []
    own, *others = (curve(MAIN, domain) for domain in DOMAINS)
    grid = np.linspace(0.0, 1.0, 100_000, endpoint=False)
    by_weight = np.interp(grid, WEIGHTS, own.mean(axis=(0, 2)))
    for how, change in ALTERNATIVES.items():
        there, *elsewhere = (curve(replace(MAIN, **change), name)[:, 0] for name in DOMAINS)
        weight = grid[np.argmax(by_weight >= there.mean())]
        share, i = np.modf(weight * (len(WEIGHTS) - 1))
        merged = [(1 - share) * x[:, int(i)] + share * x[:, int(i) + 1] for x in others]
        gain = paired([x - y for x, y in zip(merged, elsewhere, strict=True)])
        means = [in_points(there), in_points([x.mean() for x in elsewhere])]
        rows.append([how, *means, f"{weight:.2f}", gain.show()])
    head = ["instead", "docstrings", "the others", "weight as good", "merging over it, others"]
    return markdown(head, rows)


TABLES = {"merging": curve_table, "instead of merging": alternative_table}

if __name__ == "__main__":
    for seed in range(cells.asked(__doc__).seeds):
        CELLS.run(
            measure, [replace(MAIN, seed=seed, **how) for how in ({}, *ALTERNATIVES.values())]
        )
