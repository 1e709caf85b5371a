"""SIGReg and other regularizers in losses: values, gradients, caching, logs, two processes."""

import json
from functools import partial

import pytest
import torch
import torch.distributed as dist
from _losses import (
    BATCHING,
    assert_same,
    assert_same_gradients,
    batch_of,
    features,
    gradients,
    value_and_gradients,
)
from _ranks import on_ranks
from _tiny import ROWS, formula, load_transformer, raw_embeddings
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer.losses import GlobalOrthogonalRegularizationLoss
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm

SIGREGS = {
    "default": {},
    "dims": {"dims": (8, 16, 32)},
    "drawn": {"num_directions": 64, "dims": (8, 16, 32)},
    "raw": {"num_directions": 64, "scale": None},
}
REGULARIZED = [stm.QNormRankingLoss, stm.LearnableNormLoss, stm.TempAggMRLLoss, stm.SIGRegInfoNCE]


@pytest.mark.parametrize("options", SIGREGS.values(), ids=SIGREGS)
@BATCHING
def test_loss_is_infonce_plus_sigreg_of_the_whole_batch(model, options, mini_batch_size):
    model.double()
    batch, reference = features(model, num_negatives=1), stm.SIGReg(**options)
    embeddings = raw_embeddings(model, batch)
    torch.manual_seed(7)
    expected = reference(torch.cat(embeddings))
    infonce = formula(embeddings, (1, 1), 20)
    loss = stm.SIGRegInfoNCE(
        model, 0.3, sigreg=stm.SIGReg(**options), mini_batch_size=mini_batch_size
    )
    torch.manual_seed(7)
    values = loss(batch)
    assert list(values) == ["infonce", "sigreg"]
    assert values["sigreg"].item() == pytest.approx(0.3 * expected.item(), rel=1e-10)
    torch.testing.assert_close(values["infonce"], infonce)
    assert_same(model, sum(values.values()), infonce + 0.3 * expected, atol=1e-10)


def mean_square(x):
    return x.square().mean()


class GOR:
    """sentence-transformers' own, on columns: docs/papers.md allows such regularizers."""

    name = "gor"

    def __init__(self, model):
        self.loss = GlobalOrthogonalRegularizationLoss(model)

    def of_columns(self, columns):
        return sum(self.loss.compute_loss_from_embeddings(columns).values())


@pytest.mark.parametrize("loss_class", REGULARIZED)
@BATCHING
def test_every_loss_takes_regularizers(model, loss_class, mini_batch_size):
    batch = features(model, num_negatives=1)
    square = mean_square(torch.cat(raw_embeddings(model, batch))).item()
    orthogonal = sum(
        GlobalOrthogonalRegularizationLoss(model)([dict(column) for column in batch]).values()
    ).item()
    regularizers = [(stm.SIGReg(32), 0.1), (mean_square, 0.2), mean_square, (GOR(model), 0.5)]
    values = loss_class(model, regularizers=regularizers, mini_batch_size=mini_batch_size)(batch)
    name = "sigreg_2" if loss_class is stm.SIGRegInfoNCE else "sigreg"
    assert list(values)[-4:] == [name, "mean_square", "mean_square_2", "gor"]
    found = [value.item() for value in list(values.values())[-3:]]
    assert found == pytest.approx([0.2 * square, square, 0.5 * orthogonal], rel=1e-4)
    sum(values.values()).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.parametrize(
    "regularizer", [*(partial(stm.SIGReg, **x) for x in SIGREGS.values()), lambda: mean_square, GOR]
)
@BATCHING
def test_copies_count_as_often_as_they_occur(model, regularizer, mini_batch_size):
    """Which InfoNCE counts once."""
    model.double()
    regularizer = regularizer(model) if regularizer is GOR else regularizer()
    batch = batch_of(model, [row[:2] for row in (*ROWS[:5], *ROWS[:3], ROWS[0])])
    embeddings = raw_embeddings(model, batch)
    torch.manual_seed(7)
    if regularizer.__class__ is GOR:
        expected = regularizer.of_columns(embeddings)
    else:
        expected = regularizer(torch.cat(embeddings))
    options = {"scale": 1e-9, "mini_batch_size": mini_batch_size}  # of InfoNCE no gradient
    loss = stm.CosineRankingLoss(model, regularizers=[regularizer], **options)
    torch.manual_seed(7)
    values = loss(batch)
    assert_same(model, sum(values.values()) - values["infonce"].detach(), expected, atol=1e-7)


