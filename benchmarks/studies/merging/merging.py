"""Does merging with the base keep what fine-tuning forgets, more than fewer steps or small rates?

    python benchmarks/studies/merging/merging.py [--seeds 3]

paraphrase-MiniLM-L3-v2 with a frozen token table is trained on docstrings, with a negative that is
never relevant in each row, with Cosine and QNorm, and merged with its base by
`stm.merge_with_base`. Every weight is measured on docstrings, and on WordNet and FOLDOC as other
domains: 150 queries over 300 documents each. The weight is chosen on dev queries of docstrings;
"with keep" adds dev queries of WordNet, on which at most so many points may be lost. QNorm is
scored by dot, or by the document exponent that is chosen on dev for each weight. Fewer steps and
smaller rates are trained too, and compared with the point of the curve of weights that has the same
nDCG@10 in its own domain. What was expected is on the page, docs/research/merging.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data.docstrings import build_docstring_task
from benchmarks.data.lexicons import default_cache, fetch, foldoc, wordnet
from benchmarks.data.search_tasks import shrink
from benchmarks.studies.cells import (
    BASES,
    SEED,
    Cell,
    Figures,
    Store,
    asked,
    how_of,
    kept,
    objective,
    packed,
    unpacked,
)
from benchmarks.studies.estimates import in_points, markdown, paired
from benchmarks.studies.models import train, without_padding
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

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
SETTINGS = {
    "Cosine": ("cosine", "matched"),
    "QNorm, dot": ("qnorm", "matched"),
    "QNorm, calibrated": ("qnorm", "calibrated"),
}
CELLS = Store(Path(__file__).parent / "cells")
Tasks = tuple[Any, dict[str, RetrievalData], dict[str, RetrievalData]]
Curves = list[NDArray[np.float64]]


def build_tasks() -> Tasks:
    """Rows to train on, dev and tests by domain."""
    sizes = {"num_test_queries": 400, "corpus_size": 1500, "cluster_size": 40}
    sizes |= {"num_dev_queries": 200, "dev_corpus_size": 800}
    words = wordnet(fetch("wordnet-base"), SEED, **sizes)
    folder = default_cache() / "docstrings"
    calls = build_docstring_task(
        test_queries=300, seed=SEED, workers=1, cache=folder, progress=False
    )
    computing = foldoc(fetch("dict-foldoc"), SEED, num_queries=300, corpus_size=1000)
    tests = {"docstrings": calls.test, "wordnet": words.test, "foldoc": computing}
    dev = {"docstrings": calls.dev, "wordnet": words.dev}

    def small(tasks: dict[str, RetrievalData]) -> dict[str, RetrievalData]:
        return {name: shrink(task, 150, 300, SEED) for name, task in tasks.items()}

    return calls.train.triplets(1, SEED), small(dev), small(tests)


@lru_cache(maxsize=1)
def tasks() -> Tasks:
    return kept("merging", build_tasks)


def trained(cell: Cell) -> SentenceTransformer:
    """The model after training, with the modules and the similarity of its loss."""
    torch.manual_seed(cell.seed)
    model = without_padding(stm.prepare(BASES[cell.base](), cell.loss))
    train(model, objective(model, cell), tasks()[0], cell.seed, **how_of(cell))
    return model.eval()


def measure(cell: Cell) -> Figures:
    """nDCG@10 of every query by scoring, of an alternative or at every weight of a main cell."""
    model = trained(cell)
    _, dev, tests = tasks()
    found: Figures = {"settings": asdict(cell)}
    sets = {f"dev {name}": dev[name] for name in ("docstrings", "wordnet")} | tests
    weights = (0.0, 0.25, 0.5, 0.75, 1.0) if replace(cell, seed=0) in MAIN.values() else (1.0,)
    for scoring in ("matched", "calibrated") if cell.loss == "qnorm" else ("matched",):
        first, *keep = sets.values()
        base = without_padding(BASES[cell.base]())
        is_calibrated = scoring == "calibrated"
        merge = stm.merge_with_base(model, base, first, keep, weights, np.inf, is_calibrated)
        named = zip(sets, merge.ndcg, merge.base, strict=True)
        rows = {name: ([packed(x) for x in ndcg], packed(own)) for name, ndcg, own in named}
        found[scoring] = {
            "weights": weights,
            "exponents": merge.exponents.tolist(),
            "ndcg": {name: ndcg for name, (ndcg, _) in rows.items()},
        }
        found["base"] = {name: own for name, (_, own) in rows.items()}
    return found


# --- tables ---------------------------------------------------------------------------------------


def stored(cell: Cell) -> list[Figures]:
    """The figures of all three seeds, or nothing while one of them is missing."""
    found = list(CELLS.of_seeds(cell).values())
    return found if len(found) == 3 else []


def settings() -> Iterator[tuple[str, Cell, str]]:
    """Name, main cell and scoring of what has been run."""
    for name, (loss, scoring) in SETTINGS.items():
        if stored(MAIN[loss]):
            yield name, MAIN[loss], scoring


def curve(cell: Cell, scoring: str, name: str) -> NDArray[np.float64]:
    """nDCG@10 of every query by seed and weight, (S, W, n)."""
    found = [x[scoring]["ndcg"][name] for x in stored(cell)]
    return np.array([[unpacked(row) for row in rows] for rows in found])


def difference(after: Curves, before: Curves) -> str:
    """The mean over data sets of (S, n) figures less others, with its interval."""
    return paired([x - y for x, y in zip(after, before, strict=True)]).show()


def gains(after: Curves, before: Curves) -> list[str]:
    """In docstrings, and in the other domains."""
    return [difference(after[:1], before[:1]), difference(after[1:], before[1:])]


def curve_table() -> list[str]:
    """nDCG@10 in points by weight, and what each weight gains over the trained model."""
    rows = []
    for name, cell, scoring in settings():
        curves = [curve(cell, scoring, domain) for domain in DOMAINS]
        for i, weight in enumerate(stored(cell)[0][scoring]["weights"]):
            here, last = ([x[:, at] for x in curves] for at in (i, -1))
            gained = gains(here, last) if weight < 1 else ["", ""]
            rows.append([name, f"{weight:g}", *map(in_points, here), *gained])
    head = "training, scoring|weight|docstrings|WordNet|FOLDOC|gain in docstrings|gain in the"
    return markdown(f"{head} others".split("|"), rows)


def choice_table() -> list[str]:
    """What the weight that dev chooses, with and without keep, gains over the trained model."""
    rows = []
    limits = {"dev": np.inf, "dev and keep, 1 point": 0.01, "dev and keep, 3 points": 0.03}
    for (name, cell, scoring), (how, most) in product(settings(), limits.items()):
        sets = ("dev docstrings", "dev wordnet")
        dev, kept_dev = (curve(cell, scoring, x).mean(axis=2) for x in sets)  # (S, W)
        first = stored(cell)[0]
        losses = unpacked(first["base"]["dev wordnet"]).mean() - kept_dev
        allowed = losses <= np.maximum(most, losses.min(axis=1, keepdims=True))
        best = np.where(allowed, dev, -1.0).argmax(axis=1)
        curves = [curve(cell, scoring, domain) for domain in DOMAINS]
        gained = gains([x[range(len(x)), best] for x in curves], [x[:, -1] for x in curves])
        weights = ", ".join(f"{first[scoring]['weights'][i]:g}" for i in best)
        rows.append([name, how, weights, *gained])
    head = "training, scoring|chosen by|weights of the seeds|gain in docstrings|gain in the others"
    return markdown(head.split("|"), rows, "lll")


def alternative_table() -> list[str]:
    """Fewer steps and smaller rates, each next to the first point of the curve as good as it."""
    rows = []
    for (name, cell, scoring), (how, change) in product(settings(), ALTERNATIVES.items()):
        own, *others = (curve(cell, scoring, domain) for domain in DOMAINS)
        weights = stored(cell)[0][scoring]["weights"]
        instead = replace(cell, **change)
        there, *elsewhere = (curve(instead, scoring, domain)[:, 0] for domain in DOMAINS)
        row = [name, how, in_points(there), in_points([x.mean() for x in elsewhere])]
        means = own.mean(axis=(0, 2))
        if (found := crossing(means, float(there.mean()))) is None:
            rows.append([*row, "all are better" if there.mean() < means.min() else "none", ""])
            continue
        i, share = found
        merged = [(1 - share) * x[:, i] + share * x[:, i + 1] for x in others]
        weight = (1 - share) * weights[i] + share * weights[i + 1]
        rows.append([*row, f"{weight:.2f}", difference(merged, elsewhere)])
    head = "training, scoring|instead|docstrings|the others|weight as good|merging over it, others"
    return markdown(head.split("|"), rows, "ll")


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


TABLES = {
    "merging": curve_table,
    "weights chosen": choice_table,
    "instead of merging": alternative_table,
}

if __name__ == "__main__":
    changes = ({}, *ALTERNATIVES.values())
    for seed in range(asked(__doc__).seeds):
        cells = [replace(x, seed=seed, **how) for x in MAIN.values() for how in changes]
        CELLS.run(measure, cells)
