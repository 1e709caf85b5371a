"""The command line on a small folder: what it writes, and what it refuses before any training."""

import itertools
import json

import numpy as np
import pytest
import torch
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.cli import app
from st_magnitude.data import RetrievalData, save_beir
from st_magnitude.train import LOSSES, train


@pytest.fixture
def folder(tmp_path):
    """A data set with both splits and one judged negative a query."""
    negatives = {q: {"d19"} for q in QUERIES}
    for split in ("train", "dev"):
        save_beir(RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, negatives), tmp_path / "data", split)
    return tmp_path / "data"


@pytest.fixture
def model_path(static_model, tmp_path):
    static_model.save_pretrained(str(tmp_path / "static"))
    return tmp_path / "static"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def fit(folder, model_path, output, *more):
    return invoke("train", "--data", folder, "--model", model_path, "--output", output, "--batch-size", 4, *more)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_train_saves_a_model_that_ranks_as_trained(folder, model_path, tmp_path, loss):
    output = tmp_path / "out"
    result = fit(folder, model_path, output, "--loss", loss, "--learning-rate", 0.05, "--epochs", 3, "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "matched_ndcg@10" in result.output  # the dev split was scored
    assert ("best - cosine" in result.output) == (loss != "cosine")  # and swept, where there is length

    record = json.loads((output / "training.json").read_text())
    losses = [entry["loss"] for entry in record["log"] if "loss" in entry] or [record["log"][-1]["train_loss"]]
    assert record["loss"] == LOSSES[loss].__name__
    assert np.isfinite(losses).all()
    model = stm.load(output)
    expected = {"cosine": "cosine", "dnorm": "cosine"}.get(loss, "dot")
    assert model.similarity_fn_name == expected
    before = SentenceTransformer(str(model_path), similarity_fn_name=expected)
    scores = [InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT_DOCS)(m) for m in (before, model)]
    assert scores[1][f"{expected}_ndcg@10"] > scores[0][f"{expected}_ndcg@10"]  # it has seen these pairs


def test_judged_negatives_become_hard_negatives(folder, model_path, tmp_path):
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {q: {"d19"} for q in QUERIES})
    trainer = train(str(model_path), data, tmp_path / "a", max_steps=1, batch_size=4)
    assert trainer.train_dataset.column_names == ["anchor", "positive", "negative_1"]
    assert set(trainer.train_dataset["negative_1"]) == {CORPUS["d19"]}
    trainer = train(
        str(model_path), RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS), tmp_path / "b", max_steps=1, batch_size=4
    )
    assert trainer.train_dataset.column_names == ["anchor", "positive"]


def test_nothing_is_overwritten(folder, model_path, tmp_path):
    output = tmp_path / "out"
    assert fit(folder, model_path, output, "--max-steps", 2, "--save-steps", 1).exit_code == 0
    weights = sorted(p.name for p in output.rglob("*.safetensors"))
    again = fit(folder, model_path, output)
    assert again.exit_code == 2
    assert "already holds a trained model" in again.output
    assert sorted(p.name for p in output.rglob("*.safetensors")) == weights


def test_an_interrupted_run_goes_on_with_resume(folder, model_path, tmp_path, monkeypatch):
    options = ("--max-steps", 5, "--save-steps", 2, "--learning-rate", 0.05)
    assert fit(folder, model_path, tmp_path / "straight", *options).exit_code == 0

    step, calls = SentenceTransformerTrainer.training_step, itertools.count(1)

    def power_cut(*args, **kwargs):
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformerTrainer, "training_step", power_cut)
        fit(folder, model_path, tmp_path / "broken", *options)
    assert not (tmp_path / "broken" / "modules.json").exists()

    refused = fit(folder, model_path, tmp_path / "broken", *options)
    assert refused.exit_code == 2
    assert "checkpoint-2" in refused.output
    assert "--resume" in refused.output
    assert fit(folder, model_path, tmp_path / "broken", *options, "--resume").exit_code == 0
    straight, resumed = (SentenceTransformer(str(tmp_path / n)).state_dict() for n in ("straight", "broken"))
    for name, weights in straight.items():
        torch.testing.assert_close(weights, resumed[name], rtol=0, atol=0)


def test_malformed_data_is_refused_with_file_and_line(folder, tmp_path):
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    lines[3] = '{"_id": "d04", "text": ""}'
    (folder / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    result = fit(folder, "no/such/model", tmp_path / "out")
    assert result.exit_code == 2
    assert "corpus.jsonl" in result.output
    assert "line 4" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "nope"], "nope"),
        (["--loss", "euclid"], "euclid"),
        (["--data", "no/such/folder"], "no/such/folder"),
    ],
)
def test_bad_arguments_are_named(folder, tmp_path, arguments, message):
    result = fit(folder, "no/such/model", tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_help_lists_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "train" in result.output
