"""Fusion and BM25 against literal loops, dense runs and metrics against sentence-transformers, in
training, on disk."""

import json
import math
import re
import sys
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sparse_encoder.evaluation import ReciprocalRankFusionEvaluator

from st_magnitude import COSINE, DNORM, Similarity
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import HybridEvaluator, bm25_run, dense_run, reciprocal_rank_fusion

pytestmark = pytest.mark.usefixtures("one_thread")

ids = st.sampled_from("abcdefgh")
scores = st.integers(-3, 3).map(float)  # many ties
runs = st.dictionaries(st.sampled_from(["q1", "q2"]), st.dictionaries(ids, scores))


# ---- reciprocal rank fusion


def fusion_loop(rankings, k):
    """Cormack et al., section 3, word for word: for each document, each run in which some number of
    others is ahead."""
    fused = {}
    for query in {query for run in rankings for query in run}:
        for run in rankings:
            scored = run.get(query, {})
            for d in scored:
                ahead = sum(
                    scored[e] > scored[d] or (scored[e] == scored[d] and e < d) for e in scored
                )
                found = fused.setdefault(query, {})
                found[d] = found.get(d, 0.0) + 1 / (k + ahead + 1)
    return fused


def test_fusion_by_hand():
    dense, bm25 = (
        {"q1": {"a": 0.9, "b": 0.8, "c": 0.1}, "q2": {"a": -1.0}},
        {"q1": {"c": 12.0, "b": 3.0}},
    )
    fused = reciprocal_rank_fusion([dense, bm25])
    assert fused == {
        "q1": {"c": 1 / 63 + 1 / 61, "b": 1 / 62 + 1 / 62, "a": 1 / 61},
        "q2": {"a": 1 / 61},
    }
    assert list(fused["q1"]) == ["c", "b", "a"]  # 2/62 is less than 1/61 + 1/63
    assert reciprocal_rank_fusion([dense, bm25], k=1, top_k=2)["q1"] == {
        "c": 1 / 4 + 1 / 2,
        "b": 2 / 3,
    }


def test_tied_sums_stay_tied_in_any_order_of_the_runs():
    """Ranks 1, 2, 3, 7 in one order or another: added up from the left, they can differ in the last
    bit."""

    def run(rank_of_a, rank_of_b):
        others = {f"x{rank}": -rank for rank in range(1, 11) if rank not in (rank_of_a, rank_of_b)}
        return {"q": {"a": -rank_of_a, "b": -rank_of_b, **others}}

    ranks_of_a, ranks_of_b = [1, 2, 3, 7, 10], [10, 3, 7, 1, 2]
    shares = [[1 / (60 + rank) for rank in ranks] for ranks in (ranks_of_a, ranks_of_b)]
    assert sum(shares[0]) != sum(shares[1])  # else this shows nothing
    fused = [
        reciprocal_rank_fusion([run(*pair) for pair in order])["q"]
        for order in permutations(zip(ranks_of_a, ranks_of_b, strict=True))
    ]
    assert all(each["a"] == each["b"] for each in fused)
    assert all(list(each.items()) == list(fused[0].items()) for each in fused)


@given(st.lists(runs, min_size=1, max_size=4), st.floats(0, 100), st.data())
def test_fusion_equals_the_loop_and_no_order_matters(rankings, k, data):
    fused = reciprocal_rank_fusion(rankings, k=k)
    expected = fusion_loop(rankings, k)
    assert fused.keys() == {query for run in rankings for query in run}
    for query, found in fused.items():
        assert found == pytest.approx(expected.get(query, {}), rel=1e-12)
        keys = [(-score, document) for document, score in found.items()]
        assert keys == sorted(keys)
    mixed = [
        {
            query: dict(data.draw(st.permutations(list(found.items()))))
            for query, found in run.items()
        }
        for run in data.draw(st.permutations(rankings))
    ]
    again = reciprocal_rank_fusion(mixed, k=k)
    assert again == fused
    assert all(list(again[query]) == list(found) for query, found in fused.items())


