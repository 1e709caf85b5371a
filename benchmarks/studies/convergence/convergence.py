"""Do cut-init and GradScale help where the paper says: SGD with weight decay, uneven classes?

    python benchmarks/studies/convergence/convergence.py FOLDER

FOLDER has CLINC150's file. Section 6 of *On the Importance of Embedding Norms in Self-Supervised
Learning*, for text: 100 intents, of which the i-th has 100 / 1.034^i questions (a seed draws the
order), wordllama's table, frozen, and a random map over it, linear or of two layers with biases.
InfoNCE on pairs of questions of an intent, 200 steps of 256, SGD with momentum .9, 2 % of
warm-up, then a cosine. Ways: plain; all weights divided by 3 or 9; GradScale with 20 % of warm-up.
Accuracy of the 10 nearest training questions, which vote by cosine, on balanced val and test. Dev
(val) chooses rate and decay with seed 0. "At plain's rate" is what one sees without a grid; for
GradScale it is the paper's schedule, a sixth of that rate. docs/research/norms.md says what
was expected.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from benchmarks.data import clinc150
from benchmarks.data.intents import question_pairs
from benchmarks.data.surface import auroc
from benchmarks.studies.estimates import gain_of, in_points, markdown, show
from benchmarks.studies.models import static_model
from benchmarks.studies.store import Figures, Store, packed, seeds_of, unpacked
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import st_magnitude as stm
from st_magnitude.surgery.gradients import grad_scale

STARTS = ("linear", "two layers")
CUTS = {"plain": 1.0, "cut-init 3": 3.0, "cut-init 9": 9.0, "GradScale": 1.0}
DECAYS = (0.0, 1e-3, 1e-2)
NORMS = ("norm", "frequency", "AUROC of norm", "AUROC of cosine")
SEEDS, STEPS, BATCH, TAU, NEIGHBOURS = 5, 200, 256, 0.1, 10


@dataclass(frozen=True)
class Cell:
    """The settings of one training."""

    start: str
    way: str
    decay: float
    rate: float
    seed: int = 0


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


# --- one training ---------------------------------------------------------------------------------


@cache
def embedded(folder: Path, split: str) -> tuple[Tensor, list[str]]:
    """The table's embeddings of the questions of a split, and their intents."""
    texts, intents = zip(*clinc150.read(folder / "clinc150_full.json", split), strict=True)
    return static_model().encode(texts, convert_to_tensor=True).clone(), list(intents)


@cache
def uneven(folder: Path, seed: int) -> dict[str, list[int]]:
    """Intent to the numbers of its training questions; intents that are not in it are unseen."""
    _, labels = embedded(folder, "train")
    order = np.random.default_rng(seed).permutation(sorted(set(labels))[:100])
    rows = {intent: [i for i, label in enumerate(labels) if label == intent] for intent in order}
    return {intent: rows[intent][: round(100 * 1.034**-i)] for i, intent in enumerate(order)}


