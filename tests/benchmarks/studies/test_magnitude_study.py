"""The magnitude study: its data builders, measurements and statistics on made-up data; no network,
no Debian."""

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.data import search_tasks
from benchmarks.studies import estimates
from benchmarks.studies.magnitude import magnitude, report
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation import MagnitudeEvaluator


def test_shrink_keeps_what_is_relevant() -> None:
    corpus = {f"d{i}": f"text {i}" for i in range(50)}
    relevant = {f"q{i}": {f"d{i}", f"d{i + 1}"} for i in range(20)} | {
        "many": {f"d{i}" for i in range(10)},
        "none": set(),
    }
    negatives = {"q0": {"d40", "d41"}}
    task = RetrievalData({q: q for q in relevant}, corpus, relevant, negatives)
    small = search_tasks.shrink(task, 5, 24, seed=1, most=2)
    assert len(small.queries) == 5
    assert len(small.corpus) == 24
    assert "many" not in small.queries
    assert "none" not in small.queries
    assert small.relevant == {q: dict.fromkeys(relevant[q], 1) for q in small.queries}
    assert small.queries.keys() == search_tasks.shrink(task, 5, 24, seed=1, most=2).queries.keys()
    assert small.queries.keys() != search_tasks.shrink(task, 5, 24, seed=2, most=2).queries.keys()
    assert (
        len(search_tasks.shrink(task, 20, 12, seed=1, most=2).queries) < 6
    )  # relevant ones fill half at most


TASK = RetrievalData(
    {"q1": "bees", "q2": "wax"},
    {"d1": "bees", "d2": "bees honey", "d3": "wax wax wax", "d4": "wax honey", "d5": "honey honey"},
    {"q1": {"d2"}, "q2": {"d3"}},
)


def test_read_ranks_at_every_exponent() -> None:
    bow = SentenceTransformer(
        modules=[BoW(["bees", "honey", "wax"])], similarity_fn_name="dot", device="cpu"
    )
    found = magnitude.read(bow, {"task": TASK}, (0.0, 1.0))["task"]
    evaluator = MagnitudeEvaluator(TASK.queries, TASK.corpus, TASK.relevant, write_csv=False)
    metrics = evaluator(bow)
    for i, name in enumerate(("dot", "cosine")):
        assert found["ndcg@10"][i] == pytest.approx(metrics[f"{name}_ndcg@10"]), name
        assert np.mean(found["per query"][i]) == pytest.approx(found["ndcg@10"][i], abs=1e-5)
    assert found["d"] == pytest.approx(metrics["cohens_d"])


def encoded(norms: list[float], judged: list[list[int]]) -> EncodedTask:
    documents = torch.tensor(norms)[:, None] * torch.tensor([[1.0, 0.0]])
    return EncodedTask(
        torch.ones(len(judged), 2), documents, [np.flatnonzero(row).tolist() for row in judged]
    )


def test_separations() -> None:
    task = encoded([4.0, 5.0, 1.0, 2.0, 3.0], [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    d = magnitude.separations(task, np.arange(1.0, 6.0))
    assert d["d"] == pytest.approx(stm.geometry.cohens_d([4, 5], [1, 2, 3]))
    assert d["d, length out"] == pytest.approx(
        stm.geometry.adjusted_cohens_d([4, 5, 1, 2, 3], np.log([1, 2, 3, 4, 5]), [1, 1, 0, 0, 0])
    )
    assert magnitude.separations(encoded([1.0, 2.0], [[1, 0]]), np.ones(2)) == {}


def cell(seed: int, dot: list[float], cosine: list[float], matched: float) -> dict[str, Any]:
    task = {"exponents": [0.0, 0.25, 0.5, 0.75, 1.0], "per query": [dot] * 4 + [cosine]}
    chosen = {"wordnet": 1.0, "docstrings": 0.5}
    return {
        "seed": seed,
        "matched": matched,
        "chosen": chosen,
        "tasks": {"wordnet": task, "foldoc": task},
    }


def test_gain_pairs_seeds_and_read_outs() -> None:
    """Dot: .8 by dot and .6 by cosine on every query; Cosine: .5 by cosine. The other losses are
    missing."""
    cells = {
        ("static", "none", "pretrained"): [cell(0, [0.3] * 4, [0.4] * 4, 1.0)],
        ("static", "wordnet", "cosine"): [cell(s, [0.1] * 4, [0.5] * 4, 1.0) for s in (0, 1)],
        ("static", "wordnet", "dot"): [cell(s, [0.8] * 4, [0.6] * 4, 0.0) for s in (0, 1, 2)],
    }
    matched = report.gain(cells, "static", "wordnet", "dot", ["wordnet"])
    assert (matched.mean, matched.low, matched.high) == pytest.approx((0.3, 0.3, 0.3))
    by_cosine = report.gain(cells, "static", "wordnet", "dot", ["wordnet", "foldoc"], "chosen")
    assert by_cosine.mean == pytest.approx(0.1)
    assert report.gain(cells, "static", "wordnet", "qnorm", ["wordnet"]) is None


def test_paired_takes_the_wider_interval() -> None:
    rng = np.random.default_rng(0)
    steady = np.tile(rng.normal(0.1, 0.5, 200), (3, 1))  # seeds agree, queries differ
    narrow = estimates.paired([steady])
    assert 0.05 < narrow.high - narrow.low < 0.2
    shifting = np.array([[-0.3], [0.1], [0.5]]) + np.zeros((3, 200))  # queries agree, seeds differ
    wide = estimates.paired([shifting])
    assert wide.mean == pytest.approx(0.1)
    assert wide.high - wide.low > 1.5
    assert wide.verdict(1) == "open"


@pytest.mark.parametrize(
    ("low", "high", "sign", "verdict"),
    [
        (0.1, 0.3, 1, "agrees"),
        (0.1, 0.3, -1, "disagrees"),
        (-0.1, 0.5, 1, "open"),
        (-0.3, -0.1, -2.5, "agrees"),
    ],
)
def test_verdict(low: float, high: float, sign: float, verdict: str) -> None:
    assert estimates.Estimate((low + high) / 2, low, high).verdict(sign) == verdict
