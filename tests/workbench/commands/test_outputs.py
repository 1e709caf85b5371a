"""No command writes where its input is, or over what it did not write, and it says so at once."""

import os
import re

import pytest
from _calls import COMMANDS, call, taking
from _cli import refusal

from st_magnitude._files import OUR_PAGE, WORK, written
from st_magnitude.saving.find import not_found

INPUTS = {"data", "model", "also"}
OUTPUTS = ("DIRECTORY", "FILE")


def names_of(command, kinds):
    return [x.name for x in COMMANDS[command].params if x.name in kinds or x.metavar in kinds]


PAIRS = [
    (command, output, other)
    for command in COMMANDS
    for output in names_of(command, OUTPUTS)
    for other in (*names_of(command, INPUTS), *names_of(command, OUTPUTS))
    if other != output
]


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("st_magnitude.workbench.files.pairs.load_splits", None)


def test_all_outputs_are_known():
    assert {output for _, output, _ in PAIRS} == {"output", "report"}


@pytest.mark.parametrize(("command", "output", "other"), PAIRS)
def test_an_output_is_no_input_and_no_other_output(command, output, other):
    """By the file or folder, not by its name."""
    place = "./x/../old"
    os.mkdir("x")
    if output == "report" and other in INPUTS:
        with written("old", OUR_PAGE) as file:
            file.write(OUR_PAGE)
        os.link("old", place := "link")
    elif other in INPUTS:
        os.mkdir("old")
    if other in ("data", "model"):
        words = call(command, **{other: place})
    else:
        words = [*call(command), f"--{other.replace('_', '-')}", place]
    said = refusal(*words, **{output: "old"})
    assert " are both " in said
    assert output.replace("_", "-") in said.lower().replace("_", "-")
    assert {*os.listdir()} <= {"old", "x", "link"}


@pytest.mark.parametrize(("command", "output"), sorted({(c, o) for c, o, _ in PAIRS}))
def test_a_file_of_others_is_not_replaced(command, output, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to("notes.txt")
    for name in ("notes.txt", "link"):
        said = refusal(*call(command), **{output: name})
        assert f"Invalid value for '--{output.replace('_', '-')}'" in said
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "link"}


@pytest.mark.parametrize("command", taking("output"))
def test_a_folder_of_others_is_refused_before_the_data_are_read(tmp_path, command):
    for name in ("home/README.md", "home/checkpoints/weights", "a file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    assert "home is not empty; choose another folder" in refusal(*call(command), output="home")
    for place in ("a file", "a file/out"):
        assert "a file" in refusal(*call(command), output=place)
    assert {x.read_text() for x in tmp_path.rglob("*") if x.is_file()} == {"mine"}


def test_so_is_an_unfinished_run(tmp_path):
    checkpoint = tmp_path / "out" / WORK / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text('{"global_step": 3}')
    assert "holds an unfinished run" in refusal(*call("train"))
    assert "There is no model at 'model'" in refusal(*call("train"), resume=True)


@pytest.mark.parametrize("option", ["model", "also"])
@pytest.mark.parametrize("command", taking("also"))
def test_so_is_a_missing_model(tiny_path, option, command):
    for absent, why in (
        ("no/such", "There is no model at 'no/such'"),
        ("wordlama", "Did you mean 'wordllama'?"),
        ("x", "holds no model"),
        (tiny_path.parent, f"Did you mean '{tiny_path}'?"),
    ):
        os.makedirs("x", exist_ok=True)
        words = call(command, model=tiny_path if option == "also" else absent)
        assert why in refusal(*words, **{"also": absent} if option == "also" else {})
    assert not os.path.exists("out")


def test_what_the_hub_said_ends_with_a_word():
    said = not_found("model", "x", OSError("It is not in the local cache, nor there." * 9))
    assert "(It is not in the local cache, nor" in str(said)
    assert re.search(r" \w+\.*\.\.\.\)\. Check", str(said))
