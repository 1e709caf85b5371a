"""The plan of a batch: lines through two steps, and what they say."""

import pytest
import torch
from conftest import CORPUS, QUERIES, RELEVANT_DOCS

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune import plan as plan_module
from st_magnitude.finetune.plan import BatchPlan, plan_batch
from st_magnitude.finetune.settings import TrainConfig

DATA = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS)


@pytest.mark.parametrize("options", [{}, {"loss": "qnorm", "mini_batch_size": 2, "bf16": True, "max_length": 8}])
def test_it_measures_and_trains_nothing(model, options):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_batch(model, DATA, TrainConfig(batch_size=64, **options))
    assert plan.seconds(64) > 0
    assert (plan.columns, plan.batch_size, plan.largest_batch) == (2, 64, None)
    assert "measured on CUDA devices only" in str(plan)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]


def test_the_lines_go_through_both_steps(model, monkeypatch):
    """Two seconds and 3 GB at once, and .1 seconds and .5 GB for a pair, on a device of 80 GB."""

    def step(trainer, rows):
        return 2 + 0.1 * len(rows), int(3e9 + 5e8 * len(rows))

    monkeypatch.setattr(plan_module, "_step", step)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 * 10**9))
    plan = plan_batch(model, DATA, TrainConfig(batch_size=8))
    state = 8 * sum(p.numel() for p in model.parameters())
    assert plan.fixed_bytes == pytest.approx(3e9 + state)
    assert plan.largest_batch == int((72e9 - 3e9 - state) / 5e8) == 137
    assert plan.largest_mini_batch == 274
    assert plan.seconds(8) == pytest.approx(2.8)
    assert "largest batch (--batch-size)" in str(plan)
    assert "90% of 80 GB" in str(plan)


def test_a_device_that_is_too_small():
    assert BatchPlan("cuda:0", 100, 2, 8, 1.0, 0.1, 9e9, 1e8, 8e9).largest_batch == 0
