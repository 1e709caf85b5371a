"""Learned temperatures: gradients, optimizers, checkpoints and logs."""

import math

import pytest
import torch
from _helpers import (
    BATCHING,
    assert_same_gradients,
    features,
    gradients,
    logged,
    temperatures,
    train,
)
from _tiny import columns, formula, load_transformer, raw_embeddings
from datasets import Dataset, DatasetDict
from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

import st_magnitude as stm
from st_magnitude import Term
from st_magnitude.kernel.terms import LearnedTemperature
from st_magnitude.losses import temp_spec_mrl

pytestmark = pytest.mark.usefixtures("one_thread")

MAPPING = LearnedTemperature.learning_rate_mapping
TERMS = [
    Term(8, LearnedTemperature()),
    Term(16, 0.1, 2.0),
    Term(None, LearnedTemperature(0.2), 0.5),
]


# --- value and gradient ---------------------------------------------------------------------------


@BATCHING
@pytest.mark.parametrize("loss_class", [stm.DNormRankingLoss, stm.LearnableNormLoss])
def test_gradients_are_those_of_the_definition(model, loss_class, mini_batch_size):
    """In float64, through an outer factor such as that of gradient accumulation."""
    loss = loss_class(
        model.double(),
        terms=TERMS,
        scale=3.0,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
        mini_batch_size=mini_batch_size,
    ).double()
    batch = features(model, num_negatives=1)
    value = loss(batch)
    (value / 8).backward()
    found = gradients(loss)
    loss.zero_grad()

    bias = torch.tensor([0.05, 0.2]).log().double().requires_grad_()  # float32 has the logarithms
    exponents = (0, 1)
    if loss_class is stm.LearnableNormLoss:
        exponents = model[-1].query_bias.sigmoid(), model[-1].document_bias.sigmoid()
    embeddings = raw_embeddings(model, batch)
    parts = [
        term.weight
        * formula(
            embeddings, exponents, 3.0 * 0.05 / tau, ("query_to_doc", "doc_to_query"), term.dim
        )
        for term, tau in zip(TERMS, [bias[0].exp(), 0.1, bias[1].exp()], strict=True)
    ]
    expected = sum(parts)
    (expected / 8).backward()
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found.pop("temperatures.bias"), bias.grad, rtol=1e-9, atol=0)
    assert_same_gradients(
        {name.removeprefix("model."): x for name, x in found.items()}, gradients(model), rtol=1e-7
    )


@BATCHING
def test_temperature_stays_at_a_hundredth_or_more(model, mini_batch_size):
    loss = stm.CosineRankingLoss(model, temperature="learned", mini_batch_size=mini_batch_size)
    optimizer = torch.optim.SGD(loss.temperatures.parameters(), lr=1.0)
    # it is not stuck at the bound
    for gradient, temperature in ((9.0, 0.01), (math.log(0.5), 0.02)):
        loss.temperatures.bias.grad = torch.tensor([gradient])
        optimizer.step()
        assert temperatures(loss) == [pytest.approx(temperature)]
        fixed = stm.CosineRankingLoss(
            model, temperature=temperature, mini_batch_size=mini_batch_size
        )
        torch.testing.assert_close(
            loss(features(model, num_negatives=1)), fixed(features(model, num_negatives=1))
        )


def test_arguments(model):
    assert temperatures(stm.QNormRankingLoss(model, temperature=0.1)) == [0.1]
    one = stm.QNormRankingLoss(model, temperature=LearnedTemperature(0.1))
    assert one.terms == (Term(None, LearnedTemperature(0.1)),)
    assert temperatures(one) == [pytest.approx(0.1)]
    several = stm.TempAggMRLLoss(model, [8, 32], temperature="learned")
    assert temperatures(several) == pytest.approx(2 * [0.03, 0.06, 0.1])
    assert all(isinstance(term.temperature, LearnedTemperature) for term in several.terms)
    partly = stm.CosineRankingLoss(model, terms=temp_spec_mrl({8: 0.05, 32: LearnedTemperature()}))
    assert len(partly.temperatures.bias) == 1
    with pytest.raises(ValueError, match="for a loss of one term, and this one has 3"):
        stm.TempAggLoss(model, temperature=0.1)
    with pytest.raises(ValueError, match="got 'cold'"):
        stm.CosineRankingLoss(model, temperature="cold")


