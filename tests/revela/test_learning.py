"""A retriever learns from next-token prediction alone which document helps."""

import copy
import random

import pytest
from benchmarks.studies.revela import copy_task
from datasets import Dataset
from revela_tiny import arguments

from st_magnitude.revela import RevelaLoss, RevelaTrainer


@pytest.mark.slow
def test_the_copy_task_is_learned(tmp_path) -> None:
    """Similarity moves to the partner, .27 to .98 when this was written, where documents share a
    group; and does not where groups are drawn at random (the paper's ablation).
    """
    lm = copy_task.warmed_lm(seed=0, v_norm=True)
    rng = random.Random(1)
    groups = [copy_task.group(rng) for _ in range(200)]
    kth = [list(documents) for documents in zip(*groups, strict=True)]  # of all groups
    apart = [documents[i : i + 8] for documents in kth for i in range(0, 200, 8)]
    rows = {"together": groups, "apart": apart}
    mass = {}
    for name, chunks in rows.items():
        model = copy_task.retriever()
        options = {"temperature": 0.05, "prefixes": ("", "")}
        loss = RevelaLoss(model, copy.deepcopy(lm), copy_task.tokenizer(), **options)
        before = copy_task.partner_mass(loss)
        args = arguments(tmp_path / name, max_steps=100, learning_rate=3e-2)
        data = Dataset.from_list([copy_task.row_of(row) for row in chunks])
        RevelaTrainer(
            model, args, loss=loss, train_dataset=data, lm_lora=None, lm_learning_rate=1e-4
        ).train()
        mass[name] = copy_task.partner_mass(loss)
    assert before < 0.35
    assert mass["together"] > 0.8
    assert mass["apart"] < 0.4