def trained(cell: Cell, x: Tensor, pairs: Tensor) -> nn.Module:
    """A map that learned pairs (P, 2) of rows of the embeddings (N, D)."""
    torch.manual_seed(cell.seed)
    width = x.shape[1]
    model: nn.Module = nn.Linear(width, width, bias=False)
    if cell.start == "two layers":
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    stm.cut_init(model, c=CUTS[cell.way])
    optimizer = torch.optim.SGD(model.parameters(), cell.rate, 0.9, weight_decay=cell.decay)
    warmup = STEPS * (0.2 if cell.way == "GradScale" else 0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min(
            (i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * (i - warmup) / (STEPS - warmup))
        ),
    )
    order = torch.cat([torch.randperm(len(pairs)) for _ in range(1 + STEPS * BATCH // len(pairs))])
    for batch in order[: STEPS * BATCH].split(BATCH):
        q, d = model(x[pairs[batch].T])  # (2, B, D)
        if cell.way == "GradScale":
            q, d = grad_scale(q), grad_scale(d)
        optimizer.zero_grad()
        cross_entropy(stm.COSINE(q, d) / TAU, torch.arange(len(q))).backward()
        optimizer.step()
        schedule.step()
    return model


@torch.no_grad()
def measure(cell: Cell, folder: Path) -> Figures:
    """Correct answers, dev's on val; how norms go with frequency and tell what is unseen."""
    members, (table, _) = uneven(folder, cell.seed), embedded(folder, "train")
    x = torch.cat([table[numbers] for numbers in members.values()])
    count = torch.tensor([len(numbers) for numbers in members.values()])
    labels = torch.arange(len(count)).repeat_interleave(count)
    rows = question_pairs([(str(i), f"{c}") for i, c in enumerate(labels.tolist())], cell.seed)
    pairs = torch.tensor([[int(i) for i in rows[name]] for name in ("anchor", "positive")]).T
    with torch.enable_grad():
        model = trained(cell, x, pairs)
    train, votes = stm.COSINE.document(model(x)), one_hot(labels)
    number = {intent: i for i, intent in enumerate(members)}
    right: dict[str, Tensor] = {}
    for split in ("val", "test"):
        table, intents = embedded(folder, split)
        own = torch.tensor([number.get(intent, -1) for intent in intents])
        z, own = model(table[own >= 0]), own[own >= 0]
        scores, nearest = (stm.COSINE.query(z) @ train.T).topk(NEIGHBOURS)
        found = (votes[nearest] * scores[:, :, None]).sum(dim=1).argmax(dim=1)
        right[split] = (found == own).double()
    other, norms = model(embedded(folder, "oos_test")[0]), z.norm(dim=1)
    others = stm.COSINE.query(other) @ train.T
    means = [float(norms[own == c].mean()) for c in range(len(count))]
    return {
        "dev": round(float(right["val"].mean()), 5),
        "test": packed(right["test"].numpy()),
        "norm": round(float(norms.mean()), 3),
        "frequency": round(float(spearmanr(count, means)[0]), 4),
        "AUROC of norm": round(auroc(norms, other.norm(dim=1)), 4),
        "AUROC of cosine": round(auroc(scores[:, 0], others.amax(dim=1)), 4),
    }


# --- runs and tables ------------------------------------------------------------------------------


def grid(start: str, way: str) -> list[Cell]:
    """Rates 3^k / c²: all cuts turn the weights equally fast."""
    rates = [0.003 * 3**k / CUTS[way] ** 2 for k in range(5)]
    return [Cell(start, way, *how) for how in product(DECAYS, rates)]


def best(*where: str) -> Cell:
    return CELLS.best(grid(*where))


def at_plain(start: str, way: str) -> Cell:
    """At rate and decay of the plain training; for GradScale the paper's sixth of that rate."""
    plain = best(start, "plain")
    return replace(plain, way=way, rate=plain.rate / (6 if way == "GradScale" else 1))


def per_query(cell: Cell) -> dict[int, NDArray[np.float64]]:
    return {seed: unpacked(x["test"]) for seed, x in CELLS.of_seeds(cell, SEEDS).items()}


def table() -> list[str]:
    rows = []
    for where in product(STARTS, CUTS):
        cell, plain = best(*where), per_query(best(where[0], "plain"))
        gains = [show(gain_of(per_query(x), plain)) for x in (cell, at_plain(*where))]
        shown = [in_points(list(plain.values())), ""] if where[1] == "plain" else gains
        found = list(CELLS.of_seeds(cell, SEEDS).values())
        shown += [f"{np.mean([x[name] for x in found]):.2f}" for name in NORMS]
        rows.append([", ".join(where), f"{cell.decay:g}", f"{cell.rate:.2g}", *shown])
    head = ["map, way", "decay", "rate", "accuracy", "at plain's rate", *NORMS]
    return markdown(head, rows)


TABLES = {"convergence": table}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    measured = partial(measure, folder=folder)
    for where in product(STARTS, CUTS):
        CELLS.run(measured, grid(*where))
        for cell in (best(*where), at_plain(*where)):
            CELLS.run(measured, seeds_of(cell, SEEDS))


if __name__ == "__main__":
    main()
