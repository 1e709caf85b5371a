"""One temperature chosen on dev, or the sum? What does SIGReg do to an index?

    python benchmarks/studies/compression/compression.py [sums] [texts] [sigreg] [--seeds 3]
    python benchmarks/studies/compression/compression.py --choices

On the static table, at the horizon and the rate of temperature.py, whose cells of Cosine it shares.
Embeddings are scored by cosine in full, at a quarter of the dimensions, and as bits that the float
query rescores. What was expected is on the page, docs/research/compression.md.

- sums: Cosine at each of four temperatures against TempAggLoss and TempAggMRLLoss.
- texts: the same on WordNet and, with 300 steps, on three other kinds of text. The wide sum has the
  same four temperatures, each weighted by itself. --choices has dev choose at each size.
- sigreg: InfoNCE at .05 with SIGReg of weight .01, .05 and .2 against none, at batch 32 and 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
from benchmarks.data.texts import TEXTS
from benchmarks.studies.cells import (
    POOL,
    WIDE,
    Cell,
    Store,
    asked,
    best_of,
    data,
    dev_of,
    encode,
    gain,
    per_query,
    run,
    same_seeds,
    searched,
    seeds_of,
    stored_seeds,
    train_cell,
    unpacked,
)
from benchmarks.studies.estimates import NOTHING, Estimate, in_points, markdown, paired, show
from benchmarks.studies.temperature.temperature import LOW, PLACES, STUDIES, TAUS
from numpy.typing import NDArray

import st_magnitude as stm

SIZES = {"full": "full", "quarter": "quarter", "bits": "bits, rescored"}
SUMS = {"tempagg": "TempAgg", "tempaggmrl": "TempAggMRL"}
SHAPES = {"isoscore": 3, "hubness": 2}
TEXT_TAUS, TEXT_STEPS = WIDE, 300
TEXT_SUMS = {"tempagg": "TempAgg", "tempaggwide": "wide TempAgg"}
WEIGHTS = (0.0, 0.01, 0.05, 0.2)
BATCHES = (32, 128)
COLUMNS = [f"{place}, {size}" for place in PLACES.values() for size in SIZES.values()]
CHOICES = Store(Path(__file__).parent / "choices")


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
    pairs = product(BATCHES, WEIGHTS)
    return {f"batch {b}, weight {w:g}": replace(base, batch=b, sigreg=w) for b, w in pairs}


def other_texts(study: str) -> dict[str, Cell]:
    """The rows of the table of other texts."""
    if (base := STUDIES[study].chosen) is None:
        return {}
    found = {}
    for name in TEXTS:
        plain = base if name == base.data else replace(base, data=name, steps=TEXT_STEPS)
        found |= {f"{name}, τ {tau:g}": replace(plain, temperature=tau) for tau in TEXT_TAUS}
        sums = TEXT_SUMS.items()
        found |= {f"{name}, {label}": replace(plain, loss=loss) for loss, label in sums}
    return found


def stored(rows: Mapping[str, Cell]) -> dict[str, Cell]:
    return {name: cell for name, cell in rows.items() if cell.is_stored}


def measure_choice(cell: Cell) -> dict[str, float]:
    """nDCG@10 on dev by size, of the weights that are best on dev in full."""
    model, watch = train_cell(cell)
    model.load_state_dict(watch.best["matched"]["weights"])
    found = searched(encode(model, data(cell.data).dev), stm.COSINE)
    return {size: round(float(unpacked(found[size]).mean()), 5) for size in SIZES}


def means(cell: Cell) -> list[str]:
    there = stored_seeds(cell)
    pairs = product(PLACES, SIZES)
    return [in_points(per_query(there, place, "matched", size)) for place, size in pairs]


def gains(cell: Cell, plain: Cell) -> list[str]:
    return [show(gain(cell, plain, [x], "matched", size)) for x, size in product(PLACES, SIZES)]


def sums_table(study: str) -> list[str]:
    """nDCG@10 by size, mean over seeds, and the gain over the temperature that is best on dev."""
    cells = stored(sums(study))
    best = best_of([cell for cell in cells.values() if cell.loss == "cosine"], "matched")
    if best is None or not any(cell.loss in SUMS for cell in cells.values()):
        return NOTHING
    rows = []
    for name, cell in cells.items():
        dev = in_points(dev_of(cell, "matched"))
        rows.append([name, len(stored_seeds(cell)), dev, *means(cell)])
    lines = markdown(["loss", "seeds", "dev", *COLUMNS], rows)
    for name, cell in cells.items():
        for tau in (best.temperature, LOW) if cell.loss in SUMS else ():
            found = gains(cell, replace(best, temperature=tau))
            lines.append(f"| {name} - τ {tau:g} | | | {' | '.join(found)} |")
    return lines


def chosen_on_dev(rows: Mapping[str, Cell], name: str, size: str = "full") -> Cell | None:
    """The temperature that is best on the dev task of these texts at a size.

    None before all were measured.
    """
    cells = [rows[f"{name}, τ {tau:g}"] for tau in TEXT_TAUS]
    if size == "full":
        return best_of(cells, "matched")
    found = [x[size] for cell in cells if (x := CHOICES.load(cell))]
    return cells[int(np.argmax(found))] if len(found) == len(cells) else None


def over_texts(
    rows: Mapping[str, Cell], label: str, which: float | str, size: str
) -> Estimate | None:
    """A sum less one temperature, mean over the kinds of text.

    Args:
        which: The temperature; or the size at which dev chooses one for each kind.
    """
    differences = []
    for name in TEXTS:
        is_size = isinstance(which, str)
        plain = chosen_on_dev(rows, name, which) if is_size else rows[f"{name}, τ {which:g}"]
        both = same_seeds(rows[f"{name}, {label}"], plain) if plain else []
        if not both:
            return None
        cells = zip(*both, strict=True)
        after, before = (per_query(x, name, "matched", size) for x in cells)
        differences.append(after - before)
    # else seeds are missing
    return paired(differences) if len({len(x) for x in differences}) == 1 else None


def texts_table(study: str) -> list[str]:
    """nDCG@10 on each kind of text by size, and sums less single temperatures, over all kinds."""
    cells = stored(other_texts(study))
    if len(cells) < len(other_texts(study)) or not cells:
        return NOTHING
    rows = []
    for label, cell in cells.items():
        there = stored_seeds(cell)
        kind, loss = label.split(", ")
        mark = " (dev)" if cell == chosen_on_dev(cells, cell.data) else ""
        row = [f"{TEXTS[kind]}, {loss}{mark}", len(there), in_points(dev_of(cell, "matched"))]
        found = [per_query(there, cell.data, "matched", size) for size in SIZES]
        rows.append([*row, *map(in_points, found)])
    lines = markdown(["texts, loss", "seeds", "dev", *SIZES.values()], rows)
    rivals: dict[str, list[float | str]] = {
        "the one that dev chooses in full": ["full"] * len(SIZES),
        "the one that dev chooses at that size": list(SIZES),
        **{f"τ {tau:g}": [tau] * len(SIZES) for tau in TEXT_TAUS},
    }
    for label in TEXT_SUMS.values():
        added = {}
        for name, kind in TEXTS.items():
            after, best = cells[f"{name}, {label}"], chosen_on_dev(cells, name)
            found = [gain(after, best, [name], "matched", size) for size in SIZES] if best else []
            added[f"{kind}, {label} - the one that dev chooses in full"] = found
        for rival, which in rivals.items():
            pairs = zip(which, SIZES, strict=True)
            found = [over_texts(cells, label, x, size) for x, size in pairs]
            added[f"all four, {label} - {rival}"] = found
        lines += [f"| {row} | | | {' | '.join(map(show, x))} |" for row, x in added.items()]
    return lines


def isoscores(cell: Cell) -> NDArray[np.float64]:
    """IsoScore of the documents of the test in domain, by seed."""
    return np.array([x["isoscore"] for x in shapes(cell)])


def shapes(cell: Cell) -> list[dict[str, float]]:
    found = POOL.of_seeds(cell).values()
    return [x["scorings"]["matched"]["shape"]["wordnet"] for x in found]


def sigreg_table(study: str) -> list[str]:
    """Gains over no SIGReg at the same batch, and the shape of the test corpus in domain."""
    rows = []
    for name, cell in stored(sigreg(study)).items():
        found = shapes(cell)
        shown = [f"{np.mean([x[key] for x in found]):.{n}f}" for key, n in SHAPES.items()]
        row = [name, len(found), *shown, in_points(dev_of(cell, "matched"))]
        rows.append(
            [*row, *(gains(cell, replace(cell, sigreg=0.0)) if cell.sigreg else means(cell))]
        )
    return markdown(["", "seeds", "IsoScore", "hubness", "dev", *COLUMNS], rows)


PARTS = {"sums": sums, "texts": other_texts, "sigreg": sigreg}
TABLES = {"sums": sums_table, "sigreg": sigreg_table}

if __name__ == "__main__":
    arguments = asked(__doc__, PARTS, choices="only the dev scores of other texts at each size")
    if arguments.choices:
        tried = [cell for cell in other_texts("static").values() if cell.loss == "cosine"]
        CHOICES.run(measure_choice, tried)
    else:
        cells = [x for part in arguments.names for x in PARTS[part]("static").values()]
        run(x for cell in cells for x in seeds_of(cell, arguments.seeds))
