"""The pages of the studies: their tables are what the stored cells give, and none without cells."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.studies import tables
from benchmarks.studies.estimates import NOTHING
from benchmarks.studies.known import training
from benchmarks.studies.store import Store

FILES = sorted((tables.ROOT / "benchmarks" / "studies").glob("**/cells.jsonl"))
SCRIPTS = {"boilerplate": "pages", "revela": "revela_text"}


@pytest.mark.slow
@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_a_page_is_what_the_cells_give(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == tables.rebuilt(text), "run python benchmarks/studies/tables.py"
    names = set(re.findall(r"<!-- ([^>]+) -->", text)) - {"end"}
    assert names
    assert names <= tables.TABLES.keys()
    assert NOTHING[0] not in text


def test_evidence_quotes_what_the_pages_have() -> None:
    assert tables.unquoted() == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.parent.name)
def test_a_file_has_a_line_for_each_cell(file: Path) -> None:
    name = file.parent.name
    module = "cells" if name == "studies" else f"{name}.{SCRIPTS.get(name, name)}"
    study = importlib.import_module(f"benchmarks.studies.{module}")
    stores = [x for x in vars(study).values() if isinstance(x, Store) and x.file == file]
    assert len(stores) == 1
    assert len(stores[0].found) == len(file.read_text(encoding="utf-8").splitlines())


def test_a_store_reads_what_it_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl", training.Cell)
    cell = training.Cell("data", "loss", (0.1, 0.2))
    store.run(lambda cell: {"dev": cell.seed}, [cell, replace(cell, seed=2), cell])
    store.run(lambda _: {}, [cell])  # is there
    again = Store(store.file, training.Cell)
    assert again.of_seeds(cell) == {seed: again.load(replace(cell, seed=seed)) for seed in (0, 2)}
    assert [x["dev"] for x in again.found.values()] == [0, 2]
    assert json.loads(store.file.read_text().splitlines()[1])["settings"]["seed"] == 2


def test_the_figures_of_readme_and_guides_are_on_the_pages_that_they_link():
    pages = {page: page.read_text(encoding="utf-8") for page in tables.QUOTING}
    assert {page.name: tables.unknown(page, text) for page, text in pages.items()} == {
        page.name: [] for page in pages
    }


def test_the_tables_of_the_clip_page_are_what_the_runs_give() -> None:
    pytest.importorskip("open_clip")
    clip = importlib.import_module("benchmarks.studies.clip.clip")
    runs = clip.collect()
    assert runs.keys() >= {"nonorm-sym", "imgnorm-i2t"}
    page = (tables.ROOT / "docs" / "research" / "clip.md").read_text(encoding="utf-8")
    pattern = r"<!-- stored runs, (\w+) -->\n\n(.*?)\n\n<!-- end of runs -->"
    found = re.findall(pattern, page, re.DOTALL)
    assert [test for test, _ in found] == list(clip.TESTS)
    for test, table in found:
        assert table.splitlines() == clip.sign_table(runs, test)
        assert len(table.splitlines()) == 2 + len(runs)
