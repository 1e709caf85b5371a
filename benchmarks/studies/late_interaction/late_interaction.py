"""Late interaction: is the norm of a token its importance? Pruning by norm against clustering.

The cells are those of this script at commit 6403ebd0, which has the loss and trains. The table
takes for each share of the vectors what dev chose with seed 0: the temperature, and the document
exponent of "calibrated". "norm, pooling" clusters what twice the share by norm keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.studies.cells import Cell, Figures, Store, unpacked
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from numpy.typing import NDArray

SHARES = {f"{share:g}": share for share in (1.0, 0.5, 0.25, 0.15, 0.1, 0.05)}
LOSSES = {"cosine": "Cosine", "dot": "Dot"}
WAYS = {  # how vectors are chosen, to the rules of which dev takes the better
    "clustered": ["pooling"],
    "pruned": ["norm, cosine", "norm, calibrated"],
    "both": ["norm, pooling"],
}
TEST = "docstrings"
CELLS = Store(Path(__file__).parent / "cells")
CELL = Cell("MiniLM, projection", "late docstrings", "cosine", 0, 150, 32, 1e-4, bf16=True)
GRID = [replace(CELL, loss=loss, temperature=tau) for loss in LOSSES for tau in (0.02, 0.05)]


@dataclass(frozen=True)
class Choice:
    """The stored cell with seed 0 and the rule that are best on dev for a share of the vectors."""

    cell: Cell
    rule: str
    share: str
    dev: Figures

    @property
    def by_seed(self) -> dict[int, NDArray[np.float64]]:
        """nDCG@10 of each query on the test."""
        found = CELLS.of_seeds(self.cell).items()
        return {s: unpacked(x["tests"][TEST][self.rule][self.share]["ndcg"]) for s, x in found}

    def __str__(self) -> str:
        exponent = self.dev["exponent"]
        how = f", exponent {exponent:g}" if exponent != 1 else ""
        mean = in_points([values.mean() for values in self.by_seed.values()])
        return f"{mean} ({LOSSES[self.cell.loss]} {self.cell.temperature:g}{how})"


def best(way: str, share: str) -> Choice | None:
    """The choice, or None where no stored cell has a rule for the share."""
    choices = []
    for cell in filter(CELLS.load, GRID):
        dev = CELLS.load(cell)["dev"]
        rules = [rule for rule in WAYS[way] if share in dev.get(rule, {})]
        choices += [Choice(cell, rule, share, dev[rule][share]) for rule in rules]
    return max(choices, key=lambda choice: choice.dev["ndcg"], default=None)


def table() -> list[str]:
    """For each share what dev chooses, its nDCG@10, and what pruning gains over clustering."""
    rows = []
    for share, value in SHARES.items():
        choices = [best(way, share) for way in WAYS]
        control, *others = (choice.by_seed if choice else {} for choice in choices)
        gains = [gain_of(figures, control) for figures in others]
        seeds = gains[0][1] if gains[0] else 0
        cells = [str(choice or "") for choice in choices]
        rows.append([f"{100 * value:g} %", *cells, *map(show, gains), seeds])
    head = "vectors|Cosine, clustered|by norm|norm, clustered|norm - clustered|both - clustered"
    return markdown(f"{head}|seeds".split("|"), rows, "rlll")


TABLES: dict[str, Callable[[], list[str]]] = {"late": table}
