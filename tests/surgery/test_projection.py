"""Principal axes: against singular vectors, and as a stock module whose scores the evaluator
predicts."""

import pytest
import torch
from _surgery import is_stock
from _tiny import ROWS
from sentence_transformers import SentenceTransformer

import st_magnitude as stm
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.surgery.projection import principal_axes, project

QUERIES = {f"q{i}": row[0] for i, row in enumerate(ROWS)}
CORPUS = {f"d{i}{j}": row[j] for i, row in enumerate(ROWS) for j in (1, 2)}
RELEVANT = {f"q{i}": {f"d{i}1"} for i in range(len(ROWS))}


def test_axes_are_right_singular_vectors():
    documents = torch.randn(50, 8, dtype=torch.float64) @ torch.randn(8, 8, dtype=torch.float64) + 1
    axes = principal_axes(documents, 3)
    expected = torch.linalg.svd(documents, full_matrices=False).Vh[:3].T
    torch.testing.assert_close(axes @ axes.T, expected @ expected.T)
    whole = principal_axes(documents, 8)
    torch.testing.assert_close((documents @ whole) @ (documents @ whole).T, documents @ documents.T)


@pytest.mark.parametrize("name", ["cosine", "dot", "qnorm"])
def test_a_projected_model_scores_as_the_evaluator_says(model, tmp_path, name):
    stm.prepare(model, name)
    evaluator = CompressionEvaluator(QUERIES, CORPUS, RELEVANT, dims=[32, 8], pca=True)
    metrics = evaluator(model)
    project(model, [CORPUS[document] for document in sorted(CORPUS)], 8, show_progress_bar=False)
    model.save_pretrained(str(tmp_path))
    assert is_stock(tmp_path)
    short = SentenceTransformer(str(tmp_path), device="cpu")
    assert short.encode("green tea").shape == (8,)
    found = CompressionEvaluator(QUERIES, CORPUS, RELEVANT, dims=[8])(short)
    assert found["full_ndcg@10"] == pytest.approx(metrics["float32_8_pca_ndcg@10"], abs=1e-6)
    assert metrics["float32_8_pca_ndcg@10"] != metrics["float32_8_ndcg@10"]
    assert {cell.axes for cell in evaluator.cells} == {"prefix", "pca"}


def test_a_model_that_cuts_its_embeddings_is_projected_from_all_dimensions(model):
    texts = list(CORPUS.values())
    axes = principal_axes(stm.COSINE.document(torch.from_numpy(model.encode_document(texts))), 4)
    expected = torch.from_numpy(model.encode_document("green tea")) @ axes
    model.truncate_dim = 16
    found = project(model, texts, 4, show_progress_bar=False).encode_document("green tea")
    torch.testing.assert_close(torch.from_numpy(found).abs(), expected.abs(), rtol=1e-3, atol=1e-4)


def test_dimensions_are_checked(model):
    with pytest.raises(ValueError, match="dim must be between 1 and 32"):
        project(model, ["a", "b"], 33, show_progress_bar=False)
