"""The trainings of recommendation.py: a cell is the settings of one, and measuring it gives its
figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
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
        self.train, self.dev, self.test = (
            torch.from_numpy(x) for x in (ratings.train, ratings.dev, ratings.test)
        )
        self.shape = (len(self.dev), ratings.num_films)
        both = torch.stack([torch.arange(len(self.dev)), self.dev], dim=1)
        self.seen = {"dev": self.train, "test": torch.cat([self.train, both])}
        self.sums = {part: self.matrix(pairs) for part, pairs in self.seen.items()}
        self.lengths = {part: x.to_dense().sum(dim=1) for part, x in self.sums.items()}
        self.counts = torch.bincount(self.train[:, 1], minlength=ratings.num_films)
        self.log_p = torch.log((self.counts + 1) / (self.counts + 1).sum())

    def matrix(self, pairs: Tensor) -> Tensor:
        ones = torch.ones(len(pairs))
        return torch.sparse_coo_tensor(pairs.T, ones, self.shape).coalesce().to_sparse_csr()

    def ndcg(self, scores: Tensor, part: str) -> Array:
        """nDCG@10 of every user over the films that the user has not seen: (U, M) -> (U,)."""
        wanted = getattr(self, part)[:, None]
        scores = scores.index_put(tuple(self.seen[part].T), torch.tensor(-torch.inf))
        ranks = (scores >= scores.gather(1, wanted)).sum(dim=1).double()  # from 1; ties are lost
        return torch.where(ranks <= 10, 1 / torch.log2(ranks + 1), 0.0).numpy()


@cache
def data() -> Data:
    return Data(read())


class Films(nn.Module):
    """A user is the mean of the vectors ``inner`` of the history; ``outer`` ranks the films."""

    def __init__(self, cell: Cell, shape: tuple[int, int]) -> None:
        super().__init__()
        self.cell = cell
        inner, outer = torch.randn(2, shape[1], cell.dim) / cell.dim**0.5
        self.inner, self.outer = nn.Parameter(inner), nn.Parameter(outer)
        self.exponents = nn.Parameter(torch.zeros(2))  # before a sigmoid
        self.bias = nn.Parameter(torch.zeros(shape[1]))
        self.log_tau = nn.Parameter(torch.tensor(cell.temperature).log())
        self.log_factor = nn.Parameter(torch.zeros(shape[0]))

    @property
    def temperature(self) -> float | Tensor:
        return self.log_tau.exp() if self.cell.kind == "scalar" else self.cell.temperature

    def similarity(self) -> stm.Similarity:
        kind = self.cell.kind
        if kind == "learned":
            return stm.Similarity(*self.exponents.sigmoid())
        if kind in FACTORS or kind == "user":
            return stm.DNORM
        return {"bias": stm.DOT, "scalar": stm.COSINE}.get(kind) or stm.Similarity.named(kind)

    def queries(self, sums: Tensor, lengths: Tensor, users: Tensor, without: Tensor) -> Tensor:
        """Means of the histories of users without a film each; -1: with all of them."""
        kind = self.cell.kind
        inner = stm.COSINE.document(self.inner) if kind in FACTORS else self.inner
        left = without >= 0
        removed = inner[without.clamp(min=0)] * left[:, None]
        found = torch.sparse.mm(sums, inner)[users] - removed
        found = found / (lengths[users] - left.float())[:, None]
        if kind in FACTORS:
            norms = found.norm(dim=1, keepdim=True)
            return found / norms * FACTORS[kind](norms)
        if kind in ("user", "bias"):
            found = stm.COSINE.query(found)
        if kind == "user":
            return found * self.log_factor[users].exp()[:, None]
        return nn.functional.pad(found, (0, 1), value=1.0) if kind == "bias" else found

    def films(self) -> Tensor:
        if self.cell.kind != "bias":
            return self.outer
        biases = self.bias * self.cell.temperature
        return torch.cat([stm.COSINE.document(self.outer), biases[:, None]], dim=1)

    def loss(self, users: Tensor, films: Tensor, found: Data) -> Tensor:
        queries = self.queries(found.sums["dev"], found.lengths["dev"], users, films)
        terms, documents = [stm.Term(temperature=self.temperature)], self.films()
        if self.cell.softmax == "all":
            wanted = torch.zeros(len(users), len(documents))
            wanted[torch.arange(len(users)), films] = 1.0
            return stm.infonce(queries, documents, terms, self.similarity(), targets=wanted)
        log_q = found.log_p[films] if self.cell.softmax == "logq" else None
        return stm.infonce(
            queries, documents[films], terms, self.similarity(), exclude=films, log_q=log_q
        )

    @torch.no_grad()
    def logits(self, part: str, found: Data) -> Tensor:
        """Of all users and films, (U, M)."""
        users = torch.arange(found.shape[0])
        queries = self.queries(found.sums[part], found.lengths[part], users, torch.full_like(users, -1))
        return self.similarity()(queries, self.films()) / self.temperature


def measure(cell: Cell) -> Figures:
    """Trains until dev has not improved for PATIENCE epochs, and reads the test at the best one."""
    began = time.perf_counter()
    torch.manual_seed(cell.seed)
    found = data()
    model = Films(cell, found.shape)
    tables = [model.inner, model.outer]
    scalars = [model.exponents, model.log_tau, model.bias, model.log_factor]
    groups = [{"params": tables}, {"params": scalars, "weight_decay": 0.0, "lr": 0.01}]
    optimizer = torch.optim.AdamW(groups, lr=cell.rate, weight_decay=cell.decay)
    curve: list[float] = []
    best: Figures = {}
    while len(curve) < EPOCHS and len(curve) - int(np.argmax(curve or [0])) <= PATIENCE:
        for rows in torch.randperm(len(found.train)).split(BATCH):
            optimizer.zero_grad()
            model.loss(*found.train[rows].T, found).backward()
            optimizer.step()
        curve.append(round(float(found.ndcg(model.logits("dev", found), "dev").mean()), 5))
        if curve[-1] == max(curve):
            best = {name: x.clone() for name, x in model.state_dict().items()}
    model.load_state_dict(best)
    return asdict(cell) | {
        "epoch": int(np.argmax(curve)) + 1,
        "plain": chosen(model, (0.0,)),
        "prior": chosen(model, PRIORS),
        **shape(model),
        "seconds": round(time.perf_counter() - began, 1),
    }


def chosen(model: Films, weights: tuple[float, ...]) -> Figures:
    """The weight of log p that is best on dev, and every user of the test with it."""
    found = data()
    logits = model.logits("dev", found)
    dev = [float(found.ndcg(logits + x * found.log_p, "dev").mean()) for x in weights]
    weight = weights[int(np.argmax(dev))]
    test = found.ndcg(model.logits("test", found) + weight * found.log_p, "test")
    return {"dev": round(max(dev), 5), "weight": weight, "test": packed(test)}


@torch.no_grad()
def shape(model: Films) -> Figures:
    """Spearman's correlations with the number of ratings of a film, and what was learned."""
    found = data()
    users = torch.arange(found.shape[0])
    queries = model.queries(found.sums["dev"], found.lengths["dev"], users, torch.full_like(users, -1))
    queries = model.similarity().query(queries)
    films = model.similarity().document(model.films())
    lengths = {"norm": model.outer.norm(dim=1), "projection": films @ queries.mean(dim=0)}
    figures = {name: round(float(spearmanr(x, found.counts)[0]), 3) for name, x in lengths.items()}
    figures["tau"] = round(float(model.temperature), 4)
    norms = queries.norm(dim=1)
    figures["norm of queries"] = [round(float(x), 3) for x in (norms.mean(), norms.std())]
    figures["exponents"] = [round(float(x), 3) for x in model.similarity().exponents]
    return figures
