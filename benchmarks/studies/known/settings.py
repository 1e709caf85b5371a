"""What does the rule of `compare` cost: nDCG@10 of what it recommends, below the best candidate.

    python benchmarks/studies/known/settings.py FOLDER

wordllama's table is trained with each candidate of `compare`, with two seeds, on 100 and 300 pairs
of three files of `defaults.sources`, and searches for 800 other queries. Of these, a quarter of the
number of pairs are dev and three quarters are test, drawn forty times; the others measure the
regret. The rules:

- compare: the highest mean on dev, if it is clearly better on test than the best cosine on dev;
- highest: the highest mean on dev;
- half a point: that one, or the best cosine if this is at most .5 points below;
- defaults: those of `train`.

Each file, number of pairs and seed is a line of settings.jsonl, in points.
"""

import argparse
import json
import logging
import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from benchmarks.studies.known.sources import sources

import st_magnitude as stm
from st_magnitude.judge import judge
from st_magnitude.surgery.vocabulary import remembered_tokens
from st_magnitude.workbench.comparison.config import CompareConfig, grid_of
from st_magnitude.workbench.finetune.trainer import make_rows, train_copy
from st_magnitude.workbench.judging.contestants import task_of

FILE = Path(__file__).with_suffix(".jsonl")
DRAWS = 40
QUERIES = 800
GRID = grid_of(CompareConfig(), is_static=True)
COSINE = np.array([candidate.loss == "cosine" for candidate in GRID])


def trained(rows: list[dict[str, object]], pairs: int, seed: int) -> np.ndarray:
    """nDCG@10 of every query by each candidate, (candidates, n)."""
    splits = stm.load_splits(rows, threshold=4.0 if "score" in rows[0] else None, seed=7)
    ids = np.random.default_rng(seed).permutation(sorted(splits["train"].relevant))
    asked = splits["train"].only({*ids[pairs : pairs + QUERIES]})
    data = splits["train"].only({*ids[:pairs]}).apart_from(asked)
    of_train = make_rows(data, None, seed)
    steps = max(1, round(3 * len(of_train) / 32))
    model = stm.load("wordllama", device="cpu")
    found = []
    with tempfile.TemporaryDirectory() as work, remembered_tokens(model):
        for candidate in GRID:
            settings = candidate.settings(CompareConfig(seed=seed), steps)
            trainer = train_copy(model, data, of_train, settings, Path(work))
            found.append(task_of(trainer.model, asked).search(10).ndcg)
    return np.stack(found)


def regrets(values: np.ndarray, pairs: int) -> dict[str, float]:
    """The mean regret of every rule, (candidates, n) -> points."""
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for _ in range(DRAWS):
        dev, test, others = np.split(rng.permutation(values.shape[1]), [pairs // 4, pairs])
        on_dev = values[:, dev].mean(axis=1)
        first = int(on_dev.argmax())
        cosine = int(np.where(COSINE, on_dev, -1).argmax())
        gain = judge(values[first, test] - values[cosine, test], num_samples=1_000)
        chosen = {"compare": first if gain.is_better else cosine, "highest": first}
        chosen["half a point"] = cosine if on_dev[cosine] >= on_dev[first] - 0.005 else first
        chosen["defaults"] = 0
        measured = values[:, others].mean(axis=1)
        for rule, candidate in chosen.items():
            found.setdefault(rule, []).append(100 * (measured.max() - measured[candidate]))
    return {rule: round(float(np.mean(x)), 2) for rule, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    files = sources(given.folder)
    with FILE.open("w", encoding="utf-8") as file:
        for name, pairs, seed in product(("BANKING77", "XQuAD", "STS"), (100, 300), (0, 1)):
            cell: dict[str, object] = {"file": name, "pairs": pairs, "seed": seed}
            cell |= regrets(trained(files[name], pairs, seed), pairs)
            file.write(json.dumps(cell) + "\n")
            print(cell, flush=True)


if __name__ == "__main__":
    main()
