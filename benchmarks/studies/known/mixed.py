"""QNorm and Cosine at the paper's scale and at "auto", on pairs of three kinds in batches of 128.

    python benchmarks/studies/known/mixed.py --data FOLDER

FOLDER has xquad_en.json, stsb_en_{train,dev,test}.csv and clinc150_full.json. all-MiniLM without
its Normalize learns questions with their paragraphs (XQuAD), paraphrases (STS-B, scores of 4 and
more) and questions of one intent (CLINC150). A run is a line of mixed.jsonl; runs that are there
are not repeated. Dev chooses the temperature of "auto" and of Cosine with seed 0, and the test is
read once a run.

Expected before the runs: the norms of MiniLM are about 6, so logits of 20 · s are several times as
large as those of cosine at .05. QNorm at 20 · s loses 2 to 5 points to Cosine as trained, and
"auto" at most 1.5; at the calibrated exponent both lose less than a point. The two agree with
what batches of 32 show (docs/research/magnitude.md).
"""

from __future__ import annotations

import argparse
import csv
import logging
import time
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import clinc150, xquad
from benchmarks.data.intents import find_questions, question_pairs, split_off
from benchmarks.studies.estimates import gain_of
from benchmarks.studies.known import training
from benchmarks.studies.known.known import header, row
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from datasets import Dataset, concatenate_datasets

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData

KINDS = ("XQuAD", "STS-B", "CLINC150")
LOSSES: dict[str, dict[str, Any]] = {
    "Cosine": {"temperatures": [(0.05,), (0.1,)]},
    "QNorm, 20 · s": {"loss": ["QNorm"], "scale": [20.0]},
    "QNorm, auto": {"loss": ["QNorm"], "temperatures": [(0.05,), (0.1,)]},
}


@dataclass(frozen=True)
class Cell(training.Cell):
    """30 steps of 128 pairs, in which texts are cut at 64 tokens."""

    data: str = "mixed"
    loss: str = "Cosine"
    temperatures: tuple[float, ...] = (0.05,)
    base: str = "MiniLM at 64"
    steps: int = 30
    batch: int = 128
    rate: float = 1e-4


CELLS = Store(Path(__file__).with_name("mixed.jsonl"), Cell)


def of_articles(data: RetrievalData, first: int, last: int) -> RetrievalData:
    """The questions about some of the paragraphs, which have the order of their articles."""
    documents = set(list(data.corpus)[first:last])
    return data.only({q for q, grades in data.relevant.items() if grades.keys() <= documents})


def paraphrases(file: Path) -> RetrievalData:
    """First sentence -> second sentence, where people gave the pair 4 of 5 or more."""
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines))
    number: dict[str, str] = {}
    for _, second, _ in rows:
        number.setdefault(second, f"s{len(number)}")
    pairs = [(first, number[second]) for first, second, score in rows if float(score) >= 4]
    asked = {first: f"f{i}" for i, first in enumerate(dict.fromkeys(x for x, _ in pairs))}
    relevant: dict[str, set[str]] = {}
    for first, second in pairs:
        relevant.setdefault(asked[first], set()).add(second)
    queries = {key: text for text, key in asked.items()}
    return RetrievalData(queries, {key: text for text, key in number.items()}, relevant)


@cache
def data(folder: Path) -> tuple[Dataset, dict[str, RetrievalData], dict[str, RetrievalData]]:
    """Training pairs, and the dev and test data of each kind."""
    paragraphs = xquad.find_paragraph(folder / "xquad_en.json")
    intents = {x: clinc150.read(folder / "clinc150_full.json", x) for x in ("train", "val", "test")}
    asked = {x: split_off(intents[x], 500)[1] for x in ("val", "test")}
    sentences = {x: paraphrases(folder / f"stsb_en_{x}.csv") for x in ("train", "dev", "test")}
    found = {}
    for part, val, paragraph in (("dev", "val", 160), ("test", "test", 200)):
        tasks = (
            of_articles(paragraphs, paragraph, paragraph + 40),
            sentences[part],
            find_questions(asked[val], intents["train"][::5]),
        )
        found[part] = dict(zip(KINDS, tasks, strict=True))
    held_out = [x for part in found.values() for x in part.values()]
    rows = [
        of_articles(paragraphs, 0, 160).apart_from(*held_out).triplets(0),
        sentences["train"].apart_from(*held_out).triplets(0),
        question_pairs(intents["train"]).remove_columns("label").shuffle(0).select(range(2000)),
    ]
    return concatenate_datasets(rows), found["dev"], found["test"]


def measure(cell: Cell, folder: Path) -> Figures:
    """nDCG@10 of each kind, as trained and at the exponent that dev chooses for all kinds."""
    rows, dev, test = data(folder)
    began = time.perf_counter()
    model, own = training.trained(cell, rows)
    seconds = round(time.perf_counter() - began, 1)
    swept = {
        kind: stm.encode(model, x).sweep([own, *training.EXPONENTS]) for kind, x in dev.items()
    }
    mean = {e: np.mean([x[e].mean for x in swept.values()]) for e in swept[KINDS[0]]}
    chosen = max(mean, key=lambda exponent: mean[exponent])
    tests = {kind: stm.encode(model, x).sweep([own, chosen]) for kind, x in test.items()}
    return {
        "dev": round(float(mean[own]), 5),
        "exponent": chosen,
        "as trained": {kind: packed(x[own].ndcg) for kind, x in tests.items()},
        "calibrated": {kind: packed(x[chosen].ndcg) for kind, x in tests.items()},
        "seconds": seconds,
    }


def of_loss(name: str) -> list[Cell]:
    """At each temperature."""
    options = LOSSES[name]
    return [Cell(**dict(zip(options, x, strict=True))) for x in product(*options.values())]


def table() -> list[str]:
    """nDCG@10 of Cosine, and gains over it, each at the temperature that dev chooses."""
    names = [f"{kind}, {how}" for kind in KINDS for how in ("as trained", "calibrated")]
    lines = [header("loss", "temperature", *names)]
    best = {name: CELLS.best(of_loss(name)) for name in LOSSES}
    for name, cell in best.items():
        if cell is None:
            continue
        shown = []
        for kind in KINDS:
            for how in ("as trained", "calibrated"):
                found, cosine = (
                    {seed: unpacked(x[how][kind]) for seed, x in CELLS.of_seeds(one).items()}
                    for one in (cell, best["Cosine"])
                )
                mean = f"{100 * np.mean(list(found.values())):.1f}"
                shown.append(mean if name == "Cosine" else gain_of(found, cosine)[0].show())
        lines.append(row(name, f"{cell.temperatures[0]:g}", *shown))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    folder = parser.parse_args().data
    logging.getLogger("st_magnitude").setLevel(logging.ERROR)  # one-sided similarities on purpose
    torch.set_num_threads(1)
    run = partial(CELLS.run, lambda cell: measure(cell, folder))
    run(cell for name in LOSSES for cell in of_loss(name))
    chosen = [CELLS.best(of_loss(name)) for name in LOSSES]
    run(x for seeds in zip(*map(seeds_of, chosen), strict=True) for x in seeds)


if __name__ == "__main__":
    main()
