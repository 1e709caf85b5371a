"""What a search returns, against figures that were computed by hand and by trec_eval."""

import math
import random

import numpy as np
import pytest

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import judge

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


def test_ndcg_is_a_table_computed_by_hand():
    corpus = {document: f"text {document}" for document in "abcdefghijx"}
    queries = dict.fromkeys([*GRADED, "unjudged"], "which?")
    data = RetrievalData(queries, corpus, {q: grades for q, (grades, _, _) in GRADED.items()})
    run = {q: {d: -float(i) for i, d in enumerate(found)} for q, (_, found, _) in GRADED.items()}
    found = Ranking.of_run(data, run | {"unjudged": {"a": 1.0}})
    assert list(found) == list(GRADED)
    assert found.ndcg == pytest.approx([x for _, _, x in GRADED.values()], abs=1e-5)
    assert [found.first(q) for q in found] == [ranked[:1] for _, ranked, _ in GRADED.values()]
    # (1 + .79671 + .17377 + .5 + .28906) / 7
    assert found.mean == pytest.approx(0.39422, abs=1e-5)
    assert {q: [*found[q]] for q in found} == {q: [*ranked] for q, (_, ranked, _) in GRADED.items()}


def test_a_difference_is_judged_on_the_queries_with_an_answer():
    data = RetrievalData(
        {"a": "?", "b": "?", "c": "?"}, {"x": "X", "y": "Y"}, {"a": {"x"}, "c": {"y"}}
    )
    places = [np.array([0, 1]), np.array([1])]
    scores = [np.array([1.0, 0.5]), np.array([2.0])]
    before = Ranking.of(data, ["a", "b", "c"], [(places[0], scores[0])] * 3, 10)
    after = Ranking.of(data, ["a", "b", "c"], [(places[1], scores[1])] * 3, 10)
    assert np.isnan(before.ndcg).tolist() == [False, True, False]
    assert before.mean == pytest.approx((1 + 1 / math.log2(3)) / 2)
    change = 1 - 1 / math.log2(3)
    assert after - before == judge([-1.0, change])
    assert after.minus(before, seed=3) == judge([-1.0, change], seed=3)
    with pytest.raises(ValueError, match="on the same queries only"):
        after - Ranking.of_run(data, {})


TREC = {"ndcg@10": "ndcg_cut_10", "recall@20": "recall_20", "map@20": "map_cut_20"}


def trec(run, data):
    """By pytrec_eval, whose ties are broken by rewriting scores as ranks."""
    pytrec_eval = pytest.importorskip("pytrec_eval")
    ranks = {q: {d: -float(i) for i, d in enumerate(found)} for q, found in run.items()}
    qrels = {q: {d: int(x) for d, x in grades.items()} for q, grades in data.relevant.items()}
    measures = {name.replace("_10", ".10").replace("_20", ".20") for name in TREC.values()}
    return pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(ranks)


@pytest.mark.parametrize("seed", range(40))
def test_a_ranking_is_a_sort_and_its_figures_are_those_of_trec_eval(seed):
    rng = random.Random(seed)
    documents = [f"d{i:02}" for i in range(30)]
    queries = {f"q{i}": f"text {i}" for i in range(8)} | {"d07": "the seventh"}
    corpus = {d: f"a title, {queries.get(d, d)}" for d in documents}
    relevant = {q: {d: rng.choice([1, 1, 2, 3]) for d in rng.sample(documents, 4)} for q in queries}
    if seed % 2:
        relevant["d07"].pop("d07", None)  # otherwise it may be judged, and counts
    else:
        relevant["d07"]["d07"] = 1
    data = RetrievalData(queries, corpus, relevant)
    run = {
        q: {
            d: rng.choice([0.0, 0.5, 1.0, rng.random(), -math.inf])
            for d in rng.sample(documents, rng.choice([0, 3, 30]))
        }
        for q in queries
    }
    found = Ranking.of_run(data, run, k=20)
    for query, scored in run.items():
        kept = {d: x for d, x in scored.items() if x > -math.inf}
        if seed % 2 and query == "d07":
            kept.pop("d07", None)
        best = sorted(kept, key=lambda d: (-kept[d], d))[:20]
        assert [*found[query].items()] == [(d, kept[d]) for d in best]
    expected = trec({q: found[q] for q in found}, data)
    of_query = found.metrics(20)
    for row, query in enumerate(found):
        if found[query]:
            for name, theirs in TREC.items():
                assert of_query[name][row] == pytest.approx(expected[query][theirs], abs=1e-12)
        else:
            assert [values[row] for values in of_query.values()] == [0.0] * 4
    halves = (queries.keys() - {"q0"}, {"q0"})
    parts = [Ranking.of_run(data.only(half), run, 20) for half in halves]
    assert Ranking.joined(data, parts) == found
    assert (Ranking.joined(data, parts) - found).mean == 0


def test_map_divides_by_the_ranks_that_count_where_more_documents_are_relevant():
    corpus = dict.fromkeys("abcdefghi", "?")
    data = RetrievalData({"q": "?!"}, corpus, {"q": set(corpus)})
    found = Ranking.of_run(data, {"q": dict.fromkeys("abc", 1.0)}, k=3)
    assert found.metrics(3)["map@3"] == 1


def test_a_score_that_is_none_and_an_unknown_document_are_refused():
    data = RetrievalData({"q": "?"}, {"a": "A"}, {"q": ["a"]})
    with pytest.raises(ValueError, match="has the score nan for 'a'"):
        Ranking.of_run(data, {"q": {"a": math.nan}})
    with pytest.raises(ValueError, match="'z' for the query 'q', which is not in the corpus"):
        Ranking.of_run(data, {"q": {"z": 1.0}})


def test_chance_is_what_the_results_of_the_other_queries_have():
    """The mean over the other answered queries."""
    rng = np.random.default_rng(0)
    corpus = {f"d{i:02}": "?" for i in range(20)}
    queries = {f"q{i}": str(i) for i in range(8)}
    judged = {q: {f"d{d:02}": int(d) % 3 + 1 for d in rng.integers(0, 20, 3)} for q in queries}
    data = RetrievalData(queries, corpus, judged)
    run = {q: {f"d{d:02}": float(rng.random()) for d in rng.integers(0, 20, 15)} for q in queries}
    run["q3"] = {}
    found = Ranking.of_run(data, run, k=12)
    for row, query in enumerate(found):
        others = {other: queries[other] for other in found if other != query}
        there = RetrievalData(others, corpus, dict.fromkeys(others, judged[query]))
        expected = Ranking.of_run(there, run, k=12).mean
        assert found.by_chance[row] == pytest.approx(expected)
