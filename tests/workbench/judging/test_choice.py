"""Fusion by a weight, choices out of fold and the system to deploy, against plain loops."""

import random
from dataclasses import replace

import numpy as np
import pytest

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import Difference
from st_magnitude.workbench.judging.choice import (
    WEIGHTS,
    Decision,
    Fusion,
    System,
    decide,
    fusions,
)
from st_magnitude.workbench.judging.folds import folds_of
from st_magnitude.workbench.judging.options import Options


def data_of(rng, number=12):
    documents = [f"d{i:02}" for i in range(20)]
    queries = {f"q{i}": f"text {i}" for i in range(number)}
    relevant = {query: {rng.choice(documents): rng.choice([1, 2])} for query in queries}
    return RetrievalData(queries, {d: d for d in documents}, relevant)


def ranking_of(data, rng, k=8, empty=0.1):
    run = {
        query: {}
        if rng.random() < empty
        else {d: rng.choice([rng.uniform(-1, 1), 0.5]) for d in rng.sample(data.document_ids, 8)}
        for query in data.queries
    }
    return Ranking.of_run(data, run, k)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_cosine", [True, False])
def test_a_fusion_is_a_weighted_sum_of_scores(seed, is_cosine):
    """Every fourth model has negative scores alone, as dot products can be."""
    rng = random.Random(seed)
    data = data_of(rng)
    dense = ranking_of(data, rng, empty=0.0)
    if seed % 4 == 0:
        dense = Ranking(data, dense.query_ids, dense.columns, dense.scores - 2.0)
    lexical = {"words": ranking_of(data, rng), "4-grams": ranking_of(data, rng)}
    found = fusions(dense, lexical, is_cosine)
    assert [fusion.weight for fusion in found] == [*WEIGHTS] * 2
    unit = np.mean([max(scored.values()) for scored in dense.values()])
    unit = 1.0 if is_cosine or unit <= 0 else unit
    for fusion, ranking in found.items():
        other = lexical[fusion.tokens]
        scale = np.mean([max(scored.values()) for scored in other.values() if scored])
        scale = scale if scale > 0 else 1.0
        assert (fusion.unit, fusion.scale) == pytest.approx((unit, scale), rel=1e-12)
        if fusion.weight in (0.0, 1.0):
            assert ranking is (dense if fusion.weight else other)
            continue
        for query in data.queries:
            scores = {
                d: fusion.weight * dense[query].get(d, 0.0) / unit
                + (1 - fusion.weight) * other[query].get(d, 0.0) / scale
                for d in dense[query].keys() | other[query].keys()
            }
            best = sorted(scores, key=lambda d: (-round(scores[d], 12), d))[:8]
            assert list(ranking[query]) == best
            assert list(ranking[query].values()) == pytest.approx([scores[d] for d in best])


@pytest.mark.parametrize("seed", range(8))
def test_a_choice_is_judged_by_queries_that_did_not_make_it(seed):
    rng = random.Random(seed)
    data = data_of(rng)
    options = {name: ranking_of(data, rng) for name in "abc"}
    for query in ("q3", "q7"):  # which have no answer, and choose nothing
        del data.relevant[query]
    choice = Options.choose(options, seed=seed)
    means = {name: ranking.mean for name, ranking in options.items()}
    assert choice.value == max(means, key=lambda name: (round(means[name], 12), -ord(name)))
    for fold in folds_of(data, 5, seed):
        asked = enumerate(options["a"].query_ids)
        others = [row for row, query in asked if query not in fold and query in data.relevant]
        by_others = {name: options[name].ndcg[others].mean() for name in "abc"}
        best = max("abc", key=lambda name: (round(by_others[name], 12), -ord(name)))
        for query in fold:
            assert choice.held_out[query] == options[best][query]


def system_of(name, data, share, rng):
    """A search that finds the answer to a share of the queries."""
    right = {query: {next(iter(data.relevant[query])): 1.0} for query in data.queries}
    run = {query: found for query, found in right.items() if rng.random() < share}
    return System(name, Ranking.of_run(data, run))


