"""Before the first step: weights that cannot change are refused, and those in half precision are
named, in every loss."""

import itertools
import logging
from functools import partial

import pytest
import torch
from _tiny import columns, decoder, load_transformer, save_transformer, tokenizer
from _trainer import make_trainer
from datasets import Dataset
from peft import LoraConfig
from revela.revela_tiny import arguments, groups
from sentence_transformers.base.modules import Dense, Normalize

import st_magnitude as stm
from st_magnitude.losses.base import half_weights
from st_magnitude.revela import RevelaLoss, RevelaTrainer
from st_magnitude.surgery.adapters import add_lora
from st_magnitude.workbench.finetune.train import TrainConfig, train

PLAIN = {name for name in stm.__all__ if name.endswith(("Loss", "SIGRegInfoNCE"))}
OPTIONS = {
    "TempAggMRLLoss": {"dims": [8, 32]},
    "TempSpecMRLLoss": {"temperatures": {8: 0.05, 32: 0.1}},
}
LOSSES = {name: partial(getattr(stm, name), **OPTIONS.get(name, {})) for name in sorted(PLAIN)}
EVERY = LOSSES | {"QNormRankingLoss-cached": partial(stm.QNormRankingLoss, mini_batch_size=3)}
NAMES = [*EVERY, "RevelaLoss"]


def start(name, model, output):
    """Trains one step with a loss."""
    if name == "RevelaLoss":
        loss = RevelaLoss(model, decoder(), tokenizer())
        data = groups()
        args = arguments(output, max_steps=1)
        whole = {"retriever_lora": None, "lm_lora": None}
        return RevelaTrainer(model, args, loss=loss, train_dataset=data, **whole).train()
    rows = columns()
    if name == "SimilarityMSELoss":
        rows |= {"score": [0.5] * len(rows["anchor"])}
    loss = EVERY[name](model)
    return make_trainer(model, loss, output, data=Dataset.from_dict(rows), max_steps=1).train()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapter")
    model = load_transformer(save_transformer(place / "base"))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_lin"], init_lora_weights=False))
    model.save_pretrained(str(place / "adapter"))
    return place / "adapter"


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_adapter_is_named_with_the_remedies(adapter, tmp_path, name):
    model = stm.prepare(stm.load(adapter), "dot")
    before = {key: x.clone() for key, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"adapter too, as peft loads adapters frozen\..*export"):
        start(name, model, tmp_path / "run")
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    if name == "QNormRankingLoss":  # both remedies
        for key, weight in model.named_parameters():
            weight.requires_grad_("lora_" in key)
        start(name, model, tmp_path / "run")
        merged = stm.load(stm.export(model, tmp_path / "merged"))
        start(name, merged, tmp_path / "run")


def test_exponents_and_heads_of_a_frozen_model_can_be_trained(adapter, tmp_path):
    model = load_transformer(adapter.parent / "base").append(Normalize()).requires_grad_(False)
    start("LearnableNormLoss", model, tmp_path)
    with pytest.raises(ValueError, match="no weights that training could change"):
        start("QNormRankingLoss", model.requires_grad_(False), tmp_path)
    head = stm.load(adapter)
    head.append(Dense(32, 8))
    start("QNormRankingLoss", head, tmp_path)


@pytest.mark.parametrize(("lora", "said"), [(None, "peft loads adapters frozen"), (2, "frozen")])
def test_train_says_so_before_it_measures(adapter, data_folder, tmp_path, monkeypatch, lora, said):
    measuring = "st_magnitude.workbench.judging.costs.Cost.of"
    monkeypatch.setattr(measuring, lambda *_: pytest.fail("measures"))
    data = stm.load_splits(data_folder)["train"]
    for model in (str(adapter), stm.load(adapter)):
        with pytest.raises(ValueError, match=said):
            train(model, data, tmp_path / "out", TrainConfig(lora=lora))
    with pytest.raises(ValueError, match="adds an adapter, and this model has one already"):
        add_lora(stm.load(adapter), 2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*itertools.product(NAMES, [torch.bfloat16]), ("QNormRankingLoss", torch.float32)],
)
def test_half_precision_is_named(folder, tmp_path, caplog, name, dtype):
    model = load_transformer(folder).to(dtype)
    with caplog.at_level(logging.WARNING, "st_magnitude"):
        start(name, model, tmp_path / "run")
    is_half = dtype != torch.float32
    assert (str(dtype).removeprefix("torch.") in caplog.text) == is_half
    assert bool(half_weights(model)) == is_half


def test_a_language_model_in_half_precision_is_named(model, tmp_path, caplog):
    loss = RevelaLoss(model, decoder().bfloat16(), tokenizer())
    rows = groups()
    RevelaTrainer(
        model, arguments(tmp_path, max_steps=1), loss=loss, train_dataset=rows, lm_lora=None
    ).train()
    assert "The language model of RevelaLoss trains weights in bfloat16" in caplog.text
