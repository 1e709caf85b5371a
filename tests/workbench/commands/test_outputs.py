"""No command writes where its input is, or over what it did not write."""

import os

import pytest
import typer
from _cli import refusal

from st_magnitude._files import OUR_PAGE, written
from st_magnitude.workbench.commands.app import app

COMMANDS = typer.main.get_command(app).commands
INPUTS = {"data", "model", "also", "tasks"}


def names_of(command, kinds):
    return [x.name for x in COMMANDS[command].params if x.name in kinds or x.metavar in kinds]


OUTPUTS = ("DIRECTORY", "FILE")
PAIRS = [
    (command, output, other)
    for command in COMMANDS
    for output in names_of(command, OUTPUTS)
    for other in (*names_of(command, INPUTS), *names_of(command, OUTPUTS))
    if other != output
]


def given(command, **paths):
    """Arguments and options of a command, with what it has to have."""
    required = [x for x in COMMANDS[command].params if x.required]
    values = {x.name: "none" for x in required if x.name != "output"} | {"output": "out"} | paths
    known = {x.name: x for x in COMMANDS[command].params}
    values = {name: value for name, value in values.items() if name in known}
    arguments = [x.name for x in COMMANDS[command].params if x.param_type_name == "argument"]
    return [values.pop(name) for name in arguments if name in values], values


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("st_magnitude.workbench.files.pairs.load_splits", None)


def test_all_outputs_are_known():
    assert {output for _, output, _ in PAIRS} == {"output", "save_data", "report"}


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
    arguments, options = given(command, **{output: "old", other: place})
    said = refusal(command, *arguments, **options)
    assert " are both " in said
    assert output.replace("_", "-") in said.lower().replace("_", "-")
    assert {*os.listdir()} <= {"old", "x", "link"}


FILE_OPTIONS = [(c, x.name) for c in COMMANDS for x in COMMANDS[c].params if x.metavar == "FILE"]


@pytest.mark.parametrize(
    ("command", "output"), sorted({*FILE_OPTIONS, *((c, o) for c, o, _ in PAIRS)})
)
def test_a_file_of_others_is_not_replaced(command, output, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to("notes.txt")
    for name in ("notes.txt", "link", "-"):
        arguments, options = given(command, **{output: name})
        said = refusal(command, *arguments, **options)
        assert f"Invalid value for '--{output.replace('_', '-')}'" in said
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "link"}
