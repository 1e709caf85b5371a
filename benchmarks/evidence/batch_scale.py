"""The scale of a loss that keeps a norm: mean norms of the first batch, or of the batch at hand.

    python benchmarks/evidence/batch_scale.py [STUDY] [--seeds 3] [--tables]

Scores are divided by tau times the mean norms that the similarity leaves in. Measured once, on the first batch, they
make a norm that grows a temperature that falls; measured on every batch, and not detached, the loss does not change
when all embeddings grow by a factor, and it keeps no state. Both scales train on the same rows in the same order; each
loss has the temperature of .02, .05 and .1 that is best on dev with seed 0, for each scale and scoring.

Studies: the static table of temperature_control.py (1,000 steps of 128, learning rate .03, where the cells of the first
batch are stored), paraphrase-MiniLM-L3-v2 with its token table frozen (100 steps of 32, 3e-4), and all-MiniLM-L6-v2
without its Normalize (40 steps of 32, 5e-5).

Expected before the run: at each one's best temperature the two are level (within half a point, and no interval excludes
0) on all three bases, for QNorm and Dot, as trained and at the calibrated exponent. The scale of the batch prefers the
same temperature or a lower one, because nothing lowers it during the training. On the static table, whose norms change
most, differences at the same temperature reach a point; on MiniLM, whose 40 steps hardly change a norm, they stay below
a quarter of a point.

Rule, written down before the run: if the scale of the batch is clearly worse anywhere (as trained or calibrated, the
interval lies below 0), the scale of the first batch stays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import concatenate_datasets

sys.path.append(str(Path(__file__).parent))
from cells import DATA, SCORINGS, SEED, Cell, Data, best_of, dev_of, gain, run, seeds_of
from lexicons import fetch, wordnet

TAUS = (0.02, 0.05, 0.1)
LOSSES = {"qnorm": "QNorm", "dot": "Dot"}
SCALES = ("auto", "batch")
EVALUATIONS = 4


def small() -> Data:
    """WordNet with smaller tasks, for encoders on one thread."""
    sizes = {"num_test_queries": 700, "corpus_size": 1500, "num_dev_queries": 200, "dev_corpus_size": 600}
    words = wordnet(fetch("wordnet-base"), SEED, **sizes)
    return Data(concatenate_datasets(list(words.train.values())), words.dev, {"wordnet": words.test})


DATA["small"] = small


@dataclass(frozen=True)
class Study:
    """One base, its data and its horizon."""

    base: str
    data: str
    steps: int
    batch: int
    rate: float
    evaluations: int = EVALUATIONS

    def cells(self, loss: str, scale: str, taus: Sequence[float] = TAUS) -> list[Cell]:
        """All temperatures with seed 0."""
        return [Cell(self.base, self.data, loss, 0, self.steps, self.batch, self.rate, tau, scale) for tau in taus]

    def best(self, loss: str, scale: str, scoring: str) -> Cell | None:
        """The temperature that is best on dev, of those that are stored for both scales."""
        both = zip(*(self.cells(loss, x) for x in SCALES), strict=True)
        stored = [pair[SCALES.index(scale)] for pair in both if all(cell.path.is_file() for cell in pair)]
        return best_of(stored, scoring)


STUDIES = {
    "static": Study("static", "wordnet", 1000, 128, 0.03, evaluations=10),
    "L3": Study("L3frozen", "small", 100, 32, 3e-4),
    "MiniLM": Study("MiniLM", "small", 40, 32, 5e-5),
}


def run_study(study: Study, losses: Sequence[str], taus: Sequence[float], seeds: int) -> None:
    """All temperatures with seed 0, then the other seeds of the best ones."""
    for loss in losses:
        run((cell for scale in SCALES for cell in study.cells(loss, scale, taus)), study.evaluations)
    chosen = [study.best(loss, scale, scoring) for loss in losses for scale in SCALES for scoring in SCORINGS]
    for number in range(2, seeds + 1):
        run((cell for x in chosen if x for cell in seeds_of(x, number)), study.evaluations)


def table() -> list[str]:
    """The scale of the batch less that of the first batch: each at its best temperature, and both at .05."""
    lines = ["| base, loss | scoring | τ, first batch | τ, batch at hand | seeds | dev | in domain |"]
    lines.append("| --- | --- |" + " ---: |" * 5)
    for name, study in STUDIES.items():
        for loss, label in LOSSES.items():
            for scoring in SCORINGS:
                first, batch = (study.best(loss, scale, scoring) for scale in SCALES)
                if first is None or batch is None or (found := gain(batch, first, ["wordnet"], scoring)) is None:
                    continue
                dev = 100 * (dev_of(batch, scoring) - dev_of(first, scoring))
                row = [f"{first.temperature:g}", f"{batch.temperature:g}", str(found[1]), f"{dev:+.1f}"]
                lines.append(f"| {name}, {label} | {scoring} | " + " | ".join([*row, found[0].show()]) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def same_table() -> list[str]:
    """The same with seed 0, as trained, by temperature."""
    lines = ["| base, loss | " + " | ".join(f"τ {tau:g}" for tau in TAUS) + " |", "| --- |" + " ---: |" * len(TAUS)]
    for name, study in STUDIES.items():
        for loss, label in LOSSES.items():
            pairs = zip(*(study.cells(loss, scale) for scale in SCALES), strict=True)
            found = [gain(batch, first, ["wordnet"], "matched") for first, batch in pairs]
            if any(found):
                lines.append(f"| {name}, {label} | " + " | ".join(x[0].show() if x else "" for x in found) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", help=f"some of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--losses", nargs="+", default=list(LOSSES), choices=LOSSES)
    parser.add_argument("--taus", nargs="+", type=float, default=TAUS)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    arguments = parser.parse_args()
    if not arguments.tables:
        for name in arguments.studies or STUDIES:
            run_study(STUDIES[name], arguments.losses, arguments.taus, arguments.seeds)
    print("\n".join([*table(), "", *same_table()]))


if __name__ == "__main__":
    main()
