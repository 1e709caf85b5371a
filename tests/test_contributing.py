"""CONTRIBUTING.md's recipes for a similarity, a loss, a regularizer and a command."""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import torch
from _trainer import train as train_tiny
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from torch.nn.functional import cross_entropy
from typer import Option
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude import similarity
from st_magnitude._config import check_ranges
from st_magnitude.commands.core import Figures, app, command
from st_magnitude.comparison.config import CompareConfig, grid_of
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune import train as finetune
from st_magnitude.losses.table import LOSSES, NamedLoss

HALF = stm.Similarity(gamma_query=1.0, gamma_document=0.5)


def test_add_a_similarity(model, monkeypatch):
    monkeypatch.setitem(similarity._NAMED, "half", HALF)
    assert HALF.name == "half"
    loss = stm.MagnitudeRankingLoss(stm.prepare(model, "half"), "half", scale=20.0)
    queries, documents = torch.randn(2, 4, 8)
    norms = documents.norm(dim=1)
    logits = 20 * torch.cosine_similarity(queries[:, None], documents, dim=-1) * norms.sqrt()
    expected = cross_entropy(logits, torch.arange(4))
    torch.testing.assert_close(loss.compute_loss_from_embeddings([queries, documents]), expected)


class DoubleLoss(stm.MagnitudeRankingLoss):
    """A loss that is twice as large as InfoNCE."""

    fixed_similarity = stm.QNORM

    def compute_loss_from_embeddings(self, embeddings, labels=None):
        return 2 * super().compute_loss_from_embeddings(embeddings, labels)


def test_add_a_loss(static_path, tmp_path, monkeypatch):
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)
    module = ModuleType("st_magnitude.losses.double")
    module.DoubleLoss = DoubleLoss
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = NamedLoss("double.DoubleLoss", "qnorm", keeps_norms=True, is_compared=True)
    monkeypatch.setitem(LOSSES, "double", row)
    config = finetune.TrainConfig(loss="double", max_steps=2, folds=0)
    trained = finetune.train(str(static_path), data, tmp_path / "model", config)
    assert isinstance(trained.trainer.loss, DoubleLoss)
    assert trained.trainer.model.similarity_fn_name == "dot"
    tried = grid_of(CompareConfig(losses=["double"]), is_static=True)
    assert {candidate.loss for candidate in tried} == {"cosine", "double"}


def test_losses_of_the_table_are_exported_and_documented():
    page = (Path(__file__).parents[1] / "docs" / "losses.md").read_text(encoding="utf-8")
    names = {loss.load().__name__ for loss in LOSSES.values()}
    assert names <= set(stm.__all__)
    assert all(f"`{name}`" in page for name in names)


def shortness(embeddings):
    return embeddings.float().square().mean()


class FarColumns:
    def of_columns(self, columns):
        return (columns[0] - columns[1]).float().square().mean()


def test_add_a_regularizer(model, tmp_path):
    loss = stm.CosineRankingLoss(model, regularizers=[shortness, (FarColumns(), 0.5)])
    trainer = train_tiny(model, loss, tmp_path, max_steps=1)
    assert {"shortness", "far_columns", "infonce"} <= trainer.state.log_history[0].keys()


@dataclass(frozen=True)
class CountConfig:
    texts: Annotated[int, Option(min=1, help="Texts to count.")] = 3

    def __post_init__(self):
        check_ranges(self)


@pytest.mark.parametrize(("number", "code"), [(5, 0), (0, 2)])
def test_add_a_command(monkeypatch, number, code):
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))

    @command
    def count(*, settings: CountConfig) -> Figures:
        """Count texts."""
        return {"texts": settings.texts}

    result = CliRunner().invoke(app, ["count", "--texts", str(number), "--json"])
    assert result.exit_code == code
    assert ('{"texts": 5}' in result.stdout) == (code == 0)
