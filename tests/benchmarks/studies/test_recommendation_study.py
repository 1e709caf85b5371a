"""The study on MovieLens-100k: its reader, and losses by the formulas that the page explains."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.data.movielens import Ratings, read
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


def test_seen_films_are_not_ranked_and_ties_are_lost(data):
    scores = torch.zeros(3, 5)
    scores[0, 3], scores[1, 1] = 1.0, 1.0  # the wanted film; one that is in the history
    # users 1 and 2 have three films left, all equal
    np.testing.assert_allclose(data.ndcg(scores, "dev"), [1.0, 0.5, 0.5])
    assert data.lengths["test"].tolist() == [4, 3, 3]


HEADER = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
ROWS = [(7, 30, 3, 4), (7, 10, 1, 1), (9, 10, 5, 9), (7, 20, 2, 3), (9, 20, 4, 8), (9, 30, 4, 7)]


def test_the_last_film_is_test_and_the_one_before_is_dev(tmp_path):
    file = tmp_path / "ml-100k.inter"
    lines = "".join("\t".join(map(str, row)) + "\n" for row in ROWS)
    file.write_text(HEADER + lines, encoding="utf-8")
    found = read(file)
    np.testing.assert_array_equal(found.train, [[0, 0], [1, 2]])
    np.testing.assert_array_equal(found.dev, [1, 1])
    np.testing.assert_array_equal(found.test, [2, 0])
    assert found.num_films == 3
    liked = read(file, stars=4)  # only one user has liked three
    np.testing.assert_array_equal(liked.train, [[0, 2]])
    np.testing.assert_array_equal(liked.items, [10, 20, 30])
