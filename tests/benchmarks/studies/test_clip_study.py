"""The CLIP study: the tables of stored runs on its page are what the runs give."""

import re

import pytest
from benchmarks.studies.cells import ROOT

pytest.importorskip("open_clip")

from benchmarks.studies.clip import clip


def test_the_tables_of_the_page_are_what_the_runs_give() -> None:
    runs = clip.collect()
    assert runs.keys() >= {"nonorm-sym", "imgnorm-i2t"}
    page = (ROOT / "docs" / "research" / "clip.md").read_text(encoding="utf-8")
    tables = re.findall(
        r"<!-- stored runs, (\w+) -->\n\n(.*?)\n\n<!-- end of runs -->", page, re.DOTALL
    )
    assert [test for test, _ in tables] == list(clip.TESTS)
    for test, table in tables:
        assert table.splitlines() == clip.sign_table(runs, test)
        assert len(table.splitlines()) == 2 + len(runs)


def test_a_sign_is_open_where_the_interval_holds_0() -> None:
    cases = ([1.0, 1.1, 1.2], [-1.0, -1.1, -1.2], [-1.0, 0.5, 1.0])
    assert [clip.verdict(values, 1.0) for values in cases] == ["agrees", "disagrees", "open"]
    assert clip.verdict([1.0, 1.1], 0.0) == "(paper 0)"
