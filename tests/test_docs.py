"""The Python of README and docs runs as it stands, with hub ids replaced by the same model from
PyPI (the encoder) and by a tiny one (the language model)."""

import re
from operator import attrgetter
from pathlib import Path

import httpx
import pandas
import pytest
from _tiny import save_decoder
from conftest import save_splits
from typer.main import get_command

import st_magnitude as stm
from st_magnitude.workbench.commands.app import app

ROOT = Path(__file__).parents[1]
SLOW = ("compare.md", "compression.md", "how_to.md", "migration.md", "norms.md", "revela.md")
SLOW += ("serving.md", "start.md", "SKILL.md")
READING = ("compare.md", "evaluation.md")  # their blocks marked py read files
CONTINUES = re.compile(r"blocks\s+of\s+this\s+page\s+continue\s+each\s+other")
SKILL = ROOT / "skills" / "st-magnitude" / "SKILL.md"
PAGES = [ROOT / "README.md", SKILL, *sorted((ROOT / "docs").glob("*.md"))]
LM_ID = "HuggingFaceTB/SmolLM2-135M"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def python_blocks(page):
    text = page.read_text(encoding="utf-8")
    kind = "py(?:thon)?" if page.name in READING else "python"
    return re.findall(rf"^```{kind}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


EXAMPLES = [
    pytest.param(page, marks=pytest.mark.slow if page.name in SLOW else ())
    for page in PAGES
    if python_blocks(page)
]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(page, minilm_path, request, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    known = {HUB_ID: minilm_path, LM_ID: save_decoder(tmp_path / "lm")}
    if page.name in (*READING, "how_to.md"):
        known |= {'"pairs.csv"': '"my-data"', "30m": "1s"}
        save_splits(tmp_path / "my-data", "train", "dev", "test")
        request.getfixturevalue("static_model").save_pretrained("my-retriever")
    if page.name == "serving.md":
        (tmp_path / "embeddings").mkdir()
        rows = {"_id": ["d1", "d2"], "embedding": [[0.1] * 384] * 2}
        pandas.DataFrame(rows).to_parquet("embeddings/00000.parquet")
    continues = CONTINUES.search(page.read_text(encoding="utf-8").partition("```py")[0])
    namespace = {}
    for block in python_blocks(page):
        code = block
        for name, here in known.items():
            code = code.replace(name, str(here))
        namespace = namespace if continues else {}
        exec(compile(code, page.name, "exec"), namespace)
    assert "nan" not in capsys.readouterr().out.split()


def test_the_script_of_how_to_is_an_example():
    block = python_blocks(ROOT / "docs" / "how_to.md")[0]
    assert (ROOT / "examples" / "train.py").read_text(encoding="utf-8").endswith(f"\n\n{block}")


def test_the_block_for_tei_and_elasticsearch_keeps_norms(monkeypatch, capsys):
    text = (ROOT / "docs" / "how_to.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    sent = {}

    def answer(method, url, json):
        sent[method, url.rpartition(":")[2].partition("?")[0]] = json
        rows = [[3.0, 4.0] for _ in json.get("inputs", ())] or {"hits": {"hits": ["d0"]}}
        return httpx.Response(200, json=rows, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "post", lambda url, json: answer("POST", url, json))
    monkeypatch.setattr(httpx, "request", answer)
    exec(compile(block, "how_to.md", "exec"), {})
    assert sent["POST", "8080/embed"]["normalize"] is False
    (field,) = sent["PUT", "9200/docs"]["mappings"]["properties"].values()
    assert field == {"type": "dense_vector", "dims": 2, "similarity": "max_inner_product"}
    assert sent["PUT", "9200/docs/_doc/1"] == {"embedding": [3.0, 4.0]}
    assert capsys.readouterr().out == "['d0']\n"


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
