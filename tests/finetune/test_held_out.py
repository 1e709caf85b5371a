"""What held-out queries measure, against figures that were computed by hand."""

import sys

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS
from st_magnitude.finetune.measure import (
    DEPTH,
    NUM_DOCUMENTS,
    bm25_control,
    card_figures,
)


def four(*answers):
    """Four queries of a word each, and their answers."""
    queries = {f"q{i}": f"word{i} please" for i in range(4)}
    corpus = {f"d{i}": text for i, text in enumerate(answers)}
    return RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(4)})


@pytest.mark.parametrize(
    ("answers", "number"),
    [
        (["word0 it is", "word1", "two", "three"], None),  # a half is enough
        (["word0 it is", "one", "two", "three"], 1),
        (["word1", "word0", "word3", "please"], 1),  # all find documents, and one an answer
        (["A", "B", "?", "\ue000"], 0),
    ],
)
def test_a_search_that_shares_no_words_is_no_control(answers, number):
    run, said = bm25_control(four(*answers))
    if number is None:
        assert (list(run), list(run["words"]["q0"]), said) == ([*TOKENS], ["d0"], "")
        return
    assert run == {}
    assert said == (
        f"BM25 finds a word in common with an answer for {number} of 4 queries only, so it is no"
        " control."
    )


def test_a_word_of_many_documents_says_nothing_against_a_control():
    """Of 200 documents with a word of the query, a run has the first 100."""
    many = {f"a{i:03}": "please" for i in range(2 * DEPTH)}
    data = four("one please", "two", "three", "four")
    assert bm25_control(data)[0] == {}
    run, no_control = bm25_control(
        RetrievalData(data.queries, data.corpus | many, {q: {"d3"} for q in data.queries})
    )
    assert no_control == ""
    assert {len(found) for found in run["words"].values()} == {DEPTH}
    assert "d3" not in run["words"]["q3"]


def test_without_bm25s_there_is_no_control_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert bm25_control(four("word0", "word1", "word2", "word3")) == ({}, "")
    assert "Not measured: BM25 needs bm25s" in caplog.text


def test_figures_of_a_sample_for_a_card():
    words = [f"word{i}" for i in range(60)]
    model = SentenceTransformer(modules=[BoW(words)], similarity_fn_name="dot", device="cpu")
    corpus = {f"{word}-{n}": " ".join([word] * n) for word in words for n in (1, 4, 6)}
    relevant = {word: {f"{word}-4"} for word in words}
    task = RetrievalData(dict(zip(words, words, strict=True)), corpus, relevant)
    answers = {"word0-4", "word1-4"}
    found = card_figures(model, task, answers, seed=0)
    among = task.encode(model, before_normalize=True)
    assert card_figures(model, task, answers, 0, among) == found
    assert found["document_norm_mean"] == geometry.norms(among.documents).mean()
    assert found["document_norm_mean"] == pytest.approx((1 + 4 + 6) / 3)
    assert "cohens_d" in found
    assert "cohens_d" not in card_figures(model, task, {}, 0, among)
    corpus = {f"{i}": "word0 " * (1 + i % 50) for i in range(2 * NUM_DOCUMENTS)}
    data = RetrievalData({"q": "word0"}, corpus, {"q": {"0"}})
    assert len({card_figures(model, data, {}, seed)["document_norm_mean"] for seed in (0, 1)}) == 2
