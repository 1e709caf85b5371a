"""Local data scored by mteb equals what sentence-transformers' own evaluator says."""

import json
import subprocess
import sys

import pytest
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

import st_magnitude as stm
from st_magnitude.data import RetrievalData, save_beir
from st_magnitude.mteb import evaluate_retrieval

pytest.importorskip("mteb")


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_equals_the_evaluator(static_model, task, similarity):
    data = RetrievalData(**task)
    stm.prepare(static_model, similarity)
    expected = InformationRetrievalEvaluator(**task, main_score_function=similarity)(static_model)
    scores = evaluate_retrieval(static_model, data)
    assert scores["ndcg_at_10"] == pytest.approx(expected[f"{similarity}_ndcg@10"], abs=1e-4)
    assert scores["recall_at_10"] == pytest.approx(expected[f"{similarity}_recall@10"], abs=1e-4)


def test_cosine_and_dot_differ_here(static_model, task):
    """Else the test above could not tell which similarity mteb had used."""
    results = stm.MagnitudeEvaluator(**task)(stm.prepare(static_model, "dot"))
    assert abs(results["cosine_ndcg@10"] - results["dot_ndcg@10"]) > 1e-3


def test_in_a_fresh_process(static_model, task, tmp_path):
    stm.export(stm.prepare(static_model, stm.Similarity(1.0, 0.5)), tmp_path / "model")
    save_beir(RetrievalData(**task), tmp_path / "data")
    command = [sys.executable, "-m", "st_magnitude.mteb", str(tmp_path / "model"), str(tmp_path / "data")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    scores = json.loads(finished.stdout.splitlines()[-1])
    evaluator = stm.MagnitudeEvaluator(**task)
    assert scores["ndcg_at_10"] == pytest.approx(evaluator(static_model)["matched_ndcg@10"], abs=1e-4)
