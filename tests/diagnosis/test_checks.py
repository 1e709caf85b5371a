"""Gains of changes: verdicts, centring, storage, and the scoring with which all changes are measured."""

import numpy as np
import pytest
from _planted import DIM, found_in, model_of, planted, quick, table_of, unit
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

from st_magnitude import Similarity
from st_magnitude.diagnosis.measure import Check
from st_magnitude.evaluation import CompressionEvaluator
from st_magnitude.modules import ExponentNorm


@pytest.mark.parametrize(
    ("gain", "number", "verdict"),
    [
        ((0.05, 0.01, 0.09), 100, "do"),
        ((0.05, 0.01, 0.09), 24, "not enough data"),
        ((0.05, 0.0, 0.09), 100, "not enough data"),
        ((0.008, 0.002, 0.014), 100, "do"),
        ((0.005, 0.001, 0.009), 100, "no benefit expected"),
        ((-0.05, -0.09, -0.01), 100, "no benefit expected"),
        ((-0.05, -0.2, 0.1), 100, "not enough data"),
    ],
)
def test_verdicts(gain, number, verdict):
    assert Check(gain, number, 0.01).verdict == verdict


def test_centring_helps_where_documents_share_a_direction_to_different_degrees():
    rng = np.random.default_rng(0)
    model, *task = planted(0, "noise")
    spread = {text: 1.0 if "query" in text else rng.lognormal(0, 0.8) for text in table_of(model)}
    table = {text: np.append(spread[text] * unit(x), 6) for text, x in table_of(model).items()}
    found = quick(model_of(table), *task)
    assert found["centring"].verdict == "do"
    mean = np.mean([unit(table[text]) for text in task[1].values()], axis=0)
    centred = quick(model_of({text: unit(x) - mean for text, x in table.items()}), *task)
    gain = centred.exponent.ndcg(1.0).mean() - found.exponent.ndcg(1.0).mean()
    assert found["centring"].gain[0] == pytest.approx(gain, abs=1e-6)
    assert found_in(0, "noise")["centring"].verdict != "do"


def test_no_document_is_kept_for_a_large_norm_where_never_relevant_ones_have_the_largest():
    """The smaller half can go, but some documents that no query finds have huge norms."""
    model, queries, corpus, relevant = planted(0, "relevance", similarity="dot")
    table = {text: np.append(x, 0.0) for text, x in table_of(model).items()}
    assert quick(model_of(table, "dot"), queries, corpus, relevant)["pruning"].verdict == "do"
    huge = {f"huge {i}": 100.0 * np.eye(DIM + 1)[-1] for i in range(100)}
    corpus = corpus | {text: text for text in huge}
    found = quick(model_of(table | huge, "dot"), queries, corpus, relevant)
    assert found.effects["corpus"].d < 0
    assert found["pruning"].gain[1] > 0  # these queries lose nothing
    assert found["pruning"].verdict == "no benefit expected"


def test_norms_stay_with_a_model_that_uses_them():
    found = found_in(0, "relevance", similarity="dot")
    assert abs(found["centring"].gain[0]) < 0.04  # directions are even already
    assert found.exponent.ndcg(0.0).mean() - found.exponent.ndcg(1.0).mean() > 0.08  # what losing them would cost


def test_storage_is_judged_against_the_tolerance():
    model, *task = planted(0, "noise")
    table = {text: np.append(x.numpy(), np.zeros(48)) for text, x in model[0].table.items()}  # 16 of 64 carry it all
    found = quick(model_of(table), *task)
    assert found["half"].verdict == found["quarter"].verdict == "do"
    assert found["half"].choice == "truncate_dim=32"
    assert found["half"].evidence["share_of_ndcg_kept"] == pytest.approx(1.0)
    assert found["half"].gain[0] == pytest.approx(0.05 * found.exponent.ndcg(1.0).mean())
    assert found["half"].num_queries == 160
    plain = found_in(0, "noise")
    assert plain["quarter"].verdict == plain["1 bit"].verdict == "no benefit expected"
    assert quick(model, *task, tolerance=0.99)["quarter"].verdict == "do"


@pytest.mark.parametrize("common", [0.0, 0.5])
def test_following_the_exponent_leaves_all_other_verdicts_and_figures(common):
    """Norms are noise, and all texts share a component. The model is scored by dot, at which all figures differ."""
    rng = np.random.default_rng(0)
    model, *task = planted(0, "noise")
    shared = common * np.eye(DIM)[0]
    given = table_of(model).items()
    table = {text: (unit(x) + shared * rng.normal(1, 0.6)) * rng.lognormal(0, 0.5) for text, x in given}
    before = quick(model_of(table, "dot"), *task)
    assert (before.similarity, before["exponent"].verdict) == ("dot", "do")
    assert before["exponent"].scoring == f"document exponents {before.exponent.candidate:.2g} and 0"
    after = quick(model_of(table), *task, similarity=Similarity(1.0, before.exponent.candidate))
    assert after["exponent"].verdict != "do"
    assert before.recommended == after.similarity == after.recommended
    for old, new in zip(before.recommendations[1:], after.recommendations[1:], strict=True):
        assert old == new
        assert old.scoring == before.recommended
        assert old.gain is None or f"Scoring: {before.recommended}." in old.measured
    assert before.cells == after.cells
    at_dot = before.exponent.ndcg(0.0).mean()
    assert before.cells[0].ndcg == before.exponent.ndcg(before.exponent.candidate).mean() > 1.1 * at_dot


@pytest.mark.parametrize("exponent", [0.3, 0.9])
def test_prefixes_have_the_figures_that_truncate_dim_gives(exponent):
    """One definition for the diagnosis, CompressionEvaluator, and a user who loads the model with truncate_dim."""
    planted_model, *task = planted(0, "relevance", num_queries=60)
    model = SentenceTransformer(modules=[planted_model[0], ExponentNorm(1.0, exponent)], device="cpu")
    model.similarity_fn_name = "dot"
    found = quick(model, *task, min_gain=0.99)  # which nothing reaches, no other exponent is recommended
    # In float32, an exponent that went through a sigmoid.
    assert float(found.recommended.removeprefix("exponents 1 and ")) == pytest.approx(exponent)
    evaluator = CompressionEvaluator(*task, dims=[8, 4], precisions=["float32"], write_csv=False)
    evaluator(model)
    theirs = {cell.dim: cell.ndcg for cell in evaluator.cells}
    for dim in (16, 8, 4):
        ours = next(cell.ndcg for cell in found.cells if (cell.dim, cell.precision) == (dim, "float32"))
        model.truncate_dim = dim  # as SentenceTransformer(path, truncate_dim=dim) sets it
        metrics = InformationRetrievalEvaluator(*task, truncate_dim=dim, write_csv=False)(model)
        assert ours == theirs[dim] == pytest.approx(metrics["dot_ndcg@10"], abs=1e-9)
