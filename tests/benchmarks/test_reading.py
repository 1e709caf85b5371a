"""benchmarks/evidence/reading.py: its prompt, and what its table says of stored readings."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest
from _scripts import load

reading = load("reading", "evidence")


def test_prompt() -> None:
    assert not doctest.testmod(reading).failed


def test_table_compares_with_cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATH", tmp_path / "reading.json")
    assert reading.table() == ["(No cells are stored yet.)"]
    right = {"em": reading.packed(np.ones(4)), "f1": reading.packed(np.ones(4))}
    wrong = {"em": reading.packed(np.zeros(4)), "f1": reading.packed(np.full(4, 0.5))}
    readings = dict.fromkeys(reading.NAMES, wrong) | {"cosine, matched": right}
    reading.store(reading.PATH, {"readings": readings})
    lines = reading.table()
    assert "| Cosine | 100.0 | 100.0 |  |  |" in lines
    assert "| QNorm calibrated | 0.0 | 50.0 | -100.0 [-100.0, -100.0] | -50.0 [-50.0, -50.0] |" in lines
