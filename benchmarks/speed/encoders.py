"""Time and memory of an encoder's training: MultipleNegativesRankingLoss and our loss, plain and
with gradient caching.

    OMP_NUM_THREADS=1 python benchmarks/speed/encoders.py FOLDER

FOLDER has the files of `benchmarks.studies.known.sources`. A training takes the first rows of a
data set in random order, 3 batches of 64 and more, 12 of 16, with the model's own dropout and
number of tokens, on one thread in a process of its own; the losses take turns, the best of the
runs counts, and each run has a ratio. Cached losses have mini-batches of 32 texts. ``seconds`` are
processor seconds of ``train()``, with tokenization and the optimizer; ``peak`` is what the process
holds beyond its memory before; nDCG@10 is that of 300 queries that are not trained on. Draws
docs/encoders.png; benchmarks/studies/tables.py writes the table.

Expected before measuring: the time of our loss is .75 to .85 of MNRL's at batch 16, .55 to .75 at
64, .2 to .4 at 256, less where a column repeats few texts (names of intents) or mixes lengths. Of
the optimizer, which takes .15 s a step for all-MiniLM, nothing is saved. Peak memory goes with the
padded tokens. Cached losses gain less: sentence-transformers cuts the padding of a mini-batch too.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import sentence_transformers as st
import torch
from benchmarks.data.docstrings import bundled_minilm
from benchmarks.speed.memory import MIB, forget_peak, in_a_process, process_peak
from benchmarks.studies.estimates import markdown
from benchmarks.studies.known.sources import sources
from benchmarks.studies.models import QUIET
from benchmarks.studies.store import Store
from datasets import Dataset
from sentence_transformers.sentence_transformer import losses as theirs

import st_magnitude as stm

MINILM = "all-MiniLM-L6"
DATA = ("BANKING77", "CLINC150", "XQuAD", "STS")
SETTINGS = [
    *((MINILM, data, batch, False) for batch, data in product((16, 64), DATA)),
    *((MINILM, data, 256, False) for data in DATA if data != "XQuAD"),  # which takes 31 GiB
    *((MINILM, data, 256, True) for data in ("BANKING77", "STS")),
]
THEIRS, OURS = "MNRL", "st_magnitude"
COLORS = {THEIRS: "#9aa0a6", OURS: "#1a73e8"}
DEV = 300


@dataclass(frozen=True)
class Cell:
    model: str
    data: str
    batch: int
    cached: bool
    loss: str
    run: int = 0


STORE = Store(Path(__file__).with_name("encoders.jsonl"), Cell)


def pairs_of(folder: str, data: str) -> list[tuple[str, str]]:
    """Question and name of the intent, question and paragraph, or two texts of one meaning."""
    rows = [row for row in sources(Path(folder))[data] if row.get("score", 5.0) >= 4]
    order = np.random.default_rng(0).permutation(len(rows))
    return [tuple(map(str, list(rows[i].values())[:2])) for i in order]


def ndcg(model: st.SentenceTransformer, pairs: list[tuple[str, str]]) -> float:
    """nDCG@10 of the first texts of the last pairs, among the second texts of all."""
    corpus = {text: text for _, text in pairs}
    dev = dict(pairs[-DEV:])
    queries = {text: text for text in dev}
    relevant = {query: {document} for query, document in dev.items()}
    return stm.encode(model, stm.RetrievalData(queries, corpus, relevant), "cosine").search(10).mean


def measure(folder: str, cell: Cell, work: str) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pairs = pairs_of(folder, cell.data)
    model = st.SentenceTransformer(bundled_minilm(), device="cpu")
    steps = 12 if cell.batch == 16 else 3
    steps = min(steps, (len(pairs) - DEV) // cell.batch)
    columns = zip(*pairs[: steps * cell.batch], strict=True)
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), columns, strict=True)))
    if cell.loss == OURS:
        options = {"mini_batch_size": 32} if cell.cached else {}
        loss = stm.CosineRankingLoss(model, same_text="keep", **options)
    elif cell.cached:
        loss = theirs.CachedMultipleNegativesRankingLoss(model, mini_batch_size=32)
    else:
        loss = theirs.MultipleNegativesRankingLoss(model)
    how = QUIET | {"max_steps": steps, "use_cpu": True, "learning_rate": 2e-5}
    how |= {"per_device_train_batch_size": cell.batch}
    args = st.SentenceTransformerTrainingArguments(f"{work}/runs", **how)
    trainer = st.SentenceTransformerTrainer(model, args, rows, loss=loss)
    held = forget_peak()
    began = time.process_time()
    trainer.train()
    figures = {"steps": steps, "seconds": time.process_time() - began}
    figures["peak"] = (process_peak() - held) / MIB
    return figures | {"ndcg": ndcg(model, pairs)}


def runs_of(setting: tuple[str, str, int, bool], loss: str) -> list[dict]:
    return [found for run in range(2) if (found := STORE.load(Cell(*setting, loss, run)))]


def best(setting: tuple[str, str, int, bool], loss: str) -> dict | None:
    return min(runs_of(setting, loss), key=lambda run: run["seconds"], default=None)


def table() -> list[str]:
    head = ["data", "batch", "processor s", "ratio by run", "MiB", "ratio", "nDCG@10"]
    rows = []
    for setting in SETTINGS:
        before, after = (best(setting, loss) for loss in (THEIRS, OURS))
        if not before or not after:
            continue
        _, data, batch, cached = setting
        row = [data, f"{batch}, cached" if cached else f"{batch}"]
        row.append(f"{before['seconds']:.1f} / {after['seconds']:.1f}")
        by_run = zip(runs_of(setting, THEIRS), runs_of(setting, OURS), strict=False)
        row.append(", ".join(f"{x['seconds'] / y['seconds']:.2f}" for y, x in by_run))
        row.append(f"{before['peak']:,.0f} / {after['peak']:,.0f}")
        row.append(f"{after['peak'] / before['peak']:.2f}")
        row.append(" / ".join(f"{run['ndcg']:.4f}" for run in (before, after)))
        rows.append(row)
    return markdown(head, rows)


def draw(file: Path) -> None:
    """Time and memory of our loss, as a share of those of MultipleNegativesRankingLoss."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharey=True)
    for axis, key in zip(axes, ("seconds", "peak"), strict=True):
        axis.axhline(1, color=COLORS[THEIRS], linewidth=1)
        for data in DATA:
            settings = [(MINILM, data, batch, False) for batch in (16, 64, 256)]
            both = [(best(x, OURS), best(x, THEIRS)) for x in settings if x in SETTINGS]
            ratios = [ours[key] / other[key] for ours, other in both if ours and other]
            name = f"{data} (needs 31 GiB at 256)" if len(ratios) < 3 else data
            axis.plot(range(len(ratios)), ratios, marker="o", label=name)
        axis.set_xticks(range(3), (16, 64, 256))
        axis.set_xlabel("batch")
        axis.set_title("processor seconds" if key == "seconds" else "peak memory", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.1)
    axes[0].set_ylabel("share of MNRL's")
    shown = axes[0].get_legend_handles_labels()
    figure.legend(*shown, frameon=False, fontsize=9, loc="outside upper center", ncols=4)
    figure.savefig(file, dpi=160, facecolor="white")


def main(folder: str) -> None:
    for run, setting in product(range(2), SETTINGS):
        for loss in COLORS:
            cell = Cell(*setting, loss, run)
            if STORE.load(cell) is None:
                with tempfile.TemporaryDirectory() as work:
                    STORE.add(cell, in_a_process(measure, folder, cell, work))
                print(STORE.load(cell), flush=True)
    draw(Path("docs/encoders.png"))


if __name__ == "__main__":
    main(sys.argv[1])
