"""What held-out queries measure, against figures that were computed by hand."""

import sys

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.measure import (
    DEPTH,
    NUM_DOCUMENTS,
    bm25_control,
    card_figures,
    found_by,
)

# Discounts of the ranks 1, 2, 3 and 10: 1, .63093, .5 and .28906.
# The gains 3, 1 give 3.63093 at best; the gain 2 gives 2; 1 gives 1.
GRADED = {
    "whole": ({"a": 3, "b": 1}, "ab", 1.0),
    "turned": ({"a": 3, "b": 1}, "ba", 0.79671),  # (1 + 3 * .63093) / 3.63093
    "first missing": ({"a": 3, "b": 1}, "cb", 0.17377),  # .63093 / 3.63093
    "third": ({"a": 2}, "bca", 0.5),  # 2 * .5 / 2
    "tenth": ({"x": 1}, "abcdefghix", 0.28906),
    "eleventh": ({"x": 1}, "abcdefghijx", 0.0),
    "nothing": ({"a": 1}, "", 0.0),
}


def test_found_is_a_table_computed_by_hand():
    corpus = {document: f"text {document}" for document in "abcdefghijx"}
    queries = dict.fromkeys([*GRADED, "unjudged"], "which?")
    data = RetrievalData(queries, corpus, {q: grades for q, (grades, _, _) in GRADED.items()})
    run = {q: {d: -float(i) for i, d in enumerate(found)} for q, (_, found, _) in GRADED.items()}
    found = found_by(run | {"unjudged": {"a": 1.0}}, data)
    assert found.ndcg == pytest.approx({q: x for q, (_, _, x) in GRADED.items()}, abs=1e-5)
    assert found.first == {q: ranked[:1] for q, (_, ranked, _) in GRADED.items()}
    # (1 + .79671 + .17377 + .5 + .28906) / 7
    assert found.mean == pytest.approx(0.39422, abs=1e-5)


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
        assert (list(run["q0"]), said) == (["d0"], "")
        return
    assert run is None
    assert said == (
        f"BM25 finds a word in common with an answer for {number} of 4 queries only, so it is no"
        " control."
    )


def test_a_word_of_many_documents_says_nothing_against_a_control():
    """Of 200 documents with a word of the query, a run has the first 100."""
    many = {f"a{i:03}": "please" for i in range(2 * DEPTH)}
    data = four("one please", "two", "three", "four")
    assert bm25_control(data)[0] is None
    run, no_control = bm25_control(
        RetrievalData(data.queries, data.corpus | many, {q: {"d3"} for q in data.queries})
    )
    assert no_control == ""
    assert {len(found) for found in run.values()} == {DEPTH}
    assert "d3" not in run["q3"]


def test_without_bm25s_there_is_no_control_and_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert bm25_control(four("word0", "word1", "word2", "word3")) == (None, "")
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
