"""A release has one version, one address, its workflows and PyPI's README."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import st_magnitude
from st_magnitude.losses.base import CITATION as MAGNITUDE
from st_magnitude.losses.regularizers import CITATION as SIGREG
from st_magnitude.losses.temperature import CITATION as TEMPERATURE

ROOT = Path(__file__).parents[1]
RECIPE = "packaging/conda/recipe.yaml"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_stands_in_the_package():
    version = st_magnitude.__version__
    assert re.findall(r'^version = "', text("pyproject.toml"), re.MULTILINE) == []
    assert yaml.safe_load(text("CITATION.cff"))["version"] == version
    assert yaml.safe_load(text(RECIPE))["context"]["version"] == version
    assert text("CHANGELOG.md").split("\n## ")[1].startswith(f"{version} (")


def test_the_citations_of_the_losses_are_in_the_citation_file():
    revela = pytest.importorskip("st_magnitude.revela.loss")
    references = {entry["title"] for entry in yaml.safe_load(text("CITATION.cff"))["references"]}
    assert len(references) == 5
    numbers = set(re.findall(r"arXiv:([\d.]+)", text("CITATION.cff")))
    for citation in (MAGNITUDE, SIGREG, TEMPERATURE, revela.CITATION):
        citation = " ".join(citation.split())
        eprint = re.search(r"eprint={([^}]+)}", citation)
        title = re.search(r"title={([^}]+)}", citation)
        assert (eprint and eprint[1] in numbers) or title[1] in references


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_is_there(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    makefile = text("Makefile").replace("$(BIN)", ".venv/bin")
    for command in (step.get("run", "") for job in jobs.values() for step in job["steps"]):
        for target in re.findall(r"^make (\S+)$", command, re.MULTILINE):
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
        for script in re.findall(r"(?<![\w/])(?:\.ci|tests)/[\w./]+", command):
            assert (ROOT / script).exists(), script


def test_the_recipe_for_conda_has_our_dependencies():
    ours = re.search(
        r"^dependencies = \[\n(.*?)^]", text("pyproject.toml"), re.MULTILINE | re.DOTALL
    )[1]
    ours = {re.sub(r"^torch\b", "pytorch", name) for name in re.findall(r'"(.+)"', ours)}
    theirs = yaml.safe_load(text(RECIPE))["requirements"]["run"]
    assert {name.replace(" ", "") for name in theirs if not name.startswith("python ")} == ours


@pytest.mark.parametrize("url", [None, "https://example.org/you/st_magnitude"])
def test_the_readme_on_pypi_has_no_relative_links(monkeypatch, url):
    interface = SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    namespace: dict = {}
    exec(compile(text("hatch_build.py"), "hatch_build.py", "exec"), namespace)
    hook = namespace["ReadmeHook"]()
    metadata = {"version": "1.2", "urls": {"Repository": url} if url else {}}
    hook.root = str(ROOT)
    hook.update(metadata)
    readme = metadata["readme"]["text"]
    if url is None:
        assert readme == text("README.md")
        return
    assert not re.findall(r"\]\((?!https?://|#)", readme)
    assert f"]({url}/raw/v1.2/docs/training_curve.png)" in readme
    assert f"]({url}/blob/v1.2/docs/losses.md)" in readme
    assert readme.count(url) == len(re.findall(r"\]\((?!https?://|#)", text("README.md")))
