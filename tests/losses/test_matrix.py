"""What users combine: every two settings meet in some run, which learns, resumes exactly, and saves what it learned."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from _tiny import ROWS, columns, load_transformer, save_transformer
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import (
    InputExample,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from torch.utils.data import DataLoader

import st_magnitude as stm
from st_magnitude.losses import temp_spec_mrl

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 32
LOSSES = {
    "cosine": stm.CosineRankingLoss,
    "dot": stm.DotRankingLoss,
    "qnorm": stm.QNormRankingLoss,
    "dnorm": stm.DNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "tempagg": lambda model, **options: stm.TempAggLoss(model, similarity="qnorm", **options),
    "mrl": lambda model, **options: stm.TempAggMRLLoss(model, [8, WIDTH], similarity="dot", **options),
    "specmrl": lambda model, **options: stm.CosineRankingLoss(
        model, terms=temp_spec_mrl({8: 0.05, WIDTH: 0.1}), **options
    ),
    "sigreg": lambda model, **options: stm.SIGRegInfoNCE(model, sigreg=stm.SIGReg(num_directions=8), **options),
    "regularized": lambda model, **options: stm.QNormRankingLoss(
        model, regularizers=[lambda x: x.norm(dim=1).var()], **options
    ),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "loss": tuple(LOSSES),
    "way": ("Trainer", "fit"),
    "mini_batch_size": (None, 3),
    "num_negatives": (0, 2),
    "accumulation": (1, 2),
    "bf16": (False, True),
    "lora": (False, True),
    "resume": (False, True),
    "compiled": (False, True),
    "temperature": (None, "learned"),
    "margin": (None, -0.1),
    "guided": (False, True),
    "prior": (False, True),
}
Cell = dict[str, Any]


def possible(cell: Cell) -> bool:
    """fit() has none of these settings."""
    return cell.get("way") != "fit" or not (
        cell.get("accumulation") == 2 or cell.get("bf16") or cell.get("resume") or cell.get("compiled")
    )


def covering() -> list[Cell]:
    """Few cells in which all possible pairs of settings meet: greedily, the cell next that has most pairs left."""

    def pairs(cell: Cell) -> set[tuple[Any, ...]]:
        return set(itertools.combinations(cell.items(), 2))

    draw = random.Random(0)
    some = [{key: draw.choice(values) for key, values in SETTINGS.items()} for _ in range(1500)]
    every = [cell for cell in some if possible(cell)]
    of_cell = [pairs(cell) for cell in every]
    left, chosen = set().union(*of_cell), []
    while left:
        best = max(range(len(every)), key=lambda i: len(of_cell[i] & left))
        chosen.append(every[best])
        left -= of_cell[best]
    return chosen


CELLS = covering()


def name_of(cell: Cell) -> str:
    return "-".join(str(value) if key in ("loss", "way") else f"{key}={value}" for key, value in cell.items() if value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_transformer(tmp_path_factory.mktemp("transformer"))


def prepared(folder: str, cell: Cell) -> tuple[SentenceTransformer, torch.nn.Module]:
    torch.manual_seed(0)
    model = load_transformer(folder)
    if cell["lora"]:
        model.add_adapter(LoraConfig(r=2, target_modules=["q_lin", "v_lin"], lora_dropout=0.0))
    options = {key: cell[key] for key in ("mini_batch_size", "temperature", "margin")}
    guide = load_transformer(folder, "cls") if cell["guided"] else None
    counts = {row[1]: 1 + i for i, row in enumerate(ROWS)}
    prior = stm.DocumentPrior.from_texts(model, counts) if cell["prior"] else None
    return model, LOSSES[cell["loss"]](model, guide=guide, prior=prior, margin_strategy="relative", **options)


def temperatures(loss: torch.nn.Module) -> list[float]:
    return [term["temperature"] for term in loss.get_config_dict()["terms"]]


def trainer_of(folder: str, cell: Cell, output: Any, save_steps: int = 100) -> SentenceTransformerTrainer:
    model, loss = prepared(folder, cell)
    arguments = SentenceTransformerTrainingArguments(
        str(output),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=cell["accumulation"],
        learning_rate=3e-3,
        bf16=cell["bf16"],
        torch_compile=cell["compiled"],
        torch_compile_backend="eager" if cell["compiled"] else None,
        save_steps=save_steps,
        logging_steps=1,
        seed=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    rows = Dataset.from_dict(columns(num_negatives=cell["num_negatives"]))
    return stm.attach(SentenceTransformerTrainer(model, arguments, train_dataset=rows, loss=loss))


def weights(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_all_pairs_meet():
    met = {pair for cell in CELLS for pair in itertools.combinations(cell.items(), 2)}
    for (a, values_a), (b, values_b) in itertools.combinations(SETTINGS.items(), 2):
        for pair in itertools.product(values_a, values_b):
            assert not possible(dict(zip((a, b), pair, strict=True))) or tuple(zip((a, b), pair, strict=True)) in met
    assert len(CELLS) <= 32


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow if cell["compiled"] else ()) for cell in CELLS],
    ids=map(name_of, CELLS),
)
def test_it_learns_resumes_and_is_saved(folder, tmp_path, monkeypatch, cell):
    monkeypatch.chdir(tmp_path)  # fit() puts checkpoints there
    model, loss = prepared(folder, cell)
    before, start = weights(model), temperatures(loss)
    if cell["way"] == "fit":
        examples = [InputExample(texts=list(row[: 2 + cell["num_negatives"]])) for row in ROWS]
        loader = DataLoader(examples, shuffle=True, batch_size=4)
        model.fit([(loader, loss)], epochs=1, warmup_steps=0, optimizer_params={"lr": 3e-3}, show_progress_bar=False)
    else:
        trainer = trainer_of(folder, cell, tmp_path / "whole")
        trainer.train()
        model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        loss = trainer.loss
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(losses) == 4
        assert all(map(math.isfinite, losses))
    after = weights(model)
    assert all(value.isfinite().all() for value in after.values())
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    if cell["lora"]:
        assert any("lora_B" in name for name in moved)
        assert all("lora" in name or name.endswith("bias") for name in moved if "transformer" in name.lower())
    else:
        assert len(moved) > 0.9 * len(after)
    learned = temperatures(loss)
    assert all((a != b) == (cell["temperature"] == "learned") for a, b in zip(learned, start, strict=True))
    if cell["loss"] == "learnable":
        assert {name.rpartition(".")[2] for name in moved} >= {"query_bias", "document_bias"}

    if cell["resume"]:
        cut = trainer_of(folder, cell, tmp_path / "cut", save_steps=2)
        cut.train()
        again = trainer_of(folder, cell, tmp_path / "cut")
        again.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-2"))
        resumed = again.accelerator.unwrap_model(again.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        for name, value in weights(resumed).items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=0)
        assert temperatures(again.loss) == learned

    stm.export(model, tmp_path / "saved")
    text = [row[1] for row in ROWS[:3]]
    torch.testing.assert_close(
        torch.from_numpy(stm.load(tmp_path / "saved").encode_document(text)),
        torch.from_numpy(model.encode_document(text)),
        rtol=1e-5,
        atol=1e-6,
    )
