"""The trainings of recommendation.py: a cell is the settings of one, and measuring it gives its
figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from benchmarks.data.movielens import Ratings, read
from benchmarks.studies.cells import packed
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor, nn

import st_magnitude as stm

BATCH, EPOCHS, PATIENCE = 1024, 20, 3
PRIORS = (0.0, 0.25, 0.5, 1.0)  # weights of log p at scoring
# Controls, which learn no norm: the mean of unit vectors, scored by cosine with a temperature of
# its own in each row, which is tau over a factor
FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda norms: norms,
    "row, constant": lambda norms: norms.detach(),
    "schedule": lambda norms: norms.detach().mean().expand_as(norms),
    "unit": torch.ones_like,
}
Figures = dict[str, Any]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """The settings of a training, or the name of a baseline.

    Attributes:
        kind: A similarity; "learned" exponents; a key of FACTORS; or Cosine with a "bias" for each
            film, a learned temperature ("scalar"), or a learned one for each "user".
        softmax: "all" films, those of the "batch", or these with "logq".
    """

    kind: str
    temperature: float = 0.2
    softmax: str = "all"
    dim: int = 64
    rate: float = 0.003
    decay: float = 0.1
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))


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
        num_users, num_films = found.shape
        inner, outer = torch.randn(2, num_films, cell.dim) / cell.dim**0.5
        self.inner, self.outer = nn.Parameter(inner), nn.Parameter(outer)
        self.exponents = nn.Parameter(torch.zeros(2))  # before a sigmoid
        self.bias = nn.Parameter(torch.zeros(num_films))
        self.log_tau = nn.Parameter(torch.tensor(cell.temperature).log())
        self.log_factor = nn.Parameter(torch.zeros(num_users))

    @property
    def temperature(self) -> float | Tensor:
        return self.log_tau.exp() if self.cell.kind == "scalar" else self.cell.temperature

    @property
    def similarity(self) -> stm.Similarity:
        if self.cell.kind == "learned":
            return stm.Similarity(*self.exponents.sigmoid())
        others = {
            "bias": stm.DOT,
            "scalar": stm.COSINE,
            **dict.fromkeys([*FACTORS, "user"], stm.DNORM),
        }
        return stm.Similarity.named(others.get(self.cell.kind, self.cell.kind))

    def queries(self, part: str, users: Tensor, without: Tensor | None = None) -> Tensor:
        """Means of the histories of users, each without a film if one is given: (n, dim)."""
        kind = self.cell.kind
        inner = stm.COSINE.document(self.inner) if kind in FACTORS else self.inner
        sums, lengths = torch.sparse.mm(self.data.histories[part], inner), self.data.lengths[part]
        found = sums[users] / lengths[users, None]
        if without is not None:
            found = (sums[users] - inner[without]) / (lengths[users, None] - 1)
        if kind in FACTORS:
            norms = found.norm(dim=1, keepdim=True)
            return found / norms * FACTORS[kind](norms)
        if kind == "user":
            return stm.COSINE.query(found) * self.log_factor[users, None].exp()
        if kind == "bias":
            return nn.functional.pad(stm.COSINE.query(found), (0, 1), value=1.0)
        return found

    def films(self) -> Tensor:
        if self.cell.kind != "bias":
            return self.outer
        biases = self.bias[:, None] * self.cell.temperature
        return torch.cat([stm.COSINE.document(self.outer), biases], dim=1)

    def loss(self, users: Tensor, films: Tensor) -> Tensor:
        queries, documents = self.queries("dev", users, films), self.films()
        terms, how = [stm.Term(temperature=self.temperature)], self.cell.softmax
        if how == "all":
            wanted = nn.functional.one_hot(films, len(documents))
            return stm.infonce(queries, documents, terms, self.similarity, targets=wanted.float())
        log_q = self.data.log_p[films] if how == "logq" else None
        options = {"exclude": films, "log_q": log_q}
        return stm.infonce(queries, documents[films], terms, self.similarity, **options)

    @torch.no_grad()
    def logits(self, part: str) -> Tensor:
        """Of all users and films, (U, M)."""
        queries = self.queries(part, self.data.users)
        return self.similarity(queries, self.films()) / self.temperature

    @torch.no_grad()
    def shape(self) -> Figures:
        """Spearman's correlations with the number of ratings of a film, and what was learned."""
        queries = self.similarity.query(self.queries("dev", self.data.users))
        along = self.similarity.document(self.films()) @ queries.mean(dim=0)
        both = {"norm": self.outer.norm(dim=1), "projection": along}
        found = {x: float(spearmanr(y, self.data.counts)[0]) for x, y in both.items()}
        norms = queries.norm(dim=1)
        found |= {
            "tau": float(self.temperature),
            "q": float(norms.mean()),
            "sd": float(norms.std()),
        }
        figures: Figures = {name: round(x, 4) for name, x in found.items()}
        return figures | {"exponents": [round(x, 3) for x in self.similarity.exponents]}


def measure(cell: Cell) -> Figures:
    """Trains until dev has not improved for PATIENCE epochs, and reads the test at the best one."""
    torch.manual_seed(cell.seed)
    found = data()
    model = Films(cell, found)
    scalars = [model.exponents, model.log_tau, model.bias, model.log_factor]
    groups = [
        {"params": [model.inner, model.outer]},
        {"params": scalars, "weight_decay": 0.0, "lr": 0.01},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cell.rate, weight_decay=cell.decay)
    curve: list[float] = []
    best: Figures = {}
    while len(curve) < EPOCHS and len(curve) - int(np.argmax(curve or [0])) <= PATIENCE:
        for rows in torch.randperm(len(found.train)).split(BATCH):
            optimizer.zero_grad()
            model.loss(*found.train[rows].T).backward()
            optimizer.step()
        curve.append(float(found.ndcg(model.logits("dev"), "dev").mean()))
        if curve[-1] == max(curve):
            best = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(best)
    scorings = {"plain": (0.0,), "prior": PRIORS}
    figures = asdict(cell) | {"epoch": int(np.argmax(curve)) + 1} | model.shape()
    return figures | {name: chosen(model, weights) for name, weights in scorings.items()}


def chosen(model: Films, weights: Iterable[float]) -> Figures:
    """The weight of log p that is best on dev, and every user of the test with it."""
    found, logits = model.data, {part: model.logits(part) for part in ("dev", "test")}
    dev = {x: float(found.ndcg(logits["dev"] + x * found.log_p, "dev").mean()) for x in weights}
    weight = max(dev, key=lambda x: dev[x])
    test = found.ndcg(logits["test"] + weight * found.log_p, "test")
    return {"dev": round(dev[weight], 5), "weight": weight, "test": packed(test)}
