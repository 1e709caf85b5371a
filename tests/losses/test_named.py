"""The losses that train and compare know by name."""

from pathlib import Path

import pytest

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.losses.named import LOSSES
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import make_trainer


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "setting", [{}, {"dims": (4, 8)}, {"temperatures": (0.1, 0.2)}, {"prior": True}], ids=str
)
def test_losses_of_the_table_take_what_train_passes(name, setting, static_model, task, tmp_path):
    assert issubclass(LOSSES[name].load("dims" in setting), stm.MagnitudeRankingLoss)
    if name == "tempspec" and {"dims", "temperatures"} & setting.keys():  # one for each
        setting = {"dims": (4, 8), "temperatures": (0.1, 0.2)}
    data = RetrievalData(*task.values())
    config = TrainConfig(loss=name, batch_size=2, **setting)
    rows = data.triplets(0)
    loss = make_trainer(static_model, data, rows, config, tmp_path, saves=False).loss
    dims = {term.dim for term in loss.terms} - {None}
    assert dims >= {*setting.get("dims", ())}
    assert {term.temperature for term in loss.terms} >= {*setting.get("temperatures", ())}
    assert (loss.prior is not None) <= setting.get("prior", False)


def test_losses_of_the_table_are_exported_and_documented():
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text(encoding="utf-8")
    names = {loss.load().__name__ for loss in LOSSES.values()}
    assert names <= set(stm.__all__)
    assert all(f"`{name}`" in page for name in names)
