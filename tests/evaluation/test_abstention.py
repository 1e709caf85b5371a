"""Abstention: the guarantee over repeated samples, and the bookkeeping against a loop."""

import math
from dataclasses import replace

import numpy as np
import pytest
from _tiny import ROWS
from scipy.stats import binom
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.abstention import (
    SIGNALS,
    Abstention,
    choose_threshold,
    controlled_threshold,
)
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import encode_raw


def falling(signal):
    """The probability of a wrong answer: a share 0.2 (1 - t) is wrong above the threshold t."""
    return 0.4 * (1 - signal)


def uneven(signal):
    """The most confident answers break the limit of 0.1, too."""
    return np.select([signal > 0.9, signal > 0.5], [0.16, 0.04], 0.3)


@pytest.mark.parametrize(("probability", "decimals"), [(falling, 9), (uneven, 9), (uneven, 2)])
def test_the_guarantee_holds_over_repeated_samples(probability, decimals):
    """The share of samples whose rule breaks the limit is at most delta, also with ties."""
    rng = np.random.default_rng(0)
    risk, delta, runs = 0.1, 0.1, 400
    everybody = np.sort(rng.random(100_000).round(decimals))[::-1]
    risks = np.cumsum(probability(everybody)) / np.arange(1, 100_001)  # of the first 1, 2, ...
    broken = naive_broken = answered = 0
    for _ in range(runs):
        signal = rng.random(700).round(decimals)
        wrong = rng.random(700) < probability(signal)
        order = np.argsort(-signal)
        holds = np.flatnonzero(np.cumsum(wrong[order]) <= risk * np.arange(1, 701))
        scores = np.stack([signal, np.zeros(700)], axis=1)
        _, threshold = choose_threshold(scores, wrong, risk, delta)
        answered += math.isfinite(threshold)
        for is_naive, lowest in enumerate((threshold, signal[order][holds[-1]])):
            number = np.searchsorted(-everybody, -lowest, side="right")
            is_broken = bool(number) and risks[number - 1] > risk
            broken += is_broken and not is_naive
            naive_broken += is_broken and is_naive
    assert broken <= runs * delta + 2 * math.sqrt(runs * delta * (1 - delta))
    assert answered > 0.4 * runs  # the limit is not kept by silence
    assert naive_broken > 0.3 * runs


def test_threshold_is_that_of_a_loop():
    rng = np.random.default_rng(1)
    signal = rng.random(300).round(2)  # ties
    wrong = rng.random(300) < falling(signal)
    ranked = sorted(zip(-signal, ~wrong, strict=True))
    expected, mistakes = math.inf, 0
    for k in range(1, 300):
        mistakes += not ranked[k - 1][1]
        if k >= 30 and binom.cdf(mistakes, k, 0.15) > 0.2:
            break
        here, below = -ranked[k - 1][0], -ranked[k][0]
        if k > 30 and below < here:
            expected = (here + below) / 2
    assert math.isfinite(expected)
    assert controlled_threshold(signal, wrong, 0.1, 0.15, 0.2) == expected
    assert controlled_threshold(signal, np.ones(300, bool), 0.1, 0.15, 0.2) == math.inf
    assert controlled_threshold(signal, np.zeros(300, bool), 0.1, 0.15, 0.2) == signal.min()
    # the first test alone allows nothing, and of equal signals the wrong one comes first
    number = np.arange(40)
    assert controlled_threshold(-1.0 * number, number == 20, 0.5, 0.1, 0.13) == math.inf
    assert controlled_threshold(np.ones(40), number == 39, 0.5, 0.1, 0.13) == math.inf


def test_half_of_91_queries_without_a_mistake_allow_a_risk_of_a_tenth():
    for number, answered in ((90, 0), (91, 91)):
        scores = np.random.default_rng(0).random((number, 2))
        signal, threshold = choose_threshold(scores, np.zeros(number, dtype=bool), 0.1, 0.05)
        assert (SIGNALS[signal](scores) >= threshold).sum() == answered


@pytest.fixture(scope="module")
def counts():
    """A model that counts words: right often, but not always."""
    words = {word for row in ROWS for text in row for word in text.split()}
    return SentenceTransformer(modules=[BoW(sorted(words))], device="cpu")


@pytest.fixture(scope="module")
def data():
    """64 queries, every fourth of which has no relevant document."""
    queries = {
        f"q{i:02d}": f"{ROWS[i % 16][3]} {ROWS[i // 4][0]} {ROWS[i // 4][1][:12]}"
        for i in range(64)
    }
    corpus = {f"d{i:02d}": row[1] for i, row in enumerate(ROWS)} | {
        f"x{i:02d}": row[2] for i, row in enumerate(ROWS)
    }
    return RetrievalData(
        queries, corpus, {q: [f"d{i // 4:02d}"] * (i % 4 > 0) for i, q in enumerate(queries)}
    )


