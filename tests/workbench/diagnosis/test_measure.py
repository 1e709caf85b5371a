"""A diagnosis: its numbers, against the evaluators and geometry, as text, as tables and as JSON."""

import json
import math

import numpy as np
import pytest
from _lookup import bag
from _planted import planted, quick, unit

from st_magnitude import Similarity, calibrate_exponent, geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import judge
from st_magnitude.workbench.calibration import preferring
from st_magnitude.workbench.judging.folds import folds_of


def test_figures_are_those_of_the_evaluators_and_of_geometry():
    model, *task = planted(0, "relevance", num_queries=60, similarity="dot")
    corpus = task[1]
    found = quick(model, *task)
    metrics = MagnitudeEvaluator(*task)(model)
    curve = found.exponent
    assert curve.at(0.0).mean == pytest.approx(metrics["matched_ndcg@10"], abs=1e-12)
    assert curve.at(1.0).mean == pytest.approx(metrics["cosine_ndcg@10"], abs=1e-12)
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


@pytest.mark.parametrize(("seed", "kind"), [(2, "relevance"), (4, "noise")])
def test_each_fold_is_measured_at_what_the_others_choose(seed, kind):
    model, *task = planted(seed, kind, num_queries=60)
    diagnosis = quick(model, *task)
    curve = diagnosis.exponent
    assert curve.present == 1.0
    rule = preferring(curve.exponents, 1.0, 0)

    def chosen(values):
        row = rule(values)
        return row if row != len(values) - 1 else values[:-1].mean(axis=1)[::-1].argmax() * -1 - 2

    held_out = np.empty(60)
    for fold in folds_of(RetrievalData(*task), 5, 0):
        is_in = np.array([query in fold for query in diagnosis.query_ids])
        held_out[is_in] = curve.per_query[chosen(curve.per_query[:, ~is_in])][is_in]
    assert diagnosis.tried.value == curve.exponents[chosen(curve.per_query)]
    assert diagnosis["exponent"].gain == judge(held_out - curve.per_query[-1], 0.02)
    assert diagnosis["exponent"].gain.queries == 60


def test_text_json_and_tables():
    model, *task = planted(0, "relevance", normalize=True)
    found = quick(model, *task)
    short = str(found)
    shown = "\n".join(map(str, [short, *found.measurements]))
    assert max(map(len, shown.splitlines())) <= 80
    assert "scored by cosine (recommended: exponents 1 and" in short
    assert short.index("\n[do] Document exponent") < short.rindex("\n[")
    assert "nan" not in shown
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["documents"]["values"] == found.documents.values.tolist()
    assert back["exponent"] == json.loads(json.dumps(found.exponent.to_dict()))
    assert back["recommendations"][0]["gain"] == vars(found["exponent"].gain)
    for r in found.recommendations:
        assert all(text in found.to_markdown() for text in (r.action, r.reason, r.choice))
    cells = {value for table in found.measurements for row in table.rows for value in row}
    d = found.documents
    expected = {found.cohens_d, found.adjusted_cohens_d, d.mean, d.cv, d.length_spearman}
    expected |= {*d.quantiles, *found.queries.quantiles}
    expected |= {
        found.isoscore,
        found.isoscore_ceiling,
        found.mean_cosine,
        *(c.ndcg for c in found.cells),
    }
    assert not expected - cells


@pytest.mark.parametrize("present", [0.33, 0.55])
def test_exponents_are_compared_with_today(present):
    model, *task = planted(0, "relevance", num_queries=60)
    found = quick(model, *task, similarity=Similarity(1.0, present))
    choice = found.exponent
    expected = MagnitudeEvaluator(*task, similarity=Similarity(1.0, present))(model)
    assert choice.at(present).mean == pytest.approx(expected["matched_ndcg@10"], abs=1e-12)
    assert found.tried.value != present
    rows = found.measurements[1].rows
    assert [row[1] for row in rows] == pytest.approx(choice.per_query.mean(axis=1))
    gain = judge(choice.per_query[0] - choice.at(present).ndcg, num_samples=2000)
    assert rows[0][2] == gain
    marked = {row[3]: row[0] for row in rows if row[3]}
    assert marked == {"today": f"{present:g}", "tried": f"{found.tried.value:.2g}"}


def test_tiny_and_infinite(tmp_path):
    """All documents relevant alike, one dimension or few, an effect that is infinite."""
    model = bag(["bee"])
    queries = {f"q{i}": "bee" for i in range(2)}
    corpus = {f"d{i}": "bee " * (2 if i < 2 else 1) for i in range(4)}
    found = quick(model, queries, corpus, {f"q{i}": {f"d{i}"} for i in range(2)})
    assert found.cohens_d == math.inf
    found.save(tmp_path / "new" / "d.json")
    assert json.loads((tmp_path / "new" / "d.json").read_text())["cohens_d"] == "inf"
    assert np.inf in [row[-1] for row in found.measurements[0].rows]
