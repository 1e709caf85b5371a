"""The CLIP study: the tables of stored runs on its page are what the runs give."""

import re

import pytest
from _scripts import ROOT, load

pytest.importorskip("open_clip")

study = load("clip")


def test_the_tables_of_the_page_are_what_the_runs_give() -> None:
    runs = study.collect(study.RESULTS, study.Settings(), list(study.ROWS), range(5))
    page = (ROOT / "docs" / "research" / "clip.md").read_text(encoding="utf-8")
    tables = re.findall(r"<!-- stored runs, (\w+) -->\n\n(.*?)\n\n<!-- end of runs -->", page, re.DOTALL)
    assert [test for test, _ in tables] == list(study.TESTS)
    for test, table in tables:
        assert table.splitlines() == study.sign_table(runs, test)


def test_a_sign_is_open_where_the_interval_holds_0() -> None:
    cases = ([1.0, 1.1, 1.2], [-1.0, -1.1, -1.2], [-1.0, 0.5, 1.0], [0.0, 0.0])
    assert [study.verdict(values, 1.0) for values in cases] == ["agrees", "disagrees", "open", "0"]
    assert study.verdict([1.0, 1.1], 0.0) == "(paper 0)"
