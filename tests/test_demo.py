"""The demo of the README, shortened: it runs as it stands, and its models are the models that it measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_magnitude.data.retrieval import RetrievalData

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_whole_job_shortened(tmp_path, minilm_path):
    output = tmp_path / "demo"
    command = [sys.executable, ROOT / "examples" / "demo.py", "--output", output, "--steps", 3, "--train-queries", 80]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    finished = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "answers kept" in finished.stdout
    own = [line for line in finished.stdout.splitlines() if str(output) not in line and not line.startswith("{'train_")]
    assert max(map(len, own)) <= 80, max(own, key=len)
    results = json.loads((output / "results.json").read_text())
    assert (output / "norms.png").read_bytes().startswith(b"\x89PNG")
    data = RetrievalData.from_beir(output / "data", "test")
    for name in ("cosine", "qnorm"):
        model = SentenceTransformer(str(output / name))  # plain: stock modules
        scores = InformationRetrievalEvaluator(data.queries, data.corpus, data.relevant)(model)
        own = scores[f"{model.similarity_fn_name}_ndcg@10"]
        assert own == pytest.approx(results["models"][name]["matched"], abs=2e-3)
    assert results["mteb"] == pytest.approx(results["models"]["qnorm"]["matched"], abs=1e-3)
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)
    assert (again.returncode, "is not empty" in again.stderr) == (2, True)
