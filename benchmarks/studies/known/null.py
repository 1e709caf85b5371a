"""How often does `st-magnitude train` say "better" where nothing was to be learned?

    python benchmarks/studies/known/null.py FOLDER [--draws 40]

FOLDER has the files of BANKING77. Each draw takes 300 questions at random, gives each the name of
another question's intent, and lets five folds of wordllama's table judge with the defaults of
`train`. What a fold learns says nothing about the questions that it did not see, so the true
difference from the untrained table is 0. Every draw is a line of null.jsonl. Expected before the
runs: "better" in at most one of forty draws.
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
from st_magnitude.finetune.baseline import Baseline
from st_magnitude.finetune.folds import cross_validate
from st_magnitude.finetune.settings import TrainConfig

FILE = Path(__file__).with_suffix(".jsonl")


def draw(pairs: list[tuple[str, str]], seed: int) -> dict[str, object]:
    """The verdict on pairs whose intents are shuffled."""
    rng = np.random.default_rng(seed)
    chosen = [pairs[i] for i in rng.permutation(len(pairs))[:300]]
    names = rng.permutation([name for _, name in chosen])
    named = zip(chosen, names, strict=True)
    rows = [{"text": text, "intent": str(name)} for (text, _), name in named]
    splits = stm.load_splits(rows, seed=seed)
    data = splits["train"].joined(splits["dev"])
    model = stm.load("wordllama", device="cpu")
    baseline = Baseline(model, data, data, (), TrainConfig(seed=seed))
    with tempfile.TemporaryDirectory() as work:
        run = cross_validate(model, data, baseline.config, 5, Path(work))
    verdict, _ = baseline.compare(run, folds=5)
    assert verdict is not None
    gain = [round(100 * x, 2) for x in verdict.saved.gain]
    return {"seed": seed, "queries": verdict.queries, "gain": gain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draws", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pairs = banking77.read(options.folder, "train")
    with FILE.open("w", encoding="utf-8") as file:
        for seed in range(options.draws):
            file.write(json.dumps(draw(pairs, seed)) + "\n")
            file.flush()
    gains = [json.loads(line)["gain"] for line in FILE.read_text(encoding="utf-8").splitlines()]
    better = sum(low > 0 for _, low, _ in gains)
    worse = sum(high < 0 for _, _, high in gains)
    print(f"{len(gains)} draws: better in {better}, worse in {worse}")


if __name__ == "__main__":
    main()
