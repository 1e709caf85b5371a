"""Training logs and compression tables, read from what runs and commands wrote."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from _planted import found_beside_a_baseline, planted

from st_magnitude import NormMonitor
from st_magnitude.diagnosis.readers import read_compression, read_log
from st_magnitude.diagnosis.report import write_report
from st_magnitude.evaluation import CompressionCell, CompressionEvaluator

pytest.importorskip("matplotlib")
CELLS = [
    CompressionCell(16, "float32", "none", 64, 0.5, 1.0),
    CompressionCell(16, "binary", "query", 2, 0.45, 0.9),
    CompressionCell(8, "int8", "none", 8, 0.3, 0.6),
]


@pytest.fixture(scope="module")
def found():
    return found_beside_a_baseline()


def test_logs_of_a_trainer_and_of_a_monitor(tmp_path):
    for step, folder in ((9, "checkpoint-9"), (10, "checkpoint-10")):
        (tmp_path / folder).mkdir()
        rows = [{"step": 0, "auto_scale": 2.0}, {"step": step, "loss": 1.0}, {"total": 3}, {"step": "?"}]
        state = {"log_history": rows, "global_step": step}
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps(state))
    assert read_log(tmp_path) == [{"step": 0, "auto_scale": 2.0}, {"step": 10, "loss": 1.0}]
    assert read_log(tmp_path / "checkpoint-9") == read_log(tmp_path / "checkpoint-9" / "trainer_state.json")
    monitor = NormMonitor(every=1, csv=tmp_path / "norms.csv")
    for _ in range(3):
        monitor.update(queries=torch.eye(4), documents=2 * torch.eye(4), lr=0.1)
    assert read_log(str(tmp_path / "norms.csv")) == monitor.rows


def test_a_log_without_steps_is_refused(found, tmp_path):
    with pytest.raises(ValueError, match="The log has no row with a step"):
        write_report(found, tmp_path / "out", log=[{"loss": 1.0}])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("s.json", "{", "s.json is not the state of a Trainer"),
        ("s.json", "[]", "s.json is not the state of a Trainer"),
        ("s.json", '{"log_history": []}', "s.json has no row with a step"),
        ("s.json", '{"log_history": {"step": 1}}', "s.json has no row with a step"),
        ("s.csv", "a,b\n1,2\n", "s.csv has no row with a step"),
        ("s.csv", "", "s.csv has no row with a step"),
        ("folder/x.txt", "", "folder has neither training.json, revela.json, trainer_state.json nor checkpoints"),
    ],
)
def test_what_is_no_log_is_named(found, tmp_path, name, content, message):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    log = file.parent if "/" in name else file
    with pytest.raises(ValueError, match=rf"{message}.*: pass the trainer_state\.json"):
        write_report(found, tmp_path / "out", log=log)
    assert not (tmp_path / "out").exists()


def test_tables_of_compression(tmp_path):
    model, *task = planted(0, "relevance", num_queries=30, similarity="dot")
    evaluator = CompressionEvaluator(*task, dims=[16, 8])
    for epoch in (1, 2):
        evaluator(model, output_path=str(tmp_path), epoch=epoch, steps=5)
    assert read_compression(tmp_path / evaluator.csv_file) == evaluator.cells
    with (tmp_path / "c.csv").open("w", newline="") as file:  # as the command writes it
        writer = csv.DictWriter(file, fieldnames=list(CELLS[0].row))
        writer.writeheader()
        writer.writerows(cell.row for cell in CELLS)
    assert read_compression(tmp_path / "c.csv") == CELLS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("dim,precision\n16,int8\n", "has no column"),
        ("dim,precision,rescoring,bytes_per_document,ndcg@10,retention\n16,int8,none,many,.5,1\n", "'many'"),
        ("", "has no rows"),
        ("dim,precision,rescoring,bytes_per_document,ndcg@10,retention\n", "has no rows"),
    ],
)
def test_what_is_no_table_is_named(found, tmp_path, content, message):
    (tmp_path / "c.csv").write_text(content)
    with pytest.raises(ValueError, match=rf"c\.csv .*{message}.*st-magnitude compress"):
        write_report(found, tmp_path / "out", compression=tmp_path / "c.csv")
    with pytest.raises(ValueError, match="There are no cells"):
        write_report(found, tmp_path / "out", compression=[])
    assert not (tmp_path / "out").exists()
