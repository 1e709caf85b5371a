"""FSDP2 on two and four processes against one, and what FSDP and DeepSpeed cannot train.

accelerate has FSDP on GPUs only, so `fully_shard` is called here as accelerate does there.
DeepSpeed is not installed: its engine is known by its name.
"""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _losses import features
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, load_transformer
from _trainer import make_trainer
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import st_magnitude as stm
from st_magnitude._distributed import engine_of
from st_magnitude._upstream import SINCE_6_2
from st_magnitude.training.stopping import train_or_stop

BOTH_DIRECTIONS = {"directions": ("query_to_doc", "doc_to_query")}
BOTH_DIRECTIONS |= {"partition_mode": "per_direction"}
PREFIXES = {"dims": [8, 32], "similarity": "qnorm"}
PREFIXES |= {"regularizers": [(stm.SIGReg(num_directions=8), 0.01)]}
SHARDED_LOSSES = {
    "qnorm": partial(stm.QNormRankingLoss, gather_across_devices=True),
    "both": partial(stm.DotRankingLoss, gather_across_devices=True, **BOTH_DIRECTIONS),
    "cached": partial(
        stm.TempAggMRLLoss, gather_across_devices=True, mini_batch_size=3, **PREFIXES
    ),
    # "auto" takes the norms of its own process
    "regression": partial(stm.SimilarityMSELoss, scale=0.5),
}
FULL = StateDictOptions(full_state_dict=True)
IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
# of four processes: the loss, and what is different
SETTINGS = {
    "hybrid": ("cached", {"mesh": (2, 2)}),
    "uneven": ("both", {"sizes": (5, 5, 4, 2)}),
    "accumulates": ("cached", {"accumulates": True}),
    "bf16": ("qnorm", {"policy": IN_BF16}),
}


