"""The scale of a loss that keeps a norm: mean norms of the first batch, or of the batch at hand.

    python benchmarks/studies/temperature/batch_scale.py [STUDY ...] [--seeds 3]

Both scales train on the same rows in the same order; each loss has the temperature of .02, .05 and
.1 that is best on dev with seed 0, for each scale and scoring. What was expected, and the rule that
was written down before the run, are on the page, docs/research/temperature.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from benchmarks.data.lexicons import fetch, wordnet
from benchmarks.studies.cells import (
    DATA,
    SCORINGS,
    SEED,
    Cell,
    Data,
    asked,
    best_of,
    dev_of,
    gain,
    run,
    seeds_of,
)
from benchmarks.studies.estimates import markdown, show
from datasets import concatenate_datasets

TAUS = (0.02, 0.05, 0.1)
LOSSES = {"qnorm": "QNorm", "dot": "Dot"}
SCALES = ("auto", "batch")


def small() -> Data:
    """WordNet with smaller tasks, for encoders on one thread."""
    sizes = {"num_test_queries": 700, "corpus_size": 1500}
    sizes |= {"num_dev_queries": 200, "dev_corpus_size": 600}
    words = wordnet(fetch("wordnet-base"), SEED, **sizes)
    rows = concatenate_datasets(list(words.train.values()))
    return Data(rows, words.dev, {"wordnet": words.test})


DATA["small"] = small


@dataclass(frozen=True)
class Study:
    """One base, its data and its horizon."""

    base: str
    data: str
    steps: int
    batch: int
    rate: float
    evaluations: int = 4

    def cells(self, loss: str, scale: str) -> list[Cell]:
        """All temperatures with seed 0."""
        how = (self.base, self.data, loss, 0, self.steps, self.batch, self.rate)
        return [Cell(*how, tau, scale) for tau in TAUS]

    def best(self, loss: str, scale: str, scoring: str) -> Cell | None:
        """The temperature that is best on dev, of those that are stored for both scales."""
        both = zip(*(self.cells(loss, x) for x in SCALES), strict=True)
        stored = [pair for pair in both if all(cell.is_stored for cell in pair)]
        return best_of([pair[SCALES.index(scale)] for pair in stored], scoring)


STUDIES = {
    "static": Study("static", "wordnet", 1000, 128, 0.03, evaluations=10),
    "L3": Study("L3frozen", "small", 100, 32, 3e-4),
    "MiniLM": Study("MiniLM", "small", 40, 32, 5e-5),
}


def table() -> list[str]:
    """The scale of the batch less that of the first batch, each at its best temperature."""
    rows = []
    for (name, study), loss, scoring in product(STUDIES.items(), LOSSES, SCORINGS):
        first, batch = (study.best(loss, scale, scoring) for scale in SCALES)
        if first and batch and (found := gain(batch, first, ["wordnet"], scoring)):
            taus = [f"{cell.temperature:g}" for cell in (first, batch)]
            dev = f"{100 * (dev_of(batch, scoring) - dev_of(first, scoring)):+.1f}"
            rows.append([f"{name}, {LOSSES[loss]}", scoring, *taus, found[1], dev, show(found)])
    head = "base, loss|scoring|τ, first batch|τ, batch at hand|seeds|dev|in domain"
    return markdown(head.split("|"), rows, "ll")


def same_table() -> list[str]:
    """The same with seed 0, as trained, by temperature."""
    rows = []
    for (name, study), loss in product(STUDIES.items(), LOSSES):
        pairs = zip(*(study.cells(loss, scale) for scale in SCALES), strict=True)
        found = [gain(batch, first, ["wordnet"], "matched") for first, batch in pairs]
        if any(found):
            rows.append([f"{name}, {LOSSES[loss]}", *map(show, found)])
    return markdown(["base, loss", *(f"τ {tau:g}" for tau in TAUS)], rows)


TABLES = {"scale of the batch": table, "scale of the batch, same temperature": same_table}

if __name__ == "__main__":
    arguments = asked(__doc__, STUDIES)
    for study in map(STUDIES.__getitem__, arguments.names):
        cells = [cell for pair in product(LOSSES, SCALES) for cell in study.cells(*pair)]
        run(cells, study.evaluations)
        best = [study.best(*how) for how in product(LOSSES, SCALES, SCORINGS)]
        shown = [x for cell in best if cell for x in seeds_of(cell, arguments.seeds)]
        run(shown, study.evaluations)
