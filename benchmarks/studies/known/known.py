"""Losses on Banking77 and CLINC150: which one is best where nobody has tuned?

    python benchmarks/studies/known/known.py losses forgetting --data FOLDER
    python benchmarks/studies/known/known.py losses --base MiniLM --data FOLDER

FOLDER has banking77_train.csv, banking77_test.csv, clinc150_full.json and xquad_en.json
(benchmarks/data says where they are published). A run is a line of cells.jsonl with its settings;
runs that are there are not repeated. Temperatures and document exponents are chosen on dev with
seed 0; the test is read once a run. nDCG@10 is measured in full and at a quarter of the dimensions.
docs/research/known.md has the tables, the expectations, which were written before the runs, and
what came of them.

"hardness" weights negatives by exp(strength · cosine),
as the temperature paper did with all its models (docs/research/compression.md).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.studies.estimates import paired
from benchmarks.studies.known.training import INTENTS, Cell, measure, unpacked
from benchmarks.studies.store import Store, seed_by_seed, seeds_of

CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)
SIZES = ("full", "quarter")
TAUS = (0.02, 0.05, 0.1)
NARROW = (0.03, 0.06, 0.1)
STUDIES = ("losses", "forgetting", "hardness")
HARDNESS = (0.0, 5.0, 9.0)  # 5: EmbeddingGemma; 9: LLaVE and sentence-transformers
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


def weighted(data: str) -> dict[float, list[Cell]]:
    """By strength of the weights of negatives, at each temperature."""
    one = Cell(data, "Cosine", (0.05,))
    return {
        strength: [replace(one, hardness=strength, temperatures=(tau,)) for tau in (*TAUS, 0.2)]
        for strength in HARDNESS
    }


# --- runs ---------------------------------------------------------------------------------------


def run_missing(cells: Iterable[Cell], folder: Path | None) -> None:
    """Measures the cells that are missing."""
    CELLS.run(lambda cell: measure(cell, folder), cells)


def run_rows(rows: Mapping[str, Sequence[Cell]], folder: Path | None) -> None:
    """All temperatures with seed 0, then the other seeds of those that dev chooses."""
    run_missing((cell for cells in rows.values() for cell in cells), folder)
    chosen = [best_on_dev(cells) for cells in rows.values()]
    run_missing(seed_by_seed([cell for cell in chosen if cell is not None]), folder)


def best_on_dev(cells: Iterable[Cell]) -> Cell | None:
    """The cell with the highest score on dev with seed 0."""
    return CELLS.best(cells, "dev", "full")


# --- tables -------------------------------------------------------------------------------------


def ndcg_of(cell: Cell, *where: str) -> dict[int, Any]:
    """nDCG@10 of every test query by seed; ``where`` it stands in the figures."""
    found = {}
    for x in seeds_of(cell):
        figures: Any = CELLS.load(x)
        for name in where:
            figures = figures and figures.get(name)
        if figures:
            found[x.seed] = unpacked(figures)
    return found


def points(found: Mapping[int, Any]) -> str:
    return f"{100 * np.mean(list(found.values())):.1f}" if found else ""


def shown_gain(first: Mapping[int, Any], second: Mapping[int, Any]) -> str:
    """Scores of the first less those of the second in points, of means over common seeds.

    The interval is over queries alone.
    """
    common = first.keys() & second.keys()
    if not common:
        return ""
    difference = np.mean([first[seed] - second[seed] for seed in common], axis=0)  # (n,)
    return paired([difference[None]]).show(digits=2)


def table_losses() -> list[str]:
    """Gains over the best MNRL of every loss at the temperature that dev chooses."""
    rows: dict[str, dict[str, str]] = {}
    for name in INTENTS:
        chosen = {loss: best_on_dev(cells) for loss, cells in losses(name).items()}
        mnrl = ndcg_of(chosen["MNRL"], "test", "full")
        for loss, cell in chosen.items():
            if cell is None:
                continue
            found = ndcg_of(cell, "test", "full")
            shown = points(found) if loss == "MNRL" else shown_gain(found, mnrl)
            rows.setdefault(loss, {})[name] = shown
    cells = [row(loss, *(found.get(name, "") for name in INTENTS)) for loss, found in rows.items()]
    return [header("loss", *INTENTS), *cells]


def table_encoder() -> list[str]:
    """Gains of MiniLM's losses over the best MNRL, and their scores in other domains."""
    found = losses("banking names", "MiniLM")
    chosen = {loss: best_on_dev(cells) for loss, cells in found.items()}
    lines = [header("loss", "τ", "full", "quarter", "XQuAD")]
    before = untrained(chosen["MNRL"])
    shown = [points(ndcg_of(before, "test", size)) for size in SIZES]
    lines.append(row("none", "", *shown, points(where(before, "XQuAD"))))
    for loss, cell in chosen.items():
        if cell is None:
            continue
        shown = []
        for size in SIZES:
            found = ndcg_of(cell, "test", size)
            mnrl = ndcg_of(chosen["MNRL"], "test", size)
            shown.append(points(found) if loss == "MNRL" else shown_gain(found, mnrl))
        shown.append(points(where(cell, "XQuAD")))
        tau = f"{cell.temperatures[0]:g}" if len(cell.temperatures) == 1 else ""
        lines.append(row(loss, tau, *shown))
    return lines


