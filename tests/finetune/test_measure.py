"""What held-out queries measure, against figures that were computed by hand."""

import math
import sys

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.measure import (
    DEPTH,
    NUM_DOCUMENTS,
    Found,
    RetrievalEvaluator,
    bm25_control,
    card_figures,
    encode,
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


def test_differences_are_of_the_same_query_whatever_the_order():
    before = Found({"a": 0.5, "b": 1.0, "c": 0.25}, {})
    after = Found({"c": 1.0, "a": 0.5, "b": 0.0}, {})
    assert after.minus(before).tolist() == [0.75, 0.0, -1.0]


def four(*answers):
    """Four queries whose words are in the texts of the given answers, and in nothing else."""
    queries = {f"q{i}": f"word{i} please" for i in range(4)}
    corpus = {f"d{i}": text for i, text in enumerate(answers)} | {"other": "no answer"}
    return RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(4)})


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (["word0 it is", "word1", "word2", "word3"], ""),
        (["word0 it is", "word1", "two", "three"], ""),  # a half
        (["word0 it is", "one", "two", "three"], "for 1 of 4 queries only, so it is no control."),
        # they find documents, and not one that answers
        (["word1", "word0", "word3", "please"], "for 1 of 4 queries only, so it is no control."),
        (["A", "B", "C", "D"], "for 0 of 4 queries only, so it is no control."),
        (["?", "!", "...", "--"], "for 0 of 4 queries only, so it is no control."),
        (["\ue000", "\ue001", "\ue002", "\ue003"], "for 0 of 4 queries only, so it is no control."),
        # a clause of Japanese is one word
        (["絵は駅にある", "紅茶は三分", "猫は庭にいる", "窓は赤い"], "for 0 of 4 queries only"),
    ],
)
def test_a_search_that_shares_no_words_is_no_control(answers, said):
    data = four(*answers)
    run, no_control = bm25_control(data)
    assert said in no_control
    assert (run is None) == bool(said) == no_control.startswith("BM25 finds a word in common")
    if run is not None:
        assert list(run["q0"]) == ["d0"]


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


@pytest.mark.parametrize(
    ("modules", "options", "norm"),
    [
        ([], {"similarity_fn_name": "euclidean"}, 2.0),  # a distance counts as cosine
        ([Normalize()], {}, 2.0),
        ([Normalize()], {"truncate_dim": 1}, 1.0),  # parts of unit vectors are ranked as served
    ],
)
def test_embeddings_keep_the_norm_that_a_model_hides(modules, options, norm):
    data = RetrievalData({"q": "tea"}, {"a": "tea tea", "b": "rain"}, {"q": {"a"}})
    words = BoW(["tea", "rain"])
    model = SentenceTransformer(modules=[words, *modules], device="cpu", **options)
    encoded, similarity = encode(model, data)
    assert encoded.documents[0].norm() == norm
    assert similarity.exponents[1] == 1.0


def test_figures_of_a_sample_for_a_card():
    words = [f"word{i}" for i in range(60)]
    model = SentenceTransformer(modules=[BoW(words)], similarity_fn_name="dot", device="cpu")
    corpus = {f"{word}-{n}": " ".join([word] * n) for word in words for n in (1, 4, 6)}
    task = RetrievalData(
        {f"q-{word}": word for word in words},
        corpus,
        {f"q-{word}": {f"{word}-4"} for word in words},
    )
    answers = {"word0-4", "word1-4"}
    found = card_figures(model, task, answers, seed=0)
    among = task.encode(model, before_normalize=True)
    assert card_figures(model, task, answers, 0, among) == found
    assert found["document_norm_mean"] == geometry.norms(among.documents).mean()
    assert found["document_norm_mean"] == pytest.approx((1 + 4 + 6) / 3)
    assert found["query_norm_mean"] == 1.0
    assert "cohens_d" in found
    assert "cohens_d" not in card_figures(model, task, {}, 0, among)
    corpus = {f"{i}": "word0 " * (1 + i % 50) for i in range(2 * NUM_DOCUMENTS)}
    data = RetrievalData({"q": "word0"}, corpus, {"q": {"0"}})
    means = {seed: card_figures(model, data, {}, seed)["document_norm_mean"] for seed in (0, 1)}
    assert len({*means.values()}) == 2
    rest = data.encode(model, before_normalize=True)
    assert card_figures(model, data, {}, 1, rest)["document_norm_mean"] == means[1]
    assert not math.isclose(means[0], geometry.norms(rest.documents).mean())  # not of all


def test_the_card_has_the_first_figure_as_the_main_one():
    model = SentenceTransformer(modules=[BoW(["tea"])], device="cpu")
    evaluator = RetrievalEvaluator("after")
    evaluator.note(model, {"ndcg@10": 0.5, "query_norm_mean": 2.0}, steps=7)
    assert evaluator.primary_metric == "after_ndcg@10"
    (kept,) = model.model_card_data.eval_results_dict.values()
    assert kept == {"after_ndcg@10": 0.5, "after_query_norm_mean": 2.0}
