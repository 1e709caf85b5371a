"""The decoder of the magnitude study: the gains of Dot and QNorm over Cosine, from stored cells.

"matched" is the document exponent of training, "chosen" the one of 0, .25, ..., 1 that is best on
the dev task of the training set. docs/research/magnitude.md has the protocol, and names the commit
whose script trained this base and the four others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from benchmarks.studies.estimates import Estimate, markdown, paired, show
from benchmarks.studies.store import Figures, Store
from numpy.typing import NDArray

# loss to its name and its document exponent
NAMES = {"cosine": ("Cosine", 1.0), "dot": ("Dot", 0.0), "qnorm": ("QNorm", 0.0)}
TRAIN_SETS = ("wordnet", "docstrings")

Cells = dict[tuple[str, str, str], dict[int, Figures]]  # (base, training set, loss) to seeds


@dataclass(frozen=True)
class Cell:
    """A model."""

    base: str
    rows: str
    loss: str
    seed: int


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def per_query(
    runs: dict[int, Figures], tasks: Iterable[str], exponent: float | None
) -> dict[int, list[NDArray[np.float64]]]:
    """nDCG@10 of every query by seed, one array a task; at the chosen exponent without one."""
    found = {}
    for seed, x in runs.items():
        key = str(x["chosen"] if exponent is None else exponent)
        found[seed] = [np.array(x["tasks"][task]["per query"][key]) for task in tasks]
    return found


def gain(cells: Cells, base: str, rows: str, loss: str, where: str, scoring: str) -> Estimate:
    """nDCG@10 over Cosine in the domain of training or in the others."""
    runs, plain = (cells[base, rows, name] for name in (loss, "cosine"))
    tasks = [task for task in runs[0]["tasks"] if (task == rows) == (where == "in domain")]
    after = per_query(runs, tasks, NAMES[loss][1] if scoring == "matched" else None)
    before = per_query(plain, tasks, 1.0)
    seeds = sorted(after.keys() & before.keys())
    differences = [
        np.array([after[seed][i] - before[seed][i] for seed in seeds]) for i in range(len(tasks))
    ]
    return paired(differences)


def gain_table(cells: Cells, names: Iterable[str]) -> list[str]:
    """Gains over Cosine in points."""
    columns = list(product(("dot", "qnorm"), ("matched", "chosen")))
    lines = []
    for base, rows, where in product(names, TRAIN_SETS, ("in domain", "out")):
        gains = [gain(cells, base, rows, loss, where, scoring) for loss, scoring in columns]
        lines.append([f"{base}, {rows}", where, *map(show, gains)])
    head = [f"{NAMES[loss][0]}, {scoring}" for loss, scoring in columns]
    return markdown(["base, trained on", "tasks", *head], lines, "ll")


def decoder_table() -> list[str]:
    """The gains of the base whose cells are in the repository."""
    cells: Cells = {}
    for x, figures in CELLS.found.items():
        cells.setdefault((x.base, x.rows, x.loss), {})[x.seed] = figures
    return gain_table(cells, ["decoder"])
