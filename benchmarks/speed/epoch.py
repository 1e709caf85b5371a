"""One epoch of all-MiniLM-L6-v2: nDCG@10 over the processor time that the training has taken.

    OMP_NUM_THREADS=1 python benchmarks/speed/epoch.py FOLDER

FOLDER has the files of `benchmarks.studies.known.sources`, and stsb_en_test.csv. Tests:

- BANKING77: all 3,080 test questions, among the 77 names of intents;
- XQuAD: the questions of every fourth article, which is not trained on, among all paragraphs;
- STS: first texts of test pairs with a score of 4 or more, among the second texts of all.

A training is a fresh process on one thread with the defaults of sentence-transformers' Trainer
(learning rate 5e-5 with linear decay, the model's dropout and number of tokens), a warm-up over the
first tenth of the steps, and whole batches only. One seed gives all losses the same batches. Those
of NO_DUPLICATES hold no text twice, so 77 names cannot fill one of 256. A point is [step, processor
seconds of ``train()`` without the evaluations, nDCG@10], and ``peak`` is what the training holds
beyond the memory of the process before.

Each training is a line of epoch.jsonl, and a stored one does not run again. With a file named stop
next to this script, no other one begins. Draws docs/training_curve.png; the table is written by
benchmarks/studies/tables.py.

Expected before measuring: ours take .35 to .65 of MNRL's time, least at BANKING77 in batches of
256; with "keep" the curves end level, within .005 of each other for one seed. The default counts
copies of a name once, and ends level or higher. Batches of NO_DUPLICATES take as long as others.
"""

import csv
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import sentence_transformers as st
import torch
from benchmarks.data import banking77, xquad
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.speed.memory import MIB, forget_peak, in_a_process, process_peak
from benchmarks.studies.estimates import markdown
from benchmarks.studies.models import QUIET
from benchmarks.studies.store import Store
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses as theirs
from transformers import TrainerCallback

import st_magnitude as stm

MNRL, NO_DUPLICATES, KEEP, OURS = "MNRL", "MNRL, NO_DUPLICATES", "keep", "default"
LOSSES = (MNRL, NO_DUPLICATES, KEEP, OURS)
HEADLINE = ("BANKING77", 256)
SETTINGS = (HEADLINE, ("XQuAD", 64), ("STS", 64), ("BANKING77", 64))
COLORS = {MNRL: "#9aa0a6", KEEP: "#1a73e8"}
POINTS = 8
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Cell:
    data: str
    batch: int
    loss: str
    seed: int = 0


STORE = Store(Path(__file__).with_name("epoch.jsonl"), Cell)
STOP = Path(__file__).with_name("stop")


def losses_of(setting: tuple[str, int]) -> list[str]:
    return [loss for loss in LOSSES if setting != HEADLINE or loss != NO_DUPLICATES]


def cells() -> list[Cell]:
    """In the order in which they run: the headline's first, then all by seed."""
    first = [Cell(*setting, loss) for setting in SETTINGS for loss in losses_of(setting)]
    first += [Cell(*HEADLINE, loss, seed) for seed, loss in product((1, 2), (MNRL, KEEP))]
    rest = [Cell(*x, loss, seed) for seed in (1, 2) for x in SETTINGS for loss in losses_of(x)]
    return list(dict.fromkeys(first + rest))


def task_of(pairs: Pairs, corpus: list[str]) -> stm.RetrievalData:
    """First text -> its second texts, among the corpus."""
    relevant: dict[str, set[str]] = {}
    for query, document in pairs:
        relevant.setdefault(query, set()).add(document)
    return stm.RetrievalData({q: q for q in relevant}, {d: d for d in corpus}, relevant)


def sts(file: Path) -> list[tuple[str, str, float]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return [(a, b, float(score)) for a, b, score in csv.reader(opened)]


def read(folder: Path, data: str) -> tuple[Pairs, stm.RetrievalData]:
    """The pairs of the training, and the test."""
    if data == "BANKING77":
        rows = {split: banking77.read(folder, split) for split in ("train", "test")}
        pairs = {k: [(text, name.replace("_", " ")) for text, name in v] for k, v in rows.items()}
        return pairs["train"], task_of(pairs["test"], sorted({name for _, name in pairs["test"]}))
    if data == "XQuAD":
        found = xquad.find_paragraph(folder / "xquad_en.json")  # 5 paragraphs an article, in order
        fourth = {d for i, d in enumerate(found.corpus) if i // 5 % 4 == 3}
        of_query = [(q, d) for q, documents in found.relevant.items() for d in documents]
        train, test = (
            [(found.queries[q], found.corpus[d]) for q, d in of_query if (d in fourth) == is_test]
            for is_test in (False, True)
        )
        return train, task_of(test, list(found.corpus.values()))
    rows = {split: sts(folder / f"stsb_en_{split}.csv") for split in ("train", "test")}
    train, test = ([(a, b) for a, b, score in x if score >= 4] for x in rows.values())
    return train, task_of(test, [b for _, b, _ in rows["test"]])


class Curve(TrainerCallback):
    """Evaluates at equal distances, and counts neither its time nor its memory as training's."""

    def __init__(self, evaluate: Callable[[], float]) -> None:
        self.evaluate, self.spent, self.peak = evaluate, 0.0, 0
        self.points = [(0, 0.0, evaluate())]
        self.go_on()

    def go_on(self) -> None:
        forget_peak()
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        marks = {round(state.max_steps * i / POINTS) for i in range(1, POINTS + 1)}
        if state.global_step in marks:
            self.spent += time.process_time() - self.began
            self.peak = max(self.peak, process_peak())
            self.points.append((state.global_step, self.spent, self.evaluate()))
            self.go_on()


def measure(folder: str, cell: Cell, work: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(cell.seed)
    pairs, test = read(Path(folder), cell.data)
    model = st.SentenceTransformer(bundled_minilm(), device="cpu")
    if cell.loss == KEEP:
        loss = stm.CosineRankingLoss(model, same_text="keep")
    elif cell.loss == OURS:
        loss = stm.CosineRankingLoss(model)
    else:
        loss = theirs.MultipleNegativesRankingLoss(model)
    how = QUIET | {"num_train_epochs": 1, "use_cpu": True, "warmup_steps": 0.1, "seed": cell.seed}
    how |= {"per_device_train_batch_size": cell.batch}
    if cell.loss == NO_DUPLICATES:
        how["batch_sampler"] = st.base.sampler.BatchSamplers.NO_DUPLICATES
    columns = zip(*pairs, strict=True)
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, columns), strict=True)))
    args = st.SentenceTransformerTrainingArguments(f"{work}/runs", **how)
    held = forget_peak()
    curve = Curve(lambda: stm.encode(model, test, "cosine").search(10).mean)
    trainer = st.SentenceTransformerTrainer(model, args, rows, loss=loss, callbacks=[curve])
    curve.go_on()
    trainer.train()
    figures = {"points": [(n, round(s, 2), round(ndcg, 5)) for n, s, ndcg in curve.points]}
    figures |= {"peak": round((curve.peak - held) / MIB), "rate": args.learning_rate}
    packages = ("sentence-transformers", "transformers", "torch")
    figures |= {name: version(name) for name in packages}
    return figures | {"processor": processor(), "threads": torch.get_num_threads()}


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def of_seeds(setting: tuple[str, int], loss: str) -> dict[int, dict[str, Any]]:
    return STORE.of_seeds(Cell(*setting, loss))


