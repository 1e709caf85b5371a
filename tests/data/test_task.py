"""Rankings and nDCG against sorting in Python and scikit-learn, and refused embeddings."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import st_magnitude as stm
from st_magnitude import COSINE, DNORM, DOT, QNORM, Similarity, calibrate_exponent
from st_magnitude.data import task as task_module
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation import CompressionEvaluator, MagnitudeEvaluator, bm25_run

SIMILARITIES = [DOT, QNORM, DNORM, COSINE, Similarity(1.0, 0.4), Similarity(0.3, 0.8)]


def encoded(num_queries=23, num_documents=41, dim=16) -> EncodedTask:
    """Random embeddings with a zero document and every tenth document doubled."""
    q = torch.randn(num_queries, dim)
    d = torch.randn(num_documents, dim) * torch.rand(num_documents, 1) * 5
    d[7] = 0
    d[10::10] = d[0]
    return task_of(q, d)


def task_of(queries, documents, similarity=DOT) -> EncodedTask:
    """A task whose i-th document is "di"."""
    corpus = {f"d{i:02}": f"document {i}" for i in range(len(documents))}
    asked = {f"q{i:02}": "?" for i in range(len(queries))}
    data = RetrievalData(asked, corpus, {})
    return EncodedTask(data, list(asked), queries, documents, similarity)


def by_sorting(task: EncodedTask, gamma: float, k: int) -> list[list[int]]:
    """The best columns of every query, from the definition in float64."""
    q, d = task.queries.double().numpy(), task.documents.double().numpy()
    norms = [float(np.linalg.norm(row)) or 1.0 for row in d]
    scores = [[round(float(row @ d[j]) / n**gamma, 10) for j, n in enumerate(norms)] for row in q]
    return [sorted(range(len(d)), key=lambda j: (-row[j], j))[:k] for row in scores]


@pytest.mark.parametrize("tiles", ["one", "rows", "documents"])
@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_search_is_a_stable_sort_whatever_the_tiles(monkeypatch, k, tiles):
    if tiles == "rows":
        monkeypatch.setattr(task_module, "TILE", 41 * 5)
    elif tiles == "documents":
        monkeypatch.setattr(task_module, "TILE_WIDTH", 7)
    task = encoded()
    found = task.searches(SIMILARITIES, k)
    for similarity, ranking in zip(SIMILARITIES, found, strict=True):
        gamma_query, gamma = similarity.exponents
        assert ranking.columns.shape == (23, k)
        assert ranking.columns[:, :41].tolist() == by_sorting(task, gamma, k)
        assert (ranking.columns[:, 41:] == -1).all()
        again = replace(task, similarity=similarity).search(k)
        assert (again.columns == ranking.columns).all()
        assert (again.scores == ranking.scores).all()
        if gamma_query == 1.0:
            assert (task.sweep([gamma], k)[gamma].scores == ranking.scores).all()


@pytest.mark.parametrize("similarity", SIMILARITIES, ids=str)
def test_a_prefix_is_cut_before_it_is_divided(similarity):
    task = replace(encoded(), similarity=similarity)
    prefix = replace(task, queries=task.queries[:, :3], documents=task.documents[:, :3])
    found = prefix.search(10)
    assert found.columns.tolist() == by_sorting(prefix, similarity.exponents[1], 10)
    scores = similarity(task.queries[:, :3], task.documents[:, :3])
    columns = torch.from_numpy(found.columns)
    expected = scores.gather(1, columns).double()
    torch.testing.assert_close(torch.from_numpy(found.scores), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("side", "name"), [("queries", "query"), ("documents", "document")])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_embeddings_that_are_not_finite_are_refused_by_name(side, name, value):
    sides = {"queries": torch.rand(3, 2), "documents": torch.rand(3, 2)}
    sides[side][1:, 0] = value
    with pytest.raises(ValueError, match=f"2 of 3 {name} embeddings .*'{name[0]}01'"):
        task_of(**sides)
    with pytest.raises(ValueError, match=f"2 of 3 {name} embeddings .* row 1"):
        task_module.check_finite(sides[side], name)


def metrics_of(kind, **options):
    """All figures of a search; those of the embeddings do not count."""
    return lambda model, *task: {
        key: x for key, x in kind(*task, **options)(model).items() if "@" in key
    }


SEARCHES = {
    "magnitude": metrics_of(MagnitudeEvaluator),
    "compression": metrics_of(CompressionEvaluator, precisions=["float32", "binary"]),
    "ranking": lambda model, *task: [
        [*row] for row in stm.encode(model, RetrievalData(*task), DOT).search().values()
    ],
    "exponent": lambda model, *task: calibrate_exponent(
        model, RetrievalData(*task)
    ).per_query.tolist(),
}
BM25 = {"bm25": lambda model, *task: [*bm25_run(RetrievalData(*task))["q1"]]}


@pytest.mark.parametrize("search", (SEARCHES | BM25).values(), ids=SEARCHES | BM25)
def test_every_search_leaves_out_the_query_itself(task, static_model, search):
    """As if the document were not there; with the id alone it is there."""
    queries, relevant = {"q1": task["queries"]["q1"]}, {"q1": task["relevant_docs"]["q1"]}
    expected = search(static_model, queries, task["corpus"], relevant)
    assert search(static_model, queries, task["corpus"] | queries, relevant) == expected
    for text, is_itself in ((f"Bread {queries['q1']}", True), (queries["q1"] * 2, False)):
        corpus = task["corpus"] | {"q1": text}
        assert (search(static_model, queries, corpus, relevant) == expected) == is_itself


def test_the_query_itself_is_left_out_with_a_prior_and_of_a_given_run(task, static_model):
    task["corpus"] |= task["queries"]
    data = RetrievalData(*task.values())
    cosine = stm.encode(static_model, data, "cosine")
    with_prior = cosine.with_prior(dict.fromkeys(data.corpus, -1.0), weight=0.1)
    assert (with_prior.search(10).columns == cosine.search(10).columns).all()
    run = {query: {"q1": 2.0, "d02": 1.0} for query in data.queries}
    assert Ranking.of_run(data, run, 10) == run | {"q1": {"d02": 1.0}}


RANKINGS = SEARCHES | {
    "compression": metrics_of(CompressionEvaluator, similarity="dot"),
}


@pytest.mark.parametrize("power", [66, -76])
@pytest.mark.parametrize("name", RANKINGS)
def test_a_common_factor_changes_no_ranking(task, static_model, name, power):
    """Products of such vectors are infinite or 0 in float32, and then all documents tie."""
    expected = RANKINGS[name](static_model, *task.values())
    with torch.no_grad():
        static_model[0].embedding.weight.mul_(2.0**power)
    assert RANKINGS[name](static_model, *task.values()) == expected


@pytest.mark.parametrize("power", [0, 66, -76])
def test_scores_have_the_digits_of_float32(power):
    task = encoded()
    factor = 2.0**power
    long = replace(task, queries=task.queries * factor, documents=task.documents * factor)
    found = task.search(10)
    assert (long.search(10).columns == found.columns).all()
    assert (long.search(10).scores == found.scores * factor**2).all()


@pytest.mark.parametrize("tiles", [2**16, 7])
def test_own_documents_are_not_found(monkeypatch, tiles):
    monkeypatch.setattr(task_module, "TILE_WIDTH", tiles)
    task = encoded()
    own = torch.randint(-1, 41, (23,))
    monkeypatch.setattr(RetrievalData, "own_columns", lambda data, queries: own.numpy())
    left_out = task.search(41).columns
    monkeypatch.undo()
    for row, full, column in zip(left_out, task.search(41).columns, own.tolist(), strict=True):
        assert row.tolist() == [c for c in full if c != column] + [-1] * (column >= 0)