@pytest.mark.parametrize("worth", [0.0, 0.5, 6.0])
@pytest.mark.parametrize("seed", range(8))
def test_what_is_deployed_is_the_simplest_within_a_margin_of_the_best(seed, worth):
    rng = random.Random(seed)
    data = data_of(rng, number=100)
    shares = [rng.choice([0.2, 0.3, 0.5, 0.55]) for _ in range(5)]
    systems = [system_of(f"s{i}", data, share, rng) for i, share in enumerate(shares)]
    decision = decide(systems, worth=worth)
    means = [system.ranking.mean for system in systems]
    place = [max(means) - mean <= worth / 100 + 1e-9 for mean in means].index(True)
    deployed = systems[place]
    assert (decision.name, decision.ndcg) == (f"s{place}", means[place])
    if place:
        best = max(systems[:place], key=lambda system: system.ranking.mean)
        lead = deployed.ranking - best.ranking
        assert (decision.over, decision.lead) == (best.name, lead)
    else:
        assert (decision.over, decision.lead) == ("", None)
    others = [system for system in systems if system is not deployed]
    rival = max(others, key=lambda system: system.ranking.mean)
    gain = deployed.ranking - rival.ranking
    assert (decision.rival, decision.over_rival) == (rival.name, gain)
    assert decision.over_bm25 is None
    renamed = decide([replace(systems[0], name="BM25"), *systems[1:]], worth=worth)
    assert renamed.over_bm25 == (deployed.ranking - systems[0].ranking if place else None)


CLEAR = Difference(0.261, 0.226, 0.296, 448, 99)
OPEN = Difference(0.031, -0.012, 0.074, 31, 9)
BEHIND = Difference(-0.003, -0.01, 0.004, 448, 99)
GAINS = "It gains 26.1 points [+22.6, +29.6] over"
# 1.43 * 4.3 points of 3.1, squared, times 31, is 121.97
TELL = "is open: +3.1 points [-1.2, +7.4]. About 120 queries would tell."
ADDS = f"Whether BM25 adds anything to m alone {TELL}"


@pytest.mark.parametrize(
    ("name", "over", "lead", "over_bm25", "over_rival", "said"),
    [
        ("BM25", "", None, None, CLEAR, "Nothing else is better."),
        (
            "BM25",
            "",
            None,
            None,
            BEHIND,
            "It is simpler than r, the best: -0.3 points [-1.0, +0.4].",
        ),
        ("m", "BM25", CLEAR, CLEAR, CLEAR, f"{GAINS} BM25 alone."),
        ("m", "BM25", OPEN, OPEN, OPEN, f"Whether it is better than BM25 alone {TELL}"),
        ("m", "k", CLEAR, CLEAR, CLEAR, f"{GAINS} BM25 alone. {GAINS} k."),
        ("m", "k", OPEN, None, OPEN, f"Whether it is better than k {TELL}"),
        ("m with BM25", "m", OPEN, CLEAR, OPEN, f"{GAINS} BM25 alone. {ADDS}"),
    ],
)
def test_each_kind_of_decision_has_one_sentence(
    tmp_path, name, over, lead, over_bm25, over_rival, said
):
    found = Decision(name, 0.76, "", over, lead, ".", "r", over_rival, over_bm25)
    assert str(found) == f"Deploy {name}: nDCG@10 0.7600. {said}"
    found.save(tmp_path)
    assert Decision.load(tmp_path) == found


def test_a_fusion_without_one_side_is_no_rival():
    """It would be the same search again, of which the difference to itself says nothing."""
    rng = random.Random(0)
    data = data_of(rng, number=100)
    model, bm25, fused = (system_of(name, data, 0.9, rng) for name in ("m", "BM25", "m with BM25"))
    for weight, system in ((1.0, model), (0.0, replace(bm25, how="words"))):
        same = replace(fused, how=Fusion(weight, 1.0, 1.0, "words"))
        assert same.way == system.way
        assert decide([system, same]).rival == ""
    half = replace(fused, how=Fusion(0.5, 3.0, 2.0, "words"))
    assert half.way == ("m", half.how)
    found = half.again(model.ranking, bm25.ranking)  # by the scales that it has
    assert dict(found) == dict(half.how(model.ranking, bm25.ranking))
    assert decide([model, half]).rival == "m with BM25"
