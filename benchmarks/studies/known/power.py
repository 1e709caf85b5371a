"""How often does `judge` find a gain, and one that is not there, on so many queries?

    python benchmarks/studies/known/power.py

Prints a table and draws docs/assets/gallery/queries.png.

Differences of nDCG@10 of two models by query, as the cells of this study have them, drawn with
replacement. Each gets a random sign, which is plus with the probability that makes the mean the
gain. Expected: at most 5 % "better" without a gain, and 80 % at two points on 500 queries for two
trained models; fewer for a trained and an untrained one, which differ in many more queries.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from benchmarks.studies.archive import ROOT
from benchmarks.studies.estimates import markdown
from benchmarks.studies.known.known import ndcg_of, untrained
from benchmarks.studies.known.training import Cell
from numpy.typing import NDArray

from st_magnitude.judge import judge

DRAWS = 400
QUERIES = (100, 250, 500, 1000)
GAINS = (0.0, 0.02, 0.03)


def pairs() -> dict[str, NDArray[np.float64]]:
    """Differences by query, of two temperatures and of a training."""
    found = {}
    for data, name in (("banking names", "BANKING77"), ("clinc names", "CLINC150")):
        cells = [Cell(data, "Cosine", (tau,)) for tau in (0.1, 0.02)]
        first, second = (ndcg_of(cell, "test", "full")[0] for cell in cells)
        found[f"{name}, temperature .1 and .02"] = first - second
    cell = Cell("banking names", "Cosine", (0.1,))
    before = ndcg_of(untrained(replace(cell, elsewhere=True)), "test", "full")[0]
    found["BANKING77, trained and not"] = ndcg_of(cell, "test", "full")[0] - before
    return found


def share_found(sizes: NDArray[np.float64], queries: int, gain: float) -> float:
    """How often `judge` says "better", of `DRAWS` times."""
    rng = np.random.default_rng(0)
    plus = (1 + gain / sizes.mean()) / 2
    verdicts = []
    for _ in range(DRAWS):
        drawn = rng.choice(sizes, queries) * np.where(rng.random(queries) < plus, 1, -1)
        verdicts.append(judge(drawn, num_samples=2000).verdict)
    return verdicts.count("better") / DRAWS


def plot(rows: list[list[str]], path: Path) -> None:
    """A line for each kind of pair and gain."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 3.6), layout="constrained")
    looks = {"0": (":", "none"), "2": ("o-", "two points"), "3": ("s--", "three points")}
    colours = dict(zip(pairs(), ("#1f6fb4", "#6f757d", "#c8500f"), strict=True))
    for name, _, gain, *shares in rows:
        found = [float(share.rstrip("%")) for share in shares]
        axis.plot(QUERIES, found, looks[gain][0], color=colours[name])
    for name, colour in colours.items():
        axis.plot([], [], color=colour, linewidth=3, label=name)
    for look, label in looks.values():
        axis.plot([], [], look, color="#1d2127", label=f"true gain: {label}")
    axis.set(xlabel="queries", ylabel="% of draws in which\nthe gain is found", ylim=0, xlim=0)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right center")
    figure.savefig(path, dpi=110)


def main() -> None:
    rows = []
    for name, differences in pairs().items():
        sizes = np.abs(differences)
        changed = f"{(sizes > 0).mean():.0%}"
        for gain in GAINS:
            shares = [f"{share_found(sizes, queries, gain):.0%}" for queries in QUERIES]
            rows.append([name, changed, f"{100 * gain:g}", *shares])
    plot(rows, ROOT / "docs" / "assets" / "gallery" / "queries.png")
    columns = ["models", "queries that differ", "true gain"]
    print("\n".join(markdown([*columns, *(f"{queries:,}" for queries in QUERIES)], rows)))


if __name__ == "__main__":
    main()
