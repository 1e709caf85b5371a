"""SimilarityMSELoss: the formula in float64, its scale in the Trainer, and what it refuses."""

import json

import pytest
import torch
from _losses import value_and_gradients
from _tiny import ROWS, auto_scale
from sentence_transformers.sentence_transformer.losses import CosineSimilarityLoss, MatryoshkaLoss

import st_magnitude as stm

NAMES = {"cosine": (1, 1), "dot": (0, 0), "qnorm": (1, 0), "dnorm": (0, 1)}
PAIRS = {
    "sentence1": [row[0] for row in ROWS],
    "sentence2": [row[1] for row in ROWS[:8]] + [row[1] for row in ROWS[:-9:-1]],
    "score": [0.9] * 8 + [0.1] * 8,
}


def by_hand(a, b, scores, exponents, scale):
    """Row by row, in float64."""
    total = 0.0
    for x, y, score in zip(a.double(), b.double(), scores, strict=True):
        x, y = x / x.pow(2).sum() ** (exponents[0] / 2), y / y.pow(2).sum() ** (exponents[1] / 2)
        total = total + (scale * (x * y).sum() - score) ** 2
    return total / len(a)


def embeddings(n=7, d=5):
    return [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for _ in range(2)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_formula_and_gradients(model, name, scale):
    a, b = embeddings()
    scores = torch.rand(7, dtype=torch.float64)
    loss = stm.SimilarityMSELoss(model, name, scale=scale).compute_loss_from_embeddings(
        [a, b], scores
    )
    expected = by_hand(a, b, scores, NAMES[name], scale)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, (a, b)), torch.autograd.grad(expected, (a, b))
    )


def test_cosine_is_the_stock_loss(model):
    columns = [dict(model.preprocess(PAIRS[name])) for name in ("sentence1", "sentence2")]
    results = [
        value_and_gradients(
            model, loss([dict(column) for column in columns], torch.tensor(PAIRS["score"]))
        )
        for loss in (stm.SimilarityMSELoss(model, "cosine"), CosineSimilarityLoss(model))
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_scale(model, name):
    """lambda is one over the mean norms that remain, of each batch, with their gradient."""
    loss, exponents = stm.SimilarityMSELoss(model, name), NAMES[name]
    for factor in (1, 10):
        a, b = embeddings()
        columns = [factor * a, b]
        value = loss.compute_loss_from_embeddings(columns, torch.zeros(7))
        similarity = stm.Similarity.named(name).pairwise(*columns)
        expected = (auto_scale(columns, exponents, unit=1) * similarity).square().mean()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(
            torch.autograd.grad(value, [a, b], retain_graph=True),
            torch.autograd.grad(expected, [a, b]),
        )
    similarity = dict(zip(("query", "document"), exponents, strict=True))
    config = {"similarity": similarity, "scale": 1.0 if name == "cosine" else "auto"}
    config["group_by_length"] = True
    assert json.loads(json.dumps(loss.get_config_dict())) == config


@pytest.mark.parametrize(("largest", "times"), [(1.0, 0), (5.0, 1)])
def test_scores_beyond_1_warn_once(model, caplog, largest, times):
    loss = stm.SimilarityMSELoss(model, "dot", scale=1.0)
    for _ in range(3):
        loss.compute_loss_from_embeddings(embeddings(), torch.linspace(0, largest, 7))
    assert len(caplog.records) == times


def test_refusals(model):
    loss = stm.SimilarityMSELoss(model)
    with pytest.raises(ValueError, match="two text columns; the dataset has 3"):
        loss.compute_loss_from_embeddings([*embeddings(), embeddings()[0]], torch.zeros(7))
    with pytest.raises(ValueError, match="7 pairs; got 0"):
        loss.compute_loss_from_embeddings(embeddings(), None)
    with pytest.raises(ValueError, match="7 pairs; got 3"):
        loss.compute_loss_from_embeddings(embeddings(), torch.zeros(3))
    with pytest.raises(ValueError, match="nan or infinite"):
        loss.compute_loss_from_embeddings(embeddings(), torch.zeros(7) / 0)
    matryoshka = MatryoshkaLoss(model, stm.SimilarityMSELoss(model, "dot"), [32, 16])
    with pytest.raises(ValueError, match="MatryoshkaLoss normalises"):
        matryoshka(
            [dict(model.preprocess(PAIRS["sentence1"])) for _ in range(2)],
            torch.tensor(PAIRS["score"]),
        )
