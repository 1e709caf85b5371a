"""Does a higher temperature cluster better?

    python benchmarks/studies/clusters/clusters.py FOLDER [table] [MiniLM]

FOLDER has the files of BANKING77 and CLINC150. A model learns pairs of questions of one intent, 100
intents of CLINC150, which a seed draws, in batches without labels. It is measured by the v-measure
of k-means (five starts) on the other 50 intents and on BANKING77's test, and by nDCG@10 of question
-> questions of its intent. "classes" makes questions of an intent positives of each other. The rate
 of each temperature is the one that is best on dev with seed 0: by the v-measure for clusters,
by nDCG@10 for the search. docs/research/temperature_paper.md says what was expected.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.data import banking77, clinc150
from benchmarks.data.intents import Questions, find_questions, question_pairs
from benchmarks.studies.estimates import margin, markdown
from benchmarks.studies.known.training import Cell, trained
from benchmarks.studies.store import Figures, Store
from sentence_transformers import SentenceTransformer
from sklearn.cluster import KMeans
from sklearn.metrics import v_measure_score

import st_magnitude as stm

CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)
TAUS = (0.03, 0.06, 0.1, 0.3)
MASKS = {"": "Cosine", ", classes": "Cosine, classes"}
BASES: dict[str, tuple[dict[str, Any], tuple[float, ...], int]] = {  # settings, rates, seeds
    "table": ({"steps": 300, "batch": 128}, (0.003, 0.01, 0.03), 5),
    "MiniLM": ({"base": "MiniLM", "steps": 200, "batch": 64}, (5e-5, 2e-4), 3),
}
COLUMNS = {"v unseen": "v", "v banking": "v", "dimension": "v", "ndcg": "ndcg", "kept": "ndcg"}


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
        task = find_questions(asked, train[::5]).encode(model, batch_size=256)
        sizes = (task, task.prefix(task.queries.shape[1] // 4))
        full, quarter = (float(task.ndcg(x.top(stm.COSINE)).mean()) for x in sizes)
        found[part] |= {"ndcg": full, "kept": quarter / full}
    return {part: {k: round(x, 5) for k, x in of.items()} for part, of in found.items()}


def cells_of(base: str, tau: float | None, loss: str) -> list[Cell]:
    """The rates of a row; without a temperature, the base as it is."""
    settings, rates, _ = BASES[base]
    if tau is None:
        return [Cell("clinc", loss, (0.1,), **{**settings, "steps": 0})]
    return [Cell("clinc", loss, (tau,), **settings, rate=rate) for rate in rates]


def best(cells: list[Cell], by: str) -> Cell | None:
    found: Cell | None = CELLS.best(cells, "dev", by)
    return found


def tests(cells: list[Cell], column: str, seeds: int) -> dict[int, float]:
    """The figure of a test by seed, in points, at the rate that dev chooses."""
    chosen = best(cells, COLUMNS[column])
    scale = 1 if column == "dimension" else 100
    stored = CELLS.of_seeds(chosen, seeds) if chosen else {}
    return {seed: scale * x["test"][column] for seed, x in stored.items()}


def table() -> list[str]:
    """Figures of τ = .03, and what others have more, paired by seed, ± half a 95 % interval."""
    rows = []
    for base, (_, _, seeds) in BASES.items():
        for mask, loss in MASKS.items():
            low = cells_of(base, TAUS[0], loss)
            for tau in TAUS if mask else (None, *TAUS):
                cells, row = cells_of(base, tau, loss), []
                for column in COLUMNS:
                    after, before = tests(cells, column, seeds), tests(low, column, seeds)
                    pairs = [after[seed] - before[seed] for seed in after.keys() & before.keys()]
                    is_low = tau == TAUS[0]
                    value = np.mean(list(after.values())) if is_low else np.mean(pairs or [np.nan])
                    row.append(f"{value:.1f}" if is_low else f"{value:+.1f} ± {margin(pairs):.1f}")
                if best(cells, "v"):
                    name = "untrained" if tau is None else f"τ {tau:g}{mask}"
                    rates = [f"{x.rate:g}" for by in ("v", "ndcg") if (x := best(cells, by))]
                    rows.append([base, name, "" if tau is None else ", ".join(rates), *row])
    head = ["v-measure, unseen", "BANKING77", "intrinsic dim.", "nDCG@10", "quarter / full"]
    return markdown(["base", "", "rates", *head], rows, "lll")


TABLES = {"clusters": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(BASES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for base in given.names:
        rows = [cells_of(base, None, "Cosine")]
        masks = list(MASKS.values())[: 2 if base == "table" else 1]
        rows += [cells_of(base, tau, loss) for loss in masks for tau in TAUS]
        for row in rows:
            CELLS.run(lambda cell: measure(cell, given.folder), row)
        chosen = [x for row in rows for by in ("v", "ndcg") if (x := best(row, by))]
        for seed in range(1, BASES[base][2]):
            CELLS.run(
                lambda cell: measure(cell, given.folder), [replace(x, seed=seed) for x in chosen]
            )


if __name__ == "__main__":
    main()