def test_arguments(model):
    with pytest.raises(ValueError, match=r"weight must be at least 0 .* got -1\."):
        stm.SIGRegInfoNCE(model, -1)
    loss = stm.SIGRegInfoNCE(model, similarity="dot", regularizers=[(mean_square, 0.2)])
    weights = {"sigreg": 0.05, "mean_square": 0.2}
    assert json.loads(json.dumps(loss.get_config_dict()))["regularizers"] == weights
    assert model.similarity_fn_name == "dot"


@pytest.mark.parametrize("name", ["infonce", "loss"])
def test_a_regularizer_replaces_nothing_of_its_name(model, name):
    def spread(x):
        return x.square().mean()

    spread.name = name
    values = stm.CosineRankingLoss(model, regularizers=[spread])(features(model))
    assert list(values) == ["infonce", f"{name}_2"]


@pytest.mark.parametrize("wrong", [[0.05], [(stm.SIGReg(8), "much")], [(0.05, stm.SIGReg(8))]])
def test_regularizers_are_checked(model, wrong):
    with pytest.raises(TypeError, match="functions of embeddings"):
        stm.CosineRankingLoss(model, regularizers=wrong)
    loss = stm.CosineRankingLoss(model, regularizers=[torch.square])
    with pytest.raises(ValueError, match="'square' must return a scalar; got the shape"):
        loss(features(model))


CASES: dict[str, dict] = {
    "default": {},
    "dims": {"dims": (8, 32), "statistic": "plain_mean"},
    "drawn": {"num_directions": 16, "dims": (8, 32), "statistic": "plain_mean"},
    "raw": {"num_directions": 64, "scale": None},
    "alone": {"gather": False},
}
SPLIT, NUM_ROWS = 5, 14  # rank 0 has 5 rows, rank 1 the other 9
STRETCH = 4.0  # of the rows of rank 1, where length counts


def one_step(folder, name, cached):
    """Value, excess and gradients of this rank's rows, in a model as the Trainer wraps it."""
    model, rank = load_transformer(folder).double(), dist.get_rank()
    batch = batch_of(model, [row[:3] for row in (ROWS[SPLIT:NUM_ROWS] if rank else ROWS[:SPLIT])])
    sigreg, wrapped = stm.SIGReg(**CASES[name]), DistributedDataParallel(model)
    torch.manual_seed(rank)  # the directions are nevertheless those of rank 0
    if cached:
        # of InfoNCE no gradient
        loss = stm.SIGRegInfoNCE(model, 1.0, sigreg=sigreg, scale=1e-9, mini_batch_size=2)
        loss.model = wrapped
        values = loss(batch)
    else:
        x = torch.cat([x * (STRETCH if rank else 1) for x in embed_columns(wrapped, batch)])
        values = {"sigreg": sigreg(x)}
    sum(values.values()).backward()
    return values["sigreg"].item(), gradients(model)


@pytest.fixture(scope="module")
def two_ranks(folder):
    cases = [(name, cached) for name in CASES for cached in (False, True)]
    return on_ranks(2, lambda: {case: one_step(folder, *case) for case in cases})


@pytest.mark.parametrize("name", CASES)
@BATCHING
def test_two_ranks_are_one_process_on_the_joined_batch(model, two_ranks, name, mini_batch_size):
    """With 5 rows on one rank and 9 on the other; without gathering the values are others."""
    model.double()
    sigreg = stm.SIGReg(**CASES[name])
    stretch = torch.ones(NUM_ROWS, 1, dtype=torch.float64)
    if mini_batch_size is None:
        stretch[SPLIT:] = STRETCH
    torch.manual_seed(0)  # as rank 0
    value = sigreg(
        torch.cat([x * stretch for x in raw_embeddings(model, features(model, NUM_ROWS, 1))])
    )
    value, expected = value_and_gradients(model, value)
    for found, gradient in (rank[name, mini_batch_size is not None] for rank in two_ranks):
        if name == "alone":
            assert abs(found / value.item() - 1) > 0.02
            continue
        assert found == pytest.approx(value.item(), rel=1e-10)
        assert_same_gradients(gradient, expected, rtol=1e-6, atol=1e-10)
