"""Losses on Banking77 and CLINC150: which one is best where nobody has tuned?

    python benchmarks/studies/known/run.py losses forgetting --data FOLDER
    python benchmarks/studies/known/run.py losses --base MiniLM --data FOLDER

FOLDER has banking77_train.csv, banking77_test.csv, clinc150_full.json and xquad_en.json
(benchmarks/data says where they are published). A run is a line of cells.jsonl with its settings;
runs that are there are not repeated. Temperatures and document exponents are chosen on dev with
seed 0; the test is read once a run. nDCG@10 is measured in full and at a quarter of the dimensions.
docs/research/known.md has the tables, the expectations, which were written before the runs, and
what came of them.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.estimates import Estimate
from benchmarks.studies.known.training import INTENTS, Cell, Figures, measure, unpacked

CELLS = Path(__file__).parent / "cells.jsonl"
SIZES = ("full", "quarter")
TAUS = (0.02, 0.05, 0.1)
NARROW = (0.03, 0.06, 0.1)
ENCODED = ("banking names", "banking questions")
STUDIES = ("losses", "forgetting")
BASES: dict[str, dict[str, Any]] = {
    "table": {},
    "MiniLM": {"base": "MiniLM", "steps": 100, "batch": 32, "rate": 2e-4, "elsewhere": True},
}


def losses(data: str, base: str = "table") -> dict[str, list[Cell]]:
    """The rows of the tables of losses: each at the temperatures among which dev chooses."""
    one = Cell(data, "MNRL", (0.05,), **BASES[base])
    if data.endswith("names"):
        names = ["MNRL", "MNRL, NO_DUPLICATES", "Cosine", "QNorm", "Learnable"]
    else:  # every question is a positive once: no repeated text, and an even prior
        names = ["MNRL", "MNRL, other classes", "Cosine, classes", "QNorm", "Learnable"]
    tuned = names
    if base == "MiniLM":
        names, tuned = [*names[:3], "GIST"], ["MNRL", "Cosine"]
        names += ["QNorm", "SIGReg"] if data == "banking names" else []
    elif data == "banking names":
        tuned = names = [*names, "SIGReg", "Cosine, classes"]
    rows = {}
    for loss in names:
        taus = TAUS if loss in tuned else TAUS[1:]
        rows[loss] = [replace(one, loss=loss, temperatures=(tau,)) for tau in taus]
    rows["TempAgg"] = [replace(one, loss="Cosine", temperatures=NARROW)]
    return rows


def forgetting() -> dict[str, Cell]:
    """Trainings whose models are measured in other domains too, before and after merging."""
    table = Cell("banking names", "Cosine", (0.05,), elsewhere=True)
    encoder = replace(table, **BASES["MiniLM"])
    return {
        "MiniLM, τ 0.05": encoder,
        "MiniLM, τ 0.1": replace(encoder, temperatures=(0.1,)),
        "table, τ 0.05": table,
    }


# --- runs ---------------------------------------------------------------------------------------


def stored() -> dict[str, Figures]:
    """The figures by settings."""
    lines = CELLS.read_text(encoding="utf-8").splitlines() if CELLS.is_file() else []
    found = {}
    for x in map(json.loads, lines):
        settings = {name: x[name] for name in Cell.__dataclass_fields__ if name in x}
        found[Cell(**settings | {"temperatures": tuple(x["temperatures"])}).key] = x
    return found


def run(cells: Iterable[Cell], folder: Path | None) -> None:
    """Measures the cells that are missing."""
    known = stored()
    for cell in dict.fromkeys(cells):
        if cell.key in known:
            continue
        figures = measure(cell, folder)
        with CELLS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(figures, separators=(",", ":")) + "\n")
        dev = " ".join(f"{x:.4f}" for x in figures["dev"].values())
        print(f"{figures['seconds']:5.1f} s  dev {dev}  {cell}", flush=True)


def run_rows(rows: Mapping[str, Sequence[Cell]], folder: Path | None) -> None:
    """All temperatures with seed 0, then the other seeds of those that dev chooses."""
    run((cell for cells in rows.values() for cell in cells), folder)
    chosen = [best(cells, stored()) for cells in rows.values()]
    for seed in (1, 2):
        run((replace(cell, seed=seed) for cell in chosen if cell is not None), folder)


def seeds(cell: Cell) -> list[Cell]:
    return [replace(cell, seed=seed) for seed in range(3)]


def best(cells: Iterable[Cell], known: Mapping[str, Figures]) -> Cell | None:
    """The cell with the highest score on dev with seed 0."""
    found = {cell: known[cell.key]["dev"]["full"] for cell in cells if cell.key in known}
    return max(found, key=lambda cell: found[cell]) if found else None


# --- tables -------------------------------------------------------------------------------------


def scores(cell: Cell, known: Mapping[str, Figures], *where: str) -> dict[int, Any]:
    """nDCG@10 of every test query by seed; ``where`` it stands in the figures."""
    found = {}
    for x in seeds(cell):
        figures: Any = known.get(x.key)
        for name in where:
            figures = figures and figures.get(name)
        if figures:
            found[x.seed] = unpacked(figures)
    return found


def points(found: Mapping[int, Any]) -> str:
    return f"{100 * np.mean(list(found.values())):.1f}" if found else ""


def gain(first: Mapping[int, Any], second: Mapping[int, Any]) -> str:
    """Scores of the first less those of the second, in points.

    The interval is a bootstrap over queries, of their means over the seeds that both have.
    """
    common = first.keys() & second.keys()
    if not common:
        return ""
    difference = np.mean([first[seed] - second[seed] for seed in common], axis=0)  # (n,)
    rows = np.random.default_rng(0).integers(len(difference), size=(2000, len(difference)))
    low, high = np.quantile(difference[rows].mean(axis=1), [0.025, 0.975])
    return Estimate(float(difference.mean()), float(low), float(high)).show(digits=2)


def table_losses(size: str) -> list[str]:
    """Gains over the best MNRL of every loss at the temperature that dev chooses."""
    known = stored()
    rows: dict[str, dict[str, str]] = {}
    for name in INTENTS:
        chosen = {loss: best(cells, known) for loss, cells in losses(name).items()}
        mnrl = scores(chosen["MNRL"], known, "test", size)
        for loss, cell in chosen.items():
            if cell is None:
                continue
            found = scores(cell, known, "test", size)
            shown = points(found) if loss == "MNRL" else gain(found, mnrl)
            rows.setdefault(loss, {})[name] = shown
    cells = [row(loss, *(found.get(name, "") for name in INTENTS)) for loss, found in rows.items()]
    return [header("loss", *INTENTS), *cells]


def table_encoder(name: str) -> list[str]:
    """Gains of MiniLM's losses over the best MNRL, and their scores in other domains."""
    known = stored()
    chosen = {loss: best(cells, known) for loss, cells in losses(name, "MiniLM").items()}
    lines = [header("loss", "τ", "full", "quarter", "XQuAD")]
    before = untrained(chosen["MNRL"])
    shown = [points(scores(before, known, "test", size)) for size in SIZES]
    lines.append(row("none", "", *shown, points(where(before, known, "XQuAD"))))
    for loss, cell in chosen.items():
        if cell is None:
            continue
        shown = []
        for size in SIZES:
            found = scores(cell, known, "test", size)
            mnrl = scores(chosen["MNRL"], known, "test", size)
            shown.append(points(found) if loss == "MNRL" else gain(found, mnrl))
        shown.append(points(where(cell, known, "XQuAD")))
        tau = f"{cell.temperatures[0]:g}" if len(cell.temperatures) == 1 else ""
        lines.append(row(loss, tau, *shown))
    return lines


