"""Fusion and BM25 against literal loops, the others against sentence-transformers."""

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude import DNORM
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import HybridEvaluator, bm25_run, reciprocal_rank_fusion

ids = st.sampled_from("abcdefgh")
scores = st.integers(-3, 3).map(float)  # many ties
runs = st.dictionaries(st.sampled_from(["q1", "q2"]), st.dictionaries(ids, scores))


def fusion_loop(rankings, k):
    """Cormack et al., section 3: for each document, each run in which some others are ahead."""
    fused = {}
    for run in rankings:
        for query, scored in run.items():
            found = fused.setdefault(query, {})
            for d, own in scored.items():
                ahead = sum(other > own or (other == own and e < d) for e, other in scored.items())
                found[d] = found.get(d, 0.0) + 1 / (k + ahead + 1)
    return fused


@given(st.lists(runs, min_size=1, max_size=4), st.floats(0, 100), st.integers(1, 9), st.data())
def test_fusion_equals_the_loop_and_no_order_matters(rankings, k, top_k, data):
    fused = reciprocal_rank_fusion(rankings, k=k)
    expected = fusion_loop(rankings, k)
    assert fused.keys() == {query for run in rankings for query in run}
    for query, found in fused.items():
        assert found == pytest.approx(expected.get(query, {}), rel=1e-12)
        keys = [(-score, document) for document, score in found.items()]
        assert keys == sorted(keys)
    again = reciprocal_rank_fusion(data.draw(st.permutations(rankings)), k=k, top_k=top_k)
    for query, found in fused.items():
        assert list(again[query].items()) == list(found.items())[:top_k]


def test_without_bm25s(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"BM25 needs bm25s.*eval"):
        HybridEvaluator(**task)
    HybridEvaluator(**task, bm25={"q1": {"d01": 1.0}})


@pytest.fixture
def weak(static_model) -> SentenceTransformer:
    """The static model with three of its dimensions: it errs, and figures differ."""
    with torch.no_grad():
        static_model[0].embedding.weight[:, 3:] = 0
    return static_model


def test_evaluator_equals_that_of_sentence_transformers(task, weak):
    metrics = HybridEvaluator(**task, top_k=12)(weak)
    expected = InformationRetrievalEvaluator(**task, precision_recall_at_k=[12])(weak)
    for metric in ("ndcg@10", "mrr@10", "recall@12"):
        assert metrics[f"dense_{metric}"] == pytest.approx(expected[f"cosine_{metric}"], abs=1e-12)
    assert len(metrics) == 3 * 4
    assert metrics["dense_recall@12"] < 1
    assert len({metrics[f"{search}_ndcg@10"] for search in ("dense", "bm25", "hybrid")}) == 3


def test_evaluator_fuses_what_it_shows(task, minilm):
    """Prompts and the similarity are for the dense run alone."""
    prompts = {"query_prompt": "my cat ", "corpus_prompt": "my cat "}
    evaluator = HybridEvaluator(**task, top_k=10, similarity="dnorm", **prompts)
    evaluator(minilm)
    dense, bm25 = (evaluator.runs[name] for name in ("dense", "bm25"))
    data = RetrievalData(*task.values())
    assert dense == stm.encode(minilm, data, DNORM, **prompts).search(10)
    assert dense != stm.encode(minilm, data, DNORM).search(10)
    assert bm25 == bm25_run(data, top_k=10)
    assert max(map(len, reciprocal_rank_fusion([dense, bm25]).values())) > 10
    assert evaluator.runs["hybrid"] == reciprocal_rank_fusion([dense, bm25], top_k=10)
    assert evaluator.get_config_dict().items() >= (prompts | {"top_k": 10}).items()


def test_a_given_run_takes_the_place_of_bm25(task, static_model):
    run = dict(bm25_run(RetrievalData(task["queries"], task["corpus"], {}), top_k=20))
    run["unjudged"] = {"elsewhere": 1.0}
    del run["q8"]
    evaluator = HybridEvaluator(**task, top_k=10, bm25=run)
    expected = {query: dict(list(run.get(query, {}).items())[:10]) for query in task["queries"]}
    assert evaluator.runs["bm25"] == expected
    evaluator(static_model)
    assert evaluator.per_query["bm25"][7] == 0
    assert evaluator.per_query["hybrid"][7] == evaluator.per_query["dense"][7] > 0


def test_evaluator_refuses(task):
    with pytest.raises(ValueError, match="top_k must be at least 10, for nDCG@10; got 9"):
        HybridEvaluator(**task, top_k=9)
    for run, message in (
        ({"other": {"d01": 1.0}}, r"its keys start with \['other'\]"),
        ({"q1": {"d01": 1.0, "d01-2": 2.0}}, "A run has the document 'd01-2' .* not in the"),
        ({"q1": {"d01": math.nan}}, "the score nan for 'd01'"),
    ):
        with pytest.raises(ValueError, match=message):
            HybridEvaluator(**task, bm25=run)
