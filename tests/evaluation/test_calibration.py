"""calibrate_exponent against the evaluator, and where the best exponent is known."""

import numpy as np
import pytest
from sentence_transformers.base.modules import Normalize
from torch import nn
from torch.nn.functional import normalize

from st_magnitude import Similarity
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.evaluation.calibration import calibrate_exponent, exponent_curve
from st_magnitude.judge import judge


class _Unit(nn.Module):
    def forward(self, features):
        return features | {"sentence_embedding": normalize(features["sentence_embedding"])}


def test_every_point_of_the_curve_is_the_evaluators(task, static_model):
    curve = calibrate_exponent(
        static_model, RetrievalData(*task.values()), exponents=[0.0, 0.3, 0.7, 1.0]
    )
    assert curve.exponents.tolist() == [0.0, 0.3, 0.7, 1.0]
    assert curve.queries == list(task["queries"])
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
    around = noise * np.random.default_rng(0).uniform(-1, 1, size=(3, 100))
    values = np.array(means)[:, None] + around - around.mean(axis=1, keepdims=True)
    queries = [f"q{i}" for i in range(100)]
    curve = exponent_curve(np.array([0.0, 0.5, 1.0]), values, queries, present, seed=5)
    assert (curve.highest, curve.best) == (highest, best)
    assert curve.best_similarity == Similarity(gamma_query=1.0, gamma_document=best)
    top = values[int(2 * highest)]
    assert curve.versus_cosine == judge(top - values[-1], seed=5)
    assert curve.versus_dot == judge(top - values[0], seed=5)
    by_exponent, gains, *sentence = curve.tables()
    assert [row[1] for row in by_exponent.rows] == curve.ndcg.tolist()
    assert sum(row[2] == "best" for row in by_exponent.rows) == 1
    assert [row[1] for row in gains.rows] == [curve.versus_cosine, curve.versus_dot]
    assert len(sentence) == (best != highest)
    assert curve.to_dict()["ndcg@10"] == dict(zip(("0", "0.5", "1"), curve.ndcg, strict=True))


@pytest.mark.parametrize("module", [Normalize(), _Unit()])
def test_a_model_that_normalises_is_refused(task, static_model, module):
    """Also under another name than Normalize."""
    static_model.append(module)
    with pytest.raises(ValueError, match="all norms are 1"):
        calibrate_exponent(static_model, RetrievalData(*task.values()))


@pytest.mark.parametrize("exponent", [1.5, -0.1, float("nan")])
def test_exponents_are_checked(task, static_model, exponent):
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        calibrate_exponent(static_model, RetrievalData(*task.values()), exponents=[exponent])
