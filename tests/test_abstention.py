"""examples/abstention.py: the guarantee over repeated samples, and its figures against a loop."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import save_splits
from datasets import Dataset

import st_magnitude as stm
from st_magnitude.workbench.memory import write_memory

EXAMPLE = Path(__file__).parents[1] / "examples" / "abstention.py"
abstention = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def falling(signal):
    """The probability of a wrong answer: a share 0.2 (1 - t) is wrong above the threshold t."""
    return 0.4 * (1 - signal)


def uneven(signal):
    """The most confident answers break the limit of 0.1, too."""
    return np.select([signal > 0.9, signal > 0.5], [0.16, 0.04], 0.3)


@pytest.mark.parametrize(("probability", "decimals"), [(falling, 9), (uneven, 9), (uneven, 2)])
def test_the_guarantee_holds_over_repeated_samples(probability, decimals):
    """The share of samples whose rule breaks the limit is at most delta, also with ties."""
    rng = np.random.default_rng(0)
    risk, delta, runs = 0.1, 0.1, 200
    everybody = np.sort(rng.random(100_000).round(decimals))[::-1]
    risks = np.cumsum(probability(everybody)) / np.arange(1, 100_001)  # of the first 1, 2, ...
    broken = naive_broken = answered = 0
    for _ in range(runs):
        signal = rng.random(700).round(decimals)
        wrong = rng.random(700) < probability(signal)
        order = np.argsort(-signal)
        holds = np.flatnonzero(np.cumsum(wrong[order]) <= risk * np.arange(1, 701))
        scores = np.stack([signal, np.zeros(700)], axis=1)
        _, threshold = abstention.choose_threshold(scores, wrong, risk, delta)
        answered += math.isfinite(threshold)
        for is_naive, lowest in enumerate((threshold, signal[order][holds[-1]])):
            number = np.searchsorted(-everybody, -lowest, side="right")
            is_broken = bool(number) and risks[number - 1] > risk
            broken += is_broken and not is_naive
            naive_broken += is_broken and is_naive
    assert broken <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))
    assert answered > 0.4 * runs  # the limit is not kept by silence
    assert naive_broken > 0.3 * runs


def test_the_example(static_model, tmp_path, monkeypatch, capsys):
    """A risk of 0.01 needs 299 right answers in a row. What the model has read does not count."""
    monkeypatch.setattr(stm, "load", lambda _: static_model)
    places = ["--data", save_splits(tmp_path, "dev", "test"), "--output", tmp_path / "rule.json"]

    def run(*options):
        arguments = ["abstention.py", "--model", tmp_path / "model", *places, *options]
        monkeypatch.setattr(sys, "argv", [*map(str, arguments)])
        abstention.main()

    run("--risk", 0.9, "--delta", 0.5)
    rule = json.loads((tmp_path / "rule.json").read_text())
    scores, is_wrong = abstention.best_scores(static_model, stm.load_splits(tmp_path)["test"])
    answered = abstention.answers(rule, scores)
    said = capsys.readouterr().out
    assert f"test: {answered.sum()} of 8 queries answered" in said
    assert f"wrong: {(answered & is_wrong).sum() / answered.sum():.3f} [" in said
    asked = list(stm.load_splits(tmp_path)["test"].queries.values())
    write_memory(tmp_path / "model", Dataset.from_dict({"anchor": asked[:3]}))
    run("--risk", 0.9, "--delta", 0.5)
    assert "of 5 queries answered" in capsys.readouterr().out
    for risk, refused in ((0.01, "use more queries"), (1, "between 0 and 1")):
        with pytest.raises(SystemExit):
            run("--risk", risk)
        assert refused in capsys.readouterr().err
