"""What is known to be hard to beat: popularity, EASE, and the matrix factorisation of implicit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product

import torch
from benchmarks.studies.cells import packed
from benchmarks.studies.recommendation.training import Cell, Data, Figures, data
from torch import Tensor

Scores = Callable[[str], Tensor]  # of all users and films, (U, M), from the histories of a part


def popularity(found: Data, seed: int) -> Iterator[Scores]:
    yield lambda part: found.counts.float().expand(found.shape)


def ease(found: Data, seed: int) -> Iterator[Scores]:
    """Steck, Embarrassingly Shallow Autoencoders for Sparse Data, WWW 2019."""
    histories = {part: x.to_dense() for part, x in found.histories.items()}
    gram = histories["dev"].T @ histories["dev"]
    for ridge in (100, 200, 500, 1000, 2000):
        inverse = torch.linalg.inv(gram + ridge * torch.eye(len(gram)))
        weights = (-inverse / inverse.diag()).fill_diagonal_(0)
        yield lambda part, weights=weights: histories[part] @ weights


def als(found: Data, seed: int) -> Iterator[Scores]:
    """Hu, Koren and Volinsky, ICDM 2008: ``pip install --no-deps implicit==0.7.3``."""
    from implicit.cpu.als import AlternatingLeastSquares
    from scipy.sparse import csr_matrix

    histories = {part: csr_matrix(x.to_dense().numpy()) for part, x in found.histories.items()}
    users = torch.arange(found.shape[0]).numpy()
    for factors, penalty, alpha in product((16, 32, 64, 128), (1, 10, 50), (1, 5, 20)):
        options = {"factors": factors, "regularization": penalty, "alpha": alpha}
        model = AlternatingLeastSquares(**options, num_threads=1, random_state=seed)
        model.fit(histories["dev"], show_progress=False)

        def scores(part: str, model=model) -> Tensor:
            found = model.recalculate_user(users, histories[part])
            return torch.from_numpy(found @ model.item_factors.T)

        yield scores


BASELINES = {"popularity": popularity, "EASE": ease, "ALS": als}


def measure(cell: Cell) -> Figures:
    """The setting that is best on dev, and every user of the test with it."""
    found = data()

    def on_dev(scores: Scores) -> float:
        return float(found.ndcg(scores("dev"), "dev").mean())

    settings = list(BASELINES[cell.kind](found, cell.seed))
    dev = [on_dev(scores) for scores in settings]
    best = max(range(len(dev)), key=lambda i: dev[i])
    test = packed(found.ndcg(settings[best]("test"), "test"))
    return asdict(cell) | {"plain": {"dev": round(dev[best], 5), "setting": best, "test": test}}