@BATCHING
def test_matryoshka(model, mini_batch_size):
    """MatryoshkaLoss cuts off the columns in which a cached loss carries temperatures."""
    inner = stm.CosineRankingLoss(model, temperature="learned", mini_batch_size=mini_batch_size)
    loss = MatryoshkaLoss(model, inner, [32, 8])
    if mini_batch_size is not None:
        with pytest.raises(ValueError, match=r"temperatures learned under caching.*terms="):
            loss(features(model, num_negatives=1), None)
    else:
        loss(features(model, num_negatives=1), None).backward()
        assert inner.temperatures.bias.grad != 0


# --- optimizers -----------------------------------------------------------------------------------


def test_own_learning_rates(model, tmp_path):
    """Adam's first step is the learning rate, whatever the gradient; neither bias decays."""
    loss = stm.LearnableNormLoss(model, temperature="learned")
    mapping = MAPPING(0.03) | loss.learning_rate_mapping(0.02)
    options = {"learning_rate": 1e-5, "learning_rate_mapping": mapping, "weight_decay": 0.5}
    train(model, loss, tmp_path, max_steps=1, **options)
    assert abs(loss.temperatures.bias.item() - math.log(0.05)) == pytest.approx(0.03, rel=1e-2)
    assert model[-1].query_bias.abs().item() == pytest.approx(0.02, rel=1e-2)
    assert list(MAPPING().values()) == [1e-3]


# --- checkpoints, logs and the saved model --------------------------------------------------------


def test_resume_with_several_data_sets(folder, tmp_path):
    """The resumed run is the uninterrupted one; each data set has temperatures of its own."""
    data = DatasetDict(
        pairs=Dataset.from_dict(columns()), triplets=Dataset.from_dict(columns(num_negatives=1))
    )
    options = {"data": data, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    options |= {"multi_dataset_batch_sampler": "round_robin", "per_device_train_batch_size": 4}
    options |= {"learning_rate": 0.01, "learning_rate_mapping": MAPPING(0.05)}
    runs = []
    checkpoint = str(tmp_path / "first" / "checkpoint-3")
    for name, resume in (("first", None), ("again", checkpoint)):
        model = load_transformer(folder)
        losses = {
            "pairs": stm.DotRankingLoss(model, temperature="learned"),
            "triplets": stm.MagnitudeRankingLoss(model, "cosine", TERMS, mini_batch_size=3),
        }
        trainer = train(model, losses, tmp_path / name, resume=resume, **options)
        runs.append([model.state_dict(), losses, trainer])
    (state, losses, trainer), (again, resumed, _) = runs
    for name, loss in losses.items():
        assert torch.equal(loss.temperatures.bias, resumed[name].temperatures.bias)
        starts = [
            float(term.temperature)
            for term in loss.terms
            if isinstance(term.temperature, LearnedTemperature)
        ]
        assert (loss.temperatures.bias - torch.tensor(starts).log()).abs().min() > 0.02
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[-1]["temperature_pairs"] == temperatures(losses["pairs"])[0]
    assert [log[-1][f"temperature_{i}_triplets"] for i in (1, 2)] == temperatures(
        losses["triplets"]
    )[::2]


def test_the_best_step_brings_its_temperature_back(model, tmp_path):
    loss = stm.CosineRankingLoss(model, temperature="learned")
    options = {"max_steps": 4, "learning_rate_mapping": MAPPING(0.3)}
    options |= {"save_strategy": "steps", "save_steps": 1}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    options |= {"greater_is_better": True}  # the worst step, which is the first
    trainer = train(model, loss, tmp_path, eval_data=Dataset.from_dict(columns()), **options)
    best = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    seen = logged(trainer)
    assert best < 4
    assert abs(seen[best - 1] - seen[-1]) > 1e-3
    assert temperatures(loss) == [seen[best - 1]]


def test_a_resume_that_would_start_anew_is_refused(folder, tmp_path):
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    checkpoint = str(tmp_path / "first" / "checkpoint-1")
    for name, resume in (("first", None), ("resumed", checkpoint)):
        model = load_transformer(folder)
        loss = stm.CosineRankingLoss(model, temperature="learned")
        train(model, loss, tmp_path / name, resume=resume, **options)
    assert not model._load_state_dict_post_hooks
    loss = stm.CosineRankingLoss(model, temperature="learned")
    with pytest.raises(ValueError, match="learned temperature starts anew"):
        train(model, loss, tmp_path / "refused", attach=False, resume=checkpoint, **options)
