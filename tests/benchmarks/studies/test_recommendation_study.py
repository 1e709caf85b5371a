"""The study on MovieLens-100k: its losses by the formulas that the page explains."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.data.movielens import Ratings
from benchmarks.studies.recommendation.recommendation import Cell, Data, Films

TRAIN = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 3), (2, 0), (2, 4)]


@pytest.fixture
def data():
    answers = np.array([3, 0, 1]), np.array([4, 2, 3])
    return Data(Ratings(np.array(TRAIN), *answers, 5, np.arange(5)))


@pytest.mark.parametrize("kind", ["cosine", "dot", "row"])
def test_a_row_is_a_user_without_the_film_against_all_films(data, kind):
    torch.manual_seed(0)
    model = Films(Cell(kind, 0.3, dim=4), data)
    inner = F.normalize(model.inner, dim=1) if kind == "row" else model.inner
    rows = TRAIN[:5]  # infonce takes at most as many as there are films
    others = [[film for x, film in TRAIN if x == user and film != own] for user, own in rows]
    queries = torch.stack([inner[films].mean(dim=0) for films in others])
    documents = model.outer if kind == "dot" else F.normalize(model.outer, dim=1)
    if kind == "cosine":
        queries = F.normalize(queries, dim=1)
    users, films = torch.tensor(rows).T
    expected = F.cross_entropy(queries @ documents.T / 0.3, films)
    torch.testing.assert_close(model.loss(users, films), expected)


def test_a_constant_norm_has_the_same_value_and_another_gradient(data):
    found = []
    for kind in ("row", "constant"):
        torch.manual_seed(0)
        model = Films(Cell(kind, 0.3, softmax="logQ", dim=4), data)
        loss = model.loss(*data.train.T)
        found.append((loss, *torch.autograd.grad(loss, [model.inner, model.outer])))
    (loss, inner, outer), (other, constant, same) = found
    torch.testing.assert_close((other, same), (loss, outer))
    assert not torch.allclose(inner, constant)
