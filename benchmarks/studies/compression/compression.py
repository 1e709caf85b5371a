"""One temperature chosen on dev, or the sum?

    python benchmarks/studies/compression/compression.py [--seeds 3] [--choices]

Cosine at each of four temperatures against TempAggLoss, on the static table, at the horizon and the
rate of temperature.py, whose cells of Cosine it shares, on WordNet and, with 300 steps, on three
other kinds of text. Embeddings are scored by cosine in full, at a quarter of the dimensions, and as
bits that the float query rescores. --choices has dev choose at each size. The verdict is on the
page, docs/research/compression.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.data.texts import TEXTS
from benchmarks.studies.cells import (
    Cell,
    asked,
    best_of,
    data,
    encode,
    per_query,
    run_missing,
    same_seeds,
    searched,
    stored_seeds,
    train_cell,
)
from benchmarks.studies.estimates import Estimate, in_points, markdown, paired, show
from benchmarks.studies.store import Store, seeds_of, unpacked
from benchmarks.studies.temperature.temperature import STUDIES

import st_magnitude as stm

SIZES = {"full": "full", "quarter": "quarter", "bits": "bits, rescored"}
TAUS, STEPS = (0.02, 0.05, 0.1, 0.2), 300
CHOICES = Store(Path(__file__).with_name("cells.jsonl"), Cell)


def texts() -> dict[str, Cell]:
    """The cells of the table of texts by kind and loss, at the rate that temperature.py chose."""
    found, base = {}, STUDIES["static"].chosen
    for name in TEXTS:
        plain = base if name == base.data else replace(base, data=name, steps=STEPS)
        found |= {f"{name}, τ {tau:g}": replace(plain, temperature=tau) for tau in TAUS}
        found[f"{name}, TempAgg"] = replace(plain, loss="tempagg")
    return found


def measure_choice(cell: Cell) -> dict[str, float]:
    """nDCG@10 on dev by size, of the weights that are best on dev in full."""
    model, watch = train_cell(cell)
    model.load_state_dict(watch.best["matched"]["weights"])
    found = searched(encode(model, data(cell.data).dev), stm.COSINE)
    return {size: round(float(unpacked(found[size]).mean()), 5) for size in SIZES}


def chosen_on_dev(rows: Mapping[str, Cell], name: str, size: str = "full") -> Cell | None:
    """The temperature that is best on the dev task of these texts at a size."""
    cells = [rows[f"{name}, τ {tau:g}"] for tau in TAUS]
    if size == "full":
        return best_of(cells, "matched")
    return CHOICES.best(cells, size)


def over_texts(rows: Mapping[str, Cell], which: float | str, size: str) -> Estimate:
    """TempAgg less one temperature, mean over the kinds of text.

    Args:
        which: The temperature; or the size at which dev chooses one for each kind.
    """
    differences = []
    for name in TEXTS:
        is_size = isinstance(which, str)
        plain = chosen_on_dev(rows, name, which) if is_size else rows[f"{name}, τ {which:g}"]
        cells = zip(*same_seeds(rows[f"{name}, TempAgg"], plain), strict=True)
        after, before = (per_query(x, name, "matched", size) for x in cells)
        differences.append(after - before)
    return paired(differences)


def texts_table() -> list[str]:
    """nDCG@10 on each kind of text by size, and TempAgg less single temperatures, over all."""
    cells, rows = texts(), []
    for label, cell in cells.items():
        there = stored_seeds(cell)
        kind, loss = label.split(", ")
        mark = " (dev)" if cell == chosen_on_dev(cells, cell.data) else ""
        found = [per_query(there, cell.data, "matched", size) for size in SIZES]
        rows.append([f"{TEXTS[kind]}, {loss}{mark}", *map(in_points, found)])
    rivals: dict[str, list[float | str]] = {
        "the one that dev chooses in full": ["full"] * len(SIZES),
        "the one that dev chooses at that size": list(SIZES),
        **{f"τ {tau:g}": [tau] * len(SIZES) for tau in TAUS},
    }
    for rival, which in rivals.items():
        found = [show(over_texts(cells, x, size)) for x, size in zip(which, SIZES, strict=True)]
        rows.append([f"all four, TempAgg - {rival}", *found])
    return markdown(["texts, loss", *SIZES.values()], rows)


TABLES = {"texts": texts_table}

if __name__ == "__main__":
    arguments = asked(__doc__, choices="only the dev scores of texts at each size")
    if arguments.choices:
        CHOICES.run(measure_choice, [cell for cell in texts().values() if cell.loss == "cosine"])
    else:
        cells = texts().values()
        run_missing(x for cell in cells for x in seeds_of(cell, arguments.seeds))
