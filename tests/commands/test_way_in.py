"""From a file of pairs to a verdict, a retriever and a look at what it finds."""

import csv
import json

import pytest
from _cli import figures, invoke, refusal
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm

COLOURS = ["red", "green", "blue", "white", "black", "amber", "violet", "grey"]
THINGS = ["door", "roof", "wall", "lamp", "chair", "table", "shelf", "fence"]


@pytest.fixture
def pairs(tmp_path):
    """64 questions, each with a document of its own that shares no word with it."""
    pytest.importorskip("wordllama")
    file = tmp_path / "pairs.csv"
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["question", "answer"])
        for i, colour in enumerate(COLOURS):
            for j, thing in enumerate(THINGS):
                writer.writerow([f"{colour} {thing}", f"number {i} of the row {j}"])
    return file


def test_a_table_is_judged_in_folds_and_found_by_search(pairs, tmp_path):
    output = tmp_path / "out"
    said = invoke("train", data=pairs, output=output, confirm="test").output
    lines = [line for line in said.splitlines() if line]
    verdict = next(i for i, line in enumerate(lines) if "held out in 5 folds" in line)
    saved = next(i for i, line in enumerate(lines) if line.startswith("Saved to"))
    table = next(i for i, line in enumerate(lines) if line.startswith("pretrained"))
    assert verdict < saved < table
    assert any(line.startswith("BM25") for line in lines)
    assert "test queries" in " ".join(lines)
    SentenceTransformer(str(output))  # without the package
    card = (output / "README.md").read_text()
    assert "type: ndcg@10" in card
    assert "Trained from `wordllama`. An embedding takes 1,024 bytes, and 256 as int8." in card
    assert "on the pairs dataset" in card
    assert "1807.03748" in card
    assert "feng2026" not in card

    found = figures("search", output, "red door", data=pairs, against="wordllama", top_k=3)
    (search,) = found["searches"]
    assert [len(hits) for hits in search["found"]] == [3, 3]
    shown = invoke("search", output, "red door", data=pairs, top_k=64).output
    assert shown.count(" yes ") == 1
    assert "answer have no higher score" in " ".join(shown.split())


def test_search_says_by_a_rule_that_nothing_answers(tmp_path, monkeypatch):
    """Each known question shares a word with its answer; that of another kind shares none."""
    encoded = []
    encode = SentenceTransformer.encode_document
    spy = lambda *a, **k: encoded.append(1) or encode(*a, **k)  # noqa: E731
    monkeypatch.setattr(SentenceTransformer, "encode_document", spy)
    rows = [{"query": f"word{i} please", "document": f"word{i}", "split": "dev"} for i in range(99)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [f"word{i}" for i in range(99)]
    SentenceTransformer(modules=[BoW([*words, "please"])]).save_pretrained(str(tmp_path / "bow"))
    options = {"data": tmp_path / "pairs.jsonl", "risk": 0.2}
    for question, answered in (("word7 please", True), ("please", False)):
        found = figures("search", tmp_path / "bow", question, **options)
        assert found["searches"][0]["answered"] is answered
    assert len(encoded) == 2  # once for each call
    dev = stm.load_splits(options["data"])["dev"]
    rule = stm.calibrate_abstention(stm.load(tmp_path / "bow"), dev, 0.2)
    assert found["rule"] == rule.to_dict()
    said = invoke("search", tmp_path / "bow", "please", **options).output
    assert "risk at most 0.2 with probability 0.95" in said
    assert "By the rule, none answers." in said
    said = invoke("search", tmp_path / "bow", "please", **options | {"risk": 0.01}).output
    assert "for the guarantee, use more queries" in said  # and then as without a rule
    assert "no higher score" in said
    (tmp_path / "few.csv").write_text("query,document\nword1 please,word1\nword2 please,word2\n")
    options["data"] = tmp_path / "few.csv"
    assert "add a dev split" in refusal("search", tmp_path / "bow", "please", **options)


def test_a_dev_split_of_the_user_stays_a_dev_split(pairs, tmp_path):
    rows = pairs.read_text().splitlines()
    parts = ["split", *(["train"] * 40), *(["dev"] * 24)]
    pairs.write_text("\n".join(f"{row},{part}" for row, part in zip(rows, parts, strict=True)))
    found = figures("train", data=pairs, output=tmp_path / "out", save_data=tmp_path / "data")
    assert found["dev"]["queries"] == 24
    assert found["dev"]["folds"] == 0
    assert (tmp_path / "data" / "qrels" / "dev.tsv").exists()
