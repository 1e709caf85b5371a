"""Local data scored by mteb equals what sentence-transformers' own evaluator says."""

import json
import subprocess
import sys

import pytest
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
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


@pytest.mark.parametrize(("similarity", "score"), [("cosine", "cosine"), ("qnorm", "dot")])
def test_a_model_trained_for_prefixes(static_model, task, tmp_path, similarity, score):
    """Trained, saved, and scored by others: mteb in a fresh process at full size, ST's evaluator when truncated."""
    loss = stm.TempAggMRLLoss(stm.prepare(static_model, similarity), [64, 256], similarity=similarity)
    pairs = [(task["queries"][q], task["corpus"][d]) for q, docs in task["relevant_docs"].items() for d in sorted(docs)]
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*pairs, strict=True), strict=True)))
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=3, learning_rate=0.02, use_cpu=True, report_to=[], save_strategy="no"
    )
    SentenceTransformerTrainer(static_model, arguments, rows, loss=loss).train()
    evaluator = stm.CompressionEvaluator(**task, dims=[64, 256], precisions=["float32"])
    metrics = evaluator(static_model)

    static_model.save_pretrained(str(tmp_path / "model"))
    save_beir(RetrievalData(**task), tmp_path / "data")
    command = [sys.executable, "-m", "st_magnitude.mteb", str(tmp_path / "model"), str(tmp_path / "data")]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    scores = json.loads(finished.stdout.splitlines()[-1])
    assert scores["ndcg_at_10"] == pytest.approx(metrics["full_ndcg@10"], abs=1e-4)

    short = SentenceTransformer(str(tmp_path / "model"), device="cpu", truncate_dim=64)
    theirs = InformationRetrievalEvaluator(**task, main_score_function=score)(short)
    assert theirs[f"{score}_ndcg@10"] == pytest.approx(metrics["float32_64_ndcg@10"], abs=1e-6)
    assert metrics["float32_64_ndcg@10"] != metrics["full_ndcg@10"]
