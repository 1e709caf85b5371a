"""How often does `st-magnitude train` say "better" where nothing was to be learned?

    python benchmarks/studies/known/null.py FOLDER [--draws 60] [--seeds 20]

And how often does it recommend anything? FOLDER has the files of BANKING77. Two kinds of files,
judged with all defaults of `train` and wordllama's table, on held-out queries and on the test
split:

- shuffled: 60 to 400 questions, each with the name of another question's intent, in five folds;
- both ways: 400 pairs of random words, each written in both directions, in folds and without.

What is trained says nothing about the queries that judge it, so the true difference from the
untrained table is 0. Every draw is a line of null.jsonl, and a stored one is not drawn again.
Expected before the runs: of the shuffled files at most 3 of 60 "better", of the others none, and
nothing is recommended.
"""

import argparse
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import banking77
from benchmarks.studies.estimates import markdown
from benchmarks.studies.store import Store

import st_magnitude as stm
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.contestants import task_of

FILES = {
    "shuffled": "60 to 400 questions of BANKING77, each with the name of another one's intent",
    "both ways": "400 pairs of random words, each in both directions",
}
WORDS = 2_000  # of which a text of the second kind takes four


@dataclass(frozen=True)
class Cell:
    kind: str
    seed: int
    folds: int | None = None


CELLS = Store(Path(__file__).with_suffix(".jsonl"), Cell)


def shuffled(pairs: list[tuple[str, str]], seed: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[: rng.integers(60, 401)]]
    names = rng.permutation([name for _, name in chosen])
    named = zip(chosen, names, strict=True)
    return [{"text": text, "intent": str(name)} for (text, _), name in named]


def both_ways(pairs: list[tuple[str, str]], seed: int) -> list[dict[str, str]]:
    rng = np.random.default_rng(seed)
    words = sorted({word for text, _ in pairs for word in text.split() if word.isalpha()})
    words = [words[i] for i in rng.permutation(len(words))[:WORDS]]
    texts = [" ".join(rng.choice(words, 4)) for _ in range(800)]
    rows = [{"query": a, "document": b} for a, b in zip(texts[::2], texts[1::2], strict=True)]
    return rows + [{"query": row["document"], "document": row["query"]} for row in rows]


def measure(cell: Cell, pairs: list[tuple[str, str]]) -> dict[str, object]:
    """The gains over the untrained table, in points with their intervals; on test under the scoring
    that was saved."""
    rows = {"shuffled": shuffled, "both ways": both_ways}[cell.kind](pairs, cell.seed)
    splits = stm.load_splits(rows, seed=cell.seed)
    config = TrainConfig(seed=cell.seed, folds=cell.folds, confirm="test", keep_anyway=True)
    model = stm.load("wordllama", device="cpu")
    before = task_of(model, splits["test"]).search()
    with tempfile.TemporaryDirectory() as work:
        verdict = train(model, splits, Path(work, "out"), config).verdict
    found: dict[str, object] = {"deploys": "" if verdict.nothing else verdict.decision.name}
    on_test = task_of(model, splits["test"]).search().minus(before, seed=cell.seed)
    for name, gain in (("held out", verdict.saved.gain), ("test", on_test)):
        ends = [round(100 * x, 2) for x in (gain.mean, gain.low, gain.high)]
        found[name] = {"queries": gain.queries, "gain": ends}
    return found


def table() -> list[str]:
    """How many draws were called better or worse, and in how many a search was recommended."""
    rows = []
    for kind in dict.fromkeys(cell.kind for cell in CELLS.found):
        found = [figures for cell, figures in CELLS.found.items() if cell.kind == kind]
        deploys = [figures["deploys"] for figures in found if "deploys" in figures]
        for where in ("held out", "test"):
            gains = [figures[where]["gain"] for figures in found]
            better = sum(low > 0 for _, low, _ in gains)
            worse = sum(high < 0 for _, _, high in gains)
            of = f"{sum(map(bool, deploys))} of {len(deploys)}" if where == "held out" else ""
            rows.append([FILES[kind], where, len(found), better, worse, of])
    return markdown(["files", "judged by", "draws", "better", "worse", "recommended"], rows, "ll")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pairs = banking77.read(options.folder, "train")
    cells = [Cell("both ways", seed, folds) for seed in range(options.seeds) for folds in (5, 0)]
    cells += [Cell("shuffled", seed) for seed in range(options.draws)]
    CELLS.run(lambda cell: measure(cell, pairs), cells)


if __name__ == "__main__":
    main()