def untrained(cell: Cell) -> Cell:
    one = {"loss": "MNRL", "temperatures": (0.05,), "steps": 0, "seed": 0}
    return replace(cell, **one, rate=BASES[cell.base].get("rate", 0.03))


def table_forgetting() -> list[str]:
    """In domain and elsewhere: the base, the trained model, and what merging adds to it."""
    known = stored()
    places = ("in domain", "clinc names", "XQuAD")
    lines = [header("base", "", *places, "weight by dev")]
    for label, cell in forgetting().items():
        trained = {place: where(cell, known, place) for place in places}
        half = [scores(cell, known, "half", place) for place in places]
        weights = [known[x.key].get("merged, weight") for x in seeds(cell) if x.key in known]
        before = [points(where(untrained(cell), known, place)) for place in places]
        gains = [gain(*pair) for pair in zip(half, trained.values(), strict=True)]
        lines.append(row(label, "base", *before, ""))
        after = ", ".join(f"{weight:g}" for weight in weights if weight)
        lines.append(row("", "trained", *map(points, trained.values()), after))
        if all(half):
            lines.append(row("", "half - trained", *gains, ""))
    return lines


def where(cell: Cell, known: Mapping[str, Figures], place: str) -> dict[int, Any]:
    path = ("test", "full") if place == "in domain" else ("others", place)
    return scores(cell, known, *path)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def header(*names: str) -> str:
    return row(*names) + "\n" + row(*("---" for _ in names))


TABLES = {
    **{f"known losses, {size}": partial(table_losses, size) for size in SIZES},
    **{f"known losses, MiniLM, {x}": partial(table_encoder, x) for x in ENCODED},
    "known forgetting": table_forgetting,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("studies", nargs="+", choices=STUDIES)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--sets", nargs="*", default=INTENTS, help="by default all")
    parser.add_argument("--base", choices=BASES, default="table")
    given = parser.parse_args()
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)  # one-sided similarities on purpose
    torch.set_num_threads(1)
    if "losses" in given.studies:
        for name in given.sets:
            run_rows(losses(name, given.base), given.data)
    if "forgetting" in given.studies:
        cells = forgetting().values()
        run(map(untrained, cells), given.data)
        run((x for cell in cells for x in seeds(cell)), given.data)


if __name__ == "__main__":
    main()
