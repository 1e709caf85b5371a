"""All scripts: the examples in their docstrings, and the names of the cells that they stored."""

import doctest
import json
from pathlib import Path

import pytest
from _scripts import ROOT, load

cells, revela_text = load("cells", "evidence"), load("revela_text", "evidence")
SCRIPTS = [path for folder in ("", "evidence") for path in sorted((ROOT / "benchmarks" / folder).glob("*.py"))]


@pytest.mark.parametrize(
    "path", [path for path in SCRIPTS if ">>>" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
def test_examples_in_docstrings(path: Path) -> None:
    folder = path.parent.relative_to(ROOT / "benchmarks")
    failed, attempted = doctest.testmod(load(path.stem, str(folder)))
    assert failed == 0
    assert attempted > 0


@pytest.mark.parametrize(
    ("files", "cell"),
    [
        ("cells/*.json", cells.Cell),
        ("prior/*-seed*.json", cells.Cell),
        ("late_interaction/*-seed*.json", cells.Cell),
        ("revela/*/*-seed*.json", revela_text.Cell),
    ],
)
def test_every_stored_cell_has_the_name_of_its_settings(files: str, cell: type) -> None:
    paths = sorted(cells.RESULTS.glob(files))
    assert paths
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert cell(**found["settings"]).name == path.stem
        if files == "cells/*.json":
            assert found["scorings"].keys() - {"cosine"} == set(cells.SCORINGS), path
