"""The study on MovieLens-100k: its losses are the formulas that the page explains."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.data.movielens import Ratings
from benchmarks.studies.recommendation import baselines
from benchmarks.studies.recommendation.training import Cell, Data, Films

TRAIN = [(0, 0), (0, 1), (0, 2), (1, 1), (1, 3), (2, 0), (2, 4)]


@pytest.fixture
def data():
    return Data(Ratings(np.array(TRAIN), np.array([3, 0, 1]), np.array([4, 2, 3]), 5))


def by_hand(model, user, film):
    """The mean of the other films' vectors."""
    others = [f for u, f in TRAIN if u == user and f != film]
    return torch.stack([model.inner[f] for f in others]).mean(dim=0)


@pytest.mark.parametrize("kind", ["cosine", "dot", "row"])
def test_a_row_is_a_user_without_the_film_against_all_films(data, kind):
    torch.manual_seed(0)
    model = Films(Cell(kind, 0.3, dim=4), data)
    if kind == "row":
        model.inner.data = F.normalize(model.inner.data, dim=1)
    rows = TRAIN[:5]  # infonce takes at most as many as there are films
    users, films = torch.tensor(rows).T
    queries = torch.stack([by_hand(model, u, f) for u, f in rows])
    documents = model.outer
    if kind != "dot":
        documents = F.normalize(documents, dim=1)
    if kind == "cosine":
        queries = F.normalize(queries, dim=1)
    expected = F.cross_entropy(queries @ documents.T / 0.3, films)
    torch.testing.assert_close(model.loss(users, films), expected)


def test_only_the_row_differs_from_the_schedule(data):
    torch.manual_seed(0)
    model = Films(Cell("schedule", dim=4), data)
    queries = model.queries("dev", *data.train.T)
    norms = queries.norm(dim=1)
    torch.testing.assert_close(norms, norms[:1].expand(len(TRAIN)))


def test_seen_films_are_not_ranked_and_ties_are_lost(data):
    scores = torch.zeros(3, 5)
    scores[0, 3], scores[1, 1] = 1.0, 1.0  # the wanted film; one that is in the history
    found = data.ndcg(scores, "dev")
    # user 1 has 3 films left, all equal, user 2 has 3 as well
    np.testing.assert_allclose(found, [1.0, 0.5, 0.5])
    assert data.lengths["test"].tolist() == [4, 3, 3]


def test_ease_has_no_weight_of_a_film_for_itself(data):
    alone = torch.eye(5)[:3]
    data.histories = {"dev": data.histories["dev"], "test": alone.to_sparse_csr()}
    for scores in baselines.ease(data, 0):
        assert scores("test").diagonal().abs().max() == 0
