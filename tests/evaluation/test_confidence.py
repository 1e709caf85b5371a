"""Norm as confidence: against scikit-learn and loops, on data where the answer is known."""

import numpy as np
import pytest
import torch
from _tiny import ROWS
from sentence_transformers.base.modules import Normalize
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

import st_magnitude as stm
from st_magnitude.evaluation.confidence import knn_accuracy_by_norm, norm_confidence, novelty
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

QUERIES = {f"q{i:02d}": row[0] for i, row in enumerate(ROWS)}
CORPUS = {f"d{i:02d}": row[1] for i, row in enumerate(ROWS)} | {f"x{i:02d}": row[2] for i, row in enumerate(ROWS)}
RELEVANT = {query: set(sorted(CORPUS)[i % 2 :: 2]) for i, query in enumerate(QUERIES)}  # half of it: weights are random


# --- kNN by norm ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5])
def test_knn_against_scikit_learn(k):
    rng = np.random.default_rng(0)
    labels = np.array(list("abc"))[rng.integers(3, size=120)]
    x = rng.normal(size=(120, 4)) + np.eye(3, 4)[np.searchsorted(list("abc"), labels)]
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    right = []
    for i in range(120):  # leave one out
        others = np.delete(np.arange(120), i)
        model = KNeighborsClassifier(k, metric="euclidean").fit(unit[others], labels[others])
        right.append(model.predict(unit[i : i + 1])[0] == labels[i])
    length = np.linalg.norm(x, axis=1) / np.linalg.norm(x, axis=1).max()
    buckets = knn_accuracy_by_norm(torch.tensor(x), labels, k=k, num_buckets=5, min_rows=3)
    assert sum(bucket.count for bucket in buckets) > 100
    for bucket in buckets:
        inside = (length > bucket.low) & (length <= bucket.high)
        assert bucket.count == inside.sum() >= 3
        assert bucket.accuracy == pytest.approx(np.array(right)[inside].mean())


def test_long_rows_are_surer_where_they_were_made_so():
    rng = np.random.default_rng(1)
    labels = rng.integers(2, size=400)
    sure = rng.random(400) < 0.5
    x = np.stack([np.where(sure, 2 * labels - 1, 0), rng.normal(size=400)], axis=1)
    x *= np.where(sure, 3, 1)[:, None] / np.linalg.norm(x, axis=1, keepdims=True)
    low, high = knn_accuracy_by_norm(x, labels, k=20, num_buckets=2)
    assert (low.count, high.count) == ((~sure).sum(), sure.sum())
    assert high.accuracy > low.accuracy + 0.2


def test_knn_refuses():
    x = np.ones((4, 2))
    with pytest.raises(ValueError, match="4 rows and 3 labels"):
        knn_accuracy_by_norm(x, [1, 2, 3])
    with pytest.raises(ValueError, match="k must be"):
        knn_accuracy_by_norm(x, [1, 2, 3, 4], k=0)
    with pytest.raises(ValueError, match="All norms are 0"):
        knn_accuracy_by_norm(0 * x, [1, 2, 3, 4])


# --- novelty ----------------------------------------------------------------------------------------------------------


def test_novelty_against_scikit_learn():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(3, 1, 50).round(1), rng.normal(2, 1, 30).round(1)
    found = novelty(inside, outside, np.ones(50), np.ones(30))
    truth, values = [1] * 50 + [0] * 30, np.concatenate([inside, outside])
    assert found.auroc == pytest.approx(roc_auc_score(truth, values))
    assert found.ratio == pytest.approx(outside.mean() / inside.mean())
    assert found.length_auroc == 0.5
    assert "text length 0.500" in str(found)
    assert np.isnan(novelty(inside, outside).length_auroc)


# --- selective retrieval ----------------------------------------------------------------------------------------------


def by_hand(model, similarity):
    """Is the first document right, and the five signals."""
    q, d = model.encode(list(QUERIES.values())), model.encode([CORPUS[key] for key in sorted(CORPUS)])
    scores = stm.Similarity.named(similarity)(q, d).numpy()
    first = scores.argmax(axis=1)
    documents = [sorted(CORPUS)[i] for i in first]
    correct = np.array([document in RELEVANT[query] for query, document in zip(QUERIES, documents, strict=True)])
    return correct, {
        "query norm": np.linalg.norm(q, axis=1),
        "document norm": np.linalg.norm(d, axis=1)[first],
        "score": stm.COSINE(q, d).numpy()[np.arange(len(q)), first],
        "query length": np.array([len(text.split()) for text in QUERIES.values()]),
        "document length": np.array([len(CORPUS[document].split()) for document in documents]),
    }


@pytest.mark.parametrize("tail", ["raw", "normalize", "exponents"])
def test_report(model, tail):
    similarity = {"raw": "dot", "normalize": "cosine", "exponents": stm.Similarity(1, 0.5)}[tail]
    correct, signals = by_hand(model, similarity)
    assert 0 < correct.sum() < len(correct)
    stm.prepare(model, similarity)
    report = norm_confidence(model, QUERIES, CORPUS, RELEVANT, outside=["see also", "none", "notes"])
    assert isinstance(model[-1], {"raw": type(model[1]), "normalize": Normalize, "exponents": ExponentNorm}[tail])
    assert (report.is_correct == correct).all()
    for name, values in signals.items():
        signal = report.signals[name]
        np.testing.assert_allclose(signal.values, values, rtol=1e-4)
        assert signal.auroc == pytest.approx(roc_auc_score(correct, values.round(4)), abs=0.05)
    assert report.signals["query length"].length_spearman == pytest.approx(1)
    assert 0 < report.novelty.ratio < 3
    text = str(report)
    assert "Spearman with text length" in text
    assert "document norm" in text
    assert "norm ratio" in text


def test_threshold_and_risk(model):
    report = norm_confidence(stm.prepare(model, "dot"), QUERIES, CORPUS, RELEVANT)
    assert report.novelty is None
    signal = report.signals["query norm"]
    for coverage in (0.25, 0.5, 1.0):
        answered = np.argsort(-signal.values)[: round(coverage * 16)]
        assert signal.risk_at(coverage) == pytest.approx(1 - report.is_correct[answered].mean())
        assert (signal.values >= signal.threshold(coverage)).mean() == pytest.approx(coverage, abs=0.07)
    assert signal.risk_at(1.0) == pytest.approx(1 - report.is_correct.mean())
    with pytest.raises(ValueError, match="coverage"):
        signal.threshold(0)
    with pytest.raises(ValueError, match="coverage"):
        signal.risk_at(1.5)


def test_nothing_to_tell_apart(model):
    everything = {query: set(CORPUS) for query in QUERIES}
    with pytest.raises(ValueError, match="answered right"):
        norm_confidence(model, QUERIES, CORPUS, everything)


def test_plot(model, tmp_path):
    pytest.importorskip("matplotlib")
    report = norm_confidence(stm.prepare(model, "dot"), QUERIES, CORPUS, RELEVANT)
    report.plot(tmp_path / "risk.png")
    assert (tmp_path / "risk.png").stat().st_size > 10_000
