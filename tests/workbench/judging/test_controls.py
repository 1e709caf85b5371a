"""BM25 as a control, and where it is none."""

import sys

import pytest

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS
from st_magnitude.workbench.judging import controls
from st_magnitude.workbench.judging.controls import bm25_control
from st_magnitude.workbench.judging.exam import DEPTH


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


def test_grams_of_a_corpus_that_is_too_large_are_left_out(monkeypatch, caplog):
    data = four("word0", "word1", "word2", "word3")
    characters = sum(map(len, data.corpus.values()))
    monkeypatch.setattr(controls, "MOST_CHARACTERS", characters)
    assert list(bm25_control(data)[0]) == [*TOKENS]
    assert "4-grams" not in caplog.text
    monkeypatch.setattr(controls, "MOST_CHARACTERS", characters - 1)
    run, no_control = bm25_control(data)
    assert (list(run), no_control) == (["words"], "")
    assert f"the 4-grams of a corpus of {characters} characters" in caplog.text


def test_without_bm25s_there_is_no_control_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert bm25_control(four("word0", "word1", "word2", "word3")) == ({}, "")
    assert "Not measured: BM25 needs bm25s" in caplog.text
