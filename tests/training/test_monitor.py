"""NormMonitor: its figures against their definitions, and where they arrive."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _tiny import ROWS, columns, load_transformer
from _trainer import train as trainer_of
from datasets import Dataset, DatasetDict
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import TrainerCallback

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm


class Listener(TrainerCallback):
    """The logs that a tracker would receive."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(model, loss, output, monitor=None, **options):
    """Trains with a monitor; returns the Trainer."""
    if monitor:
        monitor.loss = loss
    defaults = {"max_steps": 6, "logging_steps": 2, "callbacks": [monitor] if monitor else []}
    return trainer_of(model, loss, output, **defaults | options)


def by_hand(x, lr):
    """Independent of the package, in float64."""
    x = np.asarray(x, dtype=np.float64)
    length = np.sqrt((x**2).sum(1))
    cosines = x @ x.T / np.outer(length, length)
    values = np.linalg.eigvalsh(np.cov(x.T))
    return {
        "norm_mean": length.mean(),
        "norm_cv": length.std() / length.mean(),
        **{f"norm_p{p:02}": np.quantile(length, p / 100) for p in (5, 50, 95)},
        "effective_lr": lr / length.mean() ** 2,
        "mean_cosine": cosines[~np.eye(len(x), dtype=bool)].mean(),
        "isoscore": (values.sum() ** 2 / (values**2).sum() - 1) / (x.shape[1] - 1),
    }


def assert_measures(row, role, x, lr):
    for key, value in by_hand(x, lr).items():
        assert row[f"{role}_{key}"] == pytest.approx(value, rel=1e-4), key


def test_plain_loop():
    q, d = torch.randn(40, 6), 3 * torch.randn(40, 6)
    monitor = stm.NormMonitor(every=1)
    row = monitor.update(queries=q, documents=d.clone().requires_grad_(), lr=0.1)
    assert_measures(row, "query", q, 0.1)
    assert_measures(row, "document", d, 0.1)
    assert monitor.rows == [row]
    assert row["step"] == 1


def test_rows_come_every_so_many_steps():
    monitor, x = stm.NormMonitor(every=3), torch.randn(4, 3)
    made = [monitor.update(queries=x, third=x) is not None for _ in range(7)]
    assert made == [True, False, True, False, False, True, False]
    assert [row["step"] for row in monitor.rows] == [1, 3, 6]
    assert "third_norm_mean" in monitor.rows[-1]
    assert "query_effective_lr" not in monitor.rows[-1]


