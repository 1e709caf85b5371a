"""The reader: its prompt, SQuAD's metrics, and the table of stored readings."""

from pathlib import Path

import numpy as np
import pytest
from benchmarks.studies.reading import reading


@pytest.mark.parametrize(
    ("prediction", "answers", "em", "f1"),
    [
        ("the Eiffel Tower", ["Eiffel tower"], 1.0, 1.0),
        ("Eiffel", ["Eiffel tower", "Tour Eiffel of Paris"], 0.0, 2 / 3),
        ("to be or not to be", ["to be to"], 0.0, 2 * 3 / (6 + 3)),
        ("the", ["a"], 1.0, 1.0),
        ("", ["yes"], 0.0, 0.0),
    ],
)
def test_metrics(prediction: str, answers: list[str], em: float, f1: float) -> None:
    assert reading.exact_match(prediction, answers) == em
    assert reading.token_f1(prediction, answers) == pytest.approx(f1)


def test_table_compares_with_cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PATH", tmp_path / "reading.json")
    assert reading.table() == ["(No cells are stored yet.)"]
    right = {"em": reading.packed(np.ones(4)), "f1": reading.packed(np.ones(4))}
    wrong = {"em": reading.packed(np.zeros(4)), "f1": reading.packed(np.full(4, 0.5))}
    readings = dict.fromkeys(reading.NAMES, wrong) | {"cosine, matched": right}
    reading.store(reading.PATH, {"readings": readings})
    lines = reading.table()
    assert "| Cosine | 100.0 | 100.0 |  |  |" in lines
    assert (
        "| QNorm calibrated | 0.0 | 50.0 | -100.0 [-100.0, -100.0] | -50.0 [-50.0, -50.0] |"
        in lines
    )
