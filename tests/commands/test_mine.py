"""``st-magnitude mine``: what it writes is what ``st-magnitude train`` reads."""

import pytest
from _cli import figures, refusal
from conftest import CORPUS, QUERIES, RELEVANT_DOCS

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData


@pytest.fixture
def data(tmp_path):
    RetrievalData(QUERIES, CORPUS, RELEVANT_DOCS, {"q1": {"d13"}}).save(tmp_path / "data", "train")
    return tmp_path / "data"


def test_a_mined_split_trains(data, static_path, tmp_path):
    split = data / "qrels" / "mined.tsv"
    options = {"similarity": "qnorm", "num_negatives": 2}
    done = figures("mine", static_path, data=data, output=split, never_relevant=True, **options)
    assert done == {"split": "train", "rows": 24, "output": str(split)}

    mined, split = (RetrievalData.from_beir(data, name) for name in ("mined", "train"))
    candidates = CORPUS.keys() - set().union(*RELEVANT_DOCS.values())
    expected = stm.mine_negatives(stm.load(static_path), split, candidates=candidates, **options)
    assert {query: set(grades) for query, grades in mined.relevant.items()} == RELEVANT_DOCS
    for query, documents in mined.negatives.items():
        texts = {row["negative"] for row in expected if row["anchor"] == QUERIES[query]}
        judged = {CORPUS["d13"]} if query == "q1" else set()  # stays a negative
        assert {CORPUS[document] for document in documents} == texts | judged
    assert "exists" in refusal("mine", static_path, data=data, output=done["output"])
    place = {"data": data, "split": "mined", "model": static_path, "output": tmp_path / "trained"}
    assert figures("train", **place, negatives=2, batch_size=4, max_steps=2)["steps"] == 2


def test_answers_of_other_splits_are_not_never_relevant(data, static_path, tmp_path):
    RetrievalData(QUERIES, CORPUS, {"q1": CORPUS.keys()}).save_qrels(data / "qrels" / "test.tsv")
    options = {"output": tmp_path / "rows.tsv", "never_relevant": True}
    assert "--never-relevant leaves no doc" in refusal("mine", static_path, data=data, **options)
