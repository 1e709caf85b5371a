"""What train and compare have read is written once, and commands do not measure on it."""

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from _calls import COMMANDS, taking
from _cli import figures, invoke, refusal
from _lookup import bag
from datasets import Dataset
from huggingface_hub.utils import filter_repo_objects
from huggingface_hub.utils._paths import DEFAULT_IGNORE_PATTERNS

import st_magnitude as stm
from st_magnitude.data.beir import DataError, keys_of
from st_magnitude.training.run_folder import WORK
from st_magnitude.workbench.finetune.train import TrainConfig, train
from st_magnitude.workbench.memory import MEMORY, read_by, unread, write_memory

WORDS = [f"w{i}" for i in range(400)]
READ = 150


@pytest.fixture
def place(tmp_path):
    """The folder of a model that has read train and dev and 30 queries of test, and a file."""
    bag(WORDS).save_pretrained(str(tmp_path / "model"))
    read = Dataset.from_dict({"anchor": [f"W{i}  w0!" for i in range(READ)]})
    write_memory(tmp_path / "model", read)
    rows = [
        {"query": f"w{i} w0", "document": f"w{max(i, 1)} " * 2, "split": part}
        for i, part in enumerate(["train"] * 60 + ["dev"] * 60 + ["test"] * 70)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": tmp_path / "pairs.jsonl"}, tmp_path


MEASURING = taking("data", but=["train", "compare", "search"])


def test_every_command_that_measures_is_tested_here():
    assert COMMANDS.keys() <= {*MEASURING, "search", "train", "compare", "check-serving"}


@pytest.mark.parametrize("name", MEASURING)
def test_commands_measure_the_test_split_where_dev_was_read(name, place, caplog):
    options, folder = place
    assert figures(name, folder / "model", **options).get("split", "test") == "test"
    assert "Left out 30 of 70 queries, on which the model was trained." in caplog.text
    assert "on queries of the dev split, so the test split is measured." in caplog.text
    assert "test: 40 queries" in invoke(name, folder / "model", **options).output
    few = options["data"].with_name("few.jsonl")  # a model may have read few of many
    rows = options["data"].read_text().splitlines()
    few.write_text("\n".join(row.replace("test", "dev") for row in rows))
    assert "dev: 40 queries" in invoke(name, folder / "model", data=few).output
    (one := options["data"].with_name("read.jsonl")).write_text("\n".join(rows[:120]))
    assert "trained on all" in refusal(name, folder / "model", data=one)


def test_calibrate_confirms_on_what_neither_chose_nor_was_read(place, tmp_path):
    options, folder = place
    said = refusal("calibrate", folder / "model", confirm="test", **options)
    assert "The test split chooses the exponent, as the model was trained on the dev split" in said
    said = refusal("calibrate", folder / "model", split="test", confirm="train", **options)
    assert "trained on all 60 queries" in said
    rows = options["data"].read_text().replace("test", "dev", 40)  # of which 30 were read
    options["data"].write_text(rows)
    found = figures("calibrate", folder / "model", split="test", confirm="dev", **options)
    assert found["confirm"]["queries"] == 10


def test_a_second_training_is_judged_by_what_the_first_has_not_read(place, static_path):
    options, folder = place
    stm.load(static_path).save_pretrained(str(folder / "table"))
    (folder / "model" / MEMORY).rename(folder / "keys")
    (folder / "table" / MEMORY).parent.mkdir(parents=True)
    (folder / "keys").rename(folder / "table" / MEMORY)
    shared = {"model": folder / "table", "max_steps": 1, "keep_anyway": True, **options}
    found = figures("train", output=folder / "out", confirm="test", **shared)
    assert found["dev"]["where"] == "40 test queries"
    assert "test" not in found
    found = figures(
        "compare", output=folder / "compared", budget="1s", **options, model=static_path
    )
    assert found["test"]["queries"] == 70
    read = {f"w{i} w0" for i in range(60)} | {f"w{max(i, 1)} w{max(i, 1)}" for i in range(60)}
    assert {*keys_of(read)} == {*read_by(str(folder / "compared" / "model"))}
    said = refusal("compare", output=folder / "again", **options, model=folder / "table")
    assert "trained on all" in said


def test_a_training_writes_what_it_has_read_and_nothing_else_does(static_path, tmp_path, caplog):
    words = [f"w{i}" for i in range(60)]
    rng = random.Random(2)
    texts = [" ".join(rng.sample(words, 3)) for _ in range(180)]  # nothing can be learned of them
    pairs = zip(texts[:90], texts[90:], strict=True)
    splits = stm.load_splits([{"query": a, "document": b} for a, b in pairs])
    config = TrainConfig(
        max_steps=2, save_steps=1, folds=0, keep_anyway=True, keep_checkpoints=True
    )
    out = tmp_path / "out"
    trained = train(str(static_path), splits["train"], out, config)
    rows = trained.trainer.train_dataset
    expected = np.unique(keys_of(text for name in rows.column_names for text in rows[name]))
    assert np.array_equal(read_by(str(out)), expected)
    train(str(out), splits["dev"], tmp_path / "again", config)
    assert np.isin(expected, read_by(str(tmp_path / "again"))).all()  # not the second one alone
    assert len(read_by(str(tmp_path / "again"))) > len(expected)

    known = stm.load(out)
    assert type(known) is type(stm.load(static_path))
    known.save_pretrained(str(tmp_path / "copy"))
    stm.export(known, tmp_path / "export")
    assert not [*filter_repo_objects([MEMORY], ignore_patterns=DEFAULT_IGNORE_PATTERNS)]  # uploads
    assert next((out / WORK).glob("checkpoint-*"))
    assert {*tmp_path.rglob(Path(MEMORY).name)} == {out / MEMORY, tmp_path / "again" / MEMORY}
    with caplog.at_level(logging.WARNING):
        assert len(stm.encode(known, splits["train"]).query_ids) == len(splits["train"].asked)
        evaluator = stm.evaluation.MagnitudeEvaluator(
            splits["train"].queries, splits["train"].corpus, splits["train"].relevant
        )
        evaluator(known)
    assert len(evaluator.per_query["matched"]) == len(splits["train"].asked)
    assert "Left out" not in caplog.text
    (out / MEMORY).write_bytes((out / MEMORY).read_bytes()[:-1])
    with pytest.raises(DataError, match=r"texts_read\.u64, the hashes .* is damaged"):
        unread(splits["dev"], str(out))