def test_a_frozen_side_has_no_role(folder, model):
    """Its embeddings have no gradient, so the places of the others are unknown."""
    routes = {task: [load_transformer(folder)[0]] for task in ("query", "document")}
    model[0] = Router(routes, default_route="document")
    routes["document"][0].requires_grad_(False)
    loss = stm.CosineRankingLoss(model)
    monitor = stm.NormMonitor(loss, every=1)
    monitor.on_train_begin(None, None, None, model=model)
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    monitor.on_step_begin(None, state, None, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    columns = [dict(model.preprocess([row[i] for row in ROWS[:6]])) for i in range(2)]
    loss([x | {"task": task} for x, task in zip(columns, routes, strict=True)])
    monitor.on_step_end(None, state, None)
    (row,) = monitor.rows
    assert {key.split("_")[0] for key in row} == {"step", "all"}


@pytest.mark.parametrize(
    ("mini_batch_size", "tail"),
    [(None, []), (None, [Normalize()]), (3, []), (3, [ExponentNorm(1.0, 0.5)])],
)
def test_columns_are_roles(model, tmp_path, mini_batch_size, tail):
    """The first row is of the untouched model, for all the texts."""
    raw = [model.encode([row[i] for row in ROWS]) for i in range(4)]
    model.extend(tail)
    similarity = stm.COSINE if tail and isinstance(tail[0], Normalize) else stm.Similarity(1, 0.5)
    loss = stm.MagnitudeRankingLoss(model, similarity, mini_batch_size=mini_batch_size)
    monitor = stm.NormMonitor(every=2)
    options = {"num_negatives": 2, "per_device_train_batch_size": 16, "max_steps": 3}
    trainer = train(model, loss, tmp_path, monitor, **options)
    assert [row["step"] for row in monitor.rows] == [1, 2]
    for role, x in zip(["query", "document", "negative_1", "negative_2"], raw, strict=True):
        assert_measures(monitor.rows[0], role, x, 1e-3)
    assert not any(key.startswith(("all_", "negative_3")) for key in monitor.rows[0])
    assert not any(module._forward_hooks for module in trainer.model.modules())
    assert not loss._forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_the_loss_is_needed(model, tmp_path):
    """Three columns would otherwise be taken for two."""
    with pytest.raises(ValueError, match=r"NormMonitor\(loss\)"):
        trainer_of(model, stm.DotRankingLoss(model), tmp_path, callbacks=[stm.NormMonitor()])


class Odd(MultipleNegativesRankingLoss):
    """A loss that embeds the first column twice."""

    def forward(self, features, labels=None):
        outputs = [self.model(dict(column)) for column in (*features, features[0])]
        return sum(output["sentence_embedding"].square().mean() for output in outputs)


@pytest.mark.parametrize(
    ("make", "roles"),
    [
        (partial(stm.QNormRankingLoss, directions=("doc_to_query",)), {"query", "document"}),
        (Odd, {"all"}),
    ],
)
def test_losses_that_embed_in_their_own_way(model, tmp_path, make, roles):
    monitor = stm.NormMonitor(every=1)
    options = {"num_negatives": 1, "per_device_train_batch_size": 6, "max_steps": 1}
    train(model, make(model), tmp_path, monitor, **options)
    measured = {key.removesuffix("_norm_mean") for key in monitor.rows[0] if "norm_mean" in key}
    assert measured == roles


def test_logs_reach_other_callbacks_and_history(model, tmp_path):
    """Under gradient accumulation, and not with the figures of an evaluation."""
    monitor, data = stm.NormMonitor(every=2), Dataset.from_dict(columns())
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    options |= {"callbacks": [monitor, listener := Listener()]}
    loss = stm.QNormRankingLoss(model)
    trainer = train(model, loss, tmp_path, monitor, eval_data=data, **options)
    assert [row["step"] for row in monitor.rows] == [1, 2, 4, 6]
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    logs = listener.logs
    training = [entry for entry in logs if "loss" in entry]
    assert len(training) == len(history) == 3
    for logged, entry, row in zip(training, history, monitor.rows[1:], strict=True):
        assert row["step"] == entry["step"]
        for key in ("query_norm_mean", "document_isoscore"):
            assert logged[key] == entry[key] == row[key]
    assert any("eval_loss" in entry for entry in logs)
    assert not any("query_norm_mean" in entry for entry in logs if "loss" not in entry)


def test_training_is_the_same_with_and_without(folder, tmp_path):
    models = [load_transformer(folder) for _ in range(2)]
    for model, monitor in zip(models, (None, stm.NormMonitor(every=1)), strict=True):
        train(model, stm.DotRankingLoss(model, mini_batch_size=3), tmp_path, monitor)
    assert all(
        torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True)
    )


def test_several_data_sets(model, tmp_path):
    """Each batch is split by the columns of its own data set."""
    pairs, triplets = (Dataset.from_dict(columns(16, num_negatives=n)) for n in (0, 1))
    losses = {name: stm.DotRankingLoss(model) for name in ("pairs", "triplets")}
    monitor = stm.NormMonitor(every=1)
    data = DatasetDict(pairs=pairs, triplets=triplets)
    options = {"multi_dataset_batch_sampler": "round_robin", "max_steps": 4}
    train(model, losses, tmp_path, monitor, data=data, **options)
    assert sum("negative_1_norm_mean" in row for row in monitor.rows) == 2
    assert not any("all_norm_mean" in row for row in monitor.rows)
