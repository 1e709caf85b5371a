"""calibrate_exponent against the evaluator at every exponent, and on embeddings with a known best
exponent."""

import logging

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import BoW
from torch import nn
from torch.nn.functional import normalize

from st_magnitude import Similarity
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation import MagnitudeEvaluator
from st_magnitude.evaluation.calibration import ExponentCurve, calibrate_exponent
from st_magnitude.evaluation.metrics import judge
from st_magnitude.modules import ExponentNorm


def data_of(task) -> RetrievalData:
    return RetrievalData(*task.values())


def bag_of_words() -> SentenceTransformer:
    return SentenceTransformer(
        modules=[BoW(["a", "b", "c", "d"])], similarity_fn_name="dot", device="cpu"
    )


class _Unit(nn.Module):
    def forward(self, features):
        return features | {"sentence_embedding": normalize(features["sentence_embedding"])}


def test_every_point_of_the_curve_is_the_evaluators(task, static_model):
    curve = calibrate_exponent(static_model, data_of(task), exponents=[0.0, 0.3, 0.7, 1.0])
    assert curve.exponents.tolist() == [0.0, 0.3, 0.7, 1.0]
    assert curve.queries == list(task["queries"])
    for gamma, mean, values in zip(curve.exponents, curve.ndcg, curve.per_query, strict=True):
        evaluator = MagnitudeEvaluator(**task, similarity=Similarity(1.0, gamma))
        assert mean == pytest.approx(evaluator(static_model)["matched_ndcg@10"], abs=1e-12)
        assert values == pytest.approx(evaluator.per_query["matched"], abs=1e-12)
    assert np.ptp(curve.ndcg) > 0


def test_finds_the_exponent_between_dot_and_cosine():
    """q1 needs length (d2 over d1, unless it is all removed), q2 needs it damped (d3 over the
    longer d4)."""
    corpus = {
        "d1": "a",
        "d2": "a a a a b",
        "d3": "c c",
        "d4": "c d d d d d d d d d d d d d d d d c c c",
    }
    task = {
        "queries": {"q1": "a", "q2": "c"},
        "corpus": corpus,
        "relevant_docs": {"q1": {"d2"}, "q2": {"d3"}},
    }
    curve = calibrate_exponent(bag_of_words(), data_of(task), exponents=[0.5])
    q1, q2 = curve.per_query.T
    assert q1 == pytest.approx([1.0, 1.0, 1 / np.log2(3)])
    assert q2 == pytest.approx([1 / np.log2(3), 1.0, 1.0])
    assert curve.highest == 0.5
    assert curve.best == 1.0  # two queries cannot tell it from cosine


def crafted_curve(*means, num_queries=100, noise=0.0) -> ExponentCurve:
    """Calibrated as if mean nDCG@10 at the exponents 0, 0.5 and 1 were these, with noise for every
    query."""
    around = noise * np.random.default_rng(0).uniform(-1, 1, size=(3, num_queries))
    values = np.array(means)[:, None] + around - around.mean(axis=1, keepdims=True)
    queries = {f"q{i}": "a" for i in range(num_queries)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EncodedTask, "tops", lambda self, similarities: range(3))
        patch.setattr(EncodedTask, "ndcg", lambda self, i: values[i])
        corpus, relevant = {"d1": "a a", "d2": "b"}, {query: {"d1"} for query in queries}
        data = RetrievalData(queries, corpus, relevant)
        return calibrate_exponent(bag_of_words(), data, exponents=[0.5], num_samples=1000)


@pytest.mark.parametrize(
    ("means", "noise", "best"),
    [
        ((0.5, 0.6, 0.5), 0.05, 0.5),  # better than both
        ((0.5, 0.53, 0.52), 0.3, 1.0),  # tied with both: cosine
        ((0.6, 0.65, 0.3), 0.3, 0.0),  # tied with dot alone
        ((0.3, 0.65, 0.6), 0.3, 1.0),
        ((0.6, 0.5, 0.3), 0.0, 0.0),  # dot itself is the highest
    ],
)
def test_a_tie_goes_to_the_model_that_loads_anywhere(means, noise, best):
    curve = crafted_curve(*means, noise=noise)
    assert curve.highest == [0.0, 0.5, 1.0][int(np.argmax(means))]
    assert curve.best == best
    assert curve.best_similarity == Similarity(query=1.0, document=best)
    said = (
        f"tied with {'cosine' if best == 1 else 'dot'}, so the best exponent is {best:g}: that"
        " model loads anywhere"
    )
    assert (said in " ".join(str(curve).split())) == (best != curve.highest)


