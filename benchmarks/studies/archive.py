"""Tables of closed studies, rebuilt from their cells by descriptions.

The scripts of a closed study are gone, and its page names the last commit that has them. What stays
is cells.jsonl, with the figures of every training, and tables.json, which says what each entry of a
table is: a text, or how it is calculated from figures, such as

    {"do": "gain", "of": ["4/test", "5/test"], "less": ["1/test", "2/test"]}

"4/test" is the figure "test" in line 4 of the cells: a number, a list or `packed` figures of all
queries; several figures are those of the seeds. So all that dev once chose is settled by the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.studies.estimates import Estimate, margin, markdown, paired
from benchmarks.studies.known import training
from benchmarks.studies.store import unpacked
from numpy.typing import NDArray

from st_magnitude.judge import judge

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "benchmarks" / "studies"
Figure = NDArray[np.float64]


@cache
def cells_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def figure(file: Path, address: str) -> Figure:
    """The figure at an address such as "4/test/full"."""
    line, *path = address.split("/")
    found: Any = cells_of(file)[int(line) - 1]
    for key in path:
        found = found[int(key)] if isinstance(found, list) else found[key]
    if isinstance(found, str):
        return training.unpacked(found) if file.parent.name == "known" else unpacked(found)
    return np.array(found, dtype=np.float64)


def estimate(do: str, of: list[Figure], less: list[Figure]) -> Estimate:
    """A mean difference with its interval: "gain" over queries and seeds, "by query" over queries
    of means of seeds, "judge" the same as `st_magnitude.judge` has it."""
    if do == "gain":
        return paired([np.array(of) - np.array(less)])
    difference = np.mean(of, axis=0) - np.mean(less, axis=0)
    if do == "by query":
        return paired([difference[None]])
    found = judge(difference)
    return Estimate(found.mean, found.low, found.high)


NUMBERS: dict[str, Callable[[list[Figure]], Any]] = {
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "margin": margin,  # half a 95 % interval over seeds
}


def shown(part: Any, file: Path) -> str:
    """An entry: a text, a calculation, or a list of these that stand one after the other.

    "less" is what is subtracted from "of". "gain over tasks" has lists of such figures, over which
    it takes the mean.
    """
    if isinstance(part, str):
        return part
    if isinstance(part, list):
        return "".join(shown(x, file) for x in part)
    if "cells" in part:  # of another study
        file = STUDIES / part["cells"]
    do, form, scale = part["do"], part.get("form", ".1f"), part.get("scale", 100)
    if do == "gain over tasks":
        of, less = ([[figure(file, x) for x in y] for y in part[k]] for k in ("of", "less"))
        pairs = zip(of, less, strict=True)
        return paired([np.array(a) - np.array(b) for a, b in pairs]).show(scale)
    of, less = ([figure(file, x) for x in part.get(key, [])] for key in ("of", "less"))
    if do in ("gain", "by query", "judge"):
        return estimate(do, of, less).show(scale, part.get("digits", 1))
    values = [a - b for a, b in zip(of, less, strict=True)] if less else of
    if do == "each":
        return ", ".join(f"{scale * float(x):{form}}" for x in values)
    return f"{scale * NUMBERS[do](values):{form}}"


def table(file: Path, name: str) -> list[str]:
    """The lines of a table of the descriptions in a file."""
    described = json.loads(file.read_text(encoding="utf-8"))[name]
    cells = STUDIES / described["cells"]
    rows = [[shown(entry, cells) for entry in row] for row in described["rows"]]
    return [*markdown(described["head"], rows, described["align"]), *described.get("after", [])]


TABLES = {
    name: partial(table, file, name)
    for file in sorted(STUDIES.glob("*/tables.json"))
    for name in json.loads(file.read_text(encoding="utf-8"))
}
