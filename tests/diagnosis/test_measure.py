"""The numbers that describe a model and a task, against the evaluators and geometry."""

import numpy as np
import pytest
import torch
from _planted import planted, quick, unit

from st_magnitude import calibrate_exponent, geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.measure import halves
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.evaluation.calibration import exponent_curve
from st_magnitude.judge import judge


def task_of(columns: list[list[int]], num_documents: int) -> EncodedTask:
    return EncodedTask(torch.ones(len(columns), 2), torch.ones(num_documents, 2), columns)


def test_figures_are_those_of_the_evaluators_and_of_geometry():
    model, *task = planted(0, "relevance", num_queries=60, similarity="dot")
    corpus = task[1]
    found = quick(model, *task)
    metrics = MagnitudeEvaluator(*task)(model)
    curve = found.exponent
    assert curve.ndcg(0.0).mean() == pytest.approx(metrics["matched_ndcg@10"], abs=1e-12)
    assert curve.ndcg(1.0).mean() == pytest.approx(metrics["cosine_ndcg@10"], abs=1e-12)
    calibrated = calibrate_exponent(model, RetrievalData(*task))
    assert curve.per_query == pytest.approx(calibrated.per_query, abs=1e-12)
    assert found.cohens_d == pytest.approx(metrics["cohens_d"])
    assert found.documents.cv == pytest.approx(metrics["document_norm_cv"])
    assert found.queries.mean == pytest.approx(metrics["query_norm_mean"])

    d = model.encode([corpus[key] for key in sorted(corpus)])
    norms = geometry.norms(d)
    words = [len(corpus[key].split()) for key in sorted(corpus)]
    assert found.documents.values == pytest.approx(norms)
    assert found.documents.length_spearman == pytest.approx(geometry.spearman(norms, words))
    quantiles = np.quantile(norms, [0.05, 0.25, 0.5, 0.75, 0.95])
    assert found.documents.quantiles == pytest.approx(quantiles)
    adjusted = geometry.adjusted_cohens_d(norms, np.log(words), found.is_relevant)
    assert found.adjusted_cohens_d == pytest.approx(adjusted)
    assert found.is_relevant.tolist() == [key.endswith("-0") for key in sorted(corpus)]
    assert found.isoscore == pytest.approx(geometry.isoscore(unit(d)))
    assert found.isoscore_ceiling == geometry.isoscore_ceiling(300, 16)
    assert found.mean_cosine == pytest.approx(geometry.mean_cosine(d))


def test_one_half_chooses_and_the_other_measures_the_gain():
    diagnosis = quick(*planted(2, "relevance", num_queries=60))
    found = diagnosis.exponent
    per_query = found.per_query
    gammas = found.exponents
    assert found.chose.sum() == 30
    assert found.present == 1.0
    curve = exponent_curve(gammas, per_query[:, found.chose], [], found.present)
    assert found.candidate == found.calibrated == curve.best
    difference = (per_query[list(gammas).index(found.candidate)] - per_query[-1])[~found.chose]
    assert diagnosis["exponent"].gain == judge(difference, 0.02)
    assert diagnosis["exponent"].gain.queries == 30


def test_halves_share_no_relevant_document():
    columns = [[i // 3, 40 + i // 3] for i in range(60)]
    task = task_of(columns, 100)
    for seed in range(5):
        chose = halves(task, seed)
        assert 20 <= chose.sum() <= 30
        of_half = [{c for row in np.flatnonzero(x) for c in columns[row]} for x in (chose, ~chose)]
        assert not of_half[0] & of_half[1]
    assert (halves(task, 0) != halves(task, 1)).any()
    # where all share one document
    assert halves(task_of([[0], [0], [0], [0], [0]], 3), 0).sum() == 2
