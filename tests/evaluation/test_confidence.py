"""Norm as confidence: against scikit-learn and loops, on data where the answer is known."""

import numpy as np
import pytest
from _tiny import ROWS
from sentence_transformers.base.modules import Normalize
from sklearn.metrics import roc_auc_score

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.confidence import norm_confidence
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

QUERIES = {f"q{i:02d}": row[0] for i, row in enumerate(ROWS)}
CORPUS = {f"d{i:02d}": row[1] for i, row in enumerate(ROWS)} | {f"x{i:02d}": row[2] for i, row in enumerate(ROWS)}
RELEVANT = {query: set(sorted(CORPUS)[i % 2 :: 2]) for i, query in enumerate(QUERIES)}  # half of it: weights are random
OUTSIDE = ["see also", "none", "notes and more notes"]
DATA = RetrievalData(QUERIES, CORPUS, RELEVANT)


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
    report = norm_confidence(model, DATA, outside=OUTSIDE)
    assert isinstance(model[-1], {"raw": type(model[1]), "normalize": Normalize, "exponents": ExponentNorm}[tail])
    assert (report.is_correct == correct).all()
    for name, values in signals.items():
        signal = report.signals[name]
        np.testing.assert_allclose(signal.values, values, rtol=1e-4)
        assert signal.auroc == pytest.approx(roc_auc_score(correct, values.round(4)), abs=0.05)
    assert report.signals["query length"].length_spearman == pytest.approx(1)
    outside, inside = np.linalg.norm(model.encode(OUTSIDE), axis=1), signals["query norm"]
    if tail == "raw":
        assert report.outside["norm ratio"] == pytest.approx(outside.mean() / inside.mean(), rel=1e-4)
        truth = [1] * len(inside) + [0] * len(outside)
        assert report.outside["auroc"] == pytest.approx(roc_auc_score(truth, np.append(inside, outside)))
    text = str(report)
    assert "Spearman with length" in text
    assert "document norm" in text
    assert "norm ratio" in text


def test_risk(model):
    report = norm_confidence(stm.prepare(model, "dot"), DATA)
    assert report.outside == {}
    signal = report.signals["query norm"]
    for coverage in (0.25, 0.5, 1.0):
        answered = np.argsort(-signal.values)[: round(coverage * 16)]
        assert signal.risk_at(coverage) == pytest.approx(1 - report.is_correct[answered].mean())


def test_nothing_to_tell_apart(model):
    everything = {query: set(CORPUS) for query in QUERIES}
    with pytest.raises(ValueError, match="answered right"):
        norm_confidence(model, RetrievalData(QUERIES, CORPUS, everything))
