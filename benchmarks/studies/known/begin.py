"""Begin with BM25, a static table or an encoder? And what does a rule that decides cost?

    python benchmarks/data/faq.py
    python benchmarks/studies/known/begin.py FOLDER [--sizes 100] [--models table] [--seeds 0 1]

FOLDER has the files of `sources`. A cell is a model on a file with a number of pairs to train on:
wordllama's table or all-MiniLM-L6-v2, as it comes and trained with the defaults of `train`, alone
and with BM25. Folds of the training queries judge, five of the table and two of the encoder. Up to
600 other queries test, and the corpus is the documents of both. A cell is a line of begin.jsonl.

A rule chooses a system by the queries that judge. Its regret is the best figure on test minus that
of its choice.

Expected before the runs: MiniLM is ahead by 5 to 15 points on questions and answers with fewer than
1,000 pairs. The table is level or ahead where the answers are names of classes. The rule of `train`
has a mean regret of at most .7 points.
"""

from __future__ import annotations

import argparse
import copy
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import faq
from benchmarks.data.docstrings import bundled_minilm, docstring_task
from benchmarks.studies.estimates import markdown
from benchmarks.studies.known.sources import sources
from benchmarks.studies.store import Store, packed, unpacked
from numpy.typing import NDArray

import st_magnitude as stm
from st_magnitude.data.beir import canonical
from st_magnitude.evaluation.lexical import TOKENS, bm25_run
from st_magnitude.judge import judge
from st_magnitude.surgery.normalize import score_by_cosine
from st_magnitude.workbench.files.pairs import Splits
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import trained_copy
from st_magnitude.workbench.judging.choice import systems_of
from st_magnitude.workbench.judging.contestants import search, search_in_folds
from st_magnitude.workbench.judging.controls import bm25_control
from st_magnitude.workbench.judging.exam import DEPTH, Exam

NAMES = ("BANKING77", "CLINC150")
ANSWERS = ("construction", "software", "docstrings", "XQuAD")
FILES = (*NAMES, *ANSWERS, "STS", "STS, Chinese")
MOST_TESTED = 600
MOST_OF_ANSWERS = 300  # long texts take an encoder long
MODELS = {"table": "the table", "encoder": "the encoder"}
FOLDS = {"table": 5, "encoder": 2}
BM25 = "BM25"


@dataclass(frozen=True)
class Cell:
    data: str
    pairs: int
    model: str
    seed: int = 0
    judged: bool = True  # else the trained model is tested alone, without the trainings of folds


CELLS = Store(Path(__file__).with_suffix(".jsonl"), Cell)
Figures = Mapping[str, NDArray[np.float64]]  # nDCG@10 of every query by system
Pairs = list[tuple[str, str]]


# --- runs ---------------------------------------------------------------------------------------


def pairs_of(name: str, folder: Path) -> Pairs:
    """All pairs of a file, one of each query."""
    if name in ("construction", "software"):
        found = faq.read(name)
    elif name == "docstrings":
        data = docstring_task().train
        found = [(text, data.corpus[min(data.relevant[q])]) for q, text in data.queries.items()]
    else:
        rows = sources(folder)[name]
        found = [
            (str(query), str(document))
            for query, document, *score in (row.values() for row in rows)
            if not score or float(score[0]) >= 4
        ]
    return list({canonical(query): (query, document) for query, document in found}.values())


