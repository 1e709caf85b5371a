"""Importing the package asks no network, and loads what is used and nothing else."""

import compileall
import json
import shutil
from pathlib import Path

import pytest
from _calls import call, taking
from _processes import forked, python

import st_magnitude

GUARDED = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(f"network: {args}")

socket.getaddrinfo = socket.create_connection = refuse
socket.socket.connect = refuse
import st_magnitude
import st_magnitude.workbench.commands.app
heavy = {"torch", "numpy", "sentence_transformers", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
for name in set(st_magnitude.__all__) - {"revela"}:
    getattr(st_magnitude, name)
revela = {name for name in sys.modules if name.startswith("st_magnitude.revela.")}
assert not revela, revela
heavy = {"open_clip", "mteb", "matplotlib", "faiss", "bm25s", "peft", "usearch", "ir_measures"}
loaded = heavy & set(sys.modules)
print(sorted(loaded))
from st_magnitude.revela import *
from st_magnitude import revela
from st_magnitude.revela.attention import NAME
from transformers import AttentionInterface
assert all(getattr(revela, name) is globals()[name] for name in revela.__all__)
assert set(revela.__all__) <= set(dir(revela))
assert NAME not in AttentionInterface._global_mapping
"""


@pytest.mark.slow
def test_import_is_offline_and_light():
    """Names of Revela load when they are used, and loading them registers nothing."""
    loads = "import sys, sentence_transformers"
    theirs = f"{loads}; print(sorted({{'peft', 'matplotlib'}} & set(sys.modules)))"
    expected = forked("-c", theirs).stdout
    # what sentence-transformers itself loads, and nothing else
    assert python("-c", GUARDED).stdout == expected


HELP = """
import json, sys
from typer.testing import CliRunner
from st_magnitude.workbench.commands.app import app

for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 2), result.output
    assert "torch" not in sys.modules, arguments
"""


def test_help_and_a_mistake_import_no_torch(tmp_path):
    """Nor do data that cannot be read, by any command."""
    (tmp_path / "a.csv").write_text("title,body\na,b\n")
    arguments = [["--help"], ["--version"], ["train", "--help"], ["tarin"], ["train", "--oops"]]
    arguments += [call(name, model="wordllama", data="a.csv") for name in taking("data")]
    python("-c", HELP, json.dumps(arguments), cwd=tmp_path)


def test_an_installation_without_sources_has_all_names(tmp_path):
    for name in ("__init__.py", "__init__.pyi", "clip/__init__.py", "clip/__init__.pyi"):
        target = tmp_path / "st_magnitude" / name
        target.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(Path(st_magnitude.__file__).parent / name, target)
    compileall.compile_dir(tmp_path, quiet=1, legacy=True)
    for source in tmp_path.rglob("*.py"):
        source.unlink()
    code = "from st_magnitude import clip; print(st_magnitude.__all__, clip.__all__)"
    code = f"import st_magnitude; {code}; assert clip.__file__.endswith('.pyc')"
    done = python("-c", code, cwd=tmp_path, environment={"PYTHONPATH": ""})
    assert done.stdout == f"{st_magnitude.__all__} {st_magnitude.clip.__all__}\n"
