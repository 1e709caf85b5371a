"""The magnitude study: its data builders, measurements and statistics on made-up data; no network,
no Debian."""

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.data import search_tasks
from benchmarks.studies import estimates
from benchmarks.studies.magnitude import magnitude
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
    found = magnitude.read(bow, {"task": TASK})["task"]
    evaluator = MagnitudeEvaluator(TASK.queries, TASK.corpus, TASK.relevant, write_csv=False)
    metrics = evaluator(bow)
    for exponent, name in ((0.0, "dot"), (1.0, "cosine")):
        ndcg = np.mean(found["per query"][str(exponent)])
        assert ndcg == pytest.approx(metrics[f"{name}_ndcg@10"], abs=1e-5), name
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


def test_gain_pairs_seeds_and_tasks() -> None:
    """Dot: .8 by dot and .6 by cosine on every query; Cosine: .5 by cosine."""

    def figures(dot: float, cosine: float) -> dict[str, Any]:
        task = {"per query": {"0.0": [dot] * 4, "1.0": [cosine] * 4}}
        return {"chosen": 1.0, "tasks": {"wordnet": task, "foldoc": task, "hubs": task}}

    cells = {
        ("static", "wordnet", "cosine"): {seed: figures(0.1, 0.5) for seed in (0, 1)},
        ("static", "wordnet", "dot"): {seed: figures(0.8, 0.6) for seed in (0, 1, 2)},
    }
    matched = magnitude.gain(cells, "static", "wordnet", "dot", "in domain", "matched")
    assert (matched.mean, matched.low, matched.high) == pytest.approx((0.3, 0.3, 0.3))
    chosen = magnitude.gain(cells, "static", "wordnet", "dot", "out", "chosen")
    assert chosen.mean == pytest.approx(0.1)


def test_paired_takes_the_wider_interval() -> None:
    rng = np.random.default_rng(0)
    steady = np.tile(rng.normal(0.1, 0.5, 200), (3, 1))  # seeds agree, queries differ
    narrow = estimates.paired([steady])
    assert 0.05 < narrow.high - narrow.low < 0.2
    shifting = np.array([[-0.3], [0.1], [0.5]]) + np.zeros((3, 200))  # queries agree, seeds differ
    wide = estimates.paired([shifting])
    assert wide.mean == pytest.approx(0.1)
    assert wide.high - wide.low > 1.5
