"""NormMonitor: its figures against their definitions, in a plain loop and in a Trainer, and where
they arrive."""

import csv
import logging

import numpy as np
import pytest
import torch
from _tiny import ROWS, columns, load_transformer
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import nn
from transformers import TrainerCallback

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

ARGUMENTS = {"max_steps": 6, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
ARGUMENTS |= {"lr_scheduler_type": "constant", "logging_steps": 2, "save_strategy": "no"}
ARGUMENTS |= {"report_to": [], "disable_tqdm": True, "use_cpu": True}


class Listener(TrainerCallback):
    """The logs that a tracker would receive."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(
    model,
    loss,
    output,
    monitor=None,
    num_negatives=0,
    data=None,
    eval_data=None,
    listener=None,
    resume=None,
    **options,
):
    if monitor:
        monitor.loss = loss
    trainer = SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(str(output), **ARGUMENTS | options),
        train_dataset=data or Dataset.from_dict(columns(num_negatives=num_negatives)),
        eval_dataset=eval_data,
        loss=loss,
        callbacks=[callback for callback in (listener, monitor) if callback],
    )
    if listener:
        stm.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


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


# --- a loop of one's own --------------------------------------------------------------------------


def test_plain_loop():
    q, d = torch.randn(40, 6), 3 * torch.randn(40, 6)
    monitor = stm.NormMonitor(every=1)
    row = monitor.update(queries=q, documents=d.clone().requires_grad_(), lr=0.1)
    assert_measures(row, "query", q, 0.1)
    assert_measures(row, "document", d, 0.1)
    assert monitor.rows == [row]
    assert row["step"] == 1
    right = np.arange(40)
    sides = (d, nn.functional.normalize(d))
    by_dot, by_cosine = (np.mean([np.argmax(q @ x.T, axis=1) == right]) for x in sides)
    assert row["dot_cosine_gap"] == pytest.approx(by_dot - by_cosine)


def test_rows_come_every_so_many_steps():
    monitor, x = stm.NormMonitor(every=3), torch.randn(4, 3)
    made = [monitor.update(queries=x, third=x) is not None for _ in range(7)]
    assert made == [True, False, True, False, False, True, False]
    assert [row["step"] for row in monitor.rows] == [1, 3, 6]
    assert "third_norm_mean" in monitor.rows[-1]
    assert "query_effective_lr" not in monitor.rows[-1]


# --- the alarm ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "queries", "documents"),
    [
        ("mean norm", 1e-5 * torch.eye(20), torch.eye(20)),
        ("mean norm", torch.eye(20) * float("nan"), torch.eye(20)),
        ("mean cosine", torch.eye(20) + 100, torch.eye(20)),
    ],
)
def test_collapse_is_told_once(caplog, kind, queries, documents):
    monitor = stm.NormMonitor(every=1)
    for _ in range(3):
        monitor.update(queries=queries, documents=documents)
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "Collapse at step 1" in told[0]
    assert kind in told[0]


@pytest.mark.parametrize("num_rows", [8, 40])
def test_health_is_not_reported(caplog, num_rows):
    monitor = stm.NormMonitor(every=1)
    for q, noise in torch.randn(20, 2, num_rows, 16):
        monitor.update(queries=q, documents=q + noise, lr=1e-3)
    assert not caplog.records


# --- sentence-transformers' Trainer ---------------------------------------------------------------


@pytest.mark.parametrize("mini_batch_size", [None, 3], ids=["plain", "cached"])
@pytest.mark.parametrize("tail", ["raw", "normalize", "exponents"])
def test_columns_are_roles(model, tmp_path, mini_batch_size, tail):
    """The first row is of the untouched model, and a batch is all texts."""
    raw = [model.encode([row[i] for row in ROWS]) for i in range(4)]
    if tail == "normalize":
        model.append(Normalize())
        similarity = "cosine"
    elif tail == "raw":
        similarity = "qnorm"
    else:
        model.append(ExponentNorm(1.0, 0.5))
        similarity = stm.Similarity(1.0, 0.5)
    loss = stm.MagnitudeRankingLoss(model, similarity, mini_batch_size=mini_batch_size)
    monitor = stm.NormMonitor(every=2)
    trainer = train(model, loss, tmp_path, monitor, 2, per_device_train_batch_size=16, max_steps=3)
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
        train(model, stm.QNormRankingLoss(model), tmp_path, listener=stm.NormMonitor())


def test_a_loss_that_leaves_columns_out(model, tmp_path):
    monitor = stm.NormMonitor(every=1)
    loss = stm.QNormRankingLoss(model, directions=("doc_to_query",))
    train(model, loss, tmp_path, monitor, num_negatives=1, per_device_train_batch_size=6)
    assert "document_norm_mean" in monitor.rows[0]
    assert "negative_1_norm_mean" not in monitor.rows[0]
    assert "all_norm_mean" not in monitor.rows[0]


def test_a_loss_that_embeds_in_its_own_way(model, tmp_path):
    class Odd(MultipleNegativesRankingLoss):
        def forward(self, features, labels=None):
            return sum(
                self.model(dict(x))["sentence_embedding"].square().mean()
                for x in (*features, features[0])
            )

    monitor = stm.NormMonitor(every=1)
    train(model, Odd(model), tmp_path, monitor)
    assert "all_norm_mean" in monitor.rows[0]
    assert "query_norm_mean" not in monitor.rows[0]


def test_gradient_accumulation_and_evaluation(model, tmp_path):
    loss, monitor = MultipleNegativesRankingLoss(model), stm.NormMonitor(every=1)
    model.append(Normalize())
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}
    options |= {"eval_strategy": "steps", "eval_steps": 1}
    eval_data = Dataset.from_dict(columns())
    trainer = train(model, loss, tmp_path, monitor, eval_data=eval_data, **options)
    assert [row["step"] for row in monitor.rows] == [1, 2, 3, 4, 5, 6]
    assert all("query_norm_mean" in row and "all_norm_mean" not in row for row in monitor.rows)
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert not any("query_norm_mean" in entry for entry in evaluations)


def test_logs_reach_other_callbacks_history_and_csv(model, tmp_path):
    listener, file = Listener(), tmp_path / "new" / "norms.csv"
    monitor = stm.NormMonitor(every=2, csv=file)
    trainer = train(model, stm.QNormRankingLoss(model), tmp_path, monitor, listener=listener)
    assert trainer.callback_handler.callbacks[0] is monitor
    logged = (listener.logs, trainer.state.log_history)
    training, history = ([logs for logs in of if "loss" in logs] for of in logged)
    assert len(training) == len(history) == 3
    for logs, entry, row in zip(training, history, monitor.rows[1:], strict=True):
        assert row["step"] == entry["step"]
        for key in ("query_norm_mean", "document_isoscore", "dot_cosine_gap"):
            assert logs[key] == entry[key] == row[key]
    assert not any("query_norm_mean" in logs for logs in listener.logs if "loss" not in logs)
    assert rows_of(file) == monitor.rows
    assert [row["step"] for row in monitor.rows] == [1, 2, 4, 6]


def test_training_is_the_same_with_and_without(folder, tmp_path):
    models = [load_transformer(folder) for _ in range(2)]
    for model, monitor in zip(models, (None, stm.NormMonitor(every=1)), strict=True):
        train(model, stm.DotRankingLoss(model, mini_batch_size=3), tmp_path, monitor)
    parameters = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(*both) for both in parameters)


def test_losses_of_several_data_sets(model, tmp_path):
    """Each batch is split by the columns of its own data set."""
    data = DatasetDict(
        pairs=Dataset.from_dict(columns(16)),
        triplets=Dataset.from_dict(columns(16, num_negatives=1)),
    )
    losses = {
        "pairs": stm.DotRankingLoss(model),
        "triplets": stm.DotRankingLoss(model, mini_batch_size=3),
    }
    monitor = stm.NormMonitor(every=1)
    options = {"multi_dataset_batch_sampler": "round_robin", "max_steps": 4}
    train(model, losses, tmp_path, monitor, data=data, **options)
    assert sum("negative_1_norm_mean" in row for row in monitor.rows) == 2
    assert not any("all_norm_mean" in row for row in monitor.rows)


def rows_of(file):
    """The numbers in a csv file."""
    lines = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return [{key: float(value) for key, value in line.items() if value} for line in lines]


def test_a_run_that_resumes_keeps_its_rows(folder, tmp_path):
    """Those before its checkpoint; the steps after it are made again."""
    file, options = tmp_path / "norms.csv", {"save_strategy": "steps", "save_steps": 2}
    for resume in (None, str(tmp_path / "checkpoint-2")):
        model = load_transformer(folder)
        monitor = stm.NormMonitor(every=1, csv=file)
        train(model, stm.DotRankingLoss(model), tmp_path, monitor, resume=resume, **options)
        assert [row["step"] for row in monitor.rows] == [1, 2, 3, 4, 5, 6]
        assert rows_of(file) == monitor.rows


def test_the_csv_file_grows_columns(tmp_path):
    monitor = stm.NormMonitor(every=1, csv=tmp_path / "norms.csv")
    for length in range(1, 5):  # a role that comes later
        others = {"negative_1": torch.randn(9, 4)} if length > 2 else {}
        queries, documents = length * torch.randn(9, 4), torch.randn(9, 4)
        monitor.update(queries=queries, documents=documents, lr=0.1, **others)
    assert rows_of(tmp_path / "norms.csv") == monitor.rows
