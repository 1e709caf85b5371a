"""calibrate_prior against a ranking in float64, and against vectors of an index."""

import numpy as np
import pytest
import torch
from _lookup import judged, lookup
from sentence_transformers.base.modules import Normalize
from sklearn.metrics import ndcg_score

import st_magnitude as stm
from st_magnitude.judge import judge
from st_magnitude.modules import ExponentNorm

N, M, D = 120, 60, 12
IDS = [f"d{j:03}" for j in range(M)]


@pytest.fixture(scope="module")
def world():
    """Queries (N, D), documents (M, D), log p (M,), answers (N,) that are drawn by p."""
    rng = np.random.default_rng(0)
    log_p = -1.5 * np.log1p(rng.permutation(M))
    log_p -= np.log(np.exp(log_p).sum())
    documents = rng.normal(size=(M, D)) * np.exp(0.3 * rng.normal(size=(M, 1)))
    asked = rng.choice(M, size=N, p=np.exp(log_p))
    queries = documents[asked] + 1.5 * rng.normal(size=(N, D))
    return queries.astype(np.float32), documents.astype(np.float32), log_p, asked


def data_of(asked) -> stm.RetrievalData:
    return stm.RetrievalData(*judged(N, M, [[j] for j in asked]).values())


CLOSING = {
    "dot": ((), "dot", (0, 0)),
    "cosine": ((), "cosine", (1, 1)),
    "normalize": ((Normalize(),), "cosine", (1, 1)),
    "exponents": ((ExponentNorm(1.0, 0.5),), "dot", (1, 0.5)),
}


@pytest.mark.parametrize(("closing", "name", "exponents"), CLOSING.values(), ids=CLOSING)
def test_every_weight_is_the_ranking_in_float64(world, closing, name, exponents):
    queries, documents, log_p, asked = world
    model = lookup(queries, documents, name)
    for module in closing:
        model.append(module)
    curve = stm.calibrate_prior(model, data_of(asked), dict(zip(IDS, log_p, strict=True)))
    q, d = queries.astype(np.float64), documents.astype(np.float64)
    q /= np.linalg.norm(q, axis=1, keepdims=True) ** exponents[0]
    d /= np.linalg.norm(d, axis=1, keepdims=True) ** exponents[1]
    assert curve.weights[0] == 0
    for weight, values in zip(curve.weights, curve.per_query, strict=True):
        rows = zip(np.eye(M)[asked], q @ d.T + weight * log_p, strict=True)
        expected = [ndcg_score(r[None], s[None], k=10) for r, s in rows]
        assert values == pytest.approx(expected, abs=1e-12)
    spread = (q @ d.T).std(axis=1, ddof=1).mean() / log_p.std()
    assert curve.weights[1:] / spread == pytest.approx(np.geomspace(1 / 64, 16, 21), rel=1e-4)
    assert curve.similarity.exponents == exponents
    assert curve.weight == curve.highest > 0


def test_the_gain_is_of_queries_that_did_not_choose(world):
    queries, documents, log_p, asked = world
    noise = np.random.default_rng(5).normal(size=M)  # with it, the folds choose different weights
    noisy = dict(zip(IDS, log_p + 2 * noise, strict=True))
    curve = stm.calibrate_prior(lookup(queries, documents), data_of(asked), noisy, seed=3)
    fold = np.random.default_rng(3).permutation(N) % 5
    best = [curve.per_query[:, fold != part].mean(axis=1).argmax() for part in range(5)]
    held_out = np.array([curve.per_query[best[fold[i]], i] for i in range(N)])
    assert curve.held_out.tolist() == held_out.tolist()
    assert len(set(best)) > 1
    assert curve.gain == judge(held_out - curve.per_query[0], seed=3)
    assert 0.02 < curve.gain.low < curve.gain.mean
    table, _ = curve.tables()
    assert [row[1] for row in table.rows] == curve.ndcg.tolist()
    assert [row[2] for row in table.rows].count("best") == 1
    found = curve.to_dict()
    assert (found["weight"], found["queries"]) == (curve.weight, N)
    assert found["ndcg@10"]["0"] == curve.ndcg[0]


def test_without_popularity_the_weight_is_0(world):
    """All documents are asked for alike, and log p is of other judgments."""
    _, documents, log_p, _ = world
    rng = np.random.default_rng(1)
    asked = rng.permutation(np.repeat(np.arange(M), N // M))
    model = lookup(documents[asked] + 1.5 * rng.normal(size=(N, D)), documents)
    curve = stm.calibrate_prior(model, data_of(asked), dict(zip(IDS, log_p, strict=True)))
    assert curve.weight == 0
    assert curve.gain.low <= 0
    flat = stm.calibrate_prior(model, data_of(asked), dict.fromkeys(IDS, 0.0))
    assert (flat.weight, flat.weights.tolist(), flat.gain.mean) == (0, [0.0], 0)


def test_an_index_with_one_more_dimension_ranks_alike(world):
    """Also from counts of training judgments."""
    queries, documents, log_p, asked = world
    model, data = lookup(queries, documents, "cosine"), data_of(asked)
    train = data_of(np.random.default_rng(2).choice(M, size=N, p=np.exp(log_p)))
    log_p = train.log_prior()
    curve = stm.calibrate_prior(model, data, log_p)
    assert curve.weight > 0
    encoded = data.encode(model)
    unit = curve.similarity.document(encoded.documents).numpy()
    stored = np.c_[unit, curve.weight * np.float32([log_p[key] for key in data.document_ids])]
    sent = np.c_[curve.similarity.query(encoded.queries).numpy(), np.ones(N, np.float32)]
    assert stored.dtype == sent.dtype == np.float32
    top = np.argsort(-(sent @ stored.T), axis=1, kind="stable")[:, :10]
    at_best = curve.per_query[curve.weights.tolist().index(curve.weight)]
    assert encoded.ndcg(torch.from_numpy(top)) == pytest.approx(at_best)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"d000": -1.0}, "no value for 59 of 60 documents, such as 'd001'"),
        (dict.fromkeys(IDS, 0.0) | {"d007": -np.inf}, "log_p of 'd007' is -inf"),
    ],
)
def test_bad_input(world, bad, message):
    queries, documents, _, asked = world
    with pytest.raises(ValueError, match=message):
        stm.calibrate_prior(lookup(queries, documents), data_of(asked), bad)
