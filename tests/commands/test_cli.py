"""The command line on a small folder: what it writes, and what it refuses before any training."""

import contextlib
import csv
import errno
import itertools
import json
import os
import shlex
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
import typer
from _embedding_server import EmbeddingServer, serving
from _tiny import load_tokens, load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS, save_splits
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import BoW
from test_docs import ROOT
from transformers import TrainingArguments
from typer.testing import CliRunner

import st_magnitude as stm
from st_magnitude._files import locked_folder
from st_magnitude.commands.app import app
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator, LateInteractionEvaluator
from st_magnitude.evaluation.compression import table
from st_magnitude.finetune.run import LOSSES, TrainConfig, train
from st_magnitude.result import interval
from st_magnitude.training.trainer import _finished_state as finished_state


@pytest.fixture
def folder(tmp_path):
    """A data set with both splits."""
    return save_splits(tmp_path / "data", "train", "dev")


@pytest.fixture
def model_path(static_model, tmp_path):
    static_model.save_pretrained(str(tmp_path / "static"))
    return tmp_path / "static"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def fit(folder, model_path, output, *more, code=0):
    done = invoke("train", "--data", folder, "--model", model_path, "--output", output, "--batch-size", 4, *more)
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize("loss", list(LOSSES))
def test_train_saves_a_model_that_ranks_as_trained(folder, model_path, tmp_path, loss):
    output = tmp_path / "out"
    options = ("--learning-rate", 0.05, "--epochs", 3, "--seed", 3, "--keep-scoring", "--keep-checkpoints")
    result = fit(folder, model_path, output, "--loss", loss, *options)
    if loss in ("cosine", "dnorm"):  # the pairs were trained on
        assert "The trained model is better than the pretrained one on the dev split" in " ".join(result.output.split())

    assert len(list((output / "checkpoints").glob("checkpoint-*"))) == 1
    record = json.loads((output / "training.json").read_text())
    losses = [entry["loss"] for entry in record["log"] if "loss" in entry] or [record["log"][-1]["train_loss"]]
    assert record["loss"] == LOSSES[loss].__name__
    assert np.isfinite(losses).all()
    model = stm.load(output)
    expected = {"cosine": "cosine", "dnorm": "cosine"}.get(loss, "dot")
    assert model.similarity_fn_name == expected
    before = SentenceTransformer(str(model_path), similarity_fn_name=expected)
    assert ndcg(model, expected) > ndcg(before, expected)  # it has seen these pairs


def ndcg(model, similarity):
    """By sentence-transformers."""
    return InformationRetrievalEvaluator(QUERIES, CORPUS, RELEVANT_DOCS)(model)[f"{similarity}_ndcg@10"]


def test_train_compares_with_the_pretrained_model_and_saves_what_scores_best(folder, model_path, tmp_path):
    """With the rate 0 the trained model is the pretrained one, so every figure can be checked."""
    options = ("--loss", "qnorm", "--learning-rate", 0, "--max-steps", 1)
    result = fit(folder, model_path, tmp_path / "best", *options, "--json")
    report = report_of(result)
    dev = report["dev"]
    pretrained = [SentenceTransformer(str(model_path), similarity_fn_name=name) for name in ("cosine", "dot")]
    cosine, dot = ndcg(pretrained[0], "cosine"), ndcg(pretrained[1], "dot")
    assert dev["pretrained"] == pytest.approx(cosine, abs=1e-6)
    assert dev["as_trained"]["ndcg"] == pytest.approx(dot, abs=1e-6)
    assert dev["as_trained"]["gain"][0] == pytest.approx(dot - cosine, abs=1e-6)
    assert dev["as_trained"]["exponent"] == 0.0
    assert dev["best"]["exponent"] == dev["saved"]["exponent"] == 1.0  # these few queries prefer cosine
    assert not dev["is_better"]
    said = " ".join(result.stderr.split())
    assert "The trained model is not clearly better than the pretrained one on the dev split: nDCG@10" in said
    assert f'Load it with SentenceTransformer("{tmp_path / "best"}")' in result.stderr
    assert report["norm_warning"] in said  # these answers are long, and their norms small
    assert "Never-relevant documents have the larger norms" in report["norm_warning"]
    assert f"Next:\n  st-magnitude diagnose {tmp_path / 'best'} --data {folder} --split dev" in result.stderr
    saved = SentenceTransformer(str(tmp_path / "best"))
    assert saved.similarity_fn_name == "cosine"
    assert ndcg(saved, "cosine") == pytest.approx(dev["saved"]["ndcg"], abs=1e-6)

    dev = report_of(fit(folder, model_path, tmp_path / "kept", *options, "--keep-scoring", "--json"))["dev"]
    assert dev["saved"] == dev["as_trained"]
    assert dev["best"]["exponent"] == 1.0
    assert dev["saved"]["gain"][2] < 0  # as these few queries prefer cosine, and the user has dot, which is saved
    assert SentenceTransformer(str(tmp_path / "kept")).similarity_fn_name == "dot"


