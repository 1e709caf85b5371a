"""The command line on a small folder: what it writes, and what it refuses before any work."""

import contextlib
import csv
import json
import logging
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from _calls import CALLS, COMMANDS, call, taking
from _cli import figures, invoke, refusal
from _embedding_server import EmbeddingServer, serving
from _lookup import bag
from conftest import CORPUS, QUERIES, RELEVANT_DOCS
from sentence_transformers import SentenceTransformer
from test_docs import ROOT

import st_magnitude as stm
from st_magnitude._checks import InputError, InputTypeError, MissingPackage, one_of
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.data.task import NotFiniteError
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.evaluation.compression import summary
from st_magnitude.workbench.commands.core import Warnings
from st_magnitude.workbench.serving.server import Refused


def test_every_command_has_a_call():
    assert CALLS.keys() == COMMANDS.keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_with_every_option_in_full(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    help = invoke(name, "--help").output
    assert max(map(len, help.splitlines())) <= 80
    for parameter in COMMANDS[name].params:
        assert all(f" {option} " in help for option in parameter.opts if option[0] == "-")


def refuse(kind):
    raise kind("choose\nanother")


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        (lambda *_: one_of("split", 1, (2, 3)), 2),
        *((partial(refuse, kind), 2) for kind in (InputError, InputTypeError, MissingPackage)),
        *((partial(refuse, kind), 2) for kind in (DataError, Refused, NotFiniteError)),
        *((partial(refuse, kind), 70) for kind in (ValueError, TypeError, ImportError)),
        (lambda *_: Path("/no/such/file").read_text(), 2),
        (lambda *_: None + 1, 70),
        (lambda *_: int("x"), 70),
        (lambda *_: json.loads("{"), 70),
        (lambda *_: {}["key"], 70),
    ],
)
def test_our_own_faults_keep_their_traceback(monkeypatch, fails, code):
    """Only what a class of ours or the system refuses is one line for the user."""
    monkeypatch.setattr(
        "st_magnitude.workbench.files.pairs.load_splits", lambda *_, **options: fails()
    )
    done = invoke("compress", "model", data="data")
    assert done.exit_code == code
    assert ("Traceback" in done.stderr) == (code == 70)
    assert len(done.stderr.splitlines()) == 1 or code == 70


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("compress", {"data": "no/such/folder"}, "no/such/folder"),
        ("compress", {"dims": 257}, "257"),
        ("compress", {"similarity": "l2"}, "'l2'"),
        ("calibrate", {"output": __file__}, "'--output'"),
        ("calibrate", {"confirm": "nope"}, "['dev', 'train']"),
        ("compress", {"split": "valid"}, "no split 'valid'"),
        ("train", {"dims": "64,x"}, "'--dims'"),
        ("train", {"temperature": "cold"}, "'--temperature'"),
        ("train", {"temperature": 0}, "temperature must be a positive number"),
        ("train", {"temperature": 0.1, "dims": "64,256"}, "pass 0.1 as temperatures"),
        ("train", {"temperature": 0.1, "loss": "tempagg"}, "pass 0.1 as temperatures"),
        ("train", {"max_length": 9}, "leave out max_length"),
        ("train", {"split": "nope"}, "['dev', 'train']"),
        ("train", {"loss": "cosin"}, "'cosine'?"),
        ("train", {"batch_size": 1}, "'--batch-size'"),
        ("compare", {"losses": "q-norm"}, "Did you mean 'qnorm'?"),
        ("compare", {"temperatures": 0}, "temperatures must be a positive number"),
        ("compress", {"threshold": "nan"}, "--threshold must be a finite number"),
    ],
)
def test_options_are_checked_before_the_work(
    data_folder, static_path, tmp_path, monkeypatch, command, options, named
):
    monkeypatch.setattr(SentenceTransformer, "encode_query", None)
    out = tmp_path / "out"
    options = options.copy()
    data = options.pop("data", data_folder)
    assert named in refusal(*call(command, model=static_path, data=data, out=out), **options)
    assert not out.exists()


@pytest.mark.parametrize("by", ["id", "text"])
@pytest.mark.parametrize("command", ["train", "compare", "calibrate"])
def test_splits_that_share_queries_are_refused(data_folder, static_path, tmp_path, by, command):
    copied = {"id": "train-q1", "text": "copy"}[by]
    with (data_folder / "queries.jsonl").open("a") as file:
        file.write(json.dumps({"_id": "copy", "text": f" {QUERIES['q1'].lower()}  train"}) + "\n")
    with (data_folder / "qrels" / "dev.tsv").open("a") as file:
        file.write(f"{copied}\td01\t1 \n")  # a trailing space, too
    words = call(command, model=static_path, data=data_folder, out=tmp_path / "out")
    if command == "calibrate":
        for confirm in ("dev", "train"):
            assert confirm in refusal(*words, split="train", confirm=confirm)
    assert f"such as {copied!r}" in refusal(*words)


