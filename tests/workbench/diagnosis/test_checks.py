"""Gains of changes: storage, and the scoring with which they are measured."""

import numpy as np
import pytest
from _planted import DIM, model_of, planted, quick, table_of, unit

from st_magnitude import Similarity
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.workbench.calibration import ExponentCurve
from st_magnitude.workbench.diagnosis import advice
from st_magnitude.workbench.judging.options import Options


def test_the_smallest_format_that_keeps_enough_is_recommended():
    """One list of formats with CompressionEvaluator: 16 of 64 dimensions carry everything."""
    model, *task = planted(0, "noise")
    table = {text: np.append(x.numpy(), np.zeros(48)) for text, x in model[0].table.items()}
    found = quick(model_of(table), *task)
    evaluator = CompressionEvaluator(*task, write_csv=False)
    evaluator(model_of(table))
    assert found.cells == evaluator.cells
    advice = found["storage"]
    assert advice.verdict == "do"
    best = next(cell for cell in found.cells if advice.choice == str(cell))
    assert best.retention > 0.95
    assert advice.gain.mean == pytest.approx(best.ndcg - found.cells[0].ndcg)
    assert advice.gain.queries == 160
    assert advice.gain.low >= -0.05 * found.cells[0].ndcg
    smaller = [cell for cell in found.cells if cell.bytes_per_document < best.bytes_per_document]
    assert all(cell.retention < 0.99 for cell in smaller)
    assert quick(model, *task, tolerance=0.01)["storage"].verdict != "do"


@pytest.mark.parametrize("common", [0.0, 0.5])
def test_following_the_exponent_leaves_all_other_verdicts_and_figures(common):
    """Norms are noise, and the model is scored by dot, at which all figures differ."""
    rng = np.random.default_rng(0)
    model, *task = planted(0, "noise")
    shared = common * np.eye(DIM)[0]
    given = table_of(model).items()
    table = {
        text: (unit(x) + shared * rng.normal(1, 0.6)) * rng.lognormal(0, 0.5) for text, x in given
    }
    before = quick(model_of(table, "dot"), *task)
    assert (before.similarity, before["exponent"].verdict) == ("dot", "do")
    assert before["exponent"].action.endswith(f"exponent {before.tried.value:.2g} instead of 0")
    after = quick(model_of(table), *task, similarity=Similarity(1.0, before.tried.value))
    assert after["exponent"].verdict != "do"
    assert before.recommended == after.similarity == after.recommended
    assert before.recommendations[1:] == after.recommendations[1:]
    assert f"Storage, scored by {before.recommended}" in " ".join(str(before).split())
    assert before.cells == after.cells
    at_dot = before.exponent.at(0.0).mean
    assert before.cells[0].ndcg == before.exponent.at(before.tried.value).mean > 1.1 * at_dot


@pytest.mark.parametrize(
    ("best", "share", "verdict"),
    [
        (1.0, 0.8, "do"),
        (0.0, 0.8, "not enough data"),  # all queries find no difference, the folds do
        (1.0, 0.2, "no benefit expected"),
        (0.0, 0.2, "no benefit expected"),
    ],
)
def test_all_queries_and_the_folds_have_to_find_an_exponent(best, share, verdict):
    """Answers of 200 queries that are found at exponent 0, today's, in half of the cases."""
    queries = {f"q{i:03}": "?" for i in range(200)}
    relevant = {query: {"a"} for query in queries}
    data = RetrievalData(queries, {"a": "answer", "b": "other"}, relevant)
    runs = [{q: {"ba"[i < 200 * x]: 1.0} for i, q in enumerate(queries)} for x in (0.5, share)]
    sweep = {x: Ranking.of_run(data, run, 10) for x, run in zip((0.0, 1.0), runs, strict=True)}
    curve = ExponentCurve(sweep, best, [], 0, present=0.0)
    tried = Options(sweep, 1.0, [1.0] * 200)
    found = advice.exponent(curve, tried, "dot", True, 0.01)
    assert found.verdict == verdict
    use = 'stm.prepare(model, "cosine")'
    assert found.choice == (use if verdict == "do" else "keep dot")
    assert found.gain.queries == 200
    assert ("measure more queries" in found.reason) == (verdict == "not enough data")
