"""Does merging with the base keep what fine-tuning forgets, and more than fewer steps or a smaller rate keep?

    python benchmarks/evidence/merging.py [--tables] [--seeds 3]

paraphrase-MiniLM-L3-v2 with a frozen token table is trained on docstrings, with a negative that is never relevant in
each row, with Cosine and QNorm, and merged with its base by `stm.merge_with_base`. Every weight is measured on
docstrings, and on WordNet and FOLDOC as other domains: 150 queries over 300 documents each. The weight is chosen on 150
dev queries of docstrings; "with keep" adds dev queries of WordNet, on which at most one point may be lost. QNorm is
scored by dot, as trained, or by the document exponent that is chosen on dev for each weight.

The obvious alternatives are trained too: fewer steps, and smaller rates. Each of them is compared with the point of the
curve of weights that has the same nDCG@10 in its own domain, between two weights by their line: which has more in the
other domains? Merging is worth its place if the difference is above 0.

Expected before the run: the trained models lose 1 to 4 points in other domains; the weight chosen on dev alone is .5 to
1 and loses nothing in domain, and half of the loss is back at .5; at the same quality in domain merging is ahead of
smaller rates and of fewer steps by less than 1 point, and most intervals of three seeds contain 0. The norm of QNorm
weakens towards the base, so dot loses 1 to 3 points in domain at .5, and its chosen exponent rises.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

sys.path.append(str(Path(__file__).parent))
from cells import BASES, RESULTS, SEED, Cell, kept, objective, packed, store, unpacked
from docstrings import build_docstring_task
from lexicons import default_cache, fetch, foldoc, wordnet
from magnitude_tables import paired
from packing import without_padding
from search_tasks import shrink
from temperature import train

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

DOMAINS = ("docstrings", "wordnet", "foldoc")
STEPS, RATE = 40, 3e-4
MAIN = {
    "cosine": Cell("L3frozen", "docstrings", "cosine", 0, STEPS, 16, RATE),
    "qnorm": Cell("L3frozen", "docstrings", "qnorm", 0, STEPS, 16, RATE, scale="batch"),
}
ALTERNATIVES = {
    "half of the steps": {"steps": STEPS // 2},
    "a quarter of the steps": {"steps": STEPS // 4},
    "half of the rate": {"rate": RATE / 2},
    "a quarter of the rate": {"rate": RATE / 4},
}
Tasks = tuple[Any, dict[str, RetrievalData], dict[str, RetrievalData]]


def build_tasks() -> Tasks:
    """Rows to train on, dev and tests by domain."""
    words = wordnet(
        fetch("wordnet-base"),
        SEED,
        num_test_queries=400,
        corpus_size=1500,
        num_dev_queries=200,
        dev_corpus_size=800,
        cluster_size=40,
    )
    folder = default_cache() / "docstrings"
    calls = build_docstring_task(test_queries=300, seed=SEED, workers=1, cache=folder, progress=False)
    computing = foldoc(fetch("dict-foldoc"), SEED, num_queries=300, corpus_size=1000)
    tests = {"docstrings": calls.test, "wordnet": words.test, "foldoc": computing}
    dev = {"docstrings": calls.dev, "wordnet": words.dev}
    small = [{name: shrink(task, 150, 300, SEED) for name, task in some.items()} for some in (dev, tests)]
    return calls.train.triplets(1, SEED), small[0], small[1]


@lru_cache(maxsize=1)
def tasks() -> Tasks:
    return kept("merging", build_tasks)


def path(cell: Cell) -> Path:
    return RESULTS / "merging" / f"{cell.name}.json"


def trained(cell: Cell) -> SentenceTransformer:
    """The model after training, with the modules and the similarity of its loss."""
    torch.manual_seed(cell.seed)
    model = without_padding(stm.prepare(BASES[cell.base](), cell.loss))
    how = {"max_steps": cell.steps, "per_device_train_batch_size": cell.batch, "learning_rate": cell.rate}
    train(model, objective(model, cell), tasks()[0], cell.seed, **how)
    return model.eval()


def measure(cell: Cell) -> dict[str, Any]:
    """nDCG@10 of every query by scoring, of an alternative or at every weight of a main cell."""
    model = trained(cell)
    _, dev, tests = tasks()
    found: dict[str, Any] = {"settings": asdict(cell)}
    sets = {f"dev {name}": dev[name] for name in ("docstrings", "wordnet")} | tests
    weights = (0.0, 0.25, 0.5, 0.75, 1.0) if cell.steps == STEPS and cell.rate == RATE else (1.0,)
    for scoring in ("matched", "calibrated") if cell.loss == "qnorm" else ("matched",):
        data, *keep = sets.values()
        base = without_padding(BASES[cell.base]())
        merge = stm.merge_with_base(model, base, data, keep, weights, np.inf, scoring == "calibrated")
        figures = {name: [packed(row) for row in x] for name, x in zip(sets, merge.ndcg, strict=True)}
        found[scoring] = {"weights": weights, "exponents": merge.exponents.tolist(), "ndcg": figures}
        found["base"] = {name: packed(row) for name, row in zip(sets, merge.base, strict=True)}
    return found


def run(seeds: int) -> None:
    for main_cell in MAIN.values():
        for seed in range(seeds):
            for how in ({}, *ALTERNATIVES.values()):
                cell = replace(main_cell, seed=seed, **how)
                if not path(cell).is_file():
                    began = time.process_time()
                    store(path(cell), measure(cell))
                    print(path(cell).stem, round(time.process_time() - began), flush=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def stored(cell: Cell, seeds: int = 3) -> list[dict[str, Any]]:
    """The figures of all seeds, or nothing while one of them is missing."""
    paths = [path(replace(cell, seed=seed)) for seed in range(seeds)]
    if not all(file.is_file() for file in paths):
        return []
    return [json.loads(file.read_text(encoding="utf-8")) for file in paths]


def settings() -> Iterator[tuple[str, Cell, str]]:
    """Name, main cell and scoring of what has been run."""
    names = {("cosine", "matched"): "Cosine", ("qnorm", "matched"): "QNorm, dot"}
    names[("qnorm", "calibrated")] = "QNorm, calibrated"
    for (loss, scoring), name in names.items():
        if stored(MAIN[loss]):
            yield name, MAIN[loss], scoring


def curve(cell: Cell, scoring: str, name: str) -> NDArray[np.float64]:
    """nDCG@10 of every query by seed and weight, (S, W, n)."""
    return np.array([[unpacked(row) for row in found[scoring]["ndcg"][name]] for found in stored(cell)])


def difference(after: list[NDArray[np.float64]], before: list[NDArray[np.float64]]) -> str:
    """The mean over data sets of (S, n) figures less others, with its interval."""
    return paired([x - y for x, y in zip(after, before, strict=True)]).show()


def curve_table() -> list[str]:
    """nDCG@10 in points by weight, and what each weight gains over the trained model."""
    lines = ["| training, scoring | weight | docstrings | WordNet | FOLDOC | gain in docstrings | gain in the others |"]
    lines.append("| --- |" + " ---: |" * 6)
    for name, cell, scoring in settings():
        curves = [curve(cell, scoring, domain) for domain in DOMAINS]
        for i, weight in enumerate(stored(cell)[0][scoring]["weights"]):
            means = " | ".join(f"{100 * x[:, i].mean():.1f}" for x in curves)
            own, others = ([x[:, i] for x in part] for part in (curves[:1], curves[1:]))
            gains = difference(own, [x[:, -1] for x in curves[:1]]), difference(others, [x[:, -1] for x in curves[1:]])
            lines.append(f"| {name} | {weight:g} | {means} | {' | '.join(gains) if weight < 1 else ' | '} |")
    return lines


def choice_table() -> list[str]:
    """What the weight that dev chooses, and that which keeps WordNet, gain on the tests over the trained model."""
    lines = ["| training, scoring | chosen by | weights of the seeds | gain in docstrings | gain in the others |"]
    lines.append("| --- | --- | --- | ---: | ---: |")
    for name, cell, scoring in settings():
        dev, kept_dev = (curve(cell, scoring, f"dev {x}").mean(axis=2) for x in ("docstrings", "wordnet"))  # (S, W)
        before = unpacked(stored(cell)[0]["base"]["dev wordnet"]).mean()
        weights = stored(cell)[0][scoring]["weights"]
        for how, most in (("dev", np.inf), ("dev and keep, 1 point", 0.01), ("dev and keep, 3 points", 0.03)):
            losses = before - kept_dev
            allowed = losses <= np.maximum(most, losses.min(axis=1, keepdims=True))
            rows = np.where(allowed, dev, -1.0).argmax(axis=1)
            curves = [curve(cell, scoring, domain) for domain in DOMAINS]
            chosen, last = [[x[range(len(x)), at] for x in curves] for at in (rows, [-1] * len(rows))]
            gains = f"{difference(chosen[:1], last[:1])} | {difference(chosen[1:], last[1:])}"
            lines.append(f"| {name} | {how} | {', '.join(f'{weights[i]:g}' for i in rows)} | {gains} |")
    return lines


def alternative_table() -> list[str]:
    """Fewer steps and smaller rates, each next to the first point of the curve that is as good in docstrings."""
    lines = ["| training, scoring | instead | docstrings | the others | weight as good | merging over it, others |"]
    lines.append("| --- | --- |" + " ---: |" * 4)
    for name, cell, scoring in settings():
        own, *others = (curve(cell, scoring, domain) for domain in DOMAINS)
        weights, means = stored(cell)[0][scoring]["weights"], own.mean(axis=(0, 2))
        for how, change in ALTERNATIVES.items():
            there, *elsewhere = (curve(replace(cell, **change), scoring, domain)[:, 0] for domain in DOMAINS)
            mean = 100 * np.mean([x.mean() for x in elsewhere])
            row = f"| {name} | {how} | {100 * there.mean():.1f} | {mean:.1f} |"
            if (found := crossing(means, float(there.mean()))) is None:
                lines.append(f"{row} {'all are better' if there.mean() < means.min() else 'none'} | |")
                continue
            i, share = found
            merged = [(1 - share) * x[:, i] + share * x[:, i + 1] for x in others]
            weight = (1 - share) * weights[i] + share * weights[i + 1]
            lines.append(f"{row} {weight:.2f} | {difference(merged, elsewhere)} |")
    return lines


def crossing(curve: NDArray[np.float64], value: float) -> tuple[int, float] | None:
    """The first segment of a curve that reaches a value, and where on it; None if none does.

    Example:
        >>> crossing(np.array([1.0, 3.0, 2.0]), 2.5), crossing(np.array([1.0, 3.0, 2.0]), 4.0)
        ((0, 0.75), None)
    """
    for i, (start, end) in enumerate(pairwise(curve)):
        if min(start, end) <= value <= max(start, end):
            return i, float((value - start) / (end - start))
    return None


TABLES = {"merging": curve_table, "weights chosen": choice_table, "instead of merging": alternative_table}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    arguments = parser.parse_args()
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)
    if not arguments.tables:
        run(arguments.seeds)
    for table in TABLES.values():
        print("\n".join(table()), end="\n\n")
