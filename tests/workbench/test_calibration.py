"""Both calibrations: against the evaluator, a ranking in float64, and vectors of an index."""

import numpy as np
import pytest
from _lookup import judged, lookup
from sentence_transformers.base.modules import Normalize
from torch import nn
from torch.nn.functional import normalize

import st_magnitude as stm
from st_magnitude import Similarity
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.judge import judge
from st_magnitude.modules import ExponentNorm
from st_magnitude.workbench.calibration import ExponentCurve, calibrate_exponent, preferring
from st_magnitude.workbench.choice import choose
from st_magnitude.workbench.folds import folds_of


class _Unit(nn.Module):
    def forward(self, features):
        return features | {"sentence_embedding": normalize(features["sentence_embedding"])}


def test_every_point_of_the_curve_is_the_evaluators(task, static_model):
    curve = calibrate_exponent(
        static_model, RetrievalData(*task.values()), exponents=[0.0, 0.3, 0.7, 1.0]
    )
    assert curve.exponents.tolist() == [0.0, 0.3, 0.7, 1.0]
    assert curve.queries == list(task["queries"])
    for gamma, mean, values in zip(curve.exponents, curve.ndcg, curve.per_query, strict=True):
        evaluator = MagnitudeEvaluator(**task, similarity=Similarity(1.0, gamma))
        assert mean == pytest.approx(evaluator(static_model)["matched_ndcg@10"], abs=1e-12)
        assert values == pytest.approx(evaluator.per_query["matched"], abs=1e-12)
    assert np.ptp(curve.ndcg) > 0


@pytest.mark.parametrize(
    ("means", "noise", "present", "highest", "best"),
    [
        ((0.5, 0.6, 0.5), 0.05, 0.0, 0.5, 0.5),  # clearly better than both
        ((0.5, 0.53, 0.52), 0.3, 0.0, 0.5, 0.0),  # tied with today's
        ((0.5, 0.53, 0.52), 0.3, 1.0, 0.5, 1.0),
        ((0.5, 0.53, 0.52), 0.3, 0.5, 0.5, 0.5),
        ((0.51, 0.53, 0.52), 0.3, 0.0, 0.5, 0.0),
        ((0.3, 0.65, 0.6), 0.3, 0.0, 0.5, 1.0),  # tied with cosine alone, which loads anywhere
        ((0.6, 0.65, 0.3), 0.3, 1.0, 0.5, 0.0),
        ((0.6, 0.5, 0.3), 0.0, 0.5, 0.0, 0.0),  # dot itself is the highest
        ((0.5, 0.5, 0.5), 0.0, 0.0, 1.0, 0.0),  # equal ones: the nearest to cosine is the highest
    ],
)
def test_a_tie_keeps_the_scoring_of_today(means, noise, present, highest, best):
    """The answer to a query is the first document at an exponent, or is not found."""
    rng = np.random.default_rng(0)
    values = np.stack([np.arange(100) < 100 * mean for mean in means]).astype(float)
    values = rng.permuted(values, axis=1) if noise > 0.1 else values
    exponents = np.array([0.0, 0.5, 1.0])
    queries = {f"q{i:02}": f"question {i}" for i in range(100)}
    relevant = {query: {"a"} for query in queries}
    data = RetrievalData(queries, {"a": "answer", "b": "other"}, relevant)
    runs = [{q: {"ba"[int(x)]: 1.0} for q, x in zip(queries, row, strict=True)} for row in values]
    sweep = {x: Ranking.of_run(data, run, 10) for x, run in zip(exponents, runs, strict=True)}
    rule = preferring(exponents, present, seed=5)
    folds = folds_of(data, 5, seed=5)
    curve = ExponentCurve(sweep, choose(sweep, folds, rule), 5, present)
    assert (curve.highest, curve.best) == (highest, best)
    assert curve.best_similarity == Similarity(gamma_query=1.0, gamma_document=best)
    held_out = np.empty(100)
    for fold in folds:
        is_in = np.array([query in fold for query in queries])
        held_out[is_in] = values[rule(values[:, ~is_in])][is_in]
    assert curve.held_out.ndcg.tolist() == held_out.tolist()
    assert curve.versus_cosine == judge(held_out - values[-1], seed=5)
    assert curve.versus_dot == judge(held_out - values[0], seed=5)
    by_exponent, gains, *sentence = curve.tables()
    assert [row[1] for row in by_exponent.rows] == curve.ndcg.tolist()
    assert sum(row[2] == "best" for row in by_exponent.rows) == 1
    assert [row[1] for row in gains.rows] == [curve.versus_cosine, curve.versus_dot]
    assert len(sentence) == (best != highest) + (present == 0.5)
    better = max(means[-1], means[0])
    assert values[int(2 * curve.stock)].mean() == better
    assert curve.versus_stock.mean == pytest.approx(means[int(2 * present)] - better)
    if present == 0.5:
        assert f"to {curve.stock:g}: today's is {curve.versus_stock} over it" in sentence[-1]
    assert curve.to_dict()["ndcg@10"] == dict(zip(("0", "0.5", "1"), curve.ndcg, strict=True))


@pytest.mark.parametrize("module", [Normalize(), _Unit()])
def test_a_model_that_normalises_is_refused(task, static_model, module):
    """Also under another name than Normalize."""
    static_model.append(module)
    with pytest.raises(ValueError, match="all norms are 1"):
        calibrate_exponent(static_model, RetrievalData(*task.values()))


@pytest.mark.parametrize("exponent", [1.5, -0.1, float("nan")])
def test_exponents_are_checked(task, static_model, exponent):
    with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
        calibrate_exponent(static_model, RetrievalData(*task.values()), exponents=[exponent])


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
        scores = q @ d.T + weight * log_p
        places = (scores > scores[np.arange(N), asked, None]).sum(axis=1)  # of the answers
        expected = np.where(places < 10, 1 / np.log2(2 + places), 0)
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
    assert curve.choice == choose(curve.rankings, folds_of(data_of(asked), 5, seed=3))
    assert len(set(curve.choice.by_query)) > 1
    assert curve.gain == judge(curve.held_out.ndcg - curve.per_query[0], seed=3)
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
    assert top.tolist() == curve.rankings[curve.weight].columns.tolist()


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
