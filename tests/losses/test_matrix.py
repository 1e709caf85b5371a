"""Every two settings that users combine meet in a run, which learns, resumes and is saved."""

import itertools
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _tiny import ROWS, columns, load_transformer
from _trainer import logged, train
from datasets import Dataset
from peft import LoraConfig
from sentence_transformers import InputExample, SentenceTransformer
from torch.utils.data import DataLoader

import st_magnitude as stm

WIDTH = 32
COMBINED = {
    "cosine": stm.CosineRankingLoss,
    "dot": stm.DotRankingLoss,
    "qnorm": stm.QNormRankingLoss,
    "dnorm": stm.DNormRankingLoss,
    "learnable": stm.LearnableNormLoss,
    "tempagg": partial(stm.TempAggLoss, similarity="qnorm"),
    "mrl": partial(stm.TempAggMRLLoss, dims=[8, WIDTH], similarity="dot"),
    "specmrl": partial(stm.TempSpecMRLLoss, temperatures={8: 0.05, WIDTH: 0.1}),
    "sigreg": partial(stm.SIGRegInfoNCE, sigreg=stm.SIGReg(num_directions=8)),
    "regularized": partial(stm.QNormRankingLoss, regularizers=[lambda x: x.norm(dim=1).var()]),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "loss": tuple(COMBINED),
    "way": ("Trainer", "fit"),
    "mini_batch_size": (None, 3),
    "num_negatives": (0, 2),
    "accumulation": (1, 2),
    "bf16": (False, True),
    "lora": (False, True),
    "resume": (False, True),
    "compiled": (False, True),
    "margin": (None, -0.1),
    "prior": (False, True),
}
Cell = dict[str, Any]


def possible(cell: Cell) -> bool:
    """fit() has none of these settings."""
    unlike_fit = cell["accumulation"] == 2 or cell["bf16"] or cell["resume"] or cell["compiled"]
    return cell["way"] != "fit" or not unlike_fit


def covering() -> list[Cell]:
    """Few cells in which all possible pairs meet: always the cell that has most pairs left."""

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


def runs_by_default(cell: Cell) -> bool:
    """Whether it has a value, such as a loss, that no cell before it has, and is not compiled."""
    plain = [cell for cell in CELLS if not cell["compiled"]]
    before = itertools.takewhile(lambda other: other is not cell, plain)
    seen = set().union(*(other.items() for other in before))
    return cell in plain and not seen.issuperset(cell.items())


def name_of(cell: Cell) -> str:
    return "-".join(
        str(value) if key in ("loss", "way") else f"{key}={value}"
        for key, value in cell.items()
        if value
    )


def prepared(folder: str, cell: Cell) -> tuple[SentenceTransformer, torch.nn.Module]:
    torch.manual_seed(0)
    model = load_transformer(folder)
    if cell["lora"]:
        model.add_adapter(LoraConfig(r=2, target_modules=["q_lin", "v_lin"], lora_dropout=0.0))
    options = {key: cell[key] for key in ("mini_batch_size", "margin")}
    counts = {row[1]: 1 + i for i, row in enumerate(ROWS)}
    prior = stm.DocumentPrior.from_texts(model, counts) if cell["prior"] else None
    return model, COMBINED[cell["loss"]](model, prior=prior, margin_strategy="relative", **options)


def trained(
    folder: str, cell: Cell, output: Path, **options: Any
) -> tuple[SentenceTransformer, Any]:
    """The model and the Trainer after four steps."""
    model, loss = prepared(folder, cell)
    options |= {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": cell["accumulation"],
        "learning_rate": 3e-3,
        "bf16": cell["bf16"],
        "torch_compile": cell["compiled"],
        "torch_compile_backend": "eager" if cell["compiled"] else None,
    }
    trainer = train(model, loss, output, cell["num_negatives"], **options)
    unwrap = trainer.accelerator.unwrap_model
    plain = unwrap(trainer.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    return plain, trainer


def weights(model: SentenceTransformer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "cell",
    [pytest.param(x, marks=() if runs_by_default(x) else pytest.mark.slow) for x in CELLS],
    ids=map(name_of, CELLS),
)
def test_it_learns_resumes_and_is_saved(folder, tmp_path, monkeypatch, cell):
    monkeypatch.chdir(tmp_path)  # fit() puts checkpoints there
    model, loss = prepared(folder, cell)
    before = weights(model)
    if cell["way"] == "fit":
        examples = [InputExample(texts=list(row[: 2 + cell["num_negatives"]])) for row in ROWS]
        loader = DataLoader(examples, shuffle=True, batch_size=4)
        model.fit(
            [(loader, loss)],
            epochs=1,
            warmup_steps=0,
            optimizer_params={"lr": 3e-3},
            show_progress_bar=False,
        )
    else:
        model, trainer = trained(folder, cell, tmp_path / "whole")
        loss, losses = trainer.loss, logged(trainer, "loss")
        assert len(losses) == 4
        assert all(map(math.isfinite, losses))
        rows = Dataset.from_dict(columns(4, cell["num_negatives"]))
        assert math.isfinite(trainer.evaluate(rows)["eval_loss"])
    after = weights(model)
    assert all(value.isfinite().all() for value in after.values())
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    if cell["lora"]:
        assert any("lora_B" in name for name in moved)
        assert all(
            "lora" in name or name.endswith("bias")
            for name in moved
            if "transformer" in name.lower()
        )
    else:
        assert len(moved) > 0.9 * len(after)
    if cell["loss"] == "learnable":
        assert {name.rpartition(".")[2] for name in moved} >= {"query_bias", "document_bias"}

    if cell["resume"]:
        resumed, _ = trained(
            folder, cell, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-2")
        )
        for name, value in weights(resumed).items():
            torch.testing.assert_close(value, after[name], rtol=0, atol=0)

    stm.export(model, tmp_path / "saved")
    text = [row[1] for row in ROWS[:3]]
    torch.testing.assert_close(
        torch.from_numpy(stm.load(tmp_path / "saved").encode_document(text)),
        torch.from_numpy(model.encode_document(text)),
        rtol=1e-5,
        atol=5e-6,  # merged adapters round
    )