def table() -> list[str]:
    """For each loss means over seeds, and by seed its time and nDCG@10 against MNRL's."""
    head = ["data", "batch", "loss", "steps", "processor s", "share by seed"]
    head += ["MiB", "nDCG@10", "points by seed"]
    lines = []
    for setting in SETTINGS:
        base = of_seeds(setting, MNRL)
        for loss in losses_of(setting):
            runs = of_seeds(setting, loss)
            if not runs:
                continue
            ends = {seed: run["points"][-1] for seed, run in runs.items()}
            line = [*setting, loss, ends[min(ends)][0]]
            line.append(f"{np.mean([seconds for _, seconds, _ in ends.values()]):,.0f}")
            mnrl = {seed: base[seed]["points"][-1] for seed in ends if seed in base}
            shares = [f"{ends[seed][1] / seconds:.2f}" for seed, (_, seconds, _) in mnrl.items()]
            line.append("" if loss == MNRL else ", ".join(shares))
            line.append(f"{np.mean([run['peak'] for run in runs.values()]):,.0f}")
            line.append(f"{np.mean([ndcg for *_, ndcg in ends.values()]):.4f}")
            gains = [f"{100 * (ends[seed][2] - ndcg):+.1f}" for seed, (*_, ndcg) in mnrl.items()]
            line.append("" if loss == MNRL else ", ".join(gains))
            lines.append([str(x) for x in line])
    return markdown(head, lines, "lrlrrlrrl")


def draw(file: Path) -> None:
    """The headline: nDCG@10 over minutes for each seed, and the peak of memory."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3), layout="constrained", width_ratios=(3.4, 1)
    )
    names = {MNRL: MNRL, KEEP: 'CosineRankingLoss(same_text="keep")'}
    ends = {}
    for (loss, color), i in zip(COLORS.items(), range(2), strict=True):
        runs = list(of_seeds(HEADLINE, loss).values())
        curves = np.array([run["points"] for run in runs])  # (seeds, points, 3)
        for curve in curves:
            left.plot(curve[:, 1] / 60, curve[:, 2], color=color, linewidth=1)
        ends[loss] = curves[:, -1, 1:].mean(axis=0) / (60, 1)
        left.plot(*ends[loss], "o", color=color, markersize=9, label=names[loss])
        gib = np.mean([run["peak"] for run in runs]) / 1024
        bar = right.bar(i, gib, 0.6, color=color)
        right.bar_label(bar, [f"{gib:.1f}"], padding=2)
    (slow, height), (fast, _) = ends[MNRL], ends[KEEP]
    below = height - 0.25 * (height - left.get_ylim()[0])
    arrow = {"arrowstyle": "->", "color": COLORS[KEEP], "linewidth": 1.5}
    left.annotate("", (fast, below), (slow, below), arrowprops=arrow)
    said = {"ha": "center", "va": "bottom", "color": COLORS[KEEP], "fontsize": 12}
    left.text((slow + fast) / 2, below, f"{slow / fast:.1f} times faster", **said)
    left.set_xlabel("CPU minutes of one epoch", fontsize=9)
    left.set_title("nDCG@10 on 3,080 test questions", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    right.set_title("peak memory, GiB", fontsize=10)
    right.set_xticks(range(2), [MNRL, "ours"], fontsize=9)
    right.set_yticks([])
    right.margins(y=0.15)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Same model, data, batch and gradients, on one CPU thread", fontsize=11)
    figure.savefig(file, dpi=160, facecolor="white")


def main(folder: str) -> None:
    for cell in cells():
        if STOP.exists():
            return
        if STORE.load(cell) is None:
            with tempfile.TemporaryDirectory() as work:
                STORE.add(cell, in_a_process(measure, folder, cell, work))
            print(STORE.load(cell), flush=True)
    draw(Path("docs/training_curve.png"))


if __name__ == "__main__":
    main(sys.argv[1])
