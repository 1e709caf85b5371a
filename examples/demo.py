"""Train a retriever on the API docs of your own Python environment, and ask what the training was
good for.

    make demo                                  # or:
    pip install -e ".[dev]"
    python examples/demo.py --output runs/demo

The docstrings of the installed packages are the data. Descriptions answer queries. Parameter lists,
references and examples never do: they are negatives in training and distractors in the index. A
static table is trained with the defaults of ``st-magnitude train`` and measured on packages that it
was not trained on, next to BM25, all-MiniLM as published and a classifier that sees only length and
punctuation. Then one training step is timed against the same loss made of sentence-transformers'
parts, and the trained model is stored in fewer bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _data import DocstringTask, SurfacePrior, build_docstring_task, bundled_minilm
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.speed.training import TAUS as TEMPERATURES
from benchmarks.speed.training import Sum
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.verdict import AFTER, BEFORE
from st_magnitude.finetune.train import TrainConfig, TrainedModel, train
from st_magnitude.judge import Difference, judge
from st_magnitude.result import Table, to_plain, wrap

ROWS = 1024  # of the batch whose step is timed
DIMS = (64, 128, 256)
PUBLISHED, TRAINED = "the table as published", "the table, trained"
SURFACE = "the table as published + surface"
NO_BOILERPLATE = "the table, trained without boilerplate"
MINILM = "all-MiniLM as published"
LENGTH = 64  # tokens that MiniLM reads, to save time


def searches(
    task: DocstringTask, model: SentenceTransformer, prior: SurfacePrior
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The model by cosine alone, and with the classifier's log-probability, whose weight dev
    chooses."""
    dev, test = task.dev.encode(model), task.test.encode(model)
    added = prior.added(test, task.test, prior.chosen((dev, task.dev)))
    return test.sweep([1.0])[1.0].ndcg, added.search(10).ndcg


def compare(
    found: dict[str, NDArray[np.float64]], trained: TrainedModel
) -> tuple[Table, dict[str, Difference]]:
    """All searches, and what the trained table has over each of them."""
    gains = {name: judge(found[TRAINED] - other) for name, other in found.items()}
    del gains[TRAINED]
    means = {name: float(ndcg.mean()) for name, ndcg in found.items()}
    for control in trained.confirmed.controls if trained.confirmed else ():
        name = control.name.replace(BEFORE, PUBLISHED).replace(AFTER, TRAINED)
        means[name], gains[name] = control.ndcg, control.gain
    rows = [
        [name, f"{means[name]:.4f}", gains.get(name, "")]
        for name in sorted(means, key=lambda name: means[name])
    ]
    return Table(["search", "nDCG@10", "the trained table over it"], rows), gains


def conclusion(gains: dict[str, Difference], beyond: Difference) -> str:
    """The sentences that the figures allow, and which control wins.

    ``beyond`` is the gain of the training where both tables are searched with the classifier.
    """

    def is_better(name: str) -> bool:
        return gains[name].is_better

    said = ["The training makes the table better on packages that it has not seen."]
    if not is_better(PUBLISHED):
        said = ["The training does not make the table clearly better."]
    if not is_better(NO_BOILERPLATE):
        said.append("Training without the boilerplate does as well.")
    elif is_better(PUBLISHED):
        said.append("Boilerplate as negatives is needed for it.")
    if is_better(SURFACE):
        said.append("It finds more than a classifier on length and punctuation does.")
    else:
        wins = "does better" if gains[SURFACE].is_worse else "does as well"
        said.append(
            f"But a classifier on length and punctuation, next to the untrained table, {wins}."
        )
    said.append(f"With that classifier next to both tables, training adds {beyond}.")
    if not beyond.is_better:
        said.append(
            "So it learns what an answer looks like; that it learns more is not shown here."
        )
    ahead = [name for name, gain in gains.items() if gain.is_worse]
    if ahead:
        said.append(f"Clearly ahead of the trained table: {', '.join(ahead)}.")
    return " ".join(said)


