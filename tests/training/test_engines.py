"""FSDP2 on two gloo processes against one process, and what FSDP and DeepSpeed cannot train.

accelerate has FSDP on GPUs only, so `fully_shard` is called here as accelerate does there.
DeepSpeed is not installed: its engine is known by its name.
"""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _ranks import on_ranks
from _tiny import ROWS, columns, load_transformer
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import st_magnitude as stm
from st_magnitude._distributed import engine_of
from st_magnitude.training.stopping import train_or_stop

two_processes = pytest.mark.skipif(
    sys.platform != "linux", reason="forks processes that have used torch"
)

BOTH_DIRECTIONS = {"directions": ("query_to_doc", "doc_to_query")}
BOTH_DIRECTIONS |= {"partition_mode": "per_direction"}
PREFIXES = {"dims": [8, 32], "similarity": "qnorm"}
PREFIXES |= {"regularizers": [(stm.SIGReg(num_directions=8), 0.01)]}
LOSSES = {
    "qnorm": partial(stm.QNormRankingLoss, gather_across_devices=True),
    "ring": partial(stm.DotRankingLoss, gather_across_devices="ring", **BOTH_DIRECTIONS),
    "cached": partial(
        stm.TempAggMRLLoss, gather_across_devices=True, mini_batch_size=3, **PREFIXES
    ),
    # "auto" takes the norms of its own process
    "regression": partial(stm.SimilarityMSELoss, scale=0.5),
}
FULL = StateDictOptions(full_state_dict=True)


def sharded(model):
    """A model as accelerate prepares it with fsdp_version=2: its layers, then the rest."""
    for layer in model[0].auto_model.transformer.layer:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def train(folder, name, shard):
    """Losses, weights and embeddings of three steps on the half of the batch that a rank has, or on
    all of it."""
    torch.manual_seed(0)
    model = load_transformer(folder).double()
    loss = LOSSES[name](model).double()
    own = slice(None)
    if shard:
        sharded(model)
        own = slice(8 * dist.get_rank(), 8 * dist.get_rank() + 8)
    # some gradients are rounding errors
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    texts = [list(column)[own] for column in zip(*ROWS, strict=True)][:3]
    labels = None
    if name == "regression":
        texts = texts[:2]
        labels = torch.linspace(0.2, 1, len(ROWS), dtype=torch.float64)[own]
    values = []
    for _ in range(3):
        value = loss([dict(model.preprocess(column)) for column in texts], labels)
        value = sum(value.values()) if isinstance(value, dict) else value
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        values.append(value.item())
    weights = get_model_state_dict(model, options=FULL) if shard else model.state_dict()
    documents = [row[1] for row in ROWS]
    with torch.no_grad():
        encoded = model.encode_document(documents, batch_size=5, convert_to_tensor=True)
    state = {key: weight.detach().clone() for key, weight in weights.items()}
    return {"values": values, "model": state, "encoded": encoded}


def on_two_shards(folder):
    found = {name: train(folder, name, shard=True) for name in LOSSES}
    return found, refusal(load_transformer(folder))


def refusal(model):
    loss = stm.LearnableNormLoss(model, scale=3.0)
    for layer in model[0].auto_model.transformer.layer:
        fully_shard(layer)
    with pytest.raises(ValueError, match="Use DistributedDataParallel") as caught:
        loss([dict(model.preprocess(["tea", "rain"]))] * 2)
    return str(caught.value)


@pytest.fixture(scope="module")
def shards(folder):
    return on_ranks(2, on_two_shards, folder)


@pytest.mark.slow
@two_processes
@pytest.mark.parametrize("name", LOSSES)
def test_two_shards_are_one_process(folder, shards, name):
    """The losses, all weights after three steps of AdamW, and what the sharded model encodes."""
    expected = train(folder, name, shard=False)
    found = [rank[name] for rank, _ in shards]
    assert sum(rank["values"][0] for rank in found) / 2 == pytest.approx(
        expected["values"][0], rel=1e-6
    )
    for rank in found:
        torch.testing.assert_close(rank["encoded"], expected["encoded"], rtol=1e-5, atol=1e-6)
    weights = found[0]["model"]  # rank 0 has them, as for a checkpoint
    assert weights.keys() == expected["model"].keys()
    for key, weight in weights.items():
        torch.testing.assert_close(weight, expected["model"][key], rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@two_processes
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


def test_attach_refuses_before_training(model, tmp_path, monkeypatch):
    args = SentenceTransformerTrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    loss = stm.LearnableNormLoss(model)
    trainer = SentenceTransformerTrainer(model, args, Dataset.from_dict(columns()), loss=loss)
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
