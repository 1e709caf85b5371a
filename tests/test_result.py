"""Results as JSON, and one table as text and Markdown."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from st_magnitude.judge import Difference
from st_magnitude.result import Result, Table, wrap

TABLE = Table(
    ["how | where", "nDCG@10", "gain", "documents"],
    [
        ["<script>", 0.5, Difference(0.1, -0.05, 0.25, 9, 9), 1200],
        ["two words", math.nan, Difference(0.0, 0.0, 0.0, 9, 0), 7],
    ],
    title="A title",
    note="A note.",
)


def test_text_fits_the_width_and_aligns_numbers():
    title, _, first, second, note = TABLE.to_text(80).splitlines()
    assert (title, note) == ("A title", "A note.")
    assert first.endswith("+10.0 points [-5.0, +25.0]      1,200")
    assert second.endswith("    7")
    assert max(map(len, Table(["a"], [["word " * 40]]).to_text(40).splitlines())) <= 40


def test_a_column_without_a_text_takes_no_place():
    assert Table(["a", ""], [["b", ""], ["c", ""]]).to_text().splitlines() == ["a", "b", "c"]


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_narrow_terminal_loses_no_word_and_no_number(width):
    columns = ["precision", "dim", "bytes/vector", "nDCG@10", "recall of float top 10"]
    text = Table(columns, [["binary + norm rescored", 384, 52, 0.44, 0.98]]).to_text(width)
    words = {*" ".join(columns).split(), "binary", "rescored", "384", "52", "0.4400", "0.9800"}
    assert words <= set(text.split())
    assert max(map(len, text.splitlines())) <= max(width, 52)


@pytest.mark.parametrize("text", ["有" * 60, "e\u0301" * 9 + " 茶 tea " * 20, "한국 " * 40])
def test_wide_letters_take_two_columns(text):
    """Lines break between them, and a letter with an accent takes one column."""
    for shown in (wrap(text, 40), Table(["text"], [[text]]).to_text(40)):
        for line in shown.splitlines():
            assert sum(2 if letter > "\u1100" else letter != "\u0301" for letter in line) <= 40
        assert "".join(shown.split()).removeprefix("text") == text.replace(" ", "")


@pytest.mark.parametrize("letter", ["\x1b", "\x07", "\x9b", "\x7f", "\u202e", "\u2066"])
def test_what_a_terminal_obeys_is_escaped(letter):
    text = f"red{letter}]8;;tea"
    for shown in (wrap(text), str(Table(["a"], [[text]], title=text, note=text))):
        assert letter not in shown
        assert shown.count(ascii(letter)[1:-1]) == shown.count("tea") > 0
    assert wrap("a\u200db") == "a\u200db"  # as in emoji and Persian


def test_markdown_holds_the_cells():
    cells = ["<script>", "0.5000", "+10.0 points [-5.0, +25.0]", "1,200", "two words", "-"]
    assert all(cell in TABLE.to_markdown() for cell in cells)
    assert "| --- | ---: | ---: | ---: |" in TABLE.to_markdown()


@dataclass
class Measured(Result):
    ndcg: float
    rows: np.ndarray = field(default_factory=lambda: np.array([1.0, np.nan]))

    def tables(self):
        return ["A sentence.", Table(["name", "value"], [["ndcg", self.ndcg]])]


def test_a_result_is_saved_and_shown(tmp_path):
    result = Measured(0.5)
    path = result.save(tmp_path / "new" / "result.json")
    assert json.loads(path.read_text()) == result.to_dict() == {"ndcg": 0.5, "rows": [1.0, None]}
    assert str(result).splitlines()[0] == "A sentence."
    assert result.to_markdown().endswith("| ndcg | 0.5000 |")