NAMED = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python reads it from the command line


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("text", ["", NAMED])
def test_no_option_takes_an_empty_text_or_other_bytes(name, tmp_path, monkeypatch, text):
    """As an unset variable of the shell gives it; it is not the current folder."""
    monkeypatch.chdir(tmp_path)
    said = "Invalid value|" + ("empty" if not text else "has bytes that are not utf-8")
    parameters = COMMANDS[name].params
    required = {p.name: "x" for p in parameters if p.required}
    arguments = [p.name for p in parameters if p.opts[0][0] != "-"]
    for parameter in parameters:
        given = required | {parameter.name: text}
        words = [given.pop(name) for name in arguments if name in given]
        if not getattr(parameter, "is_flag", False):
            assert re.search(said, refusal(name, *words, **given)), parameter.name
    assert not [*tmp_path.iterdir()]


def test_warnings_are_in_the_lines_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    said = "Left out 2 rows. " * 9
    Warnings().emit(logging.makeLogRecord({"msg": said}))
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 40
    assert shown.split() == said.split()


@pytest.mark.parametrize("command", taking("skip_empty"))
def test_empty_texts_can_be_left_out(data_folder, static_path, tmp_path, command):
    """Commands that measure run, and the others refuse an option of the model."""
    with (data_folder / "corpus.jsonl").open("a") as file:
        file.write('{"_id": "d21", "text": ""}\n')
    for path in data_folder.glob("qrels/*.tsv"):
        query = path.read_text().splitlines()[1].split("\t")[0]
        path.write_text(f"{path.read_text()}{query}\td21\t1\n")
    words = call(command, model=static_path, data=data_folder, out=tmp_path / "out")
    refuses = command in ("train", "compare")
    options = {"max_length": 9} if refuses else {}
    assert "'d21' is not in corpus.jsonl, or is empty there" in refusal(*words, **options)
    done = invoke(*words, **options, skip_empty=True)
    assert done.exit_code == (2 if refuses else 0)
    assert "d21" not in done.stderr


@pytest.mark.parametrize(
    "source", ["README.md", "docs/cli.md", pytest.param("docs/start.md", marks=pytest.mark.slow)]
)
def test_the_documented_sequence_runs(data_folder, tiny_path, tmp_path, monkeypatch, source):
    """On one model, with the arguments as printed."""
    monkeypatch.chdir(tmp_path)
    pairs = [(QUERIES[q], CORPUS[d]) for q, found in RELEVANT_DOCS.items() for d in found]
    rows = [(f"{query} {more}", text) for more in ("now", "") for query, text in pairs]
    for name, columns in (("faq.csv", ("q", "a")), ("my.csv", ("question", "answer"))):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([columns, *rows])
    data_folder.rename("my-data")
    tiny_path.rename("my-model")
    lines = (ROOT / source).read_text(encoding="utf-8").splitlines()
    printed = [line for line in lines if line.lstrip().startswith("st-magnitude ")]
    for name, *words in (shlex.split(line, comments=True)[1:] for line in printed):
        if name == "compare":
            continue
        if name == "train":
            words += ["--model", "my-model", "--max-steps", "1"]
        with contextlib.ExitStack() as stack:
            if name == "check-serving":
                model = stm.load(words[words.index("--model") + 1])
                words[0] = stack.enter_context(serving(EmbeddingServer(model))) + "/v1"
            done = invoke(name, *words)
        assert done.exit_code == 0, done.output


def test_compress_prints_the_table_of_the_evaluator(data_folder, tiny_path, caplog):
    options = {"top_k": 5, "similarity": "dot"}
    done = invoke("compress", tiny_path, data=data_folder, dims="16,5", **options)
    assert done.exit_code == 0, done.output
    assert "8 queries are few to choose a format" in caplog.text
    model = stm.load(tiny_path)
    task = QUERIES, CORPUS, RELEVANT_DOCS
    evaluator = CompressionEvaluator(*task, dims=[16, 5], **options)
    evaluator(model)
    assert str(summary(evaluator.cells)) in done.output


def test_calibrate_confirms_on_the_other_split(tmp_path):
    """The planted length helps on one split and harms on the other."""
    corpus = {"long": "honey honey bees", "short": "honey"}
    for split, answer in (("dev", "long"), ("test", "short")):
        queries = {f"{name}{i}": f"{name} honey {i}" for name in ("dev", "test") for i in range(20)}
        judged = {f"{split}{i}": {answer} for i in range(20)}
        RetrievalData(queries, corpus, judged).save(tmp_path / "data", split)
    bag(["bees", "honey"], similarity="cosine").save_pretrained(str(tmp_path / "bow"))
    found = figures("calibrate", tmp_path / "bow", data=tmp_path / "data", confirm="test")
    assert (found["exponent"], found["ndcg@10"]["0"]) == (0.0, 1.0)
    assert found["ndcg@10"]["1"] == pytest.approx(0.6309, abs=1e-4)
    assert found["confirm"]["versus_cosine"]["mean"] == pytest.approx(0.6309 - 1, abs=1e-4)
    assert found["confirm"]["versus_dot"]["mean"] == 0