def test_equal_exponents_give_the_one_nearest_to_cosine():
    task = {
        "queries": {"q": "a"},
        "corpus": {"d1": "a a", "d2": "b"},
        "relevant_docs": {"q": {"d1"}},
    }
    curve = calibrate_exponent(bag_of_words(), data_of(task))
    assert set(curve.ndcg) == {1.0}
    assert curve.best == 1.0
    assert curve.versus_cosine[0] == curve.versus_dot[0] == 0.0


def test_intervals_are_those_of_judge_and_all_figures_are_in_the_tables(task, static_model):
    curve = calibrate_exponent(
        static_model, data_of(task), exponents=[0.25], seed=5, num_samples=500
    )
    best = curve.per_query[curve.exponents.tolist().index(curve.highest)]
    options = {"seed": 5, "num_samples": 500}
    assert curve.versus_cosine == judge(best - curve.per_query[-1], **options).gain
    assert curve.versus_dot == judge(best - curve.per_query[0], **options).gain
    assert curve.versus_cosine[0] == pytest.approx(curve.ndcg.max() - curve.ndcg[-1])

    by_exponent, gains, *sentence = curve.tables()
    assert [tuple(row[:2]) for row in by_exponent.rows] == list(
        zip(curve.exponents, curve.ndcg, strict=True)
    )
    assert sum(row[2] == "best" for row in by_exponent.rows) == 1
    assert [row[1] for row in gains.rows] == [curve.versus_cosine, curve.versus_dot]
    assert len(sentence) == (curve.best != curve.highest)
    assert curve.to_dict()["ndcg@10"] == dict(zip(("0", "0.25", "1"), curve.ndcg, strict=True))


def test_looks_behind_an_exponent_norm(task, static_model):
    model = SentenceTransformer(
        modules=[static_model[0], ExponentNorm(0.5, 0.9)], similarity_fn_name="dot", device="cpu"
    )
    plain, behind = (
        calibrate_exponent(m, data_of(task), exponents=[0.5]) for m in (static_model, model)
    )
    np.testing.assert_array_equal(behind.per_query, plain.per_query)


def test_a_model_that_ends_in_normalize_is_refused_before_encoding(task, static_model, monkeypatch):
    static_model.append(Normalize())
    monkeypatch.setattr(static_model, "encode", None)
    with pytest.raises(ValueError, match=r'--keep-scoring, or .* stm\.prepare\(model, "dot"\)'):
        calibrate_exponent(static_model, data_of(task))


def test_a_module_that_normalises_under_another_name_is_refused(task, static_model):
    static_model.append(_Unit())
    with pytest.raises(ValueError, match="all norms are 1"):
        calibrate_exponent(static_model, data_of(task))


def test_inputs_are_checked_before_encoding(task):
    for exponents in ([1.5], [-0.1], [float("nan")]):
        with pytest.raises(ValueError, match=r"lie in \[0, 1\]"):
            calibrate_exponent(bag_of_words(), data_of(task), exponents=exponents)


def test_few_queries_warn(task, static_model, caplog):
    with caplog.at_level(logging.WARNING, logger="st_magnitude"):
        calibrate_exponent(static_model, data_of(task))
    assert "8 queries are few" in caplog.text
    caplog.clear()
    many = {f"{query}-{i}": text for query, text in task["queries"].items() for i in range(7)}
    relevant = {query: task["relevant_docs"][query.split("-")[0]] for query in many}
    calibrate_exponent(static_model, RetrievalData(many, task["corpus"], relevant))
    assert "few" not in caplog.text
