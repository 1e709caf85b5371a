"""Do item vectors carry popularity in their norm, and does a norm help? MovieLens-100k.

    python benchmarks/studies/recommendation/recommendation.py

A user is the mean of the vectors of the films in the history. A run is a line of cells.jsonl with
its settings; runs that are there are not repeated, so an interrupted call goes on. Temperatures,
rates and epochs are chosen on dev, the first two with seed 0; the test is read once a run.
docs/research/recommendation.md has the tables, the expectations, which were written before the
runs, and what came of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.cells import unpacked
from benchmarks.studies.estimates import Estimate, in_points, markdown
from benchmarks.studies.recommendation import baselines, training
from benchmarks.studies.recommendation.baselines import BASELINES
from benchmarks.studies.recommendation.training import Array, Cell, Figures

from st_magnitude.evaluation.metrics import judge

CELLS = Path(__file__).parent / "cells.jsonl"
TAUS = (0.05, 0.1, 0.2, 0.3)
RATES = ((0.001, 0.1), (0.003, 0.0), (0.003, 0.5))  # and decays, of Cosine
GRID: dict[str, dict[str, tuple[float, ...]]] = {  # softmax to kind to temperatures
    "all": {
        "row": (0.05, 0.1),  # over a factor of about .4
        "schedule": (0.05, 0.02),
        "dnorm": (0.05, 0.1, 0.2),
        "cosine": (0.05, 0.1, 0.2),
        "unit": (0.1,),
        "dot": (0.2, 0.1, 0.3, 0.05),
        "qnorm": (0.1, 0.2),
        "scalar": (0.1,),
        "bias": (0.1,),
        "user": (0.1,),
        "row, constant": (0.05, 0.1, 0.02),
        "learned": (0.2,),
    },
    "logq": {"dot": (0.1, 0.2, 0.05), "cosine": (0.1, 0.05), "dnorm": (0.1,), "row": (0.05,)},
    "batch": {"dot": (0.1,), "cosine": (0.1,)},
}
WAYS = {"all": "all films", "logq": "in-batch, logQ", "batch": "in-batch"}
FIVE = ("cosine", "dnorm", "row", "dot", "qnorm")  # of seeds; the others have three


def stored() -> dict[str, Figures]:
    """The figures by settings."""
    lines = CELLS.read_text(encoding="utf-8").splitlines() if CELLS.is_file() else []
    names = Cell.__dataclass_fields__
    return {Cell(**{name: x[name] for name in names}).key: x for x in map(json.loads, lines)}


def run(cells: Iterable[Cell]) -> None:
    """Measures the cells that are missing."""
    for cell in dict.fromkeys(cells):
        if cell.key in stored():
            continue
        known = cell.kind in BASELINES
        figures = baselines.measure(cell) if known else training.measure(cell)
        with CELLS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures, separators=(",", ":")) + "\n")
        print(f"dev {figures['plain']['dev']}: {cell}", flush=True)


def coarse(softmax: str, kind: str) -> list[Cell]:
    return [Cell(kind, tau, softmax) for tau in GRID[softmax][kind]]


def grid(softmax: str, kind: str) -> list[Cell]:
    """The settings among which dev chooses."""
    cells = coarse(softmax, kind)
    chosen = best(cells)
    if (softmax, kind) != ("all", "cosine") or chosen is None:
        return cells
    return cells + [replace(chosen, rate=rate, decay=decay) for rate, decay in RATES]


def best(cells: Iterable[Cell], scoring: str = "plain") -> Cell | None:
    """The stored cell with the highest nDCG@10 on dev with seed 0."""
    known = stored()
    found = {cell: known[cell.key][scoring]["dev"] for cell in cells if cell.key in known}
    return max(found, key=lambda cell: found[cell]) if found else None


def seeds(cell: Cell, number: int = 5) -> list[Cell]:
    return [replace(cell, seed=seed) for seed in range(number)]


# --- tables ---------------------------------------------------------------------------------------

LABELS = {
    "popularity": "popularity",
    "EASE": "EASE",
    "ALS": "ALS of implicit",
    "cosine": "Cosine",
    "bias": "Cosine, a bias for each film",
    "unit": "Cosine, mean of unit vectors",
    "scalar": "Cosine, one learned τ",
    "user": "Cosine, a learned τ for each user",
    "schedule": "Cosine, τ over the batch's mean of q's norm",
    "row": "Cosine, τ over q's norm",
    "row, constant": "the same, the norm a constant",
    "qnorm": "QNorm",
    "dnorm": "DNorm",
    "dot": "Dot",
    "learned": "learned exponents",
}


def of_seeds(cell: Cell, scoring: str = "plain") -> list[Figures]:
    known = stored()
    return [known[x.key][scoring] for x in seeds(cell) if x.key in known]


def per_user(found: Iterable[Figures]) -> Array:
    """Means over seeds, (U,)."""
    return np.mean([unpacked(x["test"]) for x in found], axis=0)


def row(label: str, tau: str, found: list[Figures], *others: list[Figures]) -> list[Any]:
    """Gains are paired by user, with the interval of `judge`."""
    test = per_user(found)
    gains = [Estimate(*judge(test - per_user(x)).gain).show() for x in others]
    dev = in_points([x["dev"] for x in found])
    return [label, tau, len(found), dev, in_points(test), *gains]


def table(softmax: str) -> list[str]:
    """nDCG@10 in percent and gains in points, each at the setting that dev chooses."""
    chosen = {kind: x for kind in GRID[softmax] if (x := best(grid(softmax, kind)))}
    if softmax == "all":
        chosen |= {kind: Cell(kind) for kind in BASELINES}
    others = [of_seeds(chosen[kind]) for kind in ("cosine", "row") if kind in chosen]
    rows = []
    for kind, label in LABELS.items():
        if kind not in chosen or not (found := of_seeds(chosen[kind])):
            continue
        tau = "" if kind in BASELINES else f"{chosen[kind].temperature:g}"
        rows.append(row(label, tau, found, *others))
        if kind == "cosine" and (prior := best(grid(softmax, kind), "prior")):
            found, tau = of_seeds(prior, "prior"), f"{prior.temperature:g}"
            rows.append(row("Cosine, prior at scoring", tau, found, *others))
    head = ["model", "τ", "seeds", "dev", "test", "over Cosine", "over τ / norm of q"]
    return markdown(head[: 5 + len(others)], rows)


def table_norms() -> list[str]:
    """Spearman's correlation with a film's number of ratings, by temperature, seed 0."""
    known, rows = stored(), []
    for softmax, kind, what in product(GRID, ("dot", "qnorm", "cosine"), ("norm", "projection")):
        found = [known.get(Cell(kind, tau, softmax).key) for tau in TAUS]
        shown = [f"{x[what]:+.2f}" if x else "" for x in found]
        rows.append([WAYS[softmax], LABELS[kind], what, *shown])
    shown = [x for x in rows if any(x[3:])]
    return markdown(["softmax", "loss", "of d", *map(str, TAUS)], shown, "lll")


TABLES = {
    **{f"recommendation, {x}": partial(table, x) for x in WAYS},
    "recommendation, norms": table_norms,
}


def main() -> None:
    torch.set_num_threads(1)
    run([Cell("popularity"), Cell("EASE"), *seeds(Cell("ALS"), 3)])
    run(x for kind in GRID["all"] for x in coarse("all", kind))
    run(grid("all", "cosine"))
    run_seeds("all", FIVE, 3)
    run_seeds("all", ("row, constant", "user", "schedule"), 3)
    run(x for softmax in ("logq", "batch") for kind in GRID[softmax] for x in coarse(softmax, kind))
    run_seeds("all", FIVE, 5)


def run_seeds(softmax: str, kinds: Iterable[str], number: int) -> None:
    """Other seeds of the settings that dev has chosen."""
    chosen = [best(grid(softmax, kind)) for kind in kinds]
    run(x for cell in chosen if cell for x in seeds(cell, number))


if __name__ == "__main__":
    main()
