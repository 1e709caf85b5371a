"""Do small batches with SIGReg do what large ones do without it?

    python benchmarks/studies/sigreg/sigreg.py

WordNet, lemma -> definition, by wordllama's table and cosine InfoNCE at .05: batches of 64 and of
2,048, for equal pairs (32,768) and for equal steps (16). SIGReg has 256 directions; its weight is
divided by the batch, by which the statistic is multiplied, and weights compare. At a weight of 30
and equal pairs it also has all directions, 1,024 and 16. Dev chooses the rate of each row with seed
0. IsoScore is that of 2,000 documents of the test. docs/research/compression.md says what was
expected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.lexicons import build
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.copies.copies import joined, tokens_of
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.known import training as known
from benchmarks.studies.models import static_model
from benchmarks.studies.store import Figures, Store, packed, seed_by_seed, unpacked
from datasets import concatenate_datasets

import st_magnitude as stm

PAIRS = 32_768
RATES = {64: (0.01, 0.03), 2048: (0.03, 0.1)}
ROWS = [  # batch, steps, weight
    *((batch, PAIRS // batch, weight) for batch in RATES for weight in (0.0, 3.0, 30.0)),
    *((64, 16, 0.0), (64, 16, 30.0)),
]
DIRECTIONS = (None, 1024, 16)  # None: all


@dataclass(frozen=True)
class Cell:
    """The settings of one training."""

    batch: int
    steps: int
    weight: float
    rate: float
    seed: int = 0
    directions: int | None = 256


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


@cache
def data() -> tuple[Any, Any, list[list[torch.Tensor]]]:
    """The tasks, the pairs, and the token ids of both columns."""
    words = build(seed=0, num_test_queries=700, corpus_size=2000, num_foldoc_queries=1)
    rows = concatenate_datasets(list(words.train.values())).shuffle(seed=0).select(range(PAIRS))
    return words, rows, [tokens_of(rows[name][:]) for name in ("anchor", "positive")]


def measure(cell: Cell) -> Figures:
    words, rows, columns = data()
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(static_model()).train()
    sigreg = stm.SIGReg(cell.directions)
    regularizers = [(sigreg, cell.weight / cell.batch)] if cell.weight else []
    loss = stm.CosineRankingLoss(model, temperature=0.05, regularizers=regularizers)
    model.preprocess = joined  # type: ignore[method-assign]
    with stm.trimmed_vocabulary(model, columns[0] + columns[1]):
        how = known.Cell("", "", (), steps=cell.steps, rate=cell.rate)
        began = time.process_time()
        known.fit(how, loss, columns, known.batches(rows, cell.batch, cell.seed, False), None)
        seconds = time.process_time() - began
    del model.preprocess
    dev, test = (
        stm.encode(model.eval(), task, "cosine", batch_size=256) for task in (words.dev, words.test)
    )
    return {
        "dev": round(dev.search(10).mean, 5),
        "test": packed(test.search(10).ndcg),
        "isoscore": round(stm.geometry.isoscore(stm.COSINE.document(test.documents)), 5),
        "seconds": round(seconds, 2),
    }


def grid(batch: int, steps: int, weight: float, directions: int | None = 256) -> list[Cell]:
    return [Cell(batch, steps, weight, rate, 0, directions) for rate in RATES[batch]]


def best(*row: Any) -> Any:
    return CELLS.best(grid(*row))


def per_query(*row: Any) -> dict[int, Any]:
    return {seed: unpacked(x["test"]) for seed, x in CELLS.of_seeds(best(*row)).items()}


def table() -> list[str]:
    """IsoScore, nDCG@10, and what a row has more than without SIGReg, and than large batches."""
    shown = []
    for row in ROWS:
        batch, steps, weight = row
        rivals = [(batch, steps, 0.0), (2048, 16, 0.0)]
        values, cell = per_query(*row), best(*row)
        isoscore = np.mean([x["isoscore"] for x in CELLS.of_seeds(cell).values()])
        line = [f"{batch:,}", f"{steps:,}", f"{weight:g}", f"{cell.rate:g}", f"{isoscore:.3f}"]
        gains = ["" if x == row else show(gain_of(values, per_query(*x))) for x in rivals]
        shown.append([*line, in_points(list(values.values())), *gains])
    head = ["batch", "steps", "weight", "rate", "IsoScore", "nDCG@10"]
    return markdown([*head, "over weight 0", "over 2,048, weight 0"], shown)


def noise_table() -> list[str]:
    """What all directions have more than 1,024 and 16 drawn ones at equal weight."""
    shown = []
    for batch in RATES:
        exact = per_query(batch, PAIRS // batch, 30.0, None)
        for number in DIRECTIONS:
            row = (batch, PAIRS // batch, 30.0, number)
            values, stored = per_query(*row), CELLS.of_seeds(best(*row)).values()
            isoscore, seconds = ([x[name] for x in stored] for name in ("isoscore", "seconds"))
            spread = f"{np.mean(isoscore):.3f} ({min(isoscore):.3f} to {max(isoscore):.3f})"
            line = [
                f"{batch:,}",
                f"{number:,}" if number else "all",
                f"{best(*row).rate:g}",
                spread,
            ]
            gain = show(gain_of(exact, values)) if number else ""
            shown.append([*line, in_points(list(values.values())), gain, f"{np.mean(seconds):.0f}"])
    head = ["batch", "directions", "rate", "IsoScore", "nDCG@10", "all - these", "processor s"]
    return markdown(head, shown)


TABLES = {"sigreg": table, "sigreg directions": noise_table}


def main() -> None:
    torch.set_num_threads(1)
    prepare_process()
    drawn = [(batch, PAIRS // batch, 30.0, x) for batch in RATES for x in DIRECTIONS]
    rows = [*ROWS, *drawn]
    CELLS.run(measure, chain(*(grid(*row) for row in rows)))
    CELLS.run(measure, seed_by_seed([best(*row) for row in rows]))


if __name__ == "__main__":
    main()
