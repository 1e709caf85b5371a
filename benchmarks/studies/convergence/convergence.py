"""Do GradScale and cut-init converge faster, for text?

    python benchmarks/studies/convergence/convergence.py [START ...] [--seeds 3]

*On the Importance of Embedding Norms in Self-Supervised Learning* says that large norms slow the
training of a cosine loss down, and that GradScale (power 1) and cut-init (c = 3) remove this. Here
InfoNCE under cosine at .05 learns WordNet with AdamW, from these starts:

- scratch: wordllama's table with normal random vectors; cut-init divides the whole table;
- head: the trained table, frozen, and a random linear map, which cut-init divides;
- L3 head: paraphrase-MiniLM-L3-v2 and a random linear map, all trained; cut-init divides the map.

The control is the learning rate: each way has three, and is measured at the one that is best for
itself on dev. A way converges faster if it needs fewer steps to 95 % of the best dev nDCG@10 of the
plain training, or ends higher. What was expected is on the page, docs/research/convergence.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from benchmarks.data.paraphrase import paraphrase
from benchmarks.studies.cells import (
    BASES,
    POOL,
    Cell,
    asked,
    best_of,
    dev_of,
    gain,
    run_missing,
    stored_seeds,
)
from benchmarks.studies.estimates import in_points, markdown, show
from benchmarks.studies.models import static_model
from benchmarks.studies.store import seeds_of
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
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
    return with_map(static_model().requires_grad_(False), 256)


def l3_head() -> SentenceTransformer:
    return with_map(paraphrase(), 384)


def with_map(model: SentenceTransformer, width: int) -> SentenceTransformer:
    model.append(Dense(width, width, bias=False, activation_function=nn.Identity()))
    return model


def trained(name: str, parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def last_map(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("2.")


@dataclass(frozen=True)
class Start:
    """An untrained model, what cut-init divides, and how it is trained."""

    make: Callable[[], SentenceTransformer]
    cut: Callable[[str, nn.Parameter], bool]
    steps: int
    batch: int
    rates: tuple[float, ...]
    bf16: bool = False

    def model(self, way: str) -> SentenceTransformer:
        model = self.make()
        if way == "GradScale":
            stm.attach_grad_scale(model)
        elif way == "cut-init":
            stm.cut_init(model, c=3.0, where=self.cut)
        return model


STARTS = {
    "scratch": Start(scratch, trained, 600, 128, (0.03, 0.1, 0.3)),
    "head": Start(head, trained, 600, 128, (3e-4, 1e-3, 3e-3)),
    "L3 head": Start(l3_head, last_map, 400, 64, (1e-4, 3e-4, 1e-3), bf16=True),
}
WAYS = ("plain", "GradScale", "cut-init")
NAMES = list(product(STARTS, WAYS))
BASES |= {f"{start}, {way}": partial(STARTS[start].model, way) for start, way in NAMES}


def grid(start: str, way: str) -> list[Cell]:
    how = STARTS[start]
    where = (f"{start}, {way}", "wordnet", "cosine", 0, how.steps, how.batch)
    return [Cell(*where, rate, bf16=how.bf16) for rate in how.rates]


def at_best_rate(start: str, way: str) -> Cell | None:
    """The cell of the rate that is best on dev."""
    return best_of(grid(start, way), "matched")


def steps_to(cell: Cell, dev: float) -> float:
    """Mean step, over seeds, at which dev is reached, between two evaluations by a line.

    inf if it is not reached.
    """
    found = []
    for figures in POOL.of_seeds(cell).values():
        steps = [x["step"] for x in figures["curve"]]
        values = np.maximum.accumulate([x["matched"] for x in figures["curve"]])
        found.append(np.interp(dev, values, steps) if values[-1] >= dev else np.inf)
    return float(np.mean(found))


def table() -> list[str]:
    """Each way at its best rate: dev, steps to a dev score, and the gain over plain on tests."""
    rows = []
    for start, way in NAMES:
        cell, plain = at_best_rate(start, way), at_best_rate(start, "plain")
        if cell is None or plain is None:
            continue
        gains = [show(gain(cell, plain, [place], "matched")) for place in PLACES]
        needed = steps_to(cell, SHARE * dev_of(plain, "matched"))
        row = [f"{start}, {way}", len(stored_seeds(cell)), f"{cell.rate:g}"]
        row += [in_points(dev_of(cell, "matched")), f"{needed:,.0f}"]
        rows.append([*row, *(["", ""] if way == "plain" else gains)])
    head = ["start", "seeds", "rate", "dev", "steps to 95 % of plain", *PLACES.values()]
    return markdown(head, rows)


TABLES = {"convergence": table}

if __name__ == "__main__":
    arguments = asked(__doc__, STARTS)
    names = [name for name in NAMES if name[0] in arguments.names]
    run_missing((cell for name in names for cell in grid(*name)), EVALUATIONS)
    chosen = [cell for name in names if (cell := at_best_rate(*name))]
    run_missing((x for cell in chosen for x in seeds_of(cell, arguments.seeds)), EVALUATIONS)
