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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.cells import unpacked
from benchmarks.studies.estimates import Estimate, in_points, markdown
from benchmarks.studies.recommendation import baselines, training
from benchmarks.studies.recommendation.baselines import BASELINES
from benchmarks.studies.recommendation.training import Cell, Figures

from st_magnitude.evaluation.metrics import judge

CELLS = Path(__file__).parent / "cells.jsonl"
TAUS = (0.05, 0.1, 0.2, 0.3)
LOW = (0.02, 0.05, 0.1)  # of rows, over a factor of about .4
RATES = ((0.001, 0.1), (0.01, 0.1), (0.003, 0.0), (0.003, 0.5))  # and decays, of Cosine
GRID: dict[str, dict[str, tuple[float, ...]]] = {  # softmax to kind to temperatures
    "all": {
        "dnorm": TAUS[:3],
        "cosine": TAUS[:3],
        "row": LOW,
        "schedule": LOW,
        "dot": TAUS,
        "qnorm": TAUS[:3],
        **dict.fromkeys(("unit", "bias", "user"), TAUS[1:2]),
        "scalar": (0.1,),
        "row, constant": (0.05,),
        "learned": (0.1, 0.2),
    },
    "logq": dict.fromkeys(("cosine", "dot", "dnorm", "row"), TAUS[:3]),
    "batch": dict.fromkeys(("cosine", "dot"), TAUS[1:2]),
}
WAYS = {"all": "all films", "logq": "in-batch, logQ", "batch": "in-batch"}
Row = list[Any]
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
    "schedule": "Cosine, τ over the batch's mean of |q|",
    "row": "Cosine, τ over |q| of the row",
    "row, constant": "the same as a constant",
    "qnorm": "QNorm",
    "dnorm": "DNorm",
    "dot": "Dot",
    "learned": "learned exponents",
}


def of_seeds(cell: Cell, scoring: str = "plain") -> dict[int, Figures]:
    known = stored()
    return {x.seed: known[x.key][scoring] for x in seeds(cell) if x.key in known}


def gain(after: Mapping[int, Figures], before: Mapping[int, Figures]) -> str:
    """In points, over the seeds that both have; what has one seed is compared with each."""
    if len(after) == 1 or len(before) == 1:
        common = [(x, y) for x in after.values() for y in before.values()]
    else:
        common = [(after[seed], before[seed]) for seed in after.keys() & before.keys()]
    found = np.mean([unpacked(x["test"]) - unpacked(y["test"]) for x, y in common], axis=0)
    return Estimate(*judge(found).gain).show()


def row(label: str, tau: str, found: Mapping[int, Figures], *others: Mapping[int, Figures]) -> Row:
    dev = in_points([x["dev"] for x in found.values()])
    test = in_points([unpacked(x["test"]) for x in found.values()])
    return [label, tau, len(found), dev, test, *(gain(found, x) if x is not found else "" for x in others)]


def table(softmax: str) -> list[str]:
    """nDCG@10 in percent and gains in points, each at the setting that dev chooses."""
    known = stored()
    kinds = {kind: x for kind in GRID[softmax] if (x := best(grid(softmax, kind)))}
    found = {kind: of_seeds(cell) for kind, cell in kinds.items()}
    others = [found[kind] for kind in ("cosine", "row") if kind in found]
    rows = []
    for kind, label in LABELS.items():
        if softmax == "all" and (fixed := of_seeds(Cell(kind))) and kind in BASELINES:
            rows.append(row(label, "", fixed, *others))
        if kind not in kinds:
            continue
        tau = f"{known[kinds[kind].key]['tau']:.2g}"
        rows.append(row(label, tau, found[kind], *others))
        if kind == "cosine":
            prior = best(grid(softmax, kind), "prior")
            rows.append(row("Cosine, prior at scoring", f"{prior.temperature:g}", of_seeds(prior, "prior"), *others))
    return markdown(["model", "τ", "seeds", "dev", "test", "over Cosine", "over τ / \\|q\\|"][: 5 + len(others)], rows)


def table_norms() -> list[str]:
    """Spearman's correlation with a film's number of ratings, by temperature, seed 0."""
    known, rows = stored(), []
    for softmax, kinds in GRID.items():
        for kind in ("dot", "qnorm", "dnorm", "cosine"):
            cells = [Cell(kind, tau, softmax) for tau in TAUS]
            found = [known.get(x.key) for x in cells]
            for what in ("norm", "projection"):
                shown = [f"{x[what]:+.2f}" if x else "" for x in found]
                rows.append([WAYS[softmax], LABELS[kind], what, *shown])
    return markdown(["softmax", "loss", "of d", *map(str, TAUS)], rows, "lll")


TABLES = {**{f"recommendation, {x}": partial(table, x) for x in WAYS}, "recommendation, norms": table_norms}


def main() -> None:
    torch.set_num_threads(1)
    run([Cell("popularity"), Cell("EASE"), *seeds(Cell("ALS"), 3)])
    run(x for kind in GRID["all"] for x in coarse("all", kind))
    run(grid("all", "cosine"))
    run_seeds("all", FIVE, 3)
    run_seeds("all", GRID["all"], 3)
    run(x for softmax in ("logq", "batch") for kind in GRID[softmax] for x in coarse(softmax, kind))
    run_seeds("all", FIVE, 5)
    run_seeds("logq", GRID["logq"], 3)


def run_seeds(softmax: str, kinds: Iterable[str], number: int) -> None:
    """Other seeds of the settings that dev has chosen."""
    chosen = [best(grid(softmax, kind)) for kind in kinds]
    run(x for cell in chosen if cell for x in seeds(cell, number))


if __name__ == "__main__":
    main()