@pytest.mark.parametrize("long_ones_answer", [False, True])
def test_train_says_that_norms_mark_the_wrong_documents(model_path, tmp_path, caplog, long_ones_answer):
    """The mean of token vectors is the smaller, the longer a text is, and the rate 0 leaves it so."""
    answers = [key for key in CORPUS if (key < "d13") == long_ones_answer]
    relevant = {query: {answer} for query, answer in zip(QUERIES, answers, strict=False)}
    queries = {key: QUERIES[key] for key in relevant}
    shown = {query: {"d19"} for query in relevant} if long_ones_answer else {}
    data = RetrievalData(queries, CORPUS, relevant, shown)
    config = TrainConfig(loss="qnorm", batch_size=4, max_steps=1, learning_rate=0.0)
    trained = train(str(model_path), data, tmp_path / "out", config)
    assert (trained.geometry["after"]["cohens_d"] < 0) == long_ones_answer
    assert bool(trained.norm_warning) == long_ones_answer
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("never-relevant" in card.lower()) == long_ones_answer
    assert ("no training row has a negative" in caplog.text) == (not shown)


def test_train_without_a_dev_split_says_that_nothing_was_compared(folder, model_path, tmp_path):
    result = fit(folder, model_path, tmp_path / "out", "--max-steps", 1, "--dev-split", "validation")
    said = " ".join(result.output.split())
    assert "could not be compared with the pretrained one" in said
    assert f"{folder / 'qrels' / 'validation.tsv'}, or name another split with --dev-split" in said


def test_max_length_limits_training_alone(folder, tmp_path, monkeypatch):
    """With the rate 0, the pretrained and the trained model are one model, with the length that it was given."""
    model = load_transformer(save_transformer(tmp_path / "plain"))
    model.save_pretrained(str(tmp_path / "model"))
    widths = []
    step = SentenceTransformerTrainer.training_step

    def watched(self, model, inputs, *rest):
        widths.extend(value.shape[1] for name, value in inputs.items() if name.endswith("input_ids"))
        return step(self, model, inputs, *rest)

    monkeypatch.setattr(SentenceTransformerTrainer, "training_step", watched)
    options = ("--learning-rate", 0, "--max-steps", 1, "--max-length", 4, "--json")
    dev = report_of(fit(folder, tmp_path / "model", tmp_path / "out", *options))["dev"]
    assert set(widths) == {4}
    assert dev["pretrained"] == pytest.approx(ndcg(model, "cosine"), abs=1e-6)
    assert dev["as_trained"]["ndcg"] == pytest.approx(dev["pretrained"], abs=1e-6)
    assert SentenceTransformer(str(tmp_path / "out")).max_seq_length == model.max_seq_length == 64
    model.max_seq_length = 5
    dev = report_of(fit(folder, tmp_path / "model", tmp_path / "short", *options, "--serve-length", 5))["dev"]
    assert dev["as_trained"]["ndcg"] == pytest.approx(ndcg(model, "cosine"), abs=1e-6)
    assert dev["as_trained"]["ndcg"] != pytest.approx(dev["pretrained"], abs=1e-3)
    assert SentenceTransformer(str(tmp_path / "short")).max_seq_length == 5


def test_a_model_that_is_clearly_worse_is_not_saved(folder, model_path, tmp_path):
    options = ("--learning-rate", 100, "--max-steps", 6, "--loss", "dot", "--keep-scoring")
    worse = fit(folder, model_path, tmp_path / "out", *options, "--json", code=3)
    assert json.loads(worse.stdout)["dev"]["saved"]["gain"][2] < 0
    said = " ".join(worse.stderr.split())
    assert "The trained model is clearly worse than the pretrained one on the dev split: nDCG@10 changes by -" in said
    assert "Next:" not in said
    assert not (tmp_path / "out" / "modules.json").exists()
    fit(folder, model_path, tmp_path / "out", *options, "--resume", "--keep-anyway")
    assert (tmp_path / "out" / "modules.json").exists()


