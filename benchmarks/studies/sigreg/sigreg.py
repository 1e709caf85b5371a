"""Do small batches with SIGReg do what large ones do without it?

    python benchmarks/studies/sigreg/sigreg.py

WordNet, lemma -> definition, by wordllama's table and cosine InfoNCE at .05: batches of 64 and of
2,048, for equal pairs (65,536) and for equal steps (128). SIGReg has 256 directions; its weight is
divided by the batch, by which the statistic is multiplied, so that weights compare. Dev chooses the
rate of each row with seed 0. IsoScore is that of 2,000 documents of the test.
docs/research/isotropy.md says what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from benchmarks.data.lexicons import Lexicons, build
from benchmarks.studies.cells import prepare_process
from benchmarks.studies.copies.copies import joined, tokens_of
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.known import training as known
from benchmarks.studies.models import static_model
from benchmarks.studies.store import Figures, Store, packed, unpacked
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray

import st_magnitude as stm

PAIRS, RATES = 65_536, (0.01, 0.03, 0.1)
WEIGHTS = (0.0, 1.0, 10.0, 30.0)
EQUAL = {"pairs": [(64, 1024), (2048, 32)], "steps": [(64, 128), (2048, 128)]}  # batch, steps


@dataclass(frozen=True)
class Cell:
    """The settings of one training."""

    batch: int
    steps: int
    weight: float
    rate: float
    seed: int = 0


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


@cache
def data() -> tuple[Lexicons, Dataset, list[list[torch.Tensor]]]:
    """The tasks, the pairs, and the token ids of both columns."""
    words = build(seed=0, num_test_queries=700, corpus_size=2000, num_foldoc_queries=1)
    rows = concatenate_datasets(list(words.train.values())).shuffle(seed=0).select(range(PAIRS))
    return words, rows, [tokens_of(rows[name][:]) for name in ("anchor", "positive")]


def measure(cell: Cell) -> Figures:
    words, rows, columns = data()
    torch.manual_seed(cell.seed)
    model = stm.strip_normalize(static_model()).train()
    regularizers = [(stm.SIGReg(256), cell.weight / cell.batch)] if cell.weight else []
    loss = stm.CosineRankingLoss(model, temperature=0.05, regularizers=regularizers)
    model.preprocess = joined  # type: ignore[method-assign]
    with stm.trimmed_vocabulary(model, columns[0] + columns[1]):
        how = known.Cell("", "", (), steps=cell.steps, rate=cell.rate)
        known.fit(how, loss, columns, known.batches(rows, cell.batch, cell.seed, False), None)
    del model.preprocess
    dev, test = (task.encode(model.eval(), batch_size=256) for task in (words.dev, words.test))
    return {
        "dev": round(float(dev.ndcg(dev.top(stm.COSINE)).mean()), 5),
        "test": packed(test.ndcg(test.top(stm.COSINE))),
        "isoscore": round(stm.geometry.isoscore(stm.COSINE.document(test.documents)), 5),
    }


def grid(batch: int, steps: int, weight: float) -> list[Cell]:
    return [Cell(batch, steps, weight, rate) for rate in RATES]


def best(batch: int, steps: int, weight: float) -> Cell | None:
    found: Cell | None = CELLS.best(grid(batch, steps, weight))
    return found


def per_query(cell: Cell) -> dict[int, NDArray[np.float64]]:
    return {seed: unpacked(x["test"]) for seed, x in CELLS.of_seeds(cell).items()}


def table() -> list[str]:
    """IsoScore, nDCG@10, and what a row has more than large batches without SIGReg."""
    rows = []
    for equal, sizes in EQUAL.items():
        large = best(*sizes[1], 0.0)
        for (batch, steps), weight in product(sizes, WEIGHTS):
            cell = best(batch, steps, weight)
            if cell is None or large is None:
                continue
            isoscores = [x["isoscore"] for x in CELLS.of_seeds(cell).values()]
            values, plain = per_query(cell), best(batch, steps, 0.0)
            gains = [show(gain_of(values, per_query(x))) for x in (plain, large) if x]
            row = [f"{batch:,}", f"{steps:,}", f"{weight:g}", f"{cell.rate:g}", len(values)]
            row += [f"{np.mean(isoscores):.3f}", in_points(list(values.values()))]
            gains = [x if y != cell else "" for x, y in zip(gains, (plain, large), strict=True)]
            rows.append([equal, *row, *gains])
    head = ["batch", "steps", "weight", "rate", "seeds", "IsoScore", "nDCG@10"]
    gains = ["over weight 0", "over 2,048, weight 0"]
    return markdown(["equal", *head, *gains], rows)


TABLES = {"sigreg": table}


def main() -> None:
    torch.set_num_threads(1)
    prepare_process()
    for equal, weights in (("pairs", WEIGHTS), ("steps", (0.0, 10.0))):
        where = [(*size, weight) for size, weight in product(EQUAL[equal], weights)]
        for row in where:
            CELLS.run(measure, grid(*row))
        chosen = [cell for row in where if (cell := best(*row))]
        CELLS.run(measure, [replace(cell, seed=seed) for seed in (1, 2) for cell in chosen])


if __name__ == "__main__":
    main()
