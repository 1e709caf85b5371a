"""The defaults of `st-magnitude train` for a static table, and settings next to them.

    python benchmarks/studies/known/defaults.py FOLDER

FOLDER has the files of BANKING77, CLINC150, XQuAD and the STS benchmark. Each is read as pairs, as
`load_splits` splits them with seed 7: a question and the name of its intent (BANKING77, CLINC150),
a question and its paragraph (XQuAD), two sentences with a score of 4 or more (STS, English and
Chinese). wordllama's table is trained on train and measured on dev by cosine; test is not read.
Every run is a line of defaults.jsonl, and tables.py prints them. Expected before the runs, from a
pilot on other splits: three epochs at temperature .1 better than one at .05 on intents by one to
two points and level elsewhere; rates of .01 behind; batches of 128 level.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import banking77, clinc150, xquad
from numpy.typing import NDArray
from transformers import PrinterCallback

import st_magnitude as stm
from st_magnitude.judge import judge
from st_magnitude.workbench.files.pairs import Splits
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import make_rows, make_trainer

FILE = Path(__file__).with_suffix(".jsonl")
SETTINGS: list[dict[str, float]] = [
    {"epochs": 1, "temperature": 0.05},
    {"epochs": 3, "temperature": 0.1},
    {"epochs": 3, "temperature": 0.05},
    {"epochs": 5, "temperature": 0.1},
    {"epochs": 3, "temperature": 0.2},
    {"epochs": 3, "temperature": 0.1, "learning_rate": 0.01},
    {"epochs": 3, "temperature": 0.1, "learning_rate": 0.1},
    {"epochs": 3, "temperature": 0.1, "batch_size": 128},
]


def sources(folder: Path) -> dict[str, list[dict[str, object]]]:
    """The pairs of each data set."""
    found: dict[str, list[dict[str, object]]] = {}
    for name, rows in (
        ("BANKING77", banking77.read(folder, "train")),
        ("CLINC150", clinc150.read(folder / "clinc150_full.json", "train")),
    ):
        found[name] = [{"text": text, "intent": name.replace("_", " ")} for text, name in rows]
    data = xquad.find_paragraph(folder / "xquad_en.json")
    found["XQuAD"] = [
        {"question": data.queries[query], "context": data.corpus[document]}
        for query, documents in data.relevant.items()
        for document in documents
    ]
    for name, file in (("STS", "stsb_en_train.csv"), ("STS, Chinese", "stsb_zh_train.csv")):
        with (folder / file).open(encoding="utf-8", newline="") as opened:
            found[name] = [
                {"sentence1": a, "sentence2": b, "score": float(score)}
                for a, b, score in csv.reader(opened)
            ]
    return found


def dev_ndcg(splits: Splits, setting: dict[str, float], seed: int) -> NDArray[np.float64]:
    """nDCG@10 of every dev query, by cosine, of the table trained with a setting."""
    model = copy.deepcopy(stm.load("wordllama", device="cpu"))
    model.model_card_data.widget = [{"text": "a"}]  # else the Trainer computes examples
    config = TrainConfig(**{"learning_rate": 0.03, "batch_size": 32} | setting, seed=seed)
    rows = make_rows(splits["train"], None, seed)
    with tempfile.TemporaryDirectory() as work:
        trainer = make_trainer(model, splits["train"], rows, config, Path(work), saves=False)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return stm.encode(model, splits["dev"]).search(10).ndcg


def cells() -> list[dict[str, object]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def table() -> list[str]:
    """A row for each setting: nDCG@10 on dev of the first, and what the others add to it."""
    found = cells()
    names = list(dict.fromkeys(cell["data"] for cell in found))
    lines = [f"| setting | {' | '.join(names)} |", f"| --- | {'---: | ' * len(names)}".strip()]
    before = [cell["before"] for cell in found if cell["setting"] == SETTINGS[0]]
    lines.append(f"| untrained | {' | '.join(f'{x:.3f}'[1:] for x in before)} |")
    for setting in SETTINGS:
        rows = [cell for cell in found if cell["setting"] == setting]
        label = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in setting.items())
        shown = [f"{cell['ndcg']:.3f}"[1:] for cell in rows]
        if setting != SETTINGS[0]:
            shown = ["{:+.1f} [{:+.1f}, {:+.1f}]".format(*cell["gain"]) for cell in rows]
        lines.append(f"| {label} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with FILE.open("w", encoding="utf-8") as file:
        for name, rows in sources(options.folder).items():
            splits = stm.load_splits(rows, threshold=4.0 if "score" in rows[0] else None, seed=7)
            before = stm.encode(stm.load("wordllama", device="cpu"), splits["dev"]).search(10).ndcg
            first = None
            for setting in SETTINGS:
                began = time.process_time()
                after = dev_ndcg(splits, setting, seed=0)
                first = after if first is None else first
                cell = {"data": name, "queries": len(after), "setting": setting}
                cell |= {"before": round(float(before.mean()), 4)}
                cell |= {"ndcg": round(float(after.mean()), 4)}
                gain = judge(after - first)
                cell |= {"gain": [round(100 * x, 2) for x in (gain.mean, gain.low, gain.high)]}
                cell |= {"seconds": round(time.process_time() - began, 1)}
                file.write(json.dumps(cell) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
