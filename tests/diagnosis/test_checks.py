"""Gains of changes: storage, and the scoring with which they are measured."""

import numpy as np
import pytest
from _planted import DIM, model_of, planted, quick, table_of, unit

from st_magnitude import Similarity
from st_magnitude.diagnosis import advice
from st_magnitude.diagnosis.findings import ExponentChoice
from st_magnitude.diagnosis.measure import Bench
from st_magnitude.evaluation import CompressionEvaluator


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
    assert advice.gain.mean == pytest.approx(best.ndcg - 0.95 * found.cells[0].ndcg)
    assert advice.gain.queries == 160
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
    assert before["exponent"].scoring == f"document exponents {before.exponent.candidate:.2g} and 0"
    after = quick(model_of(table), *task, similarity=Similarity(1.0, before.exponent.candidate))
    assert after["exponent"].verdict != "do"
    assert before.recommended == after.similarity == after.recommended
    for old, new in zip(before.recommendations[1:], after.recommendations[1:], strict=True):
        assert old == new
        assert old.scoring == before.recommended
        assert old.gain is None or f"Scoring: {before.recommended}." in str(old)
    assert before.cells == after.cells
    at_dot = before.exponent.ndcg(0.0).mean()
    assert (
        before.cells[0].ndcg
        == before.exponent.ndcg(before.exponent.candidate).mean()
        > 1.1 * at_dot
    )


@pytest.mark.parametrize(
    ("calibrated", "gain", "verdict"),
    [
        (1.0, 0.3, "do"),
        (0.0, 0.3, "not enough data"),  # the first half finds no difference, the other one does
        (1.0, -0.3, "no benefit expected"),
        (0.0, -0.3, "no benefit expected"),
    ],
)
def test_both_halves_of_the_queries_have_to_find_an_exponent(calibrated, gain, verdict):
    """nDCG@10 of 200 queries at exponents 0, today's, and 1."""
    chose = np.arange(200) % 2 == 0
    per_query = np.stack([np.full(200, 0.5), np.full(200, 0.5 + gain)])
    choice = ExponentChoice(np.array([0.0, 1.0]), per_query, 0.0, chose, calibrated, 1.0)
    bench = Bench(None, choice, Similarity.named("dot"), True, 0.01, 0.05, 0)
    found = advice.exponent(bench, Similarity(1.0, 1.0))
    assert found.verdict == verdict
    use = 'stm.prepare(model, "cosine")'
    assert found.choice == (use if verdict == "do" else "keep dot")
    assert found.num_queries == 100
    assert ("judge more queries" in found.reason) == (verdict == "not enough data")
