"""What people give on the command line: encodings, and variables that are not set."""

import json
import logging
import re

import pytest
from _calls import CALLS, COMMANDS, call, taking
from _cli import figures, refusal
from _processes import python
from _tiny import load_transformer, save_transformer
from conftest import CORPUS, QUERIES, RELEVANT_DOCS

from st_magnitude._files import WORK
from st_magnitude.saving.export import export
from st_magnitude.workbench.commands.core import Warnings
from st_magnitude.workbench.files.pairs import load_splits

EVERY = """
import json, sys
from st_magnitude.workbench.commands.app import main

codes = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["st-magnitude", *words]
    try:
        main()
    except SystemExit as end:
        codes[words[0]] = end.code
print(json.dumps(codes), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and pairs that cp1252 cannot show."""
    folder = tmp_path_factory.mktemp("streams")
    export(load_transformer(save_transformer(folder / "plain")), folder / "model")
    pairs = [(QUERIES[q], CORPUS[d]) for q, found in RELEVANT_DOCS.items() for d in found]
    rows = [{"query": f"{query} → 有", "document": f"{text} ∑"} for query, text in pairs]
    load_splits(rows).save(folder / "data")
    return folder


@pytest.mark.slow
def test_no_encoding_is_a_fault(place, tmp_path):
    """stdout in cp1252."""
    (tmp_path / "data").symlink_to(place / "data")
    (tmp_path / "model").symlink_to(place / "model")
    calls = [call(name, out=name) for name in CALLS]
    environment = {"PYTHONIOENCODING": "cp1252"}
    done = python("-c", EVERY, json.dumps(calls), cwd=tmp_path, environment=environment)
    codes = json.loads(done.stderr.splitlines()[-1])
    assert codes.keys() == COMMANDS.keys()
    few = ("train", "compare", "check-serving")  # queries, and nobody listens
    assert {codes.pop(name) for name in few} <= {0, 2, 3}
    assert {*codes.values()} == {0}, codes
    assert r"\u2211" in done.stdout  # of a document


NAMED = b"caf\xe9".decode("utf-8", "surrogateescape")  # as Python reads it from the command line


def test_a_question_of_other_bytes_is_asked(place, monkeypatch):
    monkeypatch.chdir(place)
    asked = figures("search", "model", NAMED, data="data")
    assert asked["question"] == "caf\ufffd"


def test_warnings_are_in_the_lines_of_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    said = "Left out 2 rows. " * 9
    Warnings().emit(logging.makeLogRecord({"msg": said}))
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 40
    assert shown.split() == said.split()


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
        if not getattr(parameter, "is_flag", False) and (parameter.name, text) != (
            "question",
            NAMED,
        ):
            assert re.search(said, refusal(name, *words, **given)), parameter.name
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", taking("output", but=["mteb"]))
def test_a_used_output_is_refused_before_the_data_are_read(tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    said = refusal(*call(name, data="absent.csv"), output=tmp_path / "out")
    assert "is not empty; choose another folder" in said


@pytest.mark.parametrize("resume", [None, True])
def test_so_is_an_unfinished_run(tmp_path, place, resume):
    checkpoint = tmp_path / "out" / WORK / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    options = {"model": place / "model", "output": tmp_path / "out", "resume": resume}
    said = refusal("train", data="absent.csv", **options)
    assert ("holds an unfinished run" if resume is None else "absent.csv") in said


@pytest.mark.parametrize("option", ["model", "also"])
@pytest.mark.parametrize("name", ["train", "compare"])
def test_a_missing_model_is_refused_before_the_data_are_read(tmp_path, place, option, name):
    options = {"model": place / "model", "output": tmp_path / "out", "data": "absent.csv"}
    assert "absent.csv" in refusal(name, **options)
    for absent, why in (
        ("no/such", "There is no model at 'no/such'"),
        ("wordlama", "Did you mean 'wordllama'?"),
        (place / "data", "holds no model"),
        (place, f"Did you mean '{place / 'model'}'?"),
    ):
        assert why in refusal(name, **options | {option: absent})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place_of", ["a file/out", "a file"])
def test_an_output_that_cannot_be_made_is_refused_before_the_work(tmp_path, monkeypatch, place_of):
    (tmp_path / "a file").touch()
    monkeypatch.setattr("st_magnitude.workbench.files.pairs.load_splits", None)
    said = refusal("calibrate", "model", data="none", output=tmp_path / place_of)
    assert "a file" in said