def tested(pairs: Pairs, name: str) -> int:
    """The number of queries of a file that test: at most a third."""
    return min(MOST_OF_ANSWERS if name in ANSWERS else MOST_TESTED, len(pairs) // 3)


def splits_of(pairs: Pairs, cell: Cell) -> Splits:
    """The pairs to train on and to test."""
    shuffled = [pairs[i] for i in np.random.default_rng(cell.seed).permutation(len(pairs))]
    tests = tested(pairs, cell.data)
    rows = [
        {"query": query, "document": document, "split": "test" if i < tests else "train"}
        for i, (query, document) in enumerate(shuffled[: tests + cell.pairs])
    ]
    return stm.load_splits(rows, seed=cell.seed)


def measure(cell: Cell, pairs: Pairs) -> dict[str, Any]:
    """The figures of BM25 and of a model on the queries that judge and on test."""
    splits = splits_of(pairs, cell)
    model = stm.load("wordllama" if cell.model == "table" else bundled_minilm(), device="cpu")
    score_by_cosine(model, logging.debug)
    exam = Exam.of(splits, model, confirm="test", folds=FOLDS[cell.model], seed=cell.seed)
    began = time.process_time()
    name = MODELS[cell.model]
    stock = search(name, copy.deepcopy(model), exam)
    encoded = time.process_time()
    config = TrainConfig(seed=cell.seed)
    with tempfile.TemporaryDirectory() as work:
        train = partial(trained_copy, model=model, config=config, output=Path(work))
        final = train(exam.train)
        ended = time.process_time()
        confirm = search("", final, replace(exam, judged=None)).confirm
        models = [stock]
        if cell.judged:
            in_folds = search_in_folds(f"the trained {cell.model}", train, exam, name)
            models.append(replace(in_folds, confirm=confirm))
    lexical = bm25_control(exam.judged)[0]
    on_test = {name: bm25_run(exam.confirm, DEPTH, tokenizer=TOKENS[name]) for name in lexical}
    dense = {system.name: system.confirm for system in models}
    judged, test = {}, {f"the trained {cell.model}": packed(confirm.ndcg)}
    for system in systems_of(models, lexical, cell.seed):
        judged[system.name] = packed(system.ranking.ndcg)
        again = system.again(dense.get(system.model), on_test.get(system.tokens))
        test[system.name] = packed(again.ndcg)
    seconds = {"encoding": encoded - began, "training": ended - encoded}
    return {
        "judged": judged if cell.judged else {},
        "test": test,
        "documents": len(exam.train.corpus),
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
    }


# --- rules --------------------------------------------------------------------------------------


def within(judged: Figures, points: float) -> str:
    """The simplest system, of those in order, that is at most so many points below the best."""
    means = {name: found.mean() for name, found in judged.items()}
    least = max(means.values()) - points / 100 - 1e-12
    return next(name for name, mean in means.items() if mean >= least)


def unbeaten(judged: Figures) -> str:
    """The simplest system than which no other is clearly better."""

    def is_beaten(name: str) -> bool:
        return any(judge(other - judged[name]).is_better for other in judged.values())

    return next(name for name in judged if not is_beaten(name))


RULES: dict[str, Callable[[Figures], str]] = {
    "the highest mean": partial(within, points=0.0),
    "the simplest within half a point of it": partial(within, points=0.5),
    "the simplest within one point of it": partial(within, points=1.0),
    "the simplest that nothing clearly beats": unbeaten,
}


def regret(rule: Callable[[Figures], str], judged: Figures, test: Figures) -> float:
    """The points on test by which the best system is above the one that the rule chooses."""
    means = {name: 100 * float(found.mean()) for name, found in test.items()}
    return max(means.values()) - means[rule(judged)]


# --- tables -------------------------------------------------------------------------------------


def contests(models: Sequence[str]) -> dict[tuple[str, int, int], dict[str, dict[str, Any]]]:
    """The figures of BM25 and the models, the simplest first, where all of them are stored."""
    settings = dict.fromkeys((cell.data, cell.pairs, cell.seed) for cell in CELLS.found)
    found = {}
    for data, pairs, seed in settings:
        cells = [CELLS.load(Cell(data, pairs, model, seed)) for model in models]
        if all(cells):
            found[data, pairs, seed] = {
                where: {name: unpacked(x) for cell in cells for name, x in cell[where].items()}
                for where in ("judged", "test")
            }
    return found


def table_begin() -> list[str]:
    """nDCG@10 on test of the first seed, and what the trained encoder adds to the trained table
    with BM25: with BM25 as well if folds could choose its weight."""
    columns = [BM25, "the table", "the trained table", "the trained table with BM25"]
    columns += ["the encoder", "the trained encoder", "the trained encoder with BM25"]
    rows = []
    for data, pairs in product(FILES, sorted({cell.pairs for cell in CELLS.found})):
        table = CELLS.load(Cell(data, pairs, "table"))
        encoders = (CELLS.load(Cell(data, pairs, "encoder", judged=x)) for x in (True, False))
        encoder = next(filter(None, encoders), None)
        if table is None or encoder is None:
            continue
        test = {name: unpacked(x) for name, x in (encoder["test"] | table["test"]).items()}
        shown = [f"{test[name].mean():.3f}"[1:] if name in test else "" for name in columns]
        gain = judge(test.get(columns[6], test[columns[5]]) - test[columns[3]])
        seconds = [f"{cell['seconds']['training']:,.0f}" for cell in (table, encoder)]
        found = str(gain).replace(" points", "")
        rows.append([data, f"{pairs:,}", f"{len(test[BM25]):,}", *shown, found, *seconds])
    head = ["file", "pairs", "queries", BM25, "table", "trained", "+ BM25"]
    head += ["encoder", "trained", "+ BM25", "encoder - table", "s, table", "s, encoder"]
    return markdown(head, rows)


def table_regret() -> list[str]:
    """Mean regret of each rule by the number of pairs, in points, and the worst of all."""
    rows, sizes = [], sorted({cell.pairs for cell in CELLS.found})
    for models in (["table"], list(MODELS)):
        found = contests(models)
        label = f"{', '.join([BM25, *models])}: {len(found)} runs"
        for name, rule in RULES.items() if found else ():
            regrets = {key: regret(rule, *figures.values()) for key, figures in found.items()}
            of_sizes = [[x for key, x in regrets.items() if key[1] == size] for size in sizes]
            shown = [f"{np.mean(x):.2f}" if x else "" for x in of_sizes]
            every = list(regrets.values())
            rows.append([label, name, *shown, f"{np.mean(every):.2f}", f"{max(every):.1f}"])
            label = ""
    return markdown(
        ["weighed", "rule", *map("{:,} pairs".format, sizes), "all", "worst"], rows, "ll"
    )


TABLES = {"known begin": table_begin, "known regret": table_regret}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", nargs="*", choices=FILES, default=FILES)
    parser.add_argument("--sizes", nargs="*", type=int, default=[300, 100, 1000])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--test", action="store_true", help="without the trainings of folds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pairs = {name: pairs_of(name, given.folder) for name in given.data}
    for seed, size, name in product(given.seeds, given.sizes, given.data):
        if tested(pairs[name], name) + size <= len(pairs[name]):
            cells = [Cell(name, size, model, seed, not given.test) for model in given.models]
            CELLS.run(lambda cell: measure(cell, pairs[cell.data]), cells)


if __name__ == "__main__":
    main()
