"""The calibrated exponent: against the evaluator, and the rule of its choice."""

import numpy as np
import pytest
from sentence_transformers.base.modules import Normalize
from torch import nn
from torch.nn.functional import normalize

from st_magnitude import Similarity
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import judge
from st_magnitude.workbench.calibration import ExponentCurve, calibrate_exponent, preferring


class _Unit(nn.Module):
    def forward(self, features):
        return features | {"sentence_embedding": normalize(features["sentence_embedding"])}


def test_every_point_of_the_curve_is_the_evaluators(task, static_model):
    curve = calibrate_exponent(
        static_model, RetrievalData(*task.values()), exponents=[0.0, 0.3, 0.7, 1.0]
    )
    assert curve.exponents.tolist() == [0.0, 0.3, 0.7, 1.0]
    assert list(curve.held_out) == list(task["queries"])
    for gamma, mean, values in zip(curve.exponents, curve.ndcg, curve.per_query, strict=True):
        evaluator = MagnitudeEvaluator(**task, similarity=Similarity(1.0, gamma))
        assert mean == pytest.approx(evaluator(static_model)["matched_ndcg@10"], abs=1e-12)
        assert values == pytest.approx(evaluator.per_query["matched"], abs=1e-12)
    assert np.ptp(curve.ndcg) > 0


@pytest.mark.parametrize(
    ("means", "noise", "present", "highest", "best"),
    [
        ((0.5, 0.6, 0.5), 0.05, 0.0, 0.5, 0.5),  # clearly better than both
        ((0.5, 0.53, 0.52), 0.3, 0.0, 0.5, 0.0),  # tied with today's
        ((0.5, 0.53, 0.52), 0.3, 1.0, 0.5, 1.0),
        ((0.5, 0.53, 0.52), 0.3, 0.5, 0.5, 0.5),
        ((0.51, 0.53, 0.52), 0.3, 0.0, 0.5, 0.0),
        ((0.3, 0.65, 0.6), 0.3, 0.0, 0.5, 1.0),  # tied with cosine alone, which loads anywhere
        ((0.6, 0.65, 0.3), 0.3, 1.0, 0.5, 0.0),
        ((0.6, 0.5, 0.3), 0.0, 0.5, 0.0, 0.0),  # dot itself is the highest
        ((0.5, 0.5, 0.5), 0.0, 0.0, 1.0, 0.0),  # equal ones: the nearest to cosine is the highest
    ],
)
def test_a_tie_keeps_the_scoring_of_today(means, noise, present, highest, best):
    """The answer to a query is the first document at an exponent, or is not found."""
    rng = np.random.default_rng(0)
    values = np.stack([np.arange(100) < 100 * mean for mean in means]).astype(float)
    values = rng.permuted(values, axis=1) if noise > 0.1 else values
    exponents = np.array([0.0, 0.5, 1.0])
    queries = {f"q{i:02}": f"question {i}" for i in range(100)}
    relevant = {query: {"a"} for query in queries}
    data = RetrievalData(queries, {"a": "answer", "b": "other"}, relevant)
    runs = [{q: {"ba"[int(x)]: 1.0} for q, x in zip(queries, row, strict=True)} for row in values]
    sweep = {x: Ranking.of_run(data, run, 10) for x, run in zip(exponents, runs, strict=True)}
    rule = preferring(exponents, present, seed=5)
    curve = ExponentCurve.choose(sweep, rule, seed=5, present=present)
    assert (curve.highest, curve.best) == (highest, best)
    assert curve.best_similarity == Similarity(gamma_query=1.0, gamma_document=best)
    held_out = curve.held_out.ndcg
    assert curve.versus_cosine == judge(held_out - values[-1], seed=5)
    assert curve.versus_dot == judge(held_out - values[0], seed=5)
    by_exponent, gains, *sentence = curve.tables()
    assert [row[1] for row in by_exponent.rows] == curve.ndcg.tolist()
    assert sum(row[2] == "best" for row in by_exponent.rows) == 1
    assert [row[1] for row in gains.rows] == [curve.versus_cosine, curve.versus_dot]
    assert len(sentence) == (best != highest)
    assert curve.to_dict()["ndcg@10"] == dict(zip(("0", "0.5", "1"), curve.ndcg, strict=True))


def test_norms_and_directions_are_those_of_the_evaluator(task, static_model):
    curve = calibrate_exponent(static_model, RetrievalData(*task.values()), also_relevant={"d20"})
    metrics = MagnitudeEvaluator(**task, also_relevant={"d20"})(static_model)
    geometry = {key: x for key, x in metrics.items() if "@" not in key}
    assert curve.geometry == {"dimensions": 256} | geometry
    shown = [*curve.tables()][-1]
    assert "256 dimensions" in shown.title
    values = [value for row in shown.rows for value in row[1:] if isinstance(value, float)]
    assert {*values} == {*geometry.values()} - {geometry["cohens_d"], geometry["cohens_d_error"]}
    d, error = geometry["cohens_d"], geometry["cohens_d_error"]
    assert shown.rows[-1][2] == f"{d:+.2f} ± {1.96 * error:.2f}"
    assert curve.to_dict()["geometry"] == curve.geometry


@pytest.mark.parametrize("module", [Normalize(), _Unit()])
def test_a_model_that_normalises_is_refused(task, static_model, module, monkeypatch):
    """Also under another name than Normalize, by what it encodes."""
    static_model.append(module)
    if isinstance(module, Normalize):
        monkeypatch.setattr(type(static_model), "encode", None)
    with pytest.raises(ValueError, match=r"all norms are 1.*--keep-scoring"):
        calibrate_exponent(static_model, RetrievalData(*task.values()))


@pytest.mark.parametrize("exponent", [1.5, -0.1, float("nan")])
def test_exponents_are_checked(task, static_model, exponent):
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        calibrate_exponent(static_model, RetrievalData(*task.values()), exponents=[exponent])
