"""The prior at scoring: against scores in float64, and as vectors of an index."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from _lookup import judged

import st_magnitude as stm
from st_magnitude.data.task import EncodedTask

N, M, D = 40, 30, 12
IDS = [f"d{j:03}" for j in range(M)]


@pytest.fixture(scope="module")
def world():
    """log p (M,), and a task of queries (N, D) and documents (M, D) with one answer each."""
    rng = np.random.default_rng(0)
    log_p = -1.5 * np.log1p(rng.permutation(M))
    asked = rng.choice(M, size=N, p=np.exp(log_p) / np.exp(log_p).sum())
    documents = rng.normal(size=(M, D)) * np.exp(0.3 * rng.normal(size=(M, 1)))
    queries = documents[asked] + 1.5 * rng.normal(size=(N, D))
    data = stm.RetrievalData(*judged(N, M, [[j] for j in asked]).values())
    sides = (torch.from_numpy(x).float() for x in (queries, documents))
    return log_p, EncodedTask(data, data.query_ids, *sides, stm.DOT)


@pytest.mark.parametrize("similarity", [stm.DOT, stm.COSINE, stm.Similarity(1.0, 0.5)], ids=str)
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_every_score_is_that_of_float64_and_of_an_index(world, similarity, weight):
    log_p, plain = world
    task = replace(plain, similarity=similarity)
    task = task.with_prior(dict(zip(IDS, log_p, strict=True)), weight)
    q, d = plain.queries.double().numpy(), plain.documents.double().numpy()
    q /= np.linalg.norm(q, axis=1, keepdims=True) ** similarity.exponents[0]
    d /= np.linalg.norm(d, axis=1, keepdims=True) ** similarity.exponents[1]
    scores = q @ d.T + weight * log_p
    found = task.search(M)
    expected = np.argsort(-scores, axis=1)
    assert (found.columns == expected).all()
    ordered = np.take_along_axis(scores, expected, axis=1)
    assert found.scores == pytest.approx(ordered, rel=1e-5, abs=1e-6)
    indexed = task.queries.float().numpy() @ task.documents.float().numpy().T
    assert indexed == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"d000": -1.0}, "no finite number for 29 of 30 documents, such as 'd001'"),
        (dict.fromkeys(IDS, 0.0) | {"d007": -np.inf}, "1 of 30 documents, such as 'd007'"),
    ],
)
def test_a_document_without_a_prior_is_named(world, bad, message):
    with pytest.raises(ValueError, match=message):
        world[1].with_prior(bad, 1.0)
