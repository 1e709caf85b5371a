"""Do item vectors carry popularity in their norm, and does a norm help? MovieLens-100k.

    python benchmarks/studies/recommendation/recommendation.py

A user is the mean of the vectors of the films in the history. A run is a line of cells.jsonl with
its settings; runs that are there are not repeated. Temperatures, rates and epochs are chosen on
dev, the first two with seed 0; the test is read once a run. docs/research/prior.md has the
tables, the expectations, which were written before the runs, and what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.data.movielens import Ratings, read
from benchmarks.studies.estimates import Estimate, in_points, markdown, show
from benchmarks.studies.store import Figures, Store, packed, unpacked
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn

import st_magnitude as stm
from st_magnitude.judge import judge

BATCH, EPOCHS, PATIENCE, SEEDS = 1024, 20, 3, 5
RIDGES = (100, 200, 500, 1000, 2000)
TAUS = (0.05, 0.1, 0.2, 0.3)
RATES = ((0.001, 0.1), (0.003, 0.0), (0.003, 0.5))  # and decays, of Cosine
GRID: dict[str, dict[str, tuple[float, ...]]] = {  # softmax to kind to temperatures
    "all films": {
        "popularity": (0.2,),  # has no temperature
        "EASE": (0.2,),
        "cosine": TAUS[:3],
        "qnorm": TAUS[1:3],
        "dnorm": TAUS[:3],
        "dot": TAUS,
        "row": TAUS[:2],
        "constant": (0.02, 0.05, 0.1),
    },
    "logQ": {"cosine": (0.1,), "dot": (0.1,), "row": (0.05,)},
    "in-batch": {"dot": (0.1,)},
}
LABELS = {
    "cosine": "Cosine",
    "qnorm": "QNorm",
    "dnorm": "DNorm",
    "dot": "Dot",
    "row": "Cosine, τ over the norm of q",
    "constant": "the same, the norm a constant",
}
# Controls: the mean q of unit vectors, scored by cosine with the temperature tau over this
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {"row": lambda x: x, "constant": Tensor.detach}
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """The settings of a training, or a baseline."""

    kind: str
    temperature: float = 0.2
    softmax: str = "all films"
    rate: float = 0.003
    decay: float = 0.1
    seed: int = 0
    dim: int = 64


CELLS = Store(Path(__file__).with_name("cells.jsonl"), Cell)


class Data:
    """Histories as a sparse matrix (U, M), of train alone and with the film of dev."""

    def __init__(self, ratings: Ratings) -> None:
        self.train = torch.from_numpy(ratings.train)
        self.wanted = {"dev": torch.tensor(ratings.dev), "test": torch.tensor(ratings.test)}
        self.users = torch.arange(len(ratings.dev))
        both = torch.cat([self.train, torch.stack([self.users, self.wanted["dev"]], dim=1)])
        self.shape = (len(self.users), ratings.num_films)
        self.seen = {"dev": self.train, "test": both}
        self.histories = {part: self.matrix(pairs) for part, pairs in self.seen.items()}
        self.lengths = {x: torch.bincount(pairs[:, 0]) for x, pairs in self.seen.items()}
        self.counts = torch.bincount(self.train[:, 1], minlength=ratings.num_films)
        self.log_p = torch.log((self.counts + 1) / (self.counts + 1).sum())

    def matrix(self, pairs: Tensor) -> Tensor:
        ones = torch.ones(len(pairs))
        return torch.sparse_coo_tensor(pairs.T, ones, self.shape).coalesce().to_sparse_csr()

    def ndcg(self, scores: Tensor, part: str) -> Array:
        """nDCG@10 of every user over the films that the user has not seen: (U, M) -> (U,)."""
        scores = scores.index_put(tuple(self.seen[part].T), torch.tensor(-torch.inf))
        own = scores.gather(1, self.wanted[part][:, None])
        ranks = (scores >= own).sum(dim=1).double()  # from 1; ties are lost
        return torch.where(ranks <= 10, 1 / torch.log2(ranks + 1), 0.0).numpy()


@cache
def data() -> Data:
    return Data(read())


class Films(nn.Module):
    """A user is the mean of the vectors ``inner`` of the history; ``outer`` ranks the films."""

    def __init__(self, cell: Cell, found: Data) -> None:
        super().__init__()
        self.cell, self.data = cell, found
        inner, outer = torch.randn(2, found.shape[1], cell.dim) / cell.dim**0.5
        self.inner, self.outer = nn.Parameter(inner), nn.Parameter(outer)
        self.similarity = stm.DNORM if cell.kind in FACTORS else stm.Similarity.named(cell.kind)

    def queries(self, part: str, users: Tensor, without: Tensor | None = None) -> Tensor:
        """Means of the histories of users, each without a film if one is given: (n, dim)."""
        factor = FACTORS.get(self.cell.kind)
        inner = stm.COSINE.document(self.inner) if factor else self.inner
        sums, lengths = torch.sparse.mm(self.data.histories[part], inner), self.data.lengths[part]
        found = sums[users] / lengths[users, None]
        if without is not None:
            found = (sums[users] - inner[without]) / (lengths[users, None] - 1)
        if factor is None:
            return found
        return stm.COSINE.query(found) * factor(found.norm(dim=1, keepdim=True))

    def loss(self, users: Tensor, films: Tensor) -> Tensor:
        queries = self.queries("dev", users, films)
        terms = [stm.Term(temperature=self.cell.temperature)]
        if self.cell.softmax == "all films":
            wanted = F.one_hot(films, len(self.outer)).float()
            return stm.infonce(queries, self.outer, terms, self.similarity, targets=wanted)
        log_q = self.data.log_p[films] if self.cell.softmax == "logQ" else None
        options = {"exclude": films, "log_q": log_q}
        return stm.infonce(queries, self.outer[films], terms, self.similarity, **options)

    @torch.no_grad()
    def scores(self, part: str) -> Tensor:
        """Of all users and films, (U, M)."""
        return self.similarity(self.queries(part, self.data.users), self.outer)

    @torch.no_grad()
    def correlations(self) -> Figures:
        """Spearman's with the number of ratings, of the norm of ``outer`` and its projection on the
        mean user."""
        mean = self.similarity.query(self.queries("dev", self.data.users)).mean(dim=0)
        along = self.similarity.document(self.outer) @ mean
        both = {"norm": self.outer.norm(dim=1), "projection": along}
        return {x: round(float(spearmanr(y, self.data.counts)[0]), 3) for x, y in both.items()}


def measure(cell: Cell) -> Figures:
    """Trains until dev has not improved for PATIENCE epochs, and reads the test at the best one."""
    found = data()
    torch.manual_seed(cell.seed)
    model = Films(cell, found)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.rate, weight_decay=cell.decay)
    curve: list[float] = []
    best: Figures = {}
    while len(curve) < EPOCHS and len(curve) - int(np.argmax(curve or [0])) <= PATIENCE:
        for rows in torch.randperm(len(found.train)).split(BATCH):
            optimizer.zero_grad()
            model.loss(*found.train[rows].T).backward()
            optimizer.step()
        curve.append(float(found.ndcg(model.scores("dev"), "dev").mean()))
        if curve[-1] == max(curve):
            best = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(best)
    test = packed(found.ndcg(model.scores("test"), "test"))
    figures = {"epoch": int(np.argmax(curve)) + 1, "dev": round(max(curve), 5), "test": test}
    return figures | model.correlations()


def baseline(cell: Cell) -> Figures:
    """Popularity, or EASE with the ridge that is best on dev (Steck, WWW 2019)."""
    found = data()
    histories = {part: x.to_dense() for part, x in found.histories.items()}
    scores = [dict.fromkeys(histories, found.counts.float().expand(found.shape))]
    if cell.kind == "EASE":
        gram = histories["dev"].T @ histories["dev"]
        inverses = [torch.linalg.inv(gram + ridge * torch.eye(len(gram))) for ridge in RIDGES]
        weights = [(-x / x.diag()).fill_diagonal_(0) for x in inverses]
        scores = [{part: x @ w for part, x in histories.items()} for w in weights]
    dev = [float(found.ndcg(x["dev"], "dev").mean()) for x in scores]
    test = found.ndcg(scores[int(np.argmax(dev))]["test"], "test")
    return {"dev": round(max(dev), 5), "test": packed(test)}


# --- runs and tables ------------------------------------------------------------------------------


def run_missing(cells: Iterable[Cell]) -> None:
    """Measures the cells that are missing."""
    CELLS.run(lambda cell: (measure if cell.kind in LABELS else baseline)(cell), cells)


def best_on_dev(softmax: str, kind: str) -> Cell:
    """The setting that is best on dev with seed 0, after runs of what is missing."""
    cells = [Cell(kind, tau, softmax) for tau in GRID[softmax][kind]]
    run_missing(cells)
    chosen = CELLS.best(cells)
    if (softmax, kind) == ("all films", "cosine"):
        cells += [replace(chosen, rate=rate, decay=decay) for rate, decay in RATES]
        run_missing(cells)
    return CELLS.best(cells)


def seeds(cell: Cell) -> list[Cell]:
    is_random = cell.kind in LABELS and cell.softmax == "all films"
    return [replace(cell, seed=seed) for seed in range(SEEDS if is_random else 1)]


def table() -> list[str]:
    """nDCG@10 in percent and gains in points, paired by user over means of seeds."""
    rows = []
    for softmax, kinds in GRID.items():
        chosen = {kind: best_on_dev(softmax, kind) for kind in kinds}
        found = {
            kind: [CELLS.found[x] for x in seeds(y) if x in CELLS.found]
            for kind, y in chosen.items()
        }
        tests = {
            kind: np.mean([unpacked(x["test"]) for x in y], axis=0) for kind, y in found.items()
        }
        for kind, test in tests.items():
            others = [tests[x] if x in tests and x != kind else None for x in ("cosine", "row")]
            judged = [None if x is None else judge(test - x) for x in others]
            gains = ["" if x is None else show(Estimate(x.mean, x.low, x.high)) for x in judged]
            tau = f"{chosen[kind].temperature:g}" if kind in LABELS else ""
            label = LABELS.get(kind, kind)
            rows.append([softmax, label, tau, len(found[kind]), in_points(test), *gains])
    head = ["softmax", "model", "τ", "seeds", "test", "over Cosine", "over τ / norm of q"]
    return markdown(head, rows, "ll")


def table_norms() -> list[str]:
    """Spearman's correlation with a film's number of ratings, by temperature, seed 0."""
    rows = []
    for softmax, kind, what in product(GRID, ("dot", "qnorm", "cosine"), ("norm", "projection")):
        found = [CELLS.load(Cell(kind, tau, softmax)) for tau in TAUS]
        shown = [f"{x[what]:+.2f}" if x else "" for x in found]
        if any(shown):
            rows.append([softmax, LABELS[kind], what, *shown])
    return markdown(["softmax", "loss", "of d", *map(str, TAUS)], rows, "lll")


TABLES = {"recommendation": table, "recommendation, norms": table_norms}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for softmax, kinds in GRID.items():
        for kind in kinds:
            run_missing(seeds(best_on_dev(softmax, kind)))
