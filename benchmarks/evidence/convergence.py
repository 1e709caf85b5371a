"""Part F of the evidence: do GradScale and cut-init converge faster, for text?

    python benchmarks/evidence/convergence.py [START ...] [--tables] [--seeds 3]

*On the Importance of Embedding Norms in Self-Supervised Learning* says that large norms slow the training of a cosine
loss down, because a gradient on the direction falls with the norm, and that GradScale (power 1) and cut-init (c = 3)
remove this. Here InfoNCE under cosine at .05 learns WordNet, lemma -> definition, with AdamW, from these starts:

- scratch: wordllama's table with normal random vectors, 600 steps of 128 pairs; cut-init divides the whole table;
- head: the trained table, frozen, and a random linear map of 256 x 256, 600 steps of 128; cut-init divides the map;
- L3 head: paraphrase-MiniLM-L3-v2 and a random linear map of 384 x 384, all of it trained, 400 steps of 64; cut-init
  divides the map;
- L3 scratch: the same encoder without the map and with random weights, 1,200 steps of 64; cut-init divides everything.

The control is the learning rate: each way has three, and is measured at the one that is best for itself on dev. A way
converges faster if it needs fewer steps to 95 % of the best dev nDCG@10 of the plain training, or ends higher.

Expected before the run: AdamW divides a gradient by its own size, so that neither way changes a step by much once the
rate is tuned. All are within 1 point at the end, and within 15 % of the steps. (The source has its largest gains with
SGD and weight decay; users of the Trainer have AdamW.) For the three layers the same, with one difference: the map is
one of many layers, so that its cut changes the rate of one layer only; cut-init with a head is between level and a
point ahead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent))
from cells import BASES, Cell, best_of, dev_of, gain, run, seeds_of
from paraphrase import paraphrase
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from temperature import static_model
from torch import nn

import st_magnitude as stm

EVALUATIONS = 12
PLACES = {"wordnet": "in domain", "foldoc": "FOLDOC"}
SHARE = 0.95  # of the best dev score of the plain training


def scratch() -> SentenceTransformer:
    model = static_model()
    nn.init.normal_(model[0].embedding.weight)
    return model


def head() -> SentenceTransformer:
    model = static_model().requires_grad_(False)
    model.append(Dense(256, 256, bias=False, activation_function=nn.Identity()))
    return model


def l3_head() -> SentenceTransformer:
    model = paraphrase()
    model.append(Dense(384, 384, bias=False, activation_function=nn.Identity()))
    return model


def l3_scratch() -> SentenceTransformer:
    model = paraphrase()
    encoder = model[0].auto_model
    encoder.load_state_dict(type(encoder)(encoder.config).state_dict())
    return model


@dataclass(frozen=True)
class Start:
    """An untrained model, what the claims call it, what cut-init divides, and how it is trained."""

    words: str
    make: Callable[[], SentenceTransformer]
    cut: Callable[[str, nn.Parameter], bool]
    steps: int
    batch: int
    rates: tuple[float, ...]
    bf16: bool = False

    def changed(self, change: Callable[[SentenceTransformer], object]) -> SentenceTransformer:
        model = self.make()
        change(model)
        return model

    def cut_init(self, model: SentenceTransformer) -> None:
        stm.cut_init(model, c=3.0, where=self.cut)


def trained(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def last_map(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("2.")


STARTS = {
    "scratch": Start("static table, scratch", scratch, trained, 600, 128, (0.03, 0.1, 0.3)),
    "head": Start("static table, head", head, trained, 600, 128, (3e-4, 1e-3, 3e-3)),
    "L3 head": Start("L3, head", l3_head, last_map, 400, 64, (1e-4, 3e-4, 1e-3), bf16=True),
    "L3 scratch": Start("L3, scratch", l3_scratch, trained, 1200, 64, (1e-4, 3e-4, 1e-3), bf16=True),
}
WAYS = ("plain", "GradScale", "cut-init")
NAMES = [(start, way) for start in STARTS for way in WAYS]
for name, start in STARTS.items():
    changes = (lambda model: None, stm.attach_grad_scale, start.cut_init)
    BASES |= {f"{name}, {way}": partial(start.changed, change) for way, change in zip(WAYS, changes, strict=True)}


def grid(start: str, way: str) -> list[Cell]:
    how = STARTS[start]
    plain = Cell(f"{start}, {way}", "wordnet", "cosine", 0, how.steps, how.batch, how.rates[0], bf16=how.bf16)
    return [replace(plain, rate=rate) for rate in how.rates]


def best(start: str, way: str) -> Cell | None:
    """The cell of the rate that is best on dev; None before all rates were tried."""
    cells = grid(start, way)
    return best_of(cells, "matched") if all(cell.path.is_file() for cell in cells) else None


def steps_to(cell: Cell, dev: float) -> float:
    """Mean step, over seeds, at which dev is reached, between two evaluations by a line; inf if it is not reached."""
    found = []
    for seed in seeds_of(cell):
        if figures := seed.load():
            steps = [x["step"] for x in figures["curve"]]
            values = np.maximum.accumulate([x["matched"] for x in figures["curve"]])
            found.append(np.interp(dev, values, steps) if values[-1] >= dev else np.inf)
    return float(np.mean(found))


def table() -> list[str]:
    """Each way at its best rate: dev and tests at the best step, steps to a dev score, and the gain over plain."""
    lines = ["| start | seeds | rate | dev | steps to 95 % of plain | " + " | ".join(PLACES.values()) + " |"]
    lines.append("| --- |" + " ---: |" * (4 + len(PLACES)))
    for start, way in NAMES:
        cell, plain = best(start, way), best(start, "plain")
        if cell is None or plain is None:
            continue
        gains = [gain(cell, plain, [place], "matched") for place in PLACES]
        shown = ["" if way == "plain" or x is None else x[0].show() for x in gains]
        seeds = sum(seed.path.is_file() for seed in seeds_of(cell))
        needed = steps_to(cell, SHARE * dev_of(plain, "matched"))
        row = [str(seeds), f"{cell.rate:g}", f"{100 * dev_of(cell, 'matched'):.1f}", f"{needed:,.0f}", *shown]
        lines.append(f"| {start}, {way} | " + " | ".join(row) + " |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def same_rate_table() -> list[str]:
    """Gains over plain training at the same rate, over the seeds that both have."""
    lines = ["| start | rate | seeds | " + " | ".join(PLACES.values()) + " |"]
    lines.append("| --- |" + " ---: |" * (2 + len(PLACES)))
    for start, way in NAMES:
        for cell, plain in zip(grid(start, way), grid(start, "plain"), strict=True):
            gains = [gain(cell, plain, [place], "matched") for place in PLACES]
            if way != "plain" and gains[0]:
                shown = " | ".join(x[0].show() for x in gains if x)
                lines.append(f"| {start}, {way} | {cell.rate:g} | {gains[0][1]} | {shown} |")
    return lines if len(lines) > 2 else ["(No cells are stored yet.)"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starts", nargs="*", help=f"some of {', '.join(STARTS)}; default: all")
    parser.add_argument("--tables", action="store_true", help="train nothing")
    parser.add_argument("--seeds", type=int, default=3, choices=(1, 2, 3))
    arguments = parser.parse_args()
    if not arguments.tables:
        names = [name for name in NAMES if name[0] in (arguments.starts or STARTS)]
        run((cell for name in names for cell in grid(*name)), EVALUATIONS)
        chosen = [cell for name in names if (cell := best(*name))]
        run((replace(cell, seed=seed) for cell in chosen for seed in range(arguments.seeds)), EVALUATIONS)
    print("\n".join([*table(), "", *same_rate_table()]))


if __name__ == "__main__":
    main()
