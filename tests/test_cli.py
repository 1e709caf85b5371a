"""The command line on a small folder: what it writes, and what it refuses before any training."""

import csv
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude.cli import app
from st_magnitude.data import RetrievalData, save_beir
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.compression import table
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


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        (("--dims", "64,256", "--temperatures", ".03,.1"), [(64, 0.03), (64, 0.1), (256, 0.03), (256, 0.1)]),
        (("--dims", "64,256"), [(64, 0.05), (256, 0.05)]),
        (("--temperatures", "0.03,0.1"), [(None, 0.03), (None, 0.1)]),
        ((), [(None, 0.05)]),
    ],
)
def test_dims_and_temperatures_become_terms(folder, model_path, tmp_path, options, terms):
    done = fit(folder, model_path, tmp_path / "out", "--loss", "qnorm", "--max-steps", 1, *options)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [(t["dim"], t["temperature"]) for t in record["terms"]] == terms
    assert record["similarity"] == {"query": 1.0, "document": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dims", "64,x"), "--dims takes whole numbers with commas between"),
        (("--temperatures", "cold"), "--temperatures takes numbers with commas between"),
        (("--dims", "64,512"), "[512] dimensions, but the embeddings of this model have 256"),
        (("--temperatures", "0.1,0"), "must be positive, got 0.0"),
        (("--max-length", 9), "leave out max_length (--max-length)"),
    ],
)
def test_options_are_checked_before_training(folder, model_path, tmp_path, options, message):
    done = fit(folder, model_path, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


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


def measure(folder, model_path, *more):
    return invoke("compress", model_path, "--data", folder, *more)


def test_compress_prints_the_table_of_the_evaluator(folder, tmp_path):
    model = load_transformer(save_transformer(tmp_path / "transformer"))
    model.save_pretrained(str(tmp_path / "tiny"))
    options = ("--split", "dev", "--dims", "16,5", "--top-k", 5, "--similarity", "dot", "--max-length", 9)
    result = measure(folder, tmp_path / "tiny", *options, "--output", tmp_path / "new" / "out")
    assert result.exit_code == 0, result.output
    model.max_seq_length = 9
    evaluator = CompressionEvaluator(QUERIES, CORPUS, RELEVANT_DOCS, dims=[16, 5], top_k=5, similarity="dot")
    evaluator(model)
    assert table(evaluator.cells) in result.output
    with (tmp_path / "new" / "out" / "compression.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [{key: str(value) for key, value in cell.row.items()} for cell in evaluator.cells]
    assert (tmp_path / "new" / "out" / "compression.png").read_bytes().startswith(b"\x89PNG")


def test_compress_by_default_writes_nothing_and_with_output_replaces(folder, model_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    result = measure(folder, model_path, "--split", "dev")
    assert result.exit_code == 0, result.output
    assert set(tmp_path.rglob("*")) == before
    for dims, rows in (("8,4,2", 16), ("8", 8)):
        assert measure(folder, model_path, "--split", "dev", "--dims", dims, "--output", "out").exit_code == 0
        assert len((tmp_path / "out" / "compression.csv").read_text().splitlines()) == 1 + rows


def test_compress_without_matplotlib_keeps_table_and_csv(folder, model_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = measure(folder, model_path, "--split", "dev", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "nDCG@10" in result.stdout
    assert 'pip install "st-magnitude[plot]"' in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compression.csv"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "nope"], "its splits are ['dev', 'train']"),
        (["--data", "no/such/folder"], "no/such/folder"),
        (["--dims", "8,x"], "numbers with commas between, as in 384,192,96; got '8,x'"),
        (["--dims", "8,0"], "at least 1, got 0"),
        (["--dims", "257"], "dims is 257 long, the model's embeddings 256"),
        (["--similarity", "l2"], "No similarity is called 'l2'"),
        (["--output", __file__], "--output is a folder"),
        (["--max-length", 9], "leave out max_length (--max-length)"),
    ],
)
def test_compress_refuses_before_encoding(folder, model_path, monkeypatch, arguments, message):
    monkeypatch.setattr(SentenceTransformer, "encode_query", None)
    result = measure(folder, model_path, "--split", "dev", *arguments)
    assert result.exit_code == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in result.output


def test_compress_refuses_a_model_that_is_not_there(folder):
    result = measure(folder, "/no/such/model", "--split", "dev")
    assert result.exit_code == 2
    assert "/no/such/model" in result.stderr


def test_help_lists_the_commands():
    result = invoke("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "train" in result.output
    assert "compress" in result.output
