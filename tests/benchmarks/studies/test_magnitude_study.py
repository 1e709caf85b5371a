"""The studies of magnitude and of the prior: builders and statistics, on made-up data."""

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.data import search_tasks
from benchmarks.data.dependencies import Task
from benchmarks.studies import estimates
from benchmarks.studies.magnitude import magnitude
from benchmarks.studies.prior import prior

from st_magnitude.data.retrieval import RetrievalData


def test_shrink_keeps_what_is_relevant() -> None:
    corpus = {f"d{i}": f"text {i}" for i in range(50)}
    relevant = {f"q{i}": {f"d{i}", f"d{i + 1}"} for i in range(20)}
    relevant |= {"many": {f"d{i}" for i in range(10)}, "none": set()}
    task = RetrievalData({q: q for q in relevant}, corpus, relevant)
    small = search_tasks.shrink(task, 5, 24, seed=1, most=2)
    assert (len(small.queries), len(small.corpus)) == (5, 24)
    assert not {"many", "none"} & small.queries.keys()
    assert small.relevant == {q: dict.fromkeys(relevant[q], 1) for q in small.queries}
    assert small.queries.keys() != search_tasks.shrink(task, 5, 24, seed=2, most=2).queries.keys()
    few = search_tasks.shrink(task, 20, 12, seed=1, most=2).queries
    assert len(few) < 6  # relevant ones fill half at most


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


CORPUS = {"a": "", "b": "", "c": ""}
PART = RetrievalData({"q": "?", "r": "!"}, CORPUS, {"q": {"b"}, "r": {"c"}})


def test_log_p_counts_the_pairs():
    task = Task(["x", "y", "z"], ["b", "b", "c"], CORPUS, PART, PART)
    torch.testing.assert_close(task.log_p("abc").exp(), torch.tensor([1.0, 3.0, 2.0]) / 6)


def test_ranking_with_the_prior():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    plain, weighted = prior.ranked(logits, torch.tensor([0.0, 3.0, 0.0]), (0.0, 1.0), PART, "abc")
    second = 1 / torch.log2(torch.tensor(3.0)).item()
    assert plain == pytest.approx([second, 1])
    assert weighted == pytest.approx([1, second])
