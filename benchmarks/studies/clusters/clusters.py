"""Does a higher temperature cluster better?

    python benchmarks/studies/clusters/clusters.py FOLDER

FOLDER has the files of BANKING77 and CLINC150. wordllama's table learns pairs of questions of one
intent, 100 intents of CLINC150, which a seed draws, in batches without labels. It is measured by
the v-measure of k-means (five starts) on the other 50 intents and on BANKING77's test, and by
nDCG@10 of question -> questions of its intent. "classes" makes questions of an intent positives of
each other. The rate of each temperature is the one that is best on dev with seed 0, by v-measure
and by nDCG@10. docs/research/temperature_paper.md says what was expected.
"""

from __future__ import annotations

import argparse
from functools import cache, partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import banking77, clinc150
from benchmarks.data.intents import Questions, find_questions, question_pairs
from benchmarks.studies.estimates import margin, markdown
from benchmarks.studies.known.training import Cell, trained
from benchmarks.studies.store import Figures, Store, seed_by_seed
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans
from sklearn.metrics import v_measure_score

import st_magnitude as stm

CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)
SEEDS = 3
LOSSES = ("Cosine", "Cosine, classes")
TAUS = (0.03, 0.06, 0.1, 0.3)
ROWS = [("Cosine", 0.0), *product(LOSSES, TAUS)]  # τ = 0 is the table as it is
SETTINGS: dict[str, Any] = {"steps": 300, "batch": 128}
RATES = (0.003, 0.01, 0.03)
COLUMNS = [  # figure, what chooses the rate, name
    ("v unseen", "v", "v-measure, unseen"),
    ("v banking", "v", "BANKING77"),
    ("v unseen", "ndcg", "unseen, rate of nDCG"),
    ("v banking", "ndcg", "BANKING77, rate of nDCG"),
    ("dimension", "ndcg", "intrinsic dim."),
    ("ndcg", "ndcg", "nDCG@10"),
    ("kept", "ndcg", "quarter / full"),
]


@cache
def questions(folder: Path, split: str, seed: int, unseen: bool) -> Questions:
    """Questions of CLINC150 of the 100 intents that are trained, or of the 50 others."""
    found = clinc150.read(folder / "clinc150_full.json", split)
    order = np.random.default_rng(seed).permutation(sorted({intent for _, intent in found}))
    intents = set(order[100:] if unseen else order[:100])
    return [(text, intent) for text, intent in found if intent in intents]


def v_measure(model: SentenceTransformer, labelled: Questions, seed: int) -> tuple[float, float]:
    """Mean v-measure of five k-means, and the intrinsic dimension."""
    texts, labels = zip(*labelled, strict=True)
    found = stm.COSINE.document(model.encode(texts, batch_size=256, convert_to_tensor=True))
    means = KMeans(len(set(labels)), n_init=1)
    guesses = [means.set_params(random_state=5 * seed + i).fit_predict(found) for i in range(5)]
    value = float(np.mean([v_measure_score(labels, guess) for guess in guesses]))
    return value, float(stm.geometry.intrinsic_dimension(found))


def measure(cell: Cell, folder: Path) -> Figures:
    """Dev is val's questions; each search is among a fifth of the training's."""
    seed = cell.seed
    train = questions(folder, "train", seed, False)
    model, _ = trained(cell, question_pairs(train, seed))
    dev, test = (questions(folder, split, seed, True) for split in ("val", "test"))
    found: Figures = {"dev": {"v": v_measure(model, dev, seed)[0]}, "test": {}}
    found["test"]["v unseen"], found["test"]["dimension"] = v_measure(model, test, seed)
    found["test"]["v banking"], _ = v_measure(model, banking77.read(folder, "test"), seed)
    for part, split in (("dev", "val"), ("test", "test")):
        asked = questions(folder, split, seed, False)[::2]
        task = stm.encode(model, find_questions(asked, train[::5]), "cosine", batch_size=256)
        sizes = (task, task.prefix(task.queries.shape[1] // 4))
        full, quarter = (x.search(10).mean for x in sizes)
        found[part] |= {"ndcg": full, "kept": quarter / full}
    return {part: {k: round(x, 5) for k, x in of.items()} for part, of in found.items()}


def cells_of(loss: str, tau: float) -> list[Cell]:
    """A row at each rate."""
    if not tau:
        return [Cell("clinc", loss, (0.1,), **SETTINGS | {"steps": 0})]
    return [Cell("clinc", loss, (tau,), **SETTINGS, rate=rate) for rate in RATES]


def tests(cells: list[Cell], figure: str, by: str) -> dict[int, float]:
    """A figure by seed, in points, at the rate that dev chooses by another."""
    scale = 1 if figure == "dimension" else 100
    found = CELLS.of_seeds(CELLS.best(cells, "dev", by), SEEDS)
    return {seed: scale * x["test"][figure] for seed, x in found.items()}


def table() -> list[str]:
    """Figures of τ = .03, and what others have more, paired by seed, ± half a 95 % interval."""
    rows = []
    for loss, tau in ROWS:
        cells, low = cells_of(loss, tau), cells_of(loss, TAUS[0])
        name = f"τ {tau:g}{loss.removeprefix('Cosine')}" if tau else "untrained"
        row = [name]
        for figure, by, _ in COLUMNS:
            after, before = tests(cells, figure, by), tests(low, figure, by)
            more = [after[seed] - before[seed] for seed in after.keys() & before.keys()]
            shown = f"{np.mean(more):+.1f} ± {margin(more):.1f}" if len(more) > 1 else ""
            row.append(f"{np.mean(list(after.values())):.1f}" if cells == low else shown)
        rows.append(row)
    return markdown(["", *(name for *_, name in COLUMNS)], rows)


TABLES = {"clusters": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    measured = partial(measure, folder=parser.parse_args().folder)
    torch.set_num_threads(1)
    rows = [cells_of(*row) for row in ROWS]
    CELLS.run(measured, chain(*rows))
    for by in ("v", "ndcg"):
        CELLS.run(measured, seed_by_seed([CELLS.best(row, "dev", by) for row in rows], SEEDS))


if __name__ == "__main__":
    main()
