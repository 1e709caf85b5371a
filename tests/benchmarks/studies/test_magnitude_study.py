"""The study of magnitude: its statistics, on made-up data."""

from typing import Any

import numpy as np
import pytest
from benchmarks.studies import estimates
from benchmarks.studies.magnitude import magnitude


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
