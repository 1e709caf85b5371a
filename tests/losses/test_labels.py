"""Labels: weights of rows, classes, and the scores or embeddings of a teacher."""

import pytest
import torch
from _losses import DIRECTIONS, features
from _tiny import raw_embeddings
from torch.nn.functional import cross_entropy

import st_magnitude as stm

SCORES = torch.tensor([[3.0, 1.0], [0.5, 0.0], [2.0, 2.5]])


def batch(model):
    """Three queries, their positives and a negative of each."""
    return features(model, 3, 1)


def logits(model):
    queries, *documents = raw_embeddings(model, batch(model))
    return stm.COSINE(queries, torch.cat(documents)) / 0.05  # (3, 6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("kind", "shape"), [("weights", (3,)), ("teacher", (3, 2)), ("teacher", (3, 3, 8))], ids=str
)
def test_labels_that_are_not_finite_reach_no_weight(model, kind, shape, value):
    labels = torch.ones(shape)
    labels[1] = value
    loss = stm.CosineRankingLoss(model, labels=kind)
    with pytest.raises(ValueError, match="nan or infinite"):
        loss(batch(model), labels)


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_labels_as_scores_of_a_teacher(model, weight):
    loss = stm.CosineRankingLoss(
        model, labels="teacher", teacher_temperature=0.7, teacher_weight=weight
    )
    soft = weight * (SCORES / 0.7).softmax(dim=1)
    soft[:, 0] += 1 - weight
    targets = torch.cat([torch.diag(soft[:, 0]), torch.diag(soft[:, 1])], dim=1)
    expected = cross_entropy(logits(model), targets)
    torch.testing.assert_close(loss(batch(model), SCORES), expected)
    exact = [x.double() for x in raw_embeddings(model, batch(model))]
    first, second = (
        loss.compute_loss_from_embeddings(exact, SCORES.double() + shift) for shift in (0, 1 / 3)
    )
    torch.testing.assert_close(first, second, rtol=1e-12, atol=0)  # in float64


@pytest.mark.parametrize(
    ("scores", "temperature", "warns"),
    [(SCORES.sigmoid(), None, True), (SCORES.sigmoid(), 0.1, False), (SCORES, None, False)],
)
def test_scores_of_a_sigmoid_warn_once(model, caplog, scores, temperature, warns):
    loss = stm.CosineRankingLoss(model, labels="teacher", teacher_temperature=temperature)
    for _ in range(2):
        loss(batch(model), scores)
    assert caplog.text.count("applies a sigmoid by default") == warns


@pytest.mark.parametrize("directions", DIRECTIONS)
def test_labels_as_embeddings_of_a_teacher(model, directions):
    """A loss that ranks queries alone reads none of the negatives, and takes no scores."""
    labels = torch.randn(3, 3, 5, generator=torch.Generator().manual_seed(0))
    options = {"directions": directions, "partition_mode": "per_direction"}
    loss = stm.CosineRankingLoss(model, labels="teacher", teacher_temperature=0.2, **options)
    queries, *documents = labels.unbind(dim=1)
    expected = []
    if "query_to_doc" in directions:
        soft = (queries @ torch.cat(documents).T / 0.2).softmax(dim=1)
        expected.append(cross_entropy(logits(model), soft))
    if "doc_to_query" in directions:
        soft = (documents[0] @ queries.T / 0.2).softmax(dim=1)
        expected.append(cross_entropy(logits(model)[:, :3].T, soft))
    torch.testing.assert_close(loss(batch(model), labels), sum(expected) / len(expected))
    if directions == ("doc_to_query",):
        with pytest.raises(ValueError, match=r"takes numbers of shape \(3, 1\) or \(3, 2, 2\)"):
            loss(batch(model), SCORES)


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("weights", torch.ones(3, 2)),
        ("weights", torch.ones(3).long()),
        ("classes", torch.ones(3)),
        ("teacher", torch.ones(3)),
        ("teacher", torch.ones(3, 3)),
        ("teacher", None),
    ],
)
def test_labels_are_checked(model, kind, labels):
    with pytest.raises(ValueError, match="labels"):
        stm.CosineRankingLoss(model, labels=kind)(batch(model), labels)