@settings(deadline=None)
@given(st.permutations("abcdefg"), st.permutations("defghij"))
def test_fusion_has_the_order_of_sentence_transformers(tmp_path_factory, first, second):
    folder = tmp_path_factory.mktemp("rrf")
    samples = [
        {"query_id": "q", "query": "", "positive": ["d"], "documents": list(order)}
        for order in (first, second)
    ]
    theirs = ReciprocalRankFusionEvaluator(
        samples[:1], samples[1:], write_predictions=True, show_progress_bar=False
    )
    theirs(output_path=str(folder))
    (line,) = next(folder.glob("*.jsonl")).read_text().splitlines()
    documents = json.loads(line)["documents"]
    fused = reciprocal_rank_fusion(
        [{"q": {d: -float(i) for i, d in enumerate(s["documents"])}} for s in samples]
    )["q"]
    assert fused.keys() == set(documents)
    assert [fused[document] for document in documents] == sorted(fused.values(), reverse=True)


# ---- BM25


def bm25_loop(queries, corpus, k1=1.5, b=0.75):
    """Kamphuis et al., Table 1, "Lucene (accurate)", one word and one document at a time."""

    def tokens(text):
        return re.findall(r"\b\w\w+\b", text.lower())

    documents = {document: tokens(text) for document, text in corpus.items()}
    mean_length = sum(map(len, documents.values())) / len(documents)
    run = {}
    for query, text in queries.items():
        run[query] = {}
        for document, words in documents.items():
            score = 0.0
            for word in tokens(text):
                n = sum(word in others for others in documents.values())
                idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
                f = words.count(word)
                score += idf * f / (f + k1 * (1 - b + b * len(words) / mean_length)) if f else 0.0
            if score > 0:
                run[query][document] = score
    return run


def search(queries, corpus, **options):
    return bm25_run(RetrievalData(queries, corpus, {}), **options)


@pytest.mark.parametrize(("k1", "b"), [(1.5, 0.75), (0.9, 0.4), (0.0, 0.0), (2.0, 1.0)])
def test_bm25_equals_the_formula(task, k1, b):
    queries = task["queries"] | {"twice": "tea tea wine"}
    corpus = task["corpus"] | {"empty": "", "dots": "... a !"}
    run = search(queries, corpus, top_k=1000, k1=k1, b=b, stopwords=None)
    expected = bm25_loop(queries, corpus, k1, b)
    assert run.keys() == expected.keys()
    for query, found in run.items():
        assert found == pytest.approx(expected[query], rel=1e-12)
        assert list(found.values()) == sorted(found.values(), reverse=True)
    # the documents without a word of the query are not there
    assert 0 < len(run["twice"]) < len(corpus)


def test_bm25_stop_words_top_k_and_ties(task):
    corpus = {"d1": "the bees of the hive", "d2": "the honey, the wax and the", "d3": "is it?"}
    assert search({"q": "the bees"}, corpus)["q"].keys() == {"d1"}
    assert search({"q": "the bees"}, corpus, stopwords=None)["q"].keys() == {"d1", "d2"}
    run = search(task["queries"], task["corpus"], stopwords=None)
    assert run["q6"] == pytest.approx(bm25_loop(task["queries"], task["corpus"])["q6"], rel=1e-12)
    assert search({"strange": "zebra", "empty": "", "stop": "the"}, corpus) == {
        "strange": {},
        "empty": {},
        "stop": {},
    }
    equal = {f"d{i}": "bees" for i in (3, 1, 2, 0)} | {"best": "bees bees"}
    for top_k in (3, 99):
        assert (
            list(search({"q": "bees"}, equal, top_k=top_k)["q"])
            == ["best", "d0", "d1", "d2", "d3"][:top_k]
        )


def test_without_bm25s(task, monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=r"BM25 needs bm25s.*eval"):
        HybridEvaluator(**task)
    HybridEvaluator(**task, bm25={"q1": {"d01": 1.0}})


# ---- by embeddings


@pytest.mark.parametrize("name", ["cosine", "dot"])
def test_dense_run_is_the_model_s_own_similarity(task, static_model, name):
    static_model.similarity_fn_name = name
    run = dense_run(
        RetrievalData(*task.values()).encode(static_model), Similarity.named(name), top_k=5
    )
    queries = static_model.encode_query(list(task["queries"].values()))
    documents = static_model.encode_document(list(task["corpus"].values()))
    for query, row in zip(
        task["queries"], static_model.similarity(queries, documents), strict=True
    ):
        expected = dict(
            sorted(zip(task["corpus"], row.tolist(), strict=True), key=lambda pair: -pair[1])[:5]
        )
        assert list(run[query]) == list(expected)
        assert run[query] == pytest.approx(expected, rel=1e-5)


# ---- the evaluator


@pytest.fixture
def weak(static_model) -> SentenceTransformer:
    """The static model with three of its dimensions: it errs, so that figures differ."""
    with torch.no_grad():
        static_model[0].embedding.weight[:, 3:] = 0
    return static_model


