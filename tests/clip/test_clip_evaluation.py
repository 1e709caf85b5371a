"""The report on image and text features against literal loops in float64; ties, edges, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from st_magnitude.clip import evaluation
from st_magnitude.clip.evaluation import RetrievalReport, retrieval_report, zero_shot
from st_magnitude.geometry import cohens_d

Array = NDArray[np.float64]


def features(n: int, m: int, dim: int = 6, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    images = rng.normal(size=(n, dim)) * rng.lognormal(size=(n, 1))
    texts = rng.normal(size=(m, dim)) * rng.lognormal(size=(m, 1))
    return images, texts


def literal(images: Array, texts: Array, relevant: NDArray[np.bool_], ks: tuple[int, ...]) -> dict[str, float]:
    """Every metric by its definition, one query at a time."""
    found: dict[str, float] = {}
    for side, queries, items, wanted in (("text", images, texts, relevant), ("image", texts, images, relevant.T)):
        way = "i2t" if side == "text" else "t2i"
        norms = [math.sqrt(sum(v * v for v in item)) for item in items]
        for name in ("cosine", "dot"):
            hits: dict[int, list[float]] = {k: [] for k in ks}
            precisions, n_10 = [], [0] * len(items)
            hard_relevant, hard_irrelevant = [], []
            for query, row in zip(queries, wanted, strict=True):
                length = math.sqrt(sum(v * v for v in query)) or 1.0
                scores = [sum(a * b for a, b in zip(query, item, strict=True)) for item in items]
                if name == "cosine":
                    scores = [s / length / (norm or 1.0) for s, norm in zip(scores, norms, strict=True)]
                order = sorted(range(len(items)), key=lambda j: (-scores[j], j))
                for j in order[:10]:
                    n_10[j] += 1
                if not row.any():
                    continue
                for k in ks:
                    hits[k].append(float(any(row[j] for j in order[:k])))
                ranks = [rank for rank, j in enumerate(order, 1) if row[j]]
                precisions.append(np.mean([i / rank for i, rank in enumerate(ranks, 1)]))
                hard_relevant += [norms[j] for j in order if row[j]]
                hard_irrelevant += [norms[j] for j in [j for j in order if not row[j]][:10]]
            for k in ks:
                found[f"{name}_{way}_recall@{k}"] = float(np.mean(hits[k]))
            found[f"{name}_{way}_map"] = float(np.mean(precisions))
            found[f"{name}_{side}_hub_skew"] = float(stats.skew(n_10))
            found[f"{name}_{side}_hub_norm"] = float(stats.spearmanr(n_10, norms).statistic)
            if name == "cosine":
                found[f"{side}_hard_d"] = cohens_d(hard_relevant, hard_irrelevant)
        pairs = [(norms[j], row[j]) for row in wanted for j in range(len(items))]
        found[f"{side}_pairs_d"] = cohens_d([v for v, yes in pairs if yes], [v for v, yes in pairs if not yes])
        some = wanted.any(axis=0)
        found[f"{side}_corpus_d"] = cohens_d(np.array(norms)[some], np.array(norms)[~some])
        found[f"{side}_norm_mean"] = float(np.mean(norms))
        found[f"{side}_norm_cv"] = float(np.std(norms) / np.mean(norms))
    return found


@pytest.mark.parametrize("tile", [2**24, 50])
@pytest.mark.parametrize("seed", [0, 1])
def test_literal_loops(monkeypatch: pytest.MonkeyPatch, seed: int, tile: int) -> None:
    monkeypatch.setattr(evaluation, "TILE", tile)
    images, texts = features(30, 23, seed=seed)
    relevant = np.random.default_rng(seed).random((30, 23)) < 0.08
    relevant[:3] = False
    relevant[:, 4:6] = False
    ks = (1, 3, 40)
    report = retrieval_report(images, texts, relevant, ks=ks)
    expected = literal(images, texts, relevant, ks)
    assert report.metrics.keys() == expected.keys()
    assert report.metrics == pytest.approx(expected, abs=1e-12)
    assert report.reasons == {}
    assert (report.num_images, report.num_texts, report.num_relevant) == (30, 23, relevant.sum())


def test_inputs_of_all_kinds_agree() -> None:
    images, texts = (x.astype(np.float32) for x in features(20, 12))
    ids = (np.arange(20) % 12, np.arange(12))
    expected = retrieval_report(images, texts, ids)
    matrix = ids[0][:, None] == ids[1]
    for relevance in (matrix, matrix.astype(int), torch.from_numpy(matrix), tuple(map(torch.from_numpy, ids))):
        parameter = torch.from_numpy(images).requires_grad_()
        same = retrieval_report(parameter, torch.from_numpy(texts), relevance)
        np.testing.assert_equal(same.metrics, expected.metrics)
    named = retrieval_report(images, texts, (np.array([f"c{i}" for i in ids[0]]), [f"c{i}" for i in ids[1]]))
    np.testing.assert_equal(named.metrics, expected.metrics)
    assert retrieval_report(images.tolist(), texts.tolist(), matrix.tolist())["dot_i2t_map"] == pytest.approx(
        expected["dot_i2t_map"]
    )
    half = retrieval_report(torch.from_numpy(images).half(), torch.from_numpy(texts).half(), ids)
    assert half["image_norm_mean"] == pytest.approx(expected["image_norm_mean"], rel=1e-3)


def test_diagonal_is_the_default() -> None:
    images, texts = features(15, 15)
    np.testing.assert_equal(
        retrieval_report(images, texts).metrics, retrieval_report(images, texts, np.eye(15, dtype=bool)).metrics
    )


def test_swapping_the_sides_swaps_the_report() -> None:
    images, texts = features(14, 9)
    relevant = np.random.default_rng(0).random((14, 9)) < 0.2
    one, other = retrieval_report(images, texts, relevant), retrieval_report(texts, images, relevant.T)
    for name, value in one.metrics.items():
        swapped = name.translate(str.maketrans("", ""))
        for a, b in (("image", "text"), ("i2t", "t2i")):
            swapped = swapped.replace(a, "*").replace(b, a).replace("*", b)
        np.testing.assert_equal(other[swapped], value)


def test_lengths_of_queries_change_no_ranking() -> None:
    images, texts = features(15, 15)
    one, other = retrieval_report(images, texts), retrieval_report(images * np.arange(1, 16)[:, None], texts)
    for name in one.metrics:
        if "i2t" in name or (name.startswith("cosine") and "hub" not in name):
            assert other[name] == pytest.approx(one[name])


def test_ties_go_to_the_lower_index() -> None:
    report = retrieval_report(np.ones((3, 2)), np.ones((3, 2)), ks=(1, 2, 3))
    assert [report[f"cosine_i2t_recall@{k}"] for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1])
    assert report["dot_t2i_map"] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert report["image_hard_d"] == 0.0


def test_equal_degrees_have_no_pairs_d() -> None:
    """It would be 0 whatever the features are, and is said not to be defined."""
    images, texts = features(12, 6)
    report = retrieval_report(images, texts, (np.arange(12) // 2, np.arange(6)))
    for side, degree in (("image", 1), ("text", 2)):
        assert math.isnan(report[f"{side}_pairs_d"])
        assert f"every {side} belongs to equally many" in report.reasons[f"{side}_pairs_d"]
        assert f"({degree})" in report.reasons[f"{side}_pairs_d"]
        lengths = report.norms[side]
        relevant = (np.arange(12) // 2)[:, None] == np.arange(6)
        grid = np.broadcast_to(lengths, (6, 12)) if side == "image" else np.broadcast_to(lengths, (12, 6))
        wanted = relevant.T if side == "image" else relevant
        assert cohens_d(grid[wanted], grid[~wanted]) == pytest.approx(0, abs=1e-12)
        assert "distractors" in report.reasons[f"{side}_corpus_d"]


def test_demoted_hubs() -> None:
    """A text near all images, and short: dot puts it last, "hard" d is positive, its N_10 goes with a short norm."""
    rng = np.random.default_rng(0)
    images = np.eye(40) + 0.6 + 0.01 * rng.normal(size=(40, 40))
    texts = np.concatenate([np.eye(40) * 3, np.full((10, 40), 0.01)])
    relevance = (np.arange(40), np.concatenate([np.arange(40), np.full(10, -1)]))
    report = retrieval_report(images, texts, relevance)
    assert report["cosine_i2t_recall@1"] == 0 < report["dot_i2t_recall@1"] == 1
    assert report["text_hard_d"] > 3
    assert report["text_corpus_d"] == pytest.approx(math.inf)
    assert report["cosine_text_hub_norm"] < -0.9 < report["dot_text_hub_norm"]
    assert report.occurrence["cosine", "text"][40:].tolist() == [40] * 10
    assert report.occurrence["dot", "text"][40:].sum() == 0
    assert report["cosine_text_hub_skew"] > 1


def test_unit_features() -> None:
    images, texts = features(20, 20)
    images = (images / np.linalg.norm(images, axis=1, keepdims=True)).astype(np.float32)
    report = retrieval_report(images, texts.astype(np.float32))
    assert report["image_hard_d"] == 0.0
    assert math.isnan(report["cosine_image_hub_norm"])
    assert report.reasons["dot_image_hub_norm"] == "all image features have the same norm"
    assert len(report.notes) == 1
    assert "all image features have norm 1" in str(report)
    assert "normalize=False" in str(report)
    assert report["dot_t2i_map"] == report["cosine_t2i_map"]


def test_few_items() -> None:
    report = retrieval_report([[1.0, 0.0]], [[2.0, 0.0]])
    assert report["cosine_i2t_recall@1"] == report["dot_t2i_map"] == 1.0
    for name in ("image_hard_d", "text_corpus_d", "text_pairs_d", "dot_image_hub_norm", "cosine_text_hub_skew"):
        assert math.isnan(report[name])
        assert name in report.reasons
    assert {name for name, value in report.metrics.items() if math.isnan(value)} == report.reasons.keys()
    everything = retrieval_report(*features(4, 5), np.ones((4, 5)))
    assert everything["cosine_i2t_map"] == 1.0
    assert "irrelevant" in everything.reasons["text_hard_d"]
    zeros = retrieval_report(np.zeros((12, 3)), np.zeros((12, 3)))
    assert zeros["text_hard_d"] == 0.0
    assert math.isnan(zeros["text_norm_cv"])
    str(zeros)


def test_table() -> None:
    images, texts = features(30, 12)
    report = retrieval_report(images, texts, (np.arange(30) % 12, np.arange(12)), ks=(1, 5))
    lines = str(report).splitlines()
    assert lines[0] == "30 images, 12 texts, 30 relevant pairs"
    assert lines[3].split() == ["R@1", "R@5", "MAP"] * 2
    cells = [float(cell) for cell in lines[4].removeprefix("cosine").split()]
    names = [f"cosine_{way}_{c}" for way in ("i2t", "t2i") for c in ("recall@1", "recall@5", "map")]
    assert cells == pytest.approx([100 * report[name] for name in names], abs=0.0501)
    assert "- [1]" in str(report)
    assert any(line.startswith("[1] ") for line in lines)
    assert "metrics" in repr(report)
    assert isinstance(report, RetrievalReport)
    with pytest.raises(KeyError, match="There is no metric 'cosine_map'; choose one of cosine_i2t_recall@1, "):
        report["cosine_map"]


@pytest.mark.parametrize(
    ("images", "texts", "options", "message"),
    [
        (np.ones(3), np.ones((2, 3)), {}, r"image_features must be a matrix .*, got shape \(3,\)"),
        (np.ones((2, 3)), np.ones((0, 3)), {}, r"text_features must be a matrix .*, got shape \(0, 3\)"),
        (np.ones((2, 3)), np.ones((2, 4)), {}, "3 and 4 dimensions: pass features that encode_image"),
        (np.ones((2, 3)), np.ones((4, 3)), {}, r"there are 2 images and 4 texts: pass relevance"),
        (
            np.ones((2, 3)),
            np.array([[1.0] * 3, [np.nan] * 3]),
            {},
            "text embeddings are not finite, such as that of row 1",
        ),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": ()}, r"ks must be whole numbers .*got \(\)"),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": (0, 1)}, r"ks must be whole numbers .*got \(0, 1\)"),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": (1.5,)}, r"ks must be whole numbers .*got \(1.5,\)"),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": (1, 5.0)}, r"ks must be whole numbers .*got \(1, 5.0\)"),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": (True,)}, r"ks must be whole numbers .*got \(True,\)"),
        (np.ones((2, 3)), np.ones((2, 3)), {"ks": (math.nan,)}, r"ks must be whole numbers .*got \(nan,\)"),
        (np.ones((2, 3)), np.ones((4, 3)), {"relevance": np.eye(4)}, r"\(2, 4\); got shape \(4, 4\)"),
        (np.ones((2, 3)), np.ones((4, 3)), {"relevance": ([0, 1], [0])}, r"2 and 4 class ids, got \[\(2,\), \(1,\)\]"),
        (np.ones((2, 3)), np.ones((4, 3)), {"relevance": ([0, 1],)}, "2 and 4 class ids, got 1 of them"),
        (np.ones((2, 3)), np.ones((2, 3)), {"relevance": np.eye(2) * 2}, "booleans; for graded judgments, pass grades"),
        (np.ones((2, 3)), np.ones((2, 3)), {"relevance": np.zeros((2, 2))}, "No text is relevant to any image"),
        (np.ones((2, 3)), np.ones((2, 3)), {"relevance": ([0, 1], [2, 3])}, "No text is relevant .* ids match"),
    ],
)
def test_errors(images: Any, texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        retrieval_report(images, texts, **options)


def test_zero_shot_literal() -> None:
    images, classes = features(40, 7)
    labels = np.random.default_rng(1).integers(0, 7, size=40)
    expected = {}
    for name in ("cosine", "dot"):
        right = 0
        for image, label in zip(images, labels, strict=True):
            scores = [
                float(image @ c) / (float(np.linalg.norm(image) * np.linalg.norm(c)) if name == "cosine" else 1)
                for c in classes
            ]
            right += scores.index(max(scores)) == label
        expected[name] = right / 40
    assert zero_shot(images, classes, labels) == expected
    tensors = (torch.from_numpy(x) for x in (images, classes, labels))
    assert zero_shot(*tensors) == expected
    assert zero_shot(images * np.arange(1, 41)[:, None], classes, labels.tolist()) == expected


def test_zero_shot_ties() -> None:
    assert zero_shot(np.ones((4, 2)), np.ones((3, 2)), [0, 0, 1, 2]) == {"cosine": 0.5, "dot": 0.5}


@pytest.mark.parametrize(
    ("classes", "labels", "message"),
    [
        (np.ones((3, 4)), [0, 1], "2 and 4 dimensions"),
        (np.ones((3, 2)), [0, 1, 2], r"2 integers, one per image; got torch.int64 of shape \(3,\)"),
        (np.ones((3, 2)), [0.0, 1.0], "2 integers, one per image; got torch.float64"),
        (np.ones((3, 2)), [True, False], "2 integers, one per image; got torch.bool"),
        (np.ones((3, 2)), [0, 3], "0 to 2; got 0 to 3"),
        (np.ones((3, 2)), [-1, 0], "0 to 2; got -1 to 0"),
    ],
)
def test_zero_shot_errors(classes: Any, labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zero_shot(np.ones((2, 2)), classes, labels)
