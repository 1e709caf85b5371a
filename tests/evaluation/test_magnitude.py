"""MagnitudeEvaluator against sentence-transformers' own evaluator."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import BoW
from sentence_transformers.util import cos_sim, dot_score

from st_magnitude import Similarity
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.evaluation.base import ranking_metrics
from st_magnitude.modules import ExponentNorm

METRICS = ("ndcg@10", "mrr@10", "recall@100", "map@100")


@pytest.fixture
def raw_minilm(minilm) -> SentenceTransformer:
    """all-MiniLM without its Normalize: norms of about 5."""
    modules = [minilm[0], minilm[1]]
    return SentenceTransformer(modules=modules, similarity_fn_name="dot", device="cpu")


def reference(task: dict, model: SentenceTransformer) -> dict[str, float]:
    functions = {"cosine": cos_sim, "dot": dot_score}
    evaluator = InformationRetrievalEvaluator(
        **task, score_functions=functions, precision_recall_at_k=[100]
    )
    return evaluator(model)


@pytest.mark.parametrize("dim", [None, 24])
def test_equals_the_evaluator_of_sentence_transformers(task, raw_minilm, dim):
    raw_minilm.truncate_dim = dim
    metrics = MagnitudeEvaluator(**task)(raw_minilm)
    expected = reference(task, raw_minilm)
    for function in ("cosine", "dot"):
        for metric in METRICS:
            key = f"{function}_{metric}"
            assert metrics[key] == pytest.approx(expected[key], abs=1e-12)
    assert metrics["matched_ndcg@10"] == metrics["dot_ndcg@10"]
    assert dim is None or metrics["cosine_ndcg@10"] < 0.99  # the figures are not all 1


def test_map_divides_by_the_ranks_that_count_where_more_documents_are_relevant():
    found = ranking_metrics(np.ones((1, 3), dtype=bool), [range(9)], k=3)
    assert found["map@3"] == 1


@pytest.mark.parametrize("learnable", [False, True])
def test_looks_behind_an_exponent_norm(task, static_model, learnable):
    """Matched is the score that the model's users get, everything else is of the raw embeddings."""
    raw = MagnitudeEvaluator(**task, similarity=Similarity(0.2, 0.6))(static_model)
    static_model.append(ExponentNorm(0.2, 0.6, learnable=learnable))
    assert MagnitudeEvaluator(**task)(static_model) == pytest.approx(raw, rel=1e-6)
    served = reference(task, static_model)
    for metric in METRICS:
        assert raw[f"matched_{metric}"] == pytest.approx(served[f"dot_{metric}"])
    assert raw["matched_map@100"] != raw["cosine_map@100"]


def test_a_normalising_model(task, minilm):
    metrics = MagnitudeEvaluator(**task)(minilm)
    assert metrics["cohens_d"] == 0.0
    assert metrics["document_norm_mean"] == pytest.approx(1.0)
    assert [metrics[f"dot_{m}"] for m in METRICS] == pytest.approx(
        [metrics[f"cosine_{m}"] for m in METRICS]
    )


def test_warns_of_collapse(caplog):
    """Relevant documents are long and point elsewhere: dot finds them, cosine does not."""
    words = BoW(["a", "b", "c"])
    model = SentenceTransformer(modules=[words], similarity_fn_name="dot", device="cpu")
    corpus = {"long": "a a a b b b b b c c c c c"} | {f"near{i}": "a" for i in range(20)}
    metrics = MagnitudeEvaluator({"q": "a"}, corpus, {"q": {"long"}})(model)
    assert (metrics["dot_ndcg@10"], metrics["cosine_ndcg@10"]) == (1.0, 0.0)
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "1.0000 by dot but 0.0000 by cosine" in warning
