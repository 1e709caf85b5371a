"""How often does `st-magnitude train` say "better" where nothing was to be learned?

    python benchmarks/studies/known/null.py FOLDER [--draws 60] [--seeds 20]

FOLDER has the files of BANKING77. Two kinds of files, judged with all defaults of `train` and
wordllama's table, on held-out queries and on the test split:

- shuffled: 60 to 400 questions, each with the name of another question's intent, in five folds;
- both ways: 400 pairs of random words, each written in both directions, in folds and without.

What is trained says nothing about the queries that judge it, so the true difference from the
untrained table is 0. Every draw is a line of null.jsonl. Expected before the runs: of the shuffled
files at most 3 of 60 "better", and of the others none.
"""

import argparse
import json
import logging
import tempfile
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import banking77

import st_magnitude as stm
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.judging.contestants import task_of

FILE = Path(__file__).with_suffix(".jsonl")
WORDS = 2_000  # of which a text of the second kind takes four


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


def draw(kind: str, rows: list[dict[str, str]], seed: int, folds: int | None) -> dict[str, object]:
    """The gains over the untrained table, in points with their intervals; on test under the scoring
    that was saved."""
    splits = stm.load_splits(rows, seed=seed)
    config = TrainConfig(seed=seed, folds=folds, confirm="test", keep_anyway=True)
    model = stm.load("wordllama", device="cpu")
    before = task_of(model, splits["test"]).search()
    with tempfile.TemporaryDirectory() as work:
        trained = train(model, splits, Path(work, "out"), config)
    cell: dict[str, object] = {"kind": kind, "seed": seed, "where": trained.verdict.where}
    on_test = task_of(model, splits["test"]).search().minus(before, seed=seed)
    for name, gain in (("held out", trained.verdict.saved.gain), ("test", on_test)):
        ends = [round(100 * x, 2) for x in (gain.mean, gain.low, gain.high)]
        cell[name] = {"queries": gain.queries, "gain": ends}
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pairs = banking77.read(options.folder, "train")
    with FILE.open("w", encoding="utf-8") as file:
        for seed in range(options.seeds):
            for folds in (5, 0):
                cell = draw("both ways", both_ways(pairs, seed), seed, folds)
                file.write(json.dumps(cell) + "\n")
                file.flush()
        for seed in range(options.draws):
            file.write(json.dumps(draw("shuffled", shuffled(pairs, seed), seed, None)) + "\n")
            file.flush()
    cells = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    for kind in ("both ways", "shuffled"):
        for name in ("held out", "test"):
            gains = [cell[name]["gain"] for cell in cells if cell["kind"] == kind]
            better = sum(low > 0 for _, low, _ in gains)
            worse = sum(high < 0 for _, _, high in gains)
            print(f"{kind}, {name}: {len(gains)} draws, better in {better}, worse in {worse}")


if __name__ == "__main__":
    main()
