"""The numbers that describe a model and a task, against the evaluators, geometry and their definitions."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from _planted import model_of, planted, quick, unit

from st_magnitude import COSINE, MagnitudeEvaluator, Similarity, calibrate_exponent, geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.measure import halves
from st_magnitude.evaluation import CompressionEvaluator


def task_of(columns: list[list[int]], num_documents: int) -> EncodedTask:
    return EncodedTask(torch.ones(len(columns), 2), torch.ones(num_documents, 2), columns)


def test_figures_are_those_of_the_evaluators_and_of_geometry():
    model, *task = planted(0, "relevance", num_queries=60, similarity="dot")
    queries, corpus, _ = task
    found = quick(model, *task)
    metrics = MagnitudeEvaluator(*task)(model)
    curve = found.exponent.curve
    assert curve.ndcg[0] == found.exponent.ndcg(0.0).mean() == pytest.approx(metrics["matched_ndcg@10"], abs=1e-12)
    assert curve.ndcg[-1] == pytest.approx(metrics["cosine_ndcg@10"], abs=1e-12)
    assert curve.per_query == pytest.approx(
        calibrate_exponent(model, RetrievalData(*task), num_samples=10).per_query, abs=1e-12
    )
    assert found.effects["corpus"].d == pytest.approx(metrics["cohens_d"])
    assert found.documents.cv == pytest.approx(metrics["document_norm_cv"])
    assert found.queries.mean == pytest.approx(metrics["query_norm_mean"])

    evaluator = CompressionEvaluator(*task, dims=[16, 8, 4], precisions=["float32", "binary"])
    assert found.recommended == found.similarity == "dot"
    evaluator(model)
    theirs = {(c.dim, c.precision, c.rescoring): c for c in evaluator.cells}
    assert len(found.cells) == 6
    assert all(cell == theirs[cell.dim, cell.precision, cell.rescoring] for cell in found.cells)

    q, d = (model.encode([side[key] for key in keys]) for side, keys in ((queries, queries), (corpus, sorted(corpus))))
    assert found.documents.values == pytest.approx(geometry.norms(d))
    words = [len(corpus[key].split()) for key in sorted(corpus)]
    assert found.documents.length_spearman == pytest.approx(geometry.spearman(geometry.norms(d), words))
    assert found.documents.quantiles == pytest.approx(np.quantile(geometry.norms(d), [0.05, 0.25, 0.5, 0.75, 0.95]))
    assert found.is_relevant.tolist() == [key.endswith("-0") for key in sorted(corpus)]
    assert found.geometry.isoscore == pytest.approx(geometry.isoscore(unit(d)))
    assert found.geometry.isoscore_ceiling == geometry.isoscore_ceiling(300, 16)
    assert found.geometry.uniformity == pytest.approx(geometry.uniformity(d))
    assert found.geometry.mean_cosine == pytest.approx(geometry.mean_cosine(d))
    answers = model.encode([corpus[f"d{i}-0"] for i in range(60)])
    assert found.geometry.alignment == pytest.approx(geometry.alignment(q, answers))
    assert found.geometry.is_sample_limited is False
    assert found.geometry.intrinsic_dimension == geometry.intrinsic_dimension(unit(d))
    variances = np.linalg.svd(unit(d) - unit(d).mean(axis=0), compute_uv=False) ** 2
    assert found.geometry.explained == pytest.approx(variances.cumsum() / variances.sum(), abs=1e-6)
    assert np.searchsorted(found.geometry.explained, 0.95) + 1 == found.geometry.intrinsic_dimension


def test_the_choice_is_that_of_one_half_and_the_gain_that_of_the_other():
    found = quick(*planted(2, "relevance", num_queries=60)).exponent
    per_query, gammas = found.curve.per_query, found.curve.exponents
    assert found.chose.sum() == 30
    assert found.present == 1.0
    chosen = per_query[:-1, found.chose].mean(axis=1)
    assert found.candidate == gammas[np.flatnonzero(chosen == chosen.max())[-1]]
    difference = (per_query[list(gammas).index(found.candidate)] - per_query[-1])[~found.chose]
    assert found.gain[0] == pytest.approx(difference.mean())
    assert found.gain == found.gain_of_magnitude
    assert found.gain == geometry.paired_bootstrap(difference, num_samples=1000)


def test_an_exponent_between_is_on_the_curve():
    model, *task = planted(0, "noise", num_queries=60)
    found = quick(model, *task, similarity=Similarity(1.0, 0.33)).exponent
    assert 0.33 in found.curve.exponents
    expected = MagnitudeEvaluator(*task, similarity=Similarity(1.0, 0.33))(model)["matched_ndcg@10"]
    assert found.ndcg(0.33).mean() == pytest.approx(expected, abs=1e-12)
    assert found.candidate != 0.33


def test_hard_effect_against_its_definition():
    model, queries, corpus, relevant = planted(3, "noise", num_queries=30)
    found = quick(model, queries, corpus, relevant).effects["hard"]
    ids = sorted(corpus)
    d = model.encode([corpus[i] for i in ids])
    groups, covariate, rows = ([], []), [], []
    for query, text in queries.items():
        order = np.argsort(-(unit(d) @ unit(model.encode(text))), kind="stable")
        negatives = [i for i in order if ids[i] not in relevant[query]][:10]
        positives = [ids.index(document) for document in relevant[query]]
        groups[0].extend(positives)
        groups[1].extend(negatives)
    rows = np.array(groups[0] + groups[1])
    flags = np.arange(len(rows)) < len(groups[0])
    lengths = geometry.norms(d)[rows]
    covariate = np.log([len(corpus[ids[i]].split()) for i in rows])
    assert found.d == pytest.approx(geometry.cohens_d(lengths[flags], lengths[~flags]))
    assert found.without_length == pytest.approx(geometry.adjusted_cohens_d(lengths, covariate, flags))
    assert found.d != pytest.approx(found.without_length, abs=1e-4)


def test_pairs_effect_where_degrees_differ():
    model, queries, corpus, relevant = planted(3, "noise", num_queries=30)
    for i in range(0, 30, 3):
        relevant[f"q{i}"] |= {"d0-0", "d1-1"}
    found = quick(model, queries, corpus, relevant).effects["pairs"]
    ids = sorted(corpus)
    lengths, words = geometry.norms(model.encode([corpus[i] for i in ids])), [len(corpus[i].split()) for i in ids]
    pairs = [(lengths[k], np.log(words[k]), i in relevant[q]) for q in queries for k, i in enumerate(ids)]
    values, covariate, flags = map(np.array, zip(*pairs, strict=True))
    assert found.d == pytest.approx(geometry.cohens_d(values[flags], values[~flags]))
    assert found.without_length == pytest.approx(geometry.adjusted_cohens_d(values, covariate, flags))


def test_undefined_effects_say_why():
    model, queries, corpus, relevant = planted(0, "noise", num_queries=30)
    answers = {key: text for key, text in corpus.items() if key.endswith("-0")}
    found = quick(model, queries, answers, relevant)
    effects = found.effects
    assert math.isnan(effects["corpus"].d)
    assert effects["corpus"].undefined == "30 documents are relevant to at least one query, 0 to no query"
    assert math.isnan(effects["pairs"].d)
    assert "0 by construction" in effects["pairs"].undefined
    assert math.isfinite(effects["hard"].d)
    assert effects["hard"].undefined == ""
    assert "undefined" in str(found)
    assert "nan" not in str(found)
    assert found.to_dict()["effects"]["corpus"]["d"] is None


def test_hubness_sees_a_hub():
    model, queries, corpus, relevant = planted(0, "noise", num_queries=60)
    calm = quick(model, queries, corpus, relevant).hubness
    table = dict(model[0].table)
    loud = {text: (x * 40 if text.startswith("document 0 ") else x).numpy() for text, x in table.items()}
    hubs = quick(model_of(loud), queries, corpus, relevant).hubness
    assert hubs["cosine"] == calm["cosine"]
    assert hubs["dot"].skewness > 2 * calm["dot"].skewness
    assert hubs["dot"].most > 0.3
    p = 10 / 300
    assert calm["dot"].by_chance == pytest.approx((1 - 2 * p) / math.sqrt(60 * p * (1 - p)))
    top = COSINE(*(model.encode([side[key] for key in sorted(side)]) for side in (queries, corpus))).topk(10).indices
    occurrences = np.bincount(top.numpy().ravel(), minlength=300).astype(float)
    z = (occurrences - occurrences.mean()) / occurrences.std()
    assert calm["cosine"].skewness == pytest.approx((z**3).mean())
    assert calm["cosine"].most == occurrences.max() / 60
    assert calm["cosine"].counts == tuple((occurrences == k).sum() for k in range(int(occurrences.max()) + 1))
    assert sum(k * count for k, count in enumerate(hubs["dot"].counts)) == 10 * 60


def test_halves_share_no_relevant_document():
    columns = [[i // 3, 40 + i // 3] for i in range(60)]
    for seed in range(5):
        chose = halves(task_of(columns, 100), seed)
        assert 20 <= chose.sum() <= 30
        assert not {c for row in np.flatnonzero(chose) for c in columns[row]} & {
            c for row in np.flatnonzero(~chose) for c in columns[row]
        }
    assert (halves(task_of(columns, 100), 0) != halves(task_of(columns, 100), 1)).any()


def test_halves_where_all_share_one_document(caplog):
    with caplog.at_level(logging.INFO, logger="st_magnitude.diagnosis.measure"):
        assert halves(task_of([[0], [0], [0], [0], [0]], 3), 0).sum() == 2
    assert "share relevant documents" in caplog.text


def test_identical_documents_explain_everything_at_once():
    assert geometry.explained_variance(torch.ones(4, 3)).tolist() == [1.0, 1.0, 1.0]
