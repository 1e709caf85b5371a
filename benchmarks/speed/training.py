"""Time and memory of whole trainings: a loss of this package over sentence-transformers'
equivalent.

    python benchmarks/speed/training.py DATA [--batches 2048 8192] [--epochs 2] [--plot
    docs/training.png]

DATA is a folder with the files of BANKING77 and CLINC150 (see benchmarks/data). A row is a question
and another one of its intent, of both data sets, 25,000 in all. The model is wordllama's static
table of 256 dimensions, whose training on a CPU is mostly loss. Every training runs in a process of
its own: ``seconds`` are processor seconds from the first step to the last, with tokenization, so
other programs hardly change them, and ``peak`` is the memory of the process beyond what it had
before the training. nDCG@10 is that of 2,000 test questions of both sets among 3,000 training
questions.

``--encoder`` measures all-MiniLM-L6-v2 instead, 20 steps of 64, expected to be level. Expected
before measuring, at batches of 2,048 to 8,192: one term takes the time of
MultipleNegativesRankingLoss in a tenth of the memory; three prefixes at three temperatures a third
to a fifth of the time of the composition.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from benchmarks.data import banking77, clinc150
from benchmarks.data.intents import find_questions, question_pairs
from benchmarks.speed.memory import MIB, in_a_process, process_peak
from benchmarks.studies.models import minilm, static_model
from datasets import concatenate_datasets
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import (
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from torch import nn

import st_magnitude as stm

DIMS = (64, 128, 256)
TEMPERATURES = (0.03, 0.06, 0.1)
ENCODER = "MiniLM, one term"


class Sum(nn.Module):
    """The composition of several temperatures from sentence-transformers' parts."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model
        self.parts = nn.ModuleList(
            MatryoshkaLoss(model, MultipleNegativesRankingLoss(model, scale=1 / tau), list(DIMS))
            for tau in TEMPERATURES
        )

    def forward(self, features: list, labels: torch.Tensor | None = None) -> torch.Tensor:
        return sum(part([dict(column) for column in features], labels) for part in self.parts)


# name -> (sentence-transformers' loss, ours)
PAIRS = {
    "one term": (MultipleNegativesRankingLoss, stm.CosineRankingLoss),
    "three prefixes": (
        lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), list(DIMS)),
        lambda model: stm.CosineRankingLoss(model, terms=[stm.Term(dim) for dim in DIMS]),
    ),
    "three prefixes at three temperatures": (
        Sum,
        lambda model: stm.CosineRankingLoss(
            model, terms=[stm.Term(dim, tau) for dim in DIMS for tau in TEMPERATURES]
        ),
    ),
}


def read(folder: Path) -> tuple:
    banking = [banking77.read(folder, split) for split in ("train", "test")]
    clinc = [clinc150.read(folder / "clinc150_full.json", split) for split in ("train", "test")]
    rows = concatenate_datasets([question_pairs(part[0]) for part in (banking, clinc)])
    return rows.remove_columns("label").shuffle(seed=0), (banking, clinc)


def measure(folder: Path, name: str, ours: bool, batch: int, epochs: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows, sets = read(folder)
    is_encoder = name == ENCODER
    model = minilm() if is_encoder else static_model()
    loss = PAIRS["one term" if is_encoder else name][ours](model)
    with tempfile.TemporaryDirectory() as output:
        args = SentenceTransformerTrainingArguments(
            output,
            num_train_epochs=epochs,
            max_steps=20 if is_encoder else -1,
            per_device_train_batch_size=batch,
            learning_rate=2e-5 if is_encoder else 0.03,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)
        memory = process_peak()
        began = time.process_time()
        trainer.train()
        seconds = time.process_time() - began
        peak = (process_peak() - memory) / MIB
    scores = []
    for train, test in sets:
        few = 5 if is_encoder else 1
        task = find_questions(test[: 1000 // few], train[: 1500 // few])
        scores += list(task.encode(model, "cosine").search(10).ndcg)
    return {"seconds": seconds, "peak": peak, "ndcg": sum(scores) / len(scores)}


def draw(cells: list[dict], file: Path) -> None:
    """Time and memory at the largest batch, sentence-transformers' losses and ours."""
    import matplotlib.pyplot as plt

    cells = [cell for cell in cells if cell["loss"] in PAIRS]
    batch = max(cell["batch"] for cell in cells)
    names = list(PAIRS)
    figure, axes = plt.subplots(2, 1, figsize=(5.6, 4.2), layout="constrained")
    for axis, key, title in zip(
        axes,
        ("seconds", "peak"),
        ("processor seconds of the training", "peak memory, MiB"),
        strict=True,
    ):
        for shift, whose, color in ((-0.2, "theirs", "#9aa0a6"), (0.2, "ours", "#1a73e8")):
            of = {c["loss"]: c[key] for c in cells if c["batch"] == batch and c["whose"] == whose}
            places = [i + shift for i in range(len(names))]
            label = "sentence-transformers" if whose == "theirs" else "st_magnitude"
            bars = axis.barh(places, [of[name] for name in names], 0.38, color=color, label=label)
            axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=9)
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_yticks(range(len(names)), [n.replace(" at three", "\nat three") for n in names])
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[0].legend(fontsize=9, frameon=False, loc="upper right")
    figure.savefig(file, dpi=160, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--encoder", action="store_true", help="Measure all-MiniLM-L6-v2 alone.")
    parser.add_argument("--plot", type=Path, help="Draw the stored figures into this file.")
    options = parser.parse_args()
    place = Path(__file__).with_name("training.json")
    if options.plot:
        draw(json.loads(place.read_text(encoding="utf-8"))["cells"], options.plot)
        return
    runs = [(name, batch) for batch in options.batches for name in PAIRS]
    if options.encoder:
        runs = [(ENCODER, 64)]
    cells = [] if not options.encoder else json.loads(place.read_text(encoding="utf-8"))["cells"]
    cells = [cell for cell in cells if cell["loss"] != ENCODER]
    for name, batch in runs:
        found = {}
        for whose in ("theirs", "ours"):
            how = (options.data, name, whose == "ours", batch, options.epochs)
            found[whose] = in_a_process(measure, *how)
            cells.append({"loss": name, "whose": whose, "batch": batch, **found[whose]})
        theirs, ours = found["theirs"], found["ours"]
        print(
            f"{name:38} batch {batch:6,}  time {theirs['seconds']:6.1f} s over"
            f" {ours['seconds']:6.1f} s ({theirs['seconds'] / ours['seconds']:.2f}), memory"
            f" {theirs['peak']:6.0f} over {ours['peak']:5.0f} MiB, nDCG@10 {theirs['ndcg']:.4f}"
            f" and {ours['ndcg']:.4f}",
            flush=True,
        )
    record = {"epochs": options.epochs, "torch": torch.__version__, "cells": cells}
    place.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