def test_a_batch_of_more_than_all_pairs_is_said(folder, model_path, tmp_path, caplog, monkeypatch):
    fit(folder, model_path, tmp_path / "out", "--max-steps", 1, "--batch-size", 100000)
    assert "batch_size=100,000 is more than the 12 training pairs fill: every step takes 12 pairs" in caplog.text
    monkeypatch.setattr("transformers.TrainingArguments.world_size", 7)
    result = fit(folder, model_path, tmp_path / "none", code=2)
    assert "12 training pairs are too few for 7 processes" in result.output


def test_documents_that_the_model_reads_as_one_text_are_refused(tmp_path):
    """Below the letterhead they differ, so with more tokens they train."""
    model = save_transformer(tmp_path / "plain")
    load_transformer(model).save_pretrained(str(tmp_path / "model"))
    corpus = {name: f"see also the notes: {text}" for name, text in CORPUS.items()}
    RetrievalData(QUERIES, corpus, RELEVANT_DOCS).save(tmp_path / "data", "train")
    options = ("--max-steps", 1, "--max-length")
    refused = fit(tmp_path / "data", tmp_path / "model", tmp_path / "out", *options, 4, code=2)
    assert "100% of the rows have no negative in a batch of 4" in " ".join(refused.output.split())
    fit(tmp_path / "data", tmp_path / "model", tmp_path / "out", *options, 30)


@pytest.mark.parametrize("by", ["id", "text"])
def test_splits_that_share_queries_are_refused(folder, model_path, tmp_path, by):
    copied = {"id": "train-q1", "text": "copy"}[by]
    with (folder / "queries.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "copy", "text": f" {QUERIES['q1'].lower()}  train"}) + "\n")
    with (folder / "qrels" / "dev.tsv").open("a") as file:
        file.write(f"{copied}\td01\t1 \n")  # a trailing space, too
    for command in ("train", "compare", "diagnose", "calibrate", "abstain"):
        trains = command in ("train", "compare")
        options = ("--model", model_path, "--output", tmp_path / "out") if trains else (model_path,)
        done = invoke(command, *options, "--data", folder)
        assert done.exit_code == 2
        assert f"1 queries of the dev split are also in the train split, such as {copied!r}" in done.stderr
    for command in ("calibrate", "abstain"):
        for split, says in (("dev", "are also in the train split"), ("train", "cannot choose and confirm")):
            chosen = invoke(command, model_path, "--data", folder, "--split", "train", "--confirm", split)
            assert says in chosen.stderr


@pytest.mark.parametrize("source", ["README.md", "docs/cli.md", "train"])
def test_the_printed_sequence_runs_on_one_model(folder, tmp_path, monkeypatch, source):
    """train, diagnose, calibrate, compress and check-serving, with the arguments as printed."""
    monkeypatch.chdir(tmp_path)
    folder.rename("my-data")
    load_transformer(save_transformer(tmp_path / "plain")).save_pretrained("my-model")
    sequence = ["diagnose", "calibrate", "compress", "check-serving"]
    if source == "train":
        text = fit("my-data", "my-model", "my-tuned", "--loss", "qnorm", "--keep-scoring").stdout
        assert "test" not in text.split()
    else:
        text = (ROOT / source).read_text(encoding="utf-8")
        sequence = ["train", *sequence]
    lines = [line for line in text.splitlines() if line.lstrip().startswith("st-magnitude ")]
    found = {words[1]: words[2:] for words in (shlex.split(line, comments=True) for line in reversed(lines))}
    for name in sequence:
        words = found[name]
        if name == "train":
            words[words.index("--model") + 1] = "my-model"
            words += ["--max-steps", "1"]
        with contextlib.ExitStack() as stack:
            if name == "check-serving":
                model = stm.load(words[words.index("--model") + 1])
                words[0] = stack.enter_context(serving(EmbeddingServer(model))) + "/v1"
            done = invoke(name, *words)
        assert done.exit_code == 0, done.output


def test_the_model_card_fits_the_model(folder, model_path, tmp_path):
    fit(folder, model_path, tmp_path / "out", "--max-steps", 1, "--loss", "dot")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "data, train split" in card
    assert "Unnamed Dataset" not in card
    assert "encode_query(" in card
    dev = json.loads((tmp_path / "out" / "training.json").read_text())["dev"]
    assert "### Retrieval (data, dev split)" in card
    assert f"| pretrained | {dev['pretrained']:.4f} |  |\n" in card
    assert f"saved) | {dev['saved']['ndcg']:.4f} | {interval(dev['saved']['gain'])} |\n" in card
    assert '"scale": "auto"' in card


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """A folder with data, a model, and a run with a checkpoint whose model was never saved."""
    place = tmp_path_factory.mktemp("unfinished")
    load_transformer(save_transformer(place / "plain")).save_pretrained(str(place / "model"))
    negatives = {q: {"d19"} for q in QUERIES}
    for split, more in (("train", {}), ("same", {}), ("other", {"q1": {"d20"}})):
        RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, negatives | more).save(place / "data", split)
    fit(place / "data", place / "model", place / "out", "--max-steps", 1, "--keep-checkpoints")
    (place / "out" / "modules.json").unlink()
    return place


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (("--loss", "dot"), "loss ('cosine' there, 'dot' now)"),
        (("--batch-size", 8, "--seed", 1), "batch_size (4 there, 8 now), seed (0 there, 1 now)"),
        (("--learning-rate", 1e-3), "learning_rate (2e-05 there, 0.001 now)"),
        (("--split", "same"), None),
        (("--split", "other"), "data ("),
        (("--model", "another"), "model ("),
    ],
)
def test_resume_refuses_other_settings(unfinished, tmp_path, options, difference):
    shutil.copytree(unfinished / "out", tmp_path / "out")
    options = (*options, "--max-steps", 2, "--resume")
    arguments = (unfinished / "data", unfinished / "model", tmp_path / "out", *options)
    done = fit(*arguments, code=2 if difference else 0)
    if difference is not None:
        assert f"was started with other settings: {difference}" in done.stderr
        assert not (tmp_path / "out" / "modules.json").exists()


