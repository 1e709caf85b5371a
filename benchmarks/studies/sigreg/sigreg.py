"""Do small batches with SIGReg do what large ones do without it?

    python benchmarks/studies/sigreg/sigreg.py

WordNet, lemma -> definition, by wordllama's table and cosine InfoNCE at .05: batches of 64 and of
2,048, for equal pairs (32,768) and for equal steps (16). SIGReg has 256 directions; its weight is
divided by the batch, by which the statistic is multiplied, so that weights compare. Dev chooses the
rate of each row with seed 0. IsoScore is that of 2,000 documents of the test.
docs/research/compression.md says what was expected.
"""

from __future__ import annotations

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
def data() -> tuple[Any, Any, list[list[torch.Tensor]]]:
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
    dev, test = (
        task.encode(model.eval(), "cosine", batch_size=256) for task in (words.dev, words.test)
    )
    return {
        "dev": round(dev.search(10).mean, 5),
        "test": packed(test.search(10).ndcg),
        "isoscore": round(stm.geometry.isoscore(stm.COSINE.document(test.documents)), 5),
    }


def grid(batch: int, steps: int, weight: float) -> list[Cell]:
    return [Cell(batch, steps, weight, rate) for rate in RATES[batch]]


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


TABLES = {"sigreg": table}


def main() -> None:
    torch.set_num_threads(1)
    prepare_process()
    CELLS.run(measure, chain(*(grid(*row) for row in ROWS)))
    CELLS.run(measure, seed_by_seed([best(*row) for row in ROWS]))


if __name__ == "__main__":
    main()
