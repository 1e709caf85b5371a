"""ScoredPairsEvaluator: against scipy and sentence-transformers' own, and the symmetry of each similarity."""

import csv

import numpy as np
import pytest
from _tiny import ROWS
from scipy.stats import pearsonr, spearmanr
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

import st_magnitude as stm
from st_magnitude.evaluation import ScoredPairsEvaluator
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

A, B = [row[0] for row in ROWS], [row[1] for row in ROWS]
SCORES = np.linspace(0, 5, len(ROWS)).tolist()


def by_hand(model, exponents):
    a, b = (model.encode(texts).astype(np.float64) for texts in (A, B))
    x, y = (np.linalg.norm(z, axis=1) for z in (a, b))
    cosine = (a * b).sum(1) / x / y
    query, document = exponents
    return cosine * x ** (1 - query) * y ** (1 - document), cosine * y ** (1 - query) * x ** (1 - document)


@pytest.mark.parametrize("exponents", [(1, 1), (0, 0), (1, 0), (0, 1), (0.5, 0.2)])
def test_against_scipy(model, exponents):
    forward, backward = by_hand(model, exponents)
    metrics = ScoredPairsEvaluator(A, B, SCORES, stm.Similarity(*exponents))(model)
    assert metrics["matched_spearman"] == pytest.approx(spearmanr(forward, SCORES)[0])
    assert metrics["matched_pearson"] == pytest.approx(pearsonr(forward, SCORES)[0], abs=1e-5)
    assert metrics["swapped_spearman"] == pytest.approx(spearmanr(backward, SCORES)[0])
    gap = np.abs(forward - backward).mean() / forward.std()
    assert metrics["symmetry_gap"] == pytest.approx(gap, rel=1e-4, abs=1e-6)
    assert (metrics["symmetry_gap"] < 1e-6) == (exponents[0] == exponents[1])


def test_agrees_with_the_stock_evaluator(model):
    stock = EmbeddingSimilarityEvaluator(A, B, SCORES, similarity_fn_names=["cosine", "dot"])(model)
    ours = ScoredPairsEvaluator(A, B, SCORES)(model)
    for name in ("cosine", "dot"):
        for metric in ("spearman", "pearson"):
            assert ours[f"{name}_{metric}"] == pytest.approx(stock[f"{metric}_{name}"], abs=1e-5)


def test_defaults_names_and_csv(model, tmp_path):
    stm.prepare(model, "dot")
    evaluator = ScoredPairsEvaluator(A, B, SCORES, name="sts")
    metrics = evaluator(model, str(tmp_path), epoch=1, steps=2)
    assert metrics["sts_matched_spearman"] == metrics["sts_dot_spearman"]
    assert metrics[evaluator.primary_metric] == metrics["sts_matched_spearman"]
    with (tmp_path / evaluator.csv_file).open(encoding="utf-8") as lines:
        row = next(csv.DictReader(lines))
    assert float(row["symmetry_gap"]) == metrics["sts_symmetry_gap"]


def test_exponents_are_looked_behind(model):
    expected = ScoredPairsEvaluator(A, B, SCORES, "qnorm")(model)
    model.append(ExponentNorm(0.5, 0.5))
    got = ScoredPairsEvaluator(A, B, SCORES, "qnorm")(model)
    assert got == pytest.approx(expected, abs=1e-6)


def test_one_sided_norms_are_told_once(model, caplog):
    evaluator = ScoredPairsEvaluator(A, B, SCORES, "qnorm")
    evaluator(model)
    evaluator(model)
    assert sum("symmetric task" in r.message for r in caplog.records) == 1
    ScoredPairsEvaluator(A, B, SCORES, "dot")(model)
    assert sum("symmetric task" in r.message for r in caplog.records) == 1


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="16, 16 and 3"):
        ScoredPairsEvaluator(A, B, SCORES[:3])
