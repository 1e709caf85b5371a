"""The prior at scoring: against scores in float64, and as vectors of an index."""

import numpy as np
import pytest
from _lookup import judged, lookup
from sentence_transformers.base.modules import Normalize

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

N, M, D = 40, 30, 12
IDS = [f"d{j:03}" for j in range(M)]
CLOSING = {
    "dot": ((), "dot", (0, 0)),
    "cosine": ((), "cosine", (1, 1)),
    "normalize": ((Normalize(),), "cosine", (1, 1)),
    "exponents": ((ExponentNorm(1.0, 0.5),), "dot", (1, 0.5)),
}


@pytest.fixture(scope="module")
def world():
    """Queries (N, D), documents (M, D), log p (M,), and the data with one answer each."""
    rng = np.random.default_rng(0)
    log_p = -1.5 * np.log1p(rng.permutation(M))
    asked = rng.choice(M, size=N, p=np.exp(log_p) / np.exp(log_p).sum())
    documents = rng.normal(size=(M, D)) * np.exp(0.3 * rng.normal(size=(M, 1)))
    queries = documents[asked] + 1.5 * rng.normal(size=(N, D))
    data = stm.RetrievalData(*judged(N, M, [[j] for j in asked]).values())
    return queries.astype(np.float32), documents.astype(np.float32), log_p, data


@pytest.mark.parametrize(("closing", "name", "exponents"), CLOSING.values(), ids=CLOSING)
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_every_score_is_that_of_float64_and_of_an_index(world, closing, name, exponents, weight):
    queries, documents, log_p, data = world
    model = lookup(queries, documents, name)
    for module in closing:
        model.append(module)
    task = stm.encode(model, data).with_prior(dict(zip(IDS, log_p, strict=True)), weight)
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    q /= np.linalg.norm(q, axis=1, keepdims=True) ** exponents[0]
    d /= np.linalg.norm(d, axis=1, keepdims=True) ** exponents[1]
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
    queries, documents, _, data = world
    with pytest.raises(ValueError, match=message):
        stm.encode(lookup(queries, documents), data).with_prior(bad, 1.0)
