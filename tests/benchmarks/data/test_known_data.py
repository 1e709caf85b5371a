"""benchmarks/data: the publishers' files become retrieval data."""

import json

import pytest
from benchmarks.data import banking77, clinc150, xquad
from benchmarks.data.intents import find_name, find_questions, name_pairs, question_pairs, split_off

QUESTIONS = [("no card yet", "card_arrival"), ("lost it", "lost_card"), ("when?", "card_arrival")]


@pytest.mark.parametrize("name", ["train.csv", "banking77_train.csv"])
def test_banking77(tmp_path, name):
    (tmp_path / name).write_text('text,category\n"No card, yet?\n",card_arrival\nLost,lost_card\n')
    found = [("No card, yet?", "card_arrival"), ("Lost", "lost_card")]
    assert banking77.read(tmp_path, "train") == found
    with pytest.raises(FileNotFoundError, match=r"test\.csv"):
        banking77.read(tmp_path, "test")


def test_clinc150(tmp_path):
    file = tmp_path / "data_full.json"
    file.write_text(json.dumps({"val": [["hola", "translate"]], "oos_val": [["?", "oos"]]}))
    assert clinc150.read(file, "val") == [("hola", "translate")]
    assert clinc150.read(file, "oos_val") == [("?", "oos")]
    with pytest.raises(ValueError, match="'dev'"):
        clinc150.read(file, "dev")


def test_xquad(tmp_path):
    paragraphs = [{"context": f"text {i}", "qas": [{"id": f"q{i}", "question": "?"}]} for i in "ab"]
    file = tmp_path / "xquad.en.json"
    file.write_text(json.dumps({"data": [{"paragraphs": [x]} for x in paragraphs]}))
    found = xquad.find_paragraph(file)
    assert found.corpus == {"d0": "text a", "d1": "text b"}
    assert found.relevant == {"qa": {"d0": 1}, "qb": {"d1": 1}}


def test_intents():
    names = find_name(QUESTIONS, ["card_arrival", "lost_card"])
    assert names.corpus == {"card_arrival": "card arrival", "lost_card": "lost card"}
    assert names.relevant["q2"] == {"card_arrival": 1}
    same = find_questions([("where is it", "card_arrival")], QUESTIONS)
    assert same.relevant == {"q0": {"d0": 1, "d2": 1}}
    assert name_pairs(QUESTIONS)["label"][:] == [0, 1, 0]
    pairs = question_pairs(QUESTIONS)  # "lost it" is alone
    assert {(row["anchor"], row["positive"]) for row in pairs} == {
        ("no card yet", "when?"),
        ("when?", "no card yet"),
    }
    kept, held_out = split_off(QUESTIONS, 1)
    assert sorted([*kept, *held_out]) == sorted(QUESTIONS)
    assert len(held_out) == 1