def untrained(cell: Cell) -> Cell:
    one = {"loss": "MNRL", "temperatures": (0.05,), "steps": 0, "seed": 0}
    return replace(cell, **one, rate=BASES[cell.base].get("rate", 0.03))


def table_forgetting() -> list[str]:
    """In domain and elsewhere: the base, the trained model, and what merging adds to it."""
    places = ("in domain", "clinc names", "XQuAD")
    lines = [header("base", "", *places, "weight by dev")]
    for label, cell in forgetting().items():
        trained = {place: where(cell, place) for place in places}
        half = [ndcg_of(cell, "half", place) for place in places]
        weights = [x.get("merged, weight") for x in CELLS.of_seeds(cell).values()]
        before = [points(where(untrained(cell), place)) for place in places]
        gains = [shown_gain(*pair) for pair in zip(half, trained.values(), strict=True)]
        lines.append(row(label, "base", *before, ""))
        after = ", ".join(f"{weight:g}" for weight in weights if weight)
        lines.append(row("", "trained", *map(points, trained.values()), after))
        if all(half):
            lines.append(row("", "half - trained", *gains, ""))
    return lines


def table_hardness() -> list[str]:
    """Gains of weights of negatives at a temperature, and each at the one that dev chooses."""
    taus = [f"τ {tau:g}" for tau in (*TAUS, 0.2)]
    lines = [header("data", "strength", *taus, "τ by dev", "over 0, each by dev")]
    for name in INTENTS[:2]:
        rows = weighted(name)
        plain = [ndcg_of(cell, "test", "full") for cell in rows[0.0]]
        for strength, cells in rows.items():
            found = [ndcg_of(cell, "test", "full") for cell in cells]
            shown = [shown_gain(*pair) for pair in zip(found, plain, strict=True)]
            chosen, first = best_on_dev(cells), best_on_dev(rows[0.0])
            pair = [ndcg_of(cell, "test", "full") for cell in (chosen, first)]
            by_dev = [f"{chosen.temperatures[0]:g}", shown_gain(*pair) if strength else ""]
            shown = shown if strength else [points(x) for x in found]
            lines.append(row(name, f"{strength:g}", *shown, *by_dev))
    return lines


def where(cell: Cell, place: str) -> dict[int, Any]:
    path = ("test", "full") if place == "in domain" else ("others", place)
    return ndcg_of(cell, *path)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def header(*names: str) -> str:
    return row(*names) + "\n" + row(*("---" for _ in names))


TABLES = {
    "known losses, full": table_losses,
    "known losses, MiniLM": table_encoder,
    "known forgetting": table_forgetting,
    "known hardness": table_hardness,
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
        run_missing(map(untrained, cells), given.data)
        run_missing((x for cell in cells for x in seeds_of(cell)), given.data)
    if "hardness" in given.studies:
        cells = [cell for name in INTENTS[:2] for one in weighted(name).values() for cell in one]
        run_missing(seed_by_seed(cells), given.data)


if __name__ == "__main__":
    main()
