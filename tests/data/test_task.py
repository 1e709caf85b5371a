"""RetrievalData and EncodedTask against sorting in Python, and every evaluator's way of refusing a broken embedding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

from st_magnitude import COSINE, DNORM, DOT, QNORM, Similarity, calibrate_exponent, diagnose
from st_magnitude.data import task as task_module
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode_texts
from st_magnitude.evaluation import (
    CompressionEvaluator,
    GeometryEvaluator,
    HybridEvaluator,
    MagnitudeEvaluator,
    ScoredPairsEvaluator,
)
from st_magnitude.modules import ExponentNorm

SIMILARITIES = [DOT, QNORM, DNORM, COSINE, Similarity(1.0, 0.4), Similarity(0.3, 0.8)]


def encoded(num_queries=23, num_documents=41, dim=16) -> EncodedTask:
    """Random embeddings with a zero document and every tenth document doubled."""
    q = torch.randn(num_queries, dim)
    d = torch.randn(num_documents, dim) * torch.rand(num_documents, 1) * 5
    d[7] = 0
    d[10::10] = d[0]
    return EncodedTask(q, d, [torch.randperm(num_documents)[: 1 + i % 4].tolist() for i in range(num_queries)])


def by_sorting(task: EncodedTask, gamma: float, k: int, among: list[int] | None = None) -> list[list[int]]:
    """The best columns of every query, from the definition in float64."""
    q, d = task.queries.double().numpy(), task.documents.double().numpy()
    norms = [float(np.linalg.norm(row)) or 1.0 for row in d]
    kept = range(len(d)) if among is None else among
    scores = [[round(float(row @ d[j]) / norms[j] ** gamma, 10) for j in range(len(d))] for row in q]
    return [sorted(kept, key=lambda j: (-row[j], j))[:k] for row in scores]


@pytest.mark.parametrize("tiles", ["one", "rows", "documents"])
@pytest.mark.parametrize("k", [1, 10, 100])
def test_top_is_a_stable_sort_whatever_the_tiles(monkeypatch, k, tiles):
    if tiles == "rows":
        monkeypatch.setattr(task_module, "TILE", 41 * 5)
    elif tiles == "documents":
        monkeypatch.setattr(task_module, "CHUNK", 7)
    task = encoded()
    found = task.tops(SIMILARITIES, k)
    for similarity, top in zip(SIMILARITIES, found, strict=True):
        assert top.tolist() == by_sorting(task, similarity.exponents[1], k)
        assert torch.equal(task.top(similarity, k), top)


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_a_prefix_is_cut_before_it_is_divided(similarity):
    task = encoded()
    prefix = task.prefix(3)
    assert prefix.top(similarity).tolist() == by_sorting(prefix, similarity.exponents[1], 10)
    scores = similarity(task.queries[:, :3], task.documents[:, :3])
    top = prefix.top(similarity)
    torch.testing.assert_close(prefix.scores(similarity, top), scores.gather(1, top))


def test_ndcg_and_hits_from_columns():
    task = EncodedTask(torch.eye(2), torch.rand(4, 2), columns=[{2: 3, 1: 1}, [0, 3]])
    top = torch.tensor([[1, 2, 0, 3], [3, 1, 2, 0]])
    assert task.gains(top).tolist() == [[1, 3, 0, 0], [1, 0, 0, 1]]
    assert task.hits(top).tolist() == [[True, True, False, False], [True, False, False, True]]
    first, second, _, fourth = 1 / np.log2([2, 3, 4, 5])
    expected = [(first + 3 * second) / (3 * first + second), (first + fourth) / (first + second)]
    assert task.ndcg(top) == pytest.approx(expected)
    assert task.ndcg(top[:, :1], k=1) == pytest.approx([1 / 3, 1])
    assert task.degrees.tolist() == [1, 1, 1, 1]


def test_encodes_each_side_with_its_role_and_prompt(task, static_model):
    static_model.prompts = {"query": "ask: ", "document": "", "own": "own: "}
    found = RetrievalData(*task.values()).encode(static_model, batch_size=8, corpus_prompt_name="own")
    ids = sorted(task["corpus"])
    texts = ["ask: " + q for q in task["queries"].values()], ["own: " + task["corpus"][d] for d in ids]
    for side, prompted in zip((found.queries, found.documents), texts, strict=True):
        torch.testing.assert_close(side, static_model.encode(prompted, convert_to_tensor=True))
    assert found.columns == [{ids.index(d): 1 for d in sorted(r)} for r in task["relevant_docs"].values()]


@pytest.mark.parametrize("closing", [Normalize(), ExponentNorm(1.0, 0.5)], ids=["Normalize", "ExponentNorm"])
def test_what_stands_at_the_end_of_the_model(task, static_model, closing):
    raw = encode_texts(static_model, task["queries"], task["corpus"])
    model = SentenceTransformer(modules=[static_model[0], closing], device="cpu")
    before = encode_texts(model, task["queries"], task["corpus"], before_normalize=True)
    assert torch.equal(before.documents, raw.documents)
    served = encode_texts(model, task["queries"], task["corpus"])
    assert torch.equal(served.documents, raw.documents) == isinstance(closing, ExponentNorm)
    assert model[-1] is closing


def test_queries_without_judgments_do_not_count(task):
    relevant = {"q2": ["d02", "d01"], "q1": {"d03"}}
    judged = RetrievalData(task["queries"], dict(reversed(task["corpus"].items())), relevant)
    assert judged.query_ids == ["q1", "q2"]
    assert judged.document_ids == sorted(task["corpus"])
    assert judged.columns == [{2: 1}, {0: 1, 1: 1}]
    with pytest.raises(ValueError, match="None of the 8 queries has a relevant document"):
        RetrievalData(task["queries"], task["corpus"], {"q1": set()}).encode(None)


@pytest.mark.parametrize(("side", "name"), [("queries", "query"), ("documents", "document")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite_are_refused_by_name(side, name, value):
    sides = {"queries": torch.rand(3, 2), "documents": torch.rand(3, 2)}
    sides[side][1:, 0] = value
    with pytest.raises(ValueError, match=f"2 of 3 {name} embeddings are not finite, such as that of row 1"):
        EncodedTask(**sides)
    with pytest.raises(ValueError, match="such as that of 'b'"):
        EncodedTask(**sides, query_ids=["a", "b", "c"], document_ids=["a", "b", "c"])


SCORERS = {
    "calibrate_exponent": lambda model, *task: calibrate_exponent(model, RetrievalData(*task)),
    "diagnose": lambda model, *task: diagnose(model, RetrievalData(*task)),
    "MagnitudeEvaluator": lambda model, *task: MagnitudeEvaluator(*task)(model),
    "CompressionEvaluator": lambda model, *task: CompressionEvaluator(*task)(model),
    "HybridEvaluator": lambda model, *task: HybridEvaluator(*task, bm25={"q1": {"d01": 1.0}})(model),
}


@pytest.fixture
def overflowing():
    module = BoW(["bread", "tea", "cat", "sofa", "overflow"], word_weights={"overflow": float("inf")})
    return SentenceTransformer(modules=[module], similarity_fn_name="dot", device="cpu")


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
@pytest.mark.parametrize(("side", "key"), [("queries", "q3"), ("corpus", "d05")])
def test_every_scorer_names_the_text_whose_embedding_is_not_finite(task, overflowing, scorer, side, key):
    task[side][key] += " overflow"
    with pytest.raises(ValueError, match=f"embeddings are not finite, such as that of '{key}'"):
        scorer(overflowing, *task.values())


def test_scorers_of_lists_name_the_row(overflowing):
    texts = ["tea", "tea overflow", "tea tea"]
    with pytest.raises(ValueError, match="1 of 3 document embeddings are not finite, such as that of row 1"):
        GeometryEvaluator(texts)(overflowing)
    with pytest.raises(ValueError, match="1 of 3 sentences2 embeddings are not finite, such as that of row 1"):
        ScoredPairsEvaluator(["tea"] * 3, texts, [1.0, 2.0, 3.0])(overflowing)
