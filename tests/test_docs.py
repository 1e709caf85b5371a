"""The Python of README and docs runs as it stands, with hub ids replaced by the same model from PyPI (the encoder) and
by a tiny one (the language model)."""

import re
from pathlib import Path

import pytest
from _tiny import language_model

ROOT = Path(__file__).parents[1]
SLOW = ("compression.md", "norms.md", "revela.md", "serving.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LM_ID = "HuggingFaceTB/SmolLM2-135M"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_there_are_examples():
    assert sum(len(python_blocks(page)) for page in PAGES) >= 5


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow if p.name in SLOW else ()) for p in PAGES if python_blocks(p)],
    ids=lambda p: p.name,
)
def test_examples_run(page, minilm_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in language_model():
        part.save_pretrained(tmp_path / "lm")
    namespace = {}
    for block in python_blocks(page):
        code = block.replace(HUB_ID, str(minilm_path)).replace(LM_ID, str(tmp_path / "lm"))
        exec(compile(code, page.name, "exec"), namespace)


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "docs").glob("*/*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
