"""A retriever learns from next-token prediction alone which document helps."""

from __future__ import annotations

import random

import copy_task
import pytest
from datasets import Dataset
from revela_tiny import arguments

from st_magnitude.revela import RevelaLoss, RevelaTrainer


@pytest.mark.slow
def test_the_copy_task_is_learned(tmp_path) -> None:
    model, lm = copy_task.retriever(), copy_task.warmed_lm()
    loss = RevelaLoss(model, lm, copy_task.tokenizer(), temperature=0.05, query_part="full", prefixes=("", ""))
    before = copy_task.partner_mass(loss)
    rng = random.Random(1)
    rows = Dataset.from_dict({"chunks": [copy_task.group(rng) for _ in range(200)]})
    args = arguments(tmp_path, max_steps=100, learning_rate=1e-2, logging_steps=20)
    trainer = RevelaTrainer(model=model, args=args, loss=loss, train_dataset=rows, lm_lora=None, lm_learning_rate=1e-3)
    trainer.train()
    after = copy_task.partner_mass(loss)
    print([entry["next_token"] for entry in trainer.state.log_history if "next_token" in entry], before, after)
    assert before < 0.6
    assert after > before + 0.2