class ByHand(nn.Module):
    """The control: three prefixes at three temperatures in PyTorch, which encodes only once."""

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: list[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        queries, *documents = (self.model(column)["sentence_embedding"] for column in features)
        total, targets = queries.new_zeros(()), torch.arange(len(queries))
        for dim in DIMS:
            parts = queries[:, :dim], torch.cat(documents)[:, :dim]
            q, d = (nn.functional.normalize(part, dim=1) for part in parts)
            for tau in TEMPERATURES:
                total = total + nn.functional.cross_entropy(q @ d.T / tau, targets)
        return total


def distinct_rows(rows: Dataset) -> Dataset:
    """Rows that share no text: the losses treat repeated texts in their own ways."""
    seen: set[str] = set()
    chosen = []
    for index, row in enumerate(rows):
        texts = set(row.values())
        if len(texts) == len(row) and not texts & seen:
            chosen.append(index)
            seen |= texts
    return rows.select(chosen[:ROWS])


def cost(rows: Dataset) -> tuple[Table, dict[str, dict[str, float]]]:
    """Seconds, memory, value and gradient of a step of the same loss, made in three ways."""
    model = stm.prepare(stm.load("wordllama", device="cpu"), "cosine")
    weights = next(model.parameters())
    batch = [model.preprocess(list(rows[column])) for column in rows.column_names]
    terms = [stm.Term(dim, tau) for dim in DIMS for tau in TEMPERATURES]
    losses = {
        "sentence-transformers' parts": Sum(model, list(DIMS)),
        "by hand, encoding once": ByHand(model),
        "CosineRankingLoss(terms=...)": stm.CosineRankingLoss(model, terms=terms),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    figures, gradients = {}, []
    for name, loss in losses.items():

        def step(loss: nn.Module = loss) -> float:
            weights.grad = None
            value = loss([dict(column) for column in batch], None)
            value.backward()
            return value.item()

        value, seconds = step(), []
        gradients.append(weights.grad)
        for _ in range(3):
            began = time.process_time()
            step()
            seconds.append(time.process_time() - began)
        weights.grad = None
        figures[name] = {"seconds": min(seconds), "MiB": peak_bytes(step) / MIB, "value": value}
        apart = (gradients[-1] - gradients[0]).norm() / gradients[0].norm()
        figures[name]["gradient"] = float(apart)
    torch.set_num_threads(threads)
    table = [
        [name, f"{f['seconds']:.2f}", f"{f['MiB']:.0f}", f"{f['value']:.4f}"]
        for name, f in figures.items()
    ]
    return Table(
        [f"one step of {len(rows):,} rows, one thread", "seconds", "MiB", "loss"], table
    ), figures


def sizes(task: DocstringTask, models: dict[str, SentenceTransformer]) -> Table:
    """nDCG@10 by bytes a document."""
    data = task.test
    formats = {"dims": DIMS, "precisions": ("float32", "int8"), "write_csv": False}
    evaluator = CompressionEvaluator(data.queries, data.corpus, data.relevant, **formats)
    rows: dict[str, list[object]] = {}
    for model in models.values():
        evaluator(model)
        for cell in evaluator.cells:
            row = rows.setdefault(str(cell), [str(cell), cell.bytes_per_document])
            row.append(cell.ndcg)
    return Table(["stored", "bytes", *models], list(rows.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), help="new folder for models and figures"
    )
    parser.add_argument("--train-queries", type=int, default=1500)
    parser.add_argument("--test-queries", type=int, default=300)
    parser.add_argument("--steps", type=int, default=-1, help="of each training; default: 3 epochs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    output, began = options.output, time.perf_counter()
    if output.exists() and any(output.iterdir()):
        parser.error(f"{output} is not empty: choose another --output, or remove it.")

    def say(text: str) -> None:
        print(f"\n[{time.perf_counter() - began:4.0f} s] {text}", flush=True)

    say("Reading the docstrings of this environment (parsed, never imported)")
    task = build_docstring_task(
        train_queries=options.train_queries,
        dev_queries=100,
        test_queries=options.test_queries,
        max_train_files=40,
        seed=options.seed,
    )
    task.test.save(output / "data", "test")
    prior = SurfacePrior(task.train)

    found: dict[str, NDArray[np.float64]] = {}
    config = TrainConfig(max_steps=options.steps, seed=options.seed, keep_anyway=True)
    splits = {"dev": task.dev, "test": task.test}
    say("Training wordllama's table with the defaults of st-magnitude train")
    trained = train("wordllama", task.train, output / "model", config, **splits)
    seconds = trained.trainer.state.log_history[-1]["train_runtime"]
    say("Control: the same without boilerplate")
    without = replace(config, negatives=0)
    train("wordllama", task.train, output / "without-boilerplate", without, **splits)
    say("Searching")
    base = stm.load("wordllama", device="cpu")
    model = stm.load(str(output / "model"), device="cpu")
    control = stm.load(str(output / "without-boilerplate"), device="cpu")
    found[PUBLISHED], found[SURFACE] = searches(task, base, prior)
    found[TRAINED], found[f"{TRAINED} + surface"] = searches(task, model, prior)
    found[NO_BOILERPLATE], _ = searches(task, control, prior)
    say("Encoding with all-MiniLM as published")
    minilm = SentenceTransformer(bundled_minilm(), device="cpu")
    minilm.max_seq_length = LENGTH
    found[MINILM], found[f"{MINILM} + surface"] = searches(task, minilm, prior)
    say("Timing one training step")
    table, gains = compare(found, trained)
    beyond = judge(found[f"{TRAINED} + surface"] - found[SURFACE])
    steps, costs = cost(distinct_rows(task.train.triplets(1, seed=options.seed)))
    stored = sizes(task, {"trained": model, "as published": base})

    whole = time.perf_counter() - began
    test, packages = task.test, ", ".join(task.packages["test"])
    boilerplate = 1 - len(set().union(*test.relevant.values())) / len(test.corpus)
    changes = trained.confirmed.changes if trained.confirmed else ()
    screen = [
        f"\n{len(test.queries):,} queries about {packages}, {len(test.corpus):,} documents"
        f" ({boilerplate:.0%} boilerplate);\n{len(task.train.queries):,} training queries of"
        f" {len(task.packages['train'])} other packages, trained in {seconds:.0f} s of"
        f" {whole:.0f} s.\n",
        table.to_text(),
        f"surface: a classifier on length and punctuation; MiniLM reads {LENGTH} tokens\n",
        wrap(conclusion(gains, beyond), 80) + "\n",
        steps.to_text(),
        stored.to_text(),
        "Before and after: the largest gain, the median change and the largest loss",
        *map(str, changes),
        f"Saved: {output / 'model'}, {output / 'results.json'}",
    ]
    print("\n".join(screen))
    figures = {
        "ndcg@10": {name: ndcg.mean() for name, ndcg in found.items()},
        "test": trained.confirmed,
        "gains": gains,
        "gain with surface": beyond,
        "step": costs,
        "sizes": stored.rows,
        "seconds": {"training": seconds, "all": whole},
        "processors": os.cpu_count(),
        "packages": task.packages,
    }
    (output / "results.json").write_text(json.dumps(to_plain(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
