"""The pages of the studies: their tables are what the stored cells give, and none without cells."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies import archive, headlines, runs, tables
from benchmarks.studies.estimates import NOTHING, paired
from benchmarks.studies.known import training
from benchmarks.studies.store import Store, packed

FILES = sorted(archive.STUDIES.glob("**/*.jsonl"))


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


@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_blocks_of_output_are_what_stored_runs_printed(tmp_path: Path, name: str) -> None:
    page = archive.ROOT / name
    assert runs.unknown_lines(page) == []
    text = page.read_text(encoding="utf-8")
    assert "0.7936  deployed" in text
    (tmp_path / "page.md").write_text(text.replace("0.7936  deployed", "0.7946  deployed"))
    (changed,) = runs.unknown_lines(tmp_path / "page.md")
    assert "0.7946" in changed


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}, {file.stem}")
def test_no_two_lines_of_cells_have_the_same_settings(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    settings = [json.dumps(json.loads(line).get("settings", line)) for line in lines]
    assert len(settings) == len(set(settings)) > 0


def test_entries_of_closed_studies_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "cells.jsonl"
    values = {1: [0.1, 0.5, 0.9], 2: [0.2, 0.5, 1.0], 3: [0.1, 0.3, 0.2], 4: [0.2, 0.2, 0.6]}
    lines = [json.dumps({"ndcg": packed(np.array(x)), "at": {"d": i}}) for i, x in values.items()]
    file.write_text("\n".join(lines))
    of, less = ["1/ndcg", "2/ndcg"], ["3/ndcg", "4/ndcg"]
    seeds = np.array([np.subtract(values[a], values[b]) for a, b in ((1, 3), (2, 4))])
    numbers = {"of": ["1/at/d", "4/at/d"], "scale": 1}
    half = 12.706 * 2.1213 / 2**0.5  # t of one degree of freedom, standard deviation, two seeds
    expected = {
        "as it is": "as it is",
        "53.3": {"do": "mean", "of": of},
        "26.7": {"do": "mean", "of": of, "less": less},
        "1, 4": {"do": "each", "form": ".0f", **numbers},
        "1 to 4": [
            {"do": "min", "form": ".0f", **numbers},
            " to ",
            {"do": "max", "form": ".0f", **numbers},
        ],
        f"{half:.1f}": {"do": "margin", **numbers},
        paired([seeds]).show(): {"do": "gain", "of": of, "less": less},
        paired([seeds, -seeds]).show(): {
            "do": "gain over tasks",
            "of": [of, less],
            "less": [less, of],
        },
        paired([seeds.mean(axis=0)[None]]).show(digits=2): {
            "do": "by query",
            "of": of,
            "less": less,
            "digits": 2,
        },
        "+26.7 [": {"do": "judge", "of": of, "less": less},
    }
    for text, entry in expected.items():
        found = archive.shown(entry, file)
        assert found.startswith(text) if text.endswith("[") else found == text, entry


def test_a_store_reads_what_it_wrote(tmp_path: Path) -> None:
    store = Store(tmp_path / "cells.jsonl", training.Cell)
    cell = training.Cell("data", "loss", (0.1, 0.2))
    store.run(lambda cell: {"dev": cell.seed}, [cell, replace(cell, seed=2), cell])
    store.run(lambda _: {}, [cell])  # is there
    again = Store(store.file, training.Cell)
    assert again.of_seeds(cell) == {seed: again.load(replace(cell, seed=seed)) for seed in (0, 2)}
    assert [x["dev"] for x in again.found.values()] == [0, 2]
    assert json.loads(store.file.read_text().splitlines()[1])["settings"]["seed"] == 2


@pytest.mark.parametrize("page", headlines.headlines())
def test_a_headline_that_its_table_contradicts_is_noticed(page: str) -> None:
    text = " ".join(headlines.text_of(page).split())
    assert headlines.contradicted(page, text) == []
    for pattern, _ in headlines.headlines()[page]:
        (start, end) = re.search(pattern, text).span(1)
        (found,) = headlines.contradicted(page, f"{text[:start]}9{text[start:end]}{text[end:]}")
        assert found.startswith(repr(pattern))


def test_the_figures_of_readme_and_guides_are_on_the_pages_that_they_link():
    pages = {page: page.read_text(encoding="utf-8") for page in tables.QUOTING}
    assert {page.name: tables.unknown(page, text) for page, text in pages.items()} == {
        page.name: [] for page in pages
    }
