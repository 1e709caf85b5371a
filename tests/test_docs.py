"""The Python of README and docs runs as it stands, with hub ids replaced by the same model from
PyPI (the encoder) and by a tiny one (the language model)."""

import re
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from _tiny import save_decoder
from conftest import save_splits
from typer.main import get_command

import st_magnitude as stm
from st_magnitude.workbench.commands.app import app

ROOT = Path(__file__).parents[1]
FAST = ("cli.md", "kernel.md", "clip.md")
SKILL = ROOT / "skills" / "st-magnitude" / "SKILL.md"
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").glob("*.md"))]
LM_ID = "HuggingFaceTB/SmolLM2-135M"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def python_blocks(page):
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(page, marks=() if page.name in FAST else pytest.mark.slow)
    for page in PAGES
    if python_blocks(page)
]


def run(code, place, minilm_path):
    """In a namespace of its own, with models of this machine and little time."""
    known = {HUB_ID: minilm_path, LM_ID: place / "lm", '"pairs.csv"': '"my-data"', "30m": "1s"}
    for name, here in known.items():
        code = code.replace(name, str(here))
    exec(compile(code, "block", "exec"), {"__name__": "block"})


@pytest.fixture
def place(tmp_path, monkeypatch, request):
    """The files that blocks read: data, a model, vectors."""
    monkeypatch.chdir(tmp_path)
    save_decoder(tmp_path / "lm")
    save_splits(tmp_path / "my-data", "train", "dev", "test")
    request.getfixturevalue("static_model").save_pretrained("my-retriever")
    for name, rows in (("documents", 4), ("queries", 1)):
        np.save(f"{name}.npy", np.random.default_rng(0).random((rows, 8), np.float32))
    return tmp_path


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_a_page_is_short_and_begins_with_whom_it_is_for_and_code(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 1800
    assert text.split("\n")[2].startswith("For you if ")
    assert len(re.split(r"^(?:```|    \S)", text, flags=re.MULTILINE)[0].split()) <= 60


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda p: p.name)
def test_every_block_runs_alone(page, place, minilm_path, capsys):
    for block in python_blocks(page):
        run(block, place, minilm_path)
    assert "nan" not in capsys.readouterr().out.split()


@pytest.mark.slow
def test_the_script_that_migration_names_runs(place, minilm_path, capsys):
    run((ROOT / "examples" / "train.py").read_text(encoding="utf-8"), place, minilm_path)
    assert "+0.0 points [" in capsys.readouterr().out


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "docs").glob("*/*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_and_names_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = get_command(app).commands
    for name, arguments in re.findall(r"st-magnitude ([a-z][a-z-]*)([^\n`|#]*)", text):
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", arguments)) <= {*options, "--help"}, name
    for path in re.findall(r"\bstm\.(\w+(?:\.\w+)?)", text):
        attrgetter(path)(stm)
    for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|md))\b", text):
        roots = (ROOT, ROOT / "st_magnitude", ROOT / "docs")
        assert any((root / path).exists() for root in roots), path