def test_rule_against_a_loop(counts, data):
    """Scores and wrong answers of every query, by numpy on raw embeddings."""
    rule = stm.calibrate_abstention(counts, data, risk=0.5, delta=0.5)
    ids = sorted(data.corpus)
    q = encode_raw(counts, list(data.queries.values()), "query").double().numpy()
    d = encode_raw(counts, [data.corpus[i] for i in ids], "document").double().numpy()
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    d /= np.linalg.norm(d, axis=1, keepdims=True) ** rule.similarity.exponents[1]
    scores = (q @ d.T).astype(np.float32)  # as the search rounds them: ties are ties
    order = np.argsort(-scores, axis=1, kind="stable")
    pairs = zip(data.queries, order[:, 0], strict=True)
    wrong = np.array([ids[i] not in data.relevant.get(query, ()) for query, i in pairs])
    answers = rule.answers(np.take_along_axis(scores, order, axis=1)[:, :2])
    assert rule.unanswerable == 0.25
    counts_of = {"answered": int(answers.sum()), "wrong": int((answers & wrong).sum())}
    assert rule.measure(counts, data) == replace(rule, queries=64, **counts_of)


ENDS = {
    "dot": ((), "dot", None),
    "Normalize": ((Normalize,), "cosine", None),
    "cut": ((Normalize,), "cosine", 131),
    "cut, dot": ((Normalize,), "dot", 131),
    "ExponentNorm": ((lambda: ExponentNorm(0.3, 0.5),), "dot", None),
}


@pytest.mark.parametrize(("closing", "name", "dim"), ENDS.values(), ids=ENDS)
def test_the_rule_holds_for_what_the_model_serves(counts, data, closing, name, dim):
    """As docs/evaluation.md applies it; with cosine, embeddings before Normalize give the same."""
    model = SentenceTransformer(
        modules=[counts[0], *(module() for module in closing)],
        similarity_fn_name=name,
        truncate_dim=dim,
        device="cpu",
    )
    rule = stm.calibrate_abstention(model, data, risk=0.6, delta=0.5)
    queries = model.encode_query(list(data.queries.values()), normalize_embeddings=True)
    scores = model.similarity(queries, model.encode_document(list(data.corpus.values())))
    answers = rule.answers(scores.sort(descending=True).values)
    assert 0 < answers.sum() == rule.answered < 64
    if name == "cosine":
        raw = stm.calibrate_abstention(model, data, 0.6, 0.5, before_normalize=True)
        assert raw == replace(rule, threshold=pytest.approx(rule.threshold, rel=1e-5))


def test_unanswerable_queries_stand_in_a_folder(counts, data, tmp_path, caplog):
    """As lines with an empty document id; without any, the rule says that it knows none."""
    data.save(tmp_path, "dev")
    assert "q00\t\t0\n" in (tmp_path / "qrels" / "dev.tsv").read_text()
    read = stm.load_splits(tmp_path)["dev"]
    assert stm.calibrate_abstention(counts, read) == stm.calibrate_abstention(counts, data)
    assert not caplog.records
    answered = RetrievalData(
        {query: data.queries[query] for query in data.relevant}, data.corpus, data.relevant
    )
    assert stm.calibrate_abstention(counts, answered).unanswerable == 0
    assert "empty corpus-id" in caplog.text


@pytest.mark.parametrize(("is_judged", "risk"), [(True, 0.01), (False, 0.5)])
def test_few_queries_answer_nothing(counts, data, tmp_path, is_judged, risk):
    """A risk of 0.01 needs 299 right answers in a row; or nothing is right. Infinity is saved."""
    judged = data.relevant if is_judged else {}
    few = RetrievalData(data.queries, data.corpus, judged)
    rule = stm.calibrate_abstention(counts, few, risk=risk)
    assert rule.threshold == math.inf
    assert not rule.answers(np.random.default_rng(0).random((20, 2))).any()
    assert Abstention.load(rule.save(tmp_path / "abstention.json")) == rule


def test_bad_input(counts, data):
    with pytest.raises(ValueError, match="risk must be strictly between 0 and 1; got 1"):
        stm.calibrate_abstention(counts, data, risk=1)
    one = RetrievalData({"q": "who?"}, {"d": "he"}, {"q": {"d"}})
    with pytest.raises(ValueError, match="the corpus has one"):
        stm.calibrate_abstention(counts, one)