def sharded(model, **options):
    """A model as accelerate prepares it with fsdp_version=2: its layers, then the rest."""
    for layer in model[0].auto_model.transformer.layer:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def train(folder, name, sizes=None, *, mesh=None, policy=None, accumulates=False):
    """Losses, weights and embeddings of 3 steps on the rows that a rank has, or on all of them."""
    torch.manual_seed(0)
    model = load_transformer(folder).double()
    loss = SHARDED_LOSSES[name](model).double()
    own = slice(None)
    if sizes:
        options = policy or {}
        if mesh:
            options = {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards"))}
        sharded(model, **options)
        start = sum(sizes[: dist.get_rank()])
        own = slice(start, start + sizes[dist.get_rank()])
    # some gradients are rounding errors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    texts = [list(column)[own] for column in zip(*ROWS, strict=True)][:3]
    labels = None
    if name == "regression":
        texts = texts[:2]
        labels = torch.linspace(0.2, 1, len(ROWS), dtype=torch.float64)[own]
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        for is_last in (False, True) if accumulates else (True,):
            if sizes:
                model.set_requires_gradient_sync(is_last)
            value = loss([dict(model.preprocess(column)) for column in texts], labels)
            value = sum(value.values()) if isinstance(value, dict) else value
            value.backward()
        optimizer.step()
        values.append(value.item())
    weights = get_model_state_dict(model, options=FULL) if sizes else model.state_dict()
    documents = [row[1] for row in ROWS]
    with torch.no_grad():
        encoded = model.encode_document(documents, batch_size=5, convert_to_tensor=True)
    state = {key: weight.detach().clone() for key, weight in weights.items()}
    return {"values": values, "model": state, "encoded": encoded}


def on_two_shards(folder):
    found = {name: train(folder, name, (8, 8)) for name in SHARDED_LOSSES}
    return found, refusal(load_transformer(folder))


def on_four_shards(folder):
    sizes = {"sizes": (4, 4, 4, 4)}
    settings = SETTINGS.items()
    return {key: train(folder, name, **sizes | options) for key, (name, options) in settings}


def refusal(model):
    loss = stm.LearnableNormLoss(model, scale=3.0)
    for layer in model[0].auto_model.transformer.layer:
        fully_shard(layer)
    with pytest.raises(ValueError, match="Use DistributedDataParallel") as caught:
        loss([dict(model.preprocess(["tea", "rain"]))] * 2)
    return str(caught.value)


@pytest.fixture(scope="module")
def shards(folder):
    if not SINCE_6_2:
        pytest.skip("encode of this release cannot move a sharded model")
    return on_ranks(2, on_two_shards, folder)


@pytest.fixture(scope="module")
def four_shards(folder):
    return on_ranks(4, on_four_shards, folder)


def assert_equal(found, expected, rtol=1e-5, atol=1e-6):
    """The losses of all steps, and what the sharded model encodes after them."""
    values = torch.tensor([rank["values"] for rank in found], dtype=torch.float64).mean(dim=0)
    assert values.tolist() == pytest.approx(expected["values"], rel=rtol)
    for rank in found:
        encoded = rank["encoded"].double()
        torch.testing.assert_close(encoded, expected["encoded"], rtol=rtol, atol=atol)


def assert_equal_weights(found, expected):
    """All weights, which rank 0 has, as for a checkpoint."""
    weights = found[0]["model"]
    assert weights.keys() == expected["model"].keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected["model"][key], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("name", SHARDED_LOSSES)
def test_two_shards_are_one_process(folder, shards, name):
    found, expected = [rank[name] for rank, _ in shards], train(folder, name)
    assert_equal(found, expected)
    assert_equal_weights(found, expected)


@pytest.mark.slow
@needs_fork
@pytest.mark.parametrize("setting", SETTINGS)
def test_four_shards_are_one_process(folder, four_shards, setting):
    name, options = SETTINGS[setting]
    expected = train(folder, name, accumulates="accumulates" in options)
    found = [rank[setting] for rank in four_shards]
    if setting == "bf16":  # AdamW makes large steps of the rounding errors of small gradients
        assert all(rank["encoded"].dtype == torch.bfloat16 for rank in found)
        assert_equal(found, expected, rtol=0.02, atol=0.1)
    else:
        assert_equal(found, expected)
        assert_equal_weights(found, expected)


@pytest.mark.slow
@needs_fork
def test_what_fsdp_cannot_train_is_refused_on_the_first_batch(shards):
    for _, refused in shards:
        assert refused.startswith("LearnableNormLoss learns exponents")


class DeepSpeedEngine(nn.Module):
    """A stand-in with the name and the method that tell an engine."""

    def __init__(self, model, stage):
        super().__init__()
        self.module, self.stage = model, stage

    def zero_optimization_stage(self):
        return self.stage

    def forward(self, features):
        return self.module(features)


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (stm.LearnableNormLoss, (3,)),
        (partial(stm.QNormRankingLoss, mini_batch_size=2), (2, 3)),
        (stm.QNormRankingLoss, ()),
    ],
)
def test_deepspeed(model, make, stages):
    for stage in (2, 3):
        loss = make(model, scale=3.0)
        loss.model = DeepSpeedEngine(model, stage)
        assert engine_of(loss.model) == f"DeepSpeed ZeRO-{stage}"
        features = [dict(model.preprocess(["tea", "rain"])) for _ in range(2)]
        if stage in stages:
            with pytest.raises(ValueError, match=rf"ZeRO-{stage}.*Use DistributedDataParallel"):
                loss(features)
        else:
            loss(features)


@pytest.mark.parametrize(("once", "ranks"), [(True, 2), (False, 1), (False, 2)])
def test_releases_that_would_wait_forever(model, monkeypatch, once, ranks):
    monkeypatch.setattr("st_magnitude.losses.base.SINCE_6_2", once)
    monkeypatch.setattr("st_magnitude.losses.base.num_ranks", lambda: ranks)
    is_refused = not once and ranks == 2
    refused = pytest.raises(ValueError, match=r"6\.2 or later") if is_refused else nullcontext()
    with refused:
        stm.QNormRankingLoss(model, mini_batch_size=2)(features(model, 3))
    stm.QNormRankingLoss(model)(features(model, 3))


def test_attach_refuses_before_training(model, tmp_path, monkeypatch):
    trainer = make_trainer(model, stm.LearnableNormLoss(model), tmp_path)
    monkeypatch.setattr(trainer, "is_fsdp_enabled", True)
    with pytest.raises(ValueError, match=r"LearnableNormLoss learns exponents, .* FSDP"):
        stm.attach(trainer)
    with pytest.raises(ValueError, match="FSDP gives each process a part of the weights"):
        train_or_stop(trainer)
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    plugin = SimpleNamespace(zero_stage=3)
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    with pytest.raises(ValueError, match="DeepSpeed ZeRO-3 shards"):
        stm.attach(trainer)
