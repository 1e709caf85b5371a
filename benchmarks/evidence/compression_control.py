"""Part F of the evidence: one temperature chosen on dev, or the sum? What does SIGReg do to an index?

    python benchmarks/evidence/compression_control.py [sums] [texts] [sigreg] [--study L3] [--tables] [--seeds 3]

A base at the horizon and the rate of temperature_control.py, whose cells of Cosine it shares. Embeddings are
scored by cosine in full, at a quarter of the dimensions, and as bits that the float query rescores.

- sums: Cosine at each of four temperatures, TempAggLoss (three temperatures) and TempAggMRLLoss (with three prefixes),
  against Cosine at the temperature that is best on dev, which costs four trainings.
- texts: Cosine at .02, .05, .1 and .2 against the sums on WordNet and, with 300 steps, on three other kinds of text.
  The wide sum has the same four temperatures, each weighted by itself, as the gradient goes with 1 / temperature.
- sigreg: InfoNCE at .05 with SIGReg of weight .01, .05 and .2 against none, at batch 32 and 128. IsoScore of the
  directions, and hubness, the skewness of how often a document is in a top 10.

Expected before the run, sums: within .5 points of the chosen temperature in full and in bits; at a quarter TempAggMRL
is ahead by 0 to 1.5 points, and not by temperature but by its prefixes, as TempAgg is not ahead. sigreg: IsoScore
rises with the weight at both batches, hubness falls, and nDCG@10 in full falls by less than a point up to .05; bits
gain 0 to 1 point; batch 32 with SIGReg is not above 128 without it in IsoScore.

Expected of texts, after one seed on dev alone: TempAgg is within half a point of the chosen temperature on package
descriptions and on Python's documentation, and 1 to 4 points behind on docstrings, where .2 is best. The wide sum is
within half a point of TempAgg on WordNet and a point ahead of it on docstrings. Over all texts both sums are level with
.05, within a point of the chosen temperature, and ahead of .02 and .2. (TempAgg came out 1.3 points ahead at a quarter,
where dev had chosen in full. --choices has dev choose at each size. Expected, before that run: it chooses .1 more often
at a quarter, and TempAgg is level with it.)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).parent))
from cells import (
    RESULTS,
    WIDE,
    Cell,
    best_of,
    data,
    dev_of,
    encode,
    gain,
    per_query,
    results,
    run,
    same_seeds,
    searched,
    seeds_of,
    store,
    train_cell,
    unpacked,
)
from magnitude_tables import Estimate, paired
from temperature_control import LOW, PLACES, STUDIES, TAUS, show
from texts import TEXTS

import st_magnitude as stm

SIZES = {"full": "full", "quarter": "quarter", "bits": "bits, rescored"}
SUMS = {"tempagg": "TempAgg", "tempaggmrl": "TempAggMRL"}
SHAPES = {"isoscore": 3, "hubness": 2}
TEXT_TAUS, TEXT_STEPS = WIDE, 300
TEXT_SUMS = {"tempagg": "TempAgg", "tempaggwide": "wide TempAgg"}
WEIGHTS = (0.0, 0.01, 0.05, 0.2)
BATCHES = (32, 128)


def sums(study: str) -> dict[str, Cell]:
    """The rows of the first table; empty before the rate is known."""
    if (base := STUDIES[study].chosen) is None:
        return {}
    singles = {f"τ {tau:g}": replace(base, temperature=tau) for tau in TAUS}
    return singles | {name: replace(base, loss=loss) for loss, name in SUMS.items()}


def sigreg(study: str) -> dict[str, Cell]:
    """The rows of the second table."""
    if (base := STUDIES[study].chosen) is None:
        return {}
    return {f"batch {b}, weight {w:g}": replace(base, batch=b, sigreg=w) for b in BATCHES for w in WEIGHTS}


@dataclass(frozen=True)
class Choice:
    """A training of the table of other texts again, for its dev score at each size."""

    cell: Cell

    @property
    def name(self) -> str:
        return self.cell.name

    @property
    def path(self) -> Path:
        return RESULTS / "choices" / f"{self.name}.json"


def measure_choice(choice: Choice) -> dict[str, float]:
    """nDCG@10 on dev by size, of the weights that are best on dev in full."""
    model, watch = train_cell(choice.cell)
    model.load_state_dict(watch.best["matched"]["weights"])
    found = searched(encode(model, data(choice.cell.data).dev), stm.COSINE)
    return {size: round(float(unpacked(found[size]).mean()), 5) for size in SIZES}


def run_choices(study: str) -> None:
    """Every temperature on every kind of text with seed 0."""
    choices = [Choice(cell) for cell in other_texts(study).values() if cell.loss == "cosine"]
    for choice, figures in results(measure_choice, [x for x in choices if not x.path.is_file()]):
        store(choice.path, figures)
        print(choice.name, figures, flush=True)


def other_texts(study: str) -> dict[str, Cell]:
    """The rows of the table of other texts."""
    if (base := STUDIES[study].chosen) is None:
        return {}
    found = {}
    for name in TEXTS:
        plain = base if name == base.data else replace(base, data=name, steps=TEXT_STEPS)
        found |= {f"{name}, τ {tau:g}": replace(plain, temperature=tau) for tau in TEXT_TAUS}
        found |= {f"{name}, {label}": replace(plain, loss=loss) for loss, label in TEXT_SUMS.items()}
    return found


def stored(rows: Mapping[str, Cell]) -> dict[str, Cell]:
    return {name: cell for name, cell in rows.items() if cell.path.is_file()}


def sums_table(study: str) -> list[str]:
    """nDCG@10 by size, mean over seeds, and the gain over the temperature that is best on dev."""
    rows = stored(sums(study))
    best = best_of([cell for cell in rows.values() if cell.loss == "cosine"], "matched")
    if best is None or not any(cell.loss in SUMS for cell in rows.values()):
        return ["(No cells are stored yet.)"]
    columns = [f"{place}, {size}" for place in PLACES.values() for size in SIZES.values()]
    lines = ["| loss | seeds | dev | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * (len(columns) + 2)]
    for name, cell in rows.items():
        there = [seed for seed in seeds_of(cell) if seed.path.is_file()]
        found = [f"{100 * per_query(there, t, 'matched', size).mean():.1f}" for t in PLACES for size in SIZES]
        lines.append(f"| {name} | {len(there)} | {100 * dev_of(cell, 'matched'):.1f} | " + " | ".join(found) + " |")
    for name, cell in rows.items():
        for tau in (best.temperature, LOW) if cell.loss in SUMS else ():
            found = [
                show(gain(cell, replace(best, temperature=tau), [t], "matched", size)) for t in PLACES for size in SIZES
            ]
            lines.append(f"| {name} - τ {tau:g} | | | " + " | ".join(found) + " |")
    return lines


def chosen_on_dev(rows: Mapping[str, Cell], name: str, size: str = "full") -> Cell | None:
    """The temperature that is best on the dev task of these texts at a size; None before all were measured."""
    cells = [rows[f"{name}, τ {tau:g}"] for tau in TEXT_TAUS]
    if size == "full":
        return best_of(cells, "matched")
    paths = [Choice(cell).path for cell in cells]
    if not all(path.is_file() for path in paths):
        return None
    return cells[int(np.argmax([json.loads(path.read_text(encoding="utf-8"))[size] for path in paths]))]


def over_texts(rows: Mapping[str, Cell], label: str, which: float | str, size: str) -> Estimate | None:
    """A sum less one temperature, mean over the kinds of text.

    Args:
        which: The temperature; or the size at which dev chooses one for each kind.
    """
    differences = []
    for name in TEXTS:
        plain = chosen_on_dev(rows, name, which) if isinstance(which, str) else rows[f"{name}, τ {which:g}"]
        both = same_seeds(rows[f"{name}, {label}"], plain) if plain else []
        if not both:
            return None
        after, before = (per_query(cells, name, "matched", size) for cells in zip(*both, strict=True))
        differences.append(after - before)
    return paired(differences) if len({len(x) for x in differences}) == 1 else None  # else seeds are missing


def texts_table(study: str) -> list[str]:
    """nDCG@10 on each kind of text by size, and TempAgg less single temperatures, over all kinds."""
    rows = stored(other_texts(study))
    if len(rows) < len(other_texts(study)) or not rows:
        return ["(No cells are stored yet.)"]
    lines = ["| texts, loss | seeds | dev | " + " | ".join(SIZES.values()) + " |"]
    lines.append("| --- |" + " ---: |" * (len(SIZES) + 2))
    for label, cell in rows.items():
        there = [seed for seed in seeds_of(cell) if seed.path.is_file()]
        found = [f"{100 * per_query(there, cell.data, 'matched', size).mean():.1f}" for size in SIZES]
        kind, loss = label.split(", ")
        mark = " (dev)" if cell == chosen_on_dev(rows, cell.data) else ""
        row = [str(len(there)), f"{100 * dev_of(cell, 'matched'):.1f}", *found]
        lines.append(f"| {TEXTS[kind]}, {loss}{mark} | " + " | ".join(row) + " |")
    for label in TEXT_SUMS.values():
        for name, kind in TEXTS.items():
            best = chosen_on_dev(rows, name)
            after = rows[f"{name}, {label}"]
            found = [show(gain(after, best, [name], "matched", size)) for size in SIZES] if best else []
            lines.append(f"| {kind}, {label} - the one that dev chooses in full | | | " + " | ".join(found) + " |")
        rivals: dict[str, list[float | str]] = {
            "the one that dev chooses in full": ["full"] * len(SIZES),
            "the one that dev chooses at that size": list(SIZES),
            **{f"τ {tau:g}": [tau] * len(SIZES) for tau in TEXT_TAUS},
        }
        for rival, which in rivals.items():
            estimates = [over_texts(rows, label, x, size) for x, size in zip(which, SIZES, strict=True)]
            found = [x.show() if x else "" for x in estimates]
            lines.append(f"| all four, {label} - {rival} | | | " + " | ".join(found) + " |")
    return lines


def isoscores(cell: Cell) -> NDArray[np.float64]:
    """IsoScore of the documents of the test in domain, by seed."""
    found = [x for seed in seeds_of(cell) if (x := seed.load())]
    return np.array([x["scorings"]["matched"]["shape"]["wordnet"]["isoscore"] for x in found])


def sigreg_table(study: str) -> list[str]:
    """Gains over no SIGReg at the same batch, and the shape of the test corpus in domain."""
    rows = stored(sigreg(study))
    if not any(cell.sigreg for cell in rows.values()):
        return ["(No cells are stored yet.)"]
    columns = ["dev", *(f"{place}, {size}" for place in PLACES.values() for size in SIZES.values())]
    lines = ["| | seeds | IsoScore | hubness | " + " | ".join(columns) + " |"]
    lines.append("| --- |" + " ---: |" * (len(columns) + 3))
    for name, cell in rows.items():
        shapes = [x["scorings"]["matched"]["shape"]["wordnet"] for seed in seeds_of(cell) if (x := seed.load())]
        shown = [f"{np.mean([x[key] for x in shapes]):.{n}f}" for key, n in SHAPES.items()]
        plain = replace(cell, sigreg=0.0)
        if cell.sigreg:
            found = [show(gain(cell, plain, [task], "matched", size)) for task in PLACES for size in SIZES]
        else:
            there = [seed for seed in seeds_of(cell) if seed.path.is_file()]
            found = [f"{100 * per_query(there, t, 'matched', size).mean():.1f}" for t in PLACES for size in SIZES]
        row = [str(len(shapes)), *shown, f"{100 * dev_of(cell, 'matched'):.1f}", *found]
        lines.append(f"| {name} | " + " | ".join(row) + " |")
    return lines


PARTS = {"sums": (sums, sums_table), "texts": (other_texts, texts_table), "sigreg": (sigreg, sigreg_table)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="sums, texts, sigreg; default: all")
    parser.add_argument("--choices", action="store_true", help="only the dev scores of other texts at each size")
    parser.add_argument("--study", default="static", choices=STUDIES)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    arguments = parser.parse_args()
    chosen = [PARTS[part] for part in arguments.parts or PARTS]
    cells = [cell for rows, _ in chosen for cell in rows(arguments.study).values()]
    if not cells:
        parser.exit(1, "The rate is not known yet: run temperature_control.py first.\n")
    if arguments.choices:
        run_choices(arguments.study)
    elif not arguments.tables:
        run(cell for x in cells for cell in seeds_of(x, arguments.seeds))
    for _, table in chosen:
        print("\n".join(["", *table(arguments.study)]))


if __name__ == "__main__":
    main()