def test_judged_negatives_become_hard_negatives_and_a_guide_decides_about_the_margin(model_path, tmp_path):
    data = RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {q: {"d19"} for q in QUERIES})
    config = TrainConfig(max_steps=1, batch_size=4, guide=str(model_path), margin=0.05)
    trainer = train(str(model_path), data, tmp_path / "out", config).trainer
    assert trainer.train_dataset.column_names == ["anchor", "positive", "negative_1"]
    assert set(trainer.train_dataset["negative_1"]) == {CORPUS["d19"]}
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["guide"], record["margin"]) == ("StaticEmbedding", 0.05)


@pytest.mark.parametrize(
    ("options", "terms"),
    [
        (("--dims", "64,256", "--temperatures", ".03,.1"), [(64, 0.03), (64, 0.1), (256, 0.03), (256, 0.1)]),
        (("--dims", "64,256"), [(64, 0.05), (256, 0.05)]),
        (("--temperatures", "0.03,0.1"), [(None, 0.03), (None, 0.1)]),
        (("--temperature", "0.1"), [(None, 0.1)]),
        (("--temperature", "learned"), [(None, pytest.approx(0.05, rel=1.01e-3, abs=0))]),  # after a step of 1e-3
        ((), [(None, 0.05)]),
    ],
)
def test_dims_and_temperatures_become_terms(folder, model_path, tmp_path, options, terms):
    fit(folder, model_path, tmp_path / "out", "--loss", "qnorm", "--max-steps", 1, *options)
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [(t["dim"], t["temperature"]) for t in record["terms"]] == terms
    moved = abs(record["terms"][0]["temperature"] / 0.05 - 1)
    assert "learned" not in options or moved == pytest.approx(1e-3, rel=0.01)
    assert record["similarity"] == {"query": 1.0, "document": 0.0}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("train", ["--dims", "64,x"], "Invalid value for '--dims': takes whole numbers separated by commas"),
        ("train", ["--temperature", "cold"], "'--temperature': takes a number or 'learned'; got 'cold'"),
        ("train", ["--temperature", "0"], "temperature must be a positive number or 'learned'"),
        ("train", ["--temperature", "0.1", "--dims", "64,256"], "temperature=0.1 is for a loss of one term"),
        ("train", ["--dims", "64,512"], "[512] dimensions, but the embeddings of this model have 256"),
        ("train", ["--max-length", 9], "leave out max_length (--max-length)"),
        ("train", ["--serve-length", 9], "leave out max_length (--max-length) and serve_length"),
        ("train", ["--split", "nope"], "its splits are ['dev', 'train']"),
        ("train", ["--loss", "euclid"], "There is no loss 'euclid'"),
        ("compress", ["--data", "no/such/folder"], "no/such/folder"),
        ("compress", ["--dims", "257"], "A prefix in dims has 257 dimensions and the model's embeddings 256"),
        ("compress", ["--similarity", "l2"], "No similarity is called 'l2'"),
        ("compress", ["--max-length", 9], "leave out max_length (--max-length)"),
        ("calibrate", ["--split", "nope"], "its splits are ['dev', 'train']"),
        ("calibrate", ["--confirm", "nope"], "its splits are ['dev', 'train']"),
        ("calibrate", ["--exponents", "0,2"], "lie in [0, 1]"),
        ("calibrate", ["--exponent", 2], "Invalid value for '--exponent'"),
    ],
)
def test_options_are_checked_before_the_work(folder, model_path, tmp_path, monkeypatch, command, options, message):
    if command != "train":  # which measures the pretrained model before it makes the loss
        monkeypatch.setattr(SentenceTransformer, "encode_query", None)
    place = ("--model", model_path, "--output", tmp_path / "out") if command == "train" else (model_path,)
    done = invoke(command, *place, "--data", folder, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(folder, model_path, tmp_path):
    output = tmp_path / "out"
    fit(folder, model_path, output, "--max-steps", 2, "--save-steps", 1)
    assert not (output / "checkpoints").exists()  # of a run that has finished
    weights = sorted(p.name for p in output.rglob("*.safetensors"))
    with locked_folder(output):
        assert "Another process is writing to" in fit(folder, model_path, output, code=2).stderr
    again = fit(folder, model_path, output, code=2)
    assert "already holds a trained model" in again.output
    assert sorted(p.name for p in output.rglob("*.safetensors")) == weights


@pytest.mark.slow
def test_a_run_that_has_ended_can_be_taken_further(folder, model_path, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "disk full")

    with monkeypatch.context() as broken:
        broken.setattr("st_magnitude.finetune.run.write_model", full)  # trained to its end, and not saved
        failed = fit(folder, model_path, tmp_path / "out", "--max-steps", 2, "--save-steps", 1, code=2)
    assert "(No space left on device). Make room, and run again with resume=True (--resume)." in failed.stderr
    fit(folder, model_path, tmp_path / "out", "--max-steps", 4, "--resume")
    assert json.loads((tmp_path / "out" / "training.json").read_text())["log"][-1]["step"] == 4


@pytest.mark.parametrize("command", ["abstain", "calibrate", "compare", "compress", "diagnose", "mine", "train"])
def test_empty_texts_can_be_left_out(folder, model_path, tmp_path, command):
    """With the option, calibrate runs, and the others refuse the model, which they load after the data."""
    with (folder / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d21", "text": ""}\n')
    name = model_path if command == "calibrate" else "no/model"
    model = ("--model", name) if command in ("train", "compare") else (name,)
    options = ("--data", folder, "--output", tmp_path / "out.tsv")
    assert "line 21: 'd21' has an empty text" in invoke(command, *model, *options).stderr
    done = invoke(command, *model, *options, "--skip-empty")
    assert done.exit_code == (0 if command == "calibrate" else 2)
    assert "empty text" not in done.stderr


def test_compress_prints_the_table_of_the_evaluator(folder, tmp_path):
    pytest.importorskip("matplotlib")
    model = load_transformer(save_transformer(tmp_path / "transformer"))
    model.save_pretrained(str(tmp_path / "tiny"))
    options = ("--split", "dev", "--dims", "16,5", "--top-k", 5, "--similarity", "dot", "--max-length", 9)
    place = ("--data", folder, "--output", tmp_path / "new" / "out")
    result = invoke("compress", tmp_path / "tiny", *place, *options)
    assert result.exit_code == 0, result.output
    model.max_seq_length = 9
    evaluator = CompressionEvaluator(QUERIES, CORPUS, RELEVANT_DOCS, dims=[16, 5], top_k=5, pca=True, similarity="dot")
    evaluator(model)
    assert str(table(evaluator.cells)) in result.output
    with (tmp_path / "new" / "out" / "compression.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows == [{key: str(value) for key, value in cell.row.items()} for cell in evaluator.cells]
    assert (tmp_path / "new" / "out" / "compression.png").read_bytes().startswith(b"\x89PNG")


def test_compress_of_a_late_interaction_model_prints_its_table(folder, tmp_path):
    model = load_tokens(save_transformer(tmp_path / "transformer"))
    model.save_pretrained(str(tmp_path / "tiny"))
    result = invoke("compress", tmp_path / "tiny", "--data", folder, "--split", "dev", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    evaluator = LateInteractionEvaluator(QUERIES, CORPUS, RELEVANT_DOCS)
    evaluator(model)
    assert str(evaluator.table) in result.output
    assert len((tmp_path / "out" / "compression.csv").read_text().splitlines()) == 1 + len(evaluator.cells)


def test_compress_without_matplotlib_keeps_table_and_csv(folder, model_path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("compress", model_path, "--data", folder, "--split", "dev", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "nDCG@10" in result.stdout
    assert 'pip install ".[plot]"' in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["compression.csv"]


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_with_every_option_in_full(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    help = invoke(name, "--help").output
    assert max(map(len, help.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        assert all(f" {option} " in help for option in parameter.opts if option[0] == "-")
    assert "--data" not in help or "qrels/<split>.tsv" in " ".join(help.split())


@pytest.mark.parametrize("arguments", [("train", "--model", "none"), ("compress", "none"), ("diagnose", "none")])
def test_an_output_that_is_a_file_is_refused_before_anything_is_loaded(arguments, tmp_path):
    result = invoke(*arguments, "--data", tmp_path, "--output", __file__)
    assert result.exit_code == 2
    assert "Invalid value for '--output'" in result.stderr


def report_of(result):
    """The JSON that a command printed, alone on stdout."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_calibrate_confirms_on_the_other_split(tmp_path, model_path):
    """The planted length helps on one split and harms on the other: confirmation must see the harm."""
    corpus = {"long": "honey honey bees", "short": "honey"}
    for split, answer in (("dev", "long"), ("test", "short")):
        RetrievalData({"dev": "honey", "test": "my honey"}, corpus, {split: {answer}}).save(tmp_path / "data", split)
    SentenceTransformer(modules=[BoW(["bees", "honey"])], device="cpu").save_pretrained(str(tmp_path / "bow"))
    options = ("--data", tmp_path / "data", "--exponents", "0", "--confirm", "test", "--json")
    figures = report_of(invoke("calibrate", tmp_path / "bow", *options))
    assert (figures["exponent"], figures["ndcg@10"]) == (0.0, {"0": 1.0, "1": pytest.approx(0.6309, abs=1e-4)})
    assert figures["confirm"]["versus_cosine"][0] == pytest.approx(0.6309 - 1, abs=1e-4)
    assert figures["confirm"]["versus_dot"] == [0, 0, 0]


def test_calibrate_saves_and_confirms_a_given_exponent(folder, model_path, tmp_path):
    figures = report_of(invoke("calibrate", model_path, "--exponent", 0.65, "--output", tmp_path / "given", "--json"))
    assert figures == {"exponent": 0.65, "output": str(tmp_path / "given")}
    assert stm.load(tmp_path / "given")[-1].similarity.exponents == pytest.approx((1.0, 0.65))
    options = ("--exponent", 0.65, "--confirm", "train", "--json")
    figures = report_of(invoke("calibrate", model_path, "--data", folder, *options))
    curve = stm.calibrate_exponent(stm.load(model_path), RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS), [0.65])
    assert figures["confirm"]["ndcg@10"] == pytest.approx(curve.ndcg[1])


def test_calibrate_says_what_to_do_with_a_model_saved_by_cosine(folder, model_path, tmp_path, monkeypatch):
    stm.prepare(stm.load(model_path), "cosine").save_pretrained(str(tmp_path / "cosine"))
    monkeypatch.setattr(SentenceTransformer, "encode", None)
    result = invoke("calibrate", tmp_path / "cosine", "--data", folder)
    assert result.exit_code == 2
    assert all(remedy in result.stderr for remedy in ("--keep-scoring", 'stm.prepare(model, "dot")'))


def config(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    return tmp_path / "config.yaml"


def test_a_config_file_gives_defaults_and_the_command_line_goes_before(folder, model_path, tmp_path):
    file = config(
        tmp_path,
        f"data: {folder}\nmodel: {model_path}\noutput: {tmp_path / 'out'}\nloss: dot\ndims: [64, 256]\n"
        "batch-size: 4\nmax_steps: 1\nseed: null\njson: true\n",
    )
    assert report_of(invoke("train", "--config", file, "--loss", "dnorm", "--max-steps", 2))["steps"] == 2
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert [t["dim"] for t in record["terms"]] == [64, 256]
    assert record["similarity"] == {"query": 0.0, "document": 1.0}
    again = invoke("train", "--config", file)  # now with all its values
    assert again.exit_code == 2
    assert "already holds a trained model" in again.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("top-kk: 1", "is not an option of compress. Did you mean 'top_k'? Its options are batch_size, data, dims"),
        ("[1, 2]", "holds list, not options such as"),
        ("top_k: [", "cannot be read as YAML"),
        ("top_k: many", "--top-k"),
    ],
)
def test_a_bad_config_is_named(folder, model_path, tmp_path, text, message):
    result = invoke("compress", model_path, "--data", folder, "--config", config(tmp_path, text))
    assert result.exit_code == 2
    assert message in result.stderr


def test_version_and_traceback(folder):
    assert invoke("--version").stdout.strip() == stm.__version__
    options = ("compress", "/no/such/model", "--data", folder, "--split", "nope")
    assert invoke(*options).exit_code == 2
    assert isinstance(invoke("--traceback", *options).exception, ValueError)
    assert invoke(*options).exit_code == 2  # a choice of that call alone


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_the_step_and_resume_ends_as_undisturbed(
    folder, model_path, tmp_path, monkeypatch, number, code
):
    options = ("--max-steps", 5, "--save-steps", 100, "--learning-rate", 0.05)
    fit(folder, model_path, tmp_path / "straight", *options)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    step, calls = SentenceTransformerTrainer.training_step, itertools.count(1)

    def disturbed(*args, **kwargs):
        if next(calls) == 2:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(SentenceTransformerTrainer, "training_step", disturbed)
        stopped = fit(folder, model_path, tmp_path / "stopped", *options, code=code)
    assert f"Stopped by {number.name} after step 2, which is saved" in stopped.stderr
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert [p.name for p in (tmp_path / "stopped" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-2"]
    fit(folder, model_path, tmp_path / "stopped", *options, "--resume")
    straight, resumed = (SentenceTransformer(str(tmp_path / n)).state_dict() for n in ("straight", "stopped"))
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_that_was_killed_behind_its_last_step_is_only_saved(folder, model_path, tmp_path):
    """A checkpoint that was not written to its end is left aside; the one before it has all steps."""
    output, options = tmp_path / "out", ("--max-steps", 5, "--learning-rate", 0.05, "--keep-checkpoints")
    fit(folder, model_path, output, *options)
    weights = SentenceTransformer(str(output)).state_dict()
    torn = output / "checkpoints" / "checkpoint-9"
    torn.mkdir()
    (torn / "trainer_state.json").write_text('{"global_')
    for file in output.glob("*.json"):
        file.unlink()
    assert report_of(fit(folder, model_path, output, *options, "--resume", "--json"))["steps"] == 5
    torch.testing.assert_close(SentenceTransformer(str(output)).state_dict(), weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("asked", "is_finished"),
    [
        ({"num_train_epochs": 1.36}, True),  # 34 steps of 25 to the epoch: 1 + 9/25 is 1.3599999999999999
        ({"num_train_epochs": 1.4}, False),
        ({"max_steps": 34, "num_train_epochs": 9}, True),
        ({"max_steps": 35, "num_train_epochs": 1}, False),
    ],
)
def test_when_a_run_has_made_all_its_steps(tmp_path, asked, is_finished):
    state = {"epoch": 1 + 9 / 25, "global_step": 34, "max_steps": 34}
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    assert (finished_state(tmp_path, TrainingArguments(str(tmp_path), **asked)) is not None) == is_finished