def test_evaluator_equals_that_of_sentence_transformers(task, weak):
    metrics = HybridEvaluator(**task, top_k=12)(weak)
    expected = InformationRetrievalEvaluator(**task, precision_recall_at_k=[10, 12])(weak)
    for metric in ("ndcg@10", "mrr@10", "recall@10", "recall@12"):
        assert metrics[f"dense_{metric}"] == pytest.approx(expected[f"cosine_{metric}"], abs=1e-12)
    assert len(metrics) == 3 * 4
    assert metrics["dense_recall@10"] < metrics["dense_recall@12"] < 1
    assert len({metrics[f"{search}_ndcg@10"] for search in ("dense", "bm25", "hybrid")}) == 3


def test_evaluator_fuses_what_it_shows(task, weak):
    evaluator = HybridEvaluator(**task, top_k=10, similarity="dnorm")
    evaluator(weak)
    dense, bm25 = evaluator.runs["dense"], evaluator.runs["bm25"]
    data = RetrievalData(*task.values())
    assert dense == dense_run(data.encode(weak), DNORM, top_k=10)
    assert bm25 == bm25_run(data, top_k=10)
    fused = reciprocal_rank_fusion([dense, bm25])
    assert max(map(len, fused.values())) > 10
    assert evaluator.runs["hybrid"] == {
        query: dict(list(found.items())[:10]) for query, found in fused.items()
    }


def test_a_given_run_takes_the_place_of_bm25(task, static_model):
    run = search(task["queries"], task["corpus"], top_k=20, stopwords=None, k1=0.9)
    run["unjudged"] = {"elsewhere": 1.0}
    del run["q8"]
    evaluator = HybridEvaluator(**task, top_k=10, bm25=run)
    assert evaluator.runs["bm25"] == {
        q: dict(list(run.get(q, {}).items())[:10]) for q in task["queries"]
    }
    assert max(len(found) for found in run.values()) > 10
    metrics = evaluator(static_model)
    assert evaluator.per_query["bm25"][7] == 0
    assert evaluator.per_query["hybrid"][7] == evaluator.per_query["dense"][7] > 0
    assert metrics["bm25_recall@10"] > 0.5


def test_runs_are_what_pytrec_eval_takes(task, weak):
    pytrec_eval = pytest.importorskip("pytrec_eval")
    evaluator = HybridEvaluator(**task)
    evaluator(weak)
    judgments = {
        query: dict.fromkeys(documents, 1) for query, documents in task["relevant_docs"].items()
    }
    judge = pytrec_eval.RelevanceEvaluator(judgments, {"ndcg_cut_10"})
    for search in ("dense", "bm25"):  # without ties: trec_eval turns them the other way round
        measured = judge.evaluate(
            {query: found for query, found in evaluator.runs[search].items() if found}
        )
        expected = [measured[query]["ndcg_cut_10"] for query in evaluator.queries_ids]
        assert evaluator.per_query[search] == pytest.approx(expected, abs=1e-6)


def test_grades_are_gains(task, static_model):
    task["relevant_docs"] = {"q1": {"d01": 3, "d02": 1}}
    evaluator = HybridEvaluator(**task, bm25={"q1": {"d02": 2.0, "d01": 1.0}})
    evaluator(static_model)
    assert evaluator.per_query["bm25"] == pytest.approx(
        [(1 + 3 / math.log2(3)) / (3 + 1 / math.log2(3))]
    )


def test_bm25_sees_no_prompt(task, minilm):
    prompts = {"query_prompt": "my cat ", "corpus_prompt": "my cat "}
    evaluator = HybridEvaluator(**task, **prompts)
    evaluator(minilm)
    data = RetrievalData(*task.values())
    assert evaluator.runs["bm25"] == bm25_run(data)
    assert evaluator.runs["dense"] == dense_run(data.encode(minilm, **prompts), COSINE)
    assert evaluator.runs["dense"] != dense_run(data.encode(minilm), COSINE)
    assert evaluator.get_config_dict() == prompts | {"top_k": 100}


def test_evaluator_refuses(task):
    with pytest.raises(ValueError, match="top_k must be at least 10, for nDCG@10; got 9"):
        HybridEvaluator(**task, top_k=9)
    with pytest.raises(ValueError, match=r"its keys start with \['other'\]"):
        HybridEvaluator(**task, bm25={"other": {"d01": 1.0}})
