"""Temperature losses against the naive sum of InfoNCE terms."""

import pytest
import torch
from _losses import BATCHING, assert_same, features
from _tiny import auto_scale, formula, raw_embeddings

import st_magnitude as stm
from st_magnitude import Similarity

pytestmark = pytest.mark.usefixtures("in_float64")

# Loss -> the sum of its paper's equation, written out: (weight, dim, temperature)
SUMS = {
    stm.TempAggLoss: [(1, 32, 0.03), (1, 32, 0.06), (1, 32, 0.1)],
    stm.TempAggMRLLoss: [(1, dim, tau) for dim in (8, 16, 32) for tau in (0.03, 0.06, 0.1)],
    stm.TempSpecMRLLoss: [(1, 8, 0.03), (1, 16, 0.06), (1, 32, 0.1)],
}


def naive(embeddings, exponents, terms, scale=20.0):
    """sum_t w_t cross_entropy(similarity of the prefix / tau_t), at a scale of 20."""
    return sum(
        weight * formula(embeddings, exponents, scale / 20 / tau, dim=dim)
        for weight, dim, tau in terms
    )


@pytest.mark.parametrize("loss_class", SUMS)
@pytest.mark.parametrize(
    ("similarity", "num_negatives"), [("cosine", 2), ("qnorm", 0), (Similarity(0.7, 0.4), 2)]
)
@BATCHING
def test_equals_the_naive_sum(model, loss_class, similarity, num_negatives, mini_batch_size):
    """With the paper's temperatures .03 .06 .1 and a quarter, half and all of the dimensions."""
    loss = loss_class(model, similarity=similarity, scale=3.0, mini_batch_size=mini_batch_size)
    exponents = Similarity.named(similarity).exponents
    columns = features(model, num_negatives=num_negatives)
    by_hand = naive(raw_embeddings(model, columns), exponents, SUMS[loss_class], 3.0)
    assert_same(model, loss(columns), by_hand)


def test_scale_is_that_of_the_longest_prefix(model):
    columns = features(model)
    loss = stm.TempAggMRLLoss(model, [4, 12], similarity="dot")
    embeddings = raw_embeddings(model, columns)
    scale = auto_scale(embeddings, (0, 0), dim=12)
    expected = naive(
        embeddings, (0, 0), [(1, dim, tau) for dim in (4, 12) for tau in (0.03, 0.06, 0.1)], scale
    )
    torch.testing.assert_close(loss(columns), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: stm.TempAggLoss(m, (0.1, 0.0)), "positive number; got 0.0"),
        (lambda m: stm.TempAggMRLLoss(m, [16, 16, 32]), r"distinct.* got \[16, 16, 32\]"),
        (lambda m: stm.TempAggMRLLoss(m, [16, 33, 64]), r"\[33, 64\] exceed the 32"),
        (lambda m: stm.TempSpecMRLLoss(m, [0.1]), r"\[8, 16, 32\] and .* \[0\.1\]"),
        (lambda m: stm.TempSpecMRLLoss(m, dims=[8, 16]), r"\[8, 16\] and .* \[0\.03, 0\.06, 0"),
        (lambda m: stm.TempSpecMRLLoss(m, {8: 0.1}, dims=[8]), "leave out dims"),
    ],
)
def test_arguments_are_checked(model, build, message):
    with pytest.raises(ValueError, match=message):
        build(model)


@pytest.mark.parametrize(
    "given", [{"temperatures": {16: 0.1, 8: 0.05}}, {"temperatures": [0.1, 0.05], "dims": [16, 8]}]
)
def test_every_prefix_has_its_temperature(model, given):
    terms = stm.TempSpecMRLLoss(model, **given).terms
    assert [(term.dim, term.temperature) for term in terms] == [(8, 0.05), (16, 0.1)]


def test_training_has_all_dimensions_whatever_encode_keeps(model, caplog):
    columns, expected = features(model), stm.TempAggMRLLoss(model)(features(model))
    with model.truncate_embeddings(8):
        assert model.get_embedding_dimension() == 8
        loss = stm.TempAggMRLLoss(model)
        assert {term.dim for term in loss.terms} == {8, 16, 32}
        assert loss(columns).item() == expected.item()
        stm.TempAggLoss(model)
        assert not caplog.records
        stm.TempAggMRLLoss(model, [8])
    assert "compares all 32 dimensions, so those beyond 8 are not trained" in caplog.text
