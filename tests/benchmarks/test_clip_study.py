"""The CLIP study: the tables of its page are what the stored runs give."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("open_clip")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("clip")


def test_the_tables_of_the_page_are_what_the_runs_give(study: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = study.collect(study.RESULTS, study.Settings(), list(study.ROWS), range(5))
    for test in study.TESTS:
        study.print_table(runs, test)
    printed = set(capsys.readouterr().out.splitlines())
    page = (ROOT / "docs" / "clip.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page if (found := re.match(r"\| ([^|]+) \|", line)) and found[1] in study.TABLE_6]
    assert len(rows) >= 4 * len(study.TABLE_6)
    assert not set(rows) - printed


def test_a_sign_is_open_where_the_interval_holds_0(study: Any) -> None:
    assert [study.verdict(values, 1.0) for values in ([1.0, 1.1, 1.2], [-1.0, -1.1, -1.2], [-1.0, 0.5, 1.0])] == [
        "agrees",
        "disagrees",
        "open",
    ]
    assert study.verdict([0.0, 0.0], 1.0) == "0"
