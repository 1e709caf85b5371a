"""Retrieval with image and text features against literal loops in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from st_magnitude.clip import evaluate_retrieval
from st_magnitude.geometry import cohens_d


def literal(queries, items, wanted, k, by_cosine):
    """Recall@k, one query at a time."""
    found = []
    for query, row in zip(queries, wanted, strict=True):
        scores = [query @ item / (np.linalg.norm(item) if by_cosine else 1) for item in items]
        order = sorted(range(len(items)), key=lambda j: (-scores[j], j))
        if row.any():
            found.append(any(row[j] for j in order[:k]))
    return np.mean(found)


def test_literal_loops():
    rng = np.random.default_rng(0)
    images, texts = (rng.normal(size=(n, 6)) * rng.lognormal(size=(n, 1)) for n in (30, 23))
    relevant = rng.random((30, 23)) < 0.08
    relevant[:3] = False
    relevant[:, 4:6] = False
    ks = (1, 3, 40)
    found = evaluate_retrieval(torch.from_numpy(images), torch.from_numpy(texts), relevant, ks)
    ways = {"i2t": (images, texts, relevant), "t2i": (texts, images, relevant.T)}
    for name, k, way in product(("cosine", "dot"), ks, ways):
        expected = literal(*ways[way], k, name == "cosine")
        assert found[f"{name}_{way}_recall@{k}"] == pytest.approx(expected)
    for side, (queries, items, wanted) in zip(("text", "image"), ways.values(), strict=True):
        norms = np.linalg.norm(items, axis=1)
        assert found[f"{side}_norm_mean"] == pytest.approx(norms.mean())
        assert found[f"{side}_norm_cv"] == pytest.approx(norms.std() / norms.mean())
        groups = ([], [])
        for query, row in zip(queries[wanted.any(axis=1)], wanted[wanted.any(axis=1)], strict=True):
            groups[0].extend(norms[row])
            order = np.argsort(-(items @ query) / norms)
            groups[1].extend([norms[j] for j in order if not row[j]][:10])
        assert found[f"{side}_cohens_d"] == pytest.approx(cohens_d(*groups))
    assert len(found) == 22
    alone = evaluate_retrieval(torch.ones(1, 2), torch.ones(1, 2))
    assert "image_cohens_d" not in alone  # there is no irrelevant item


def test_the_diagonal_is_the_default_and_ties_go_to_the_lower_index():
    found = evaluate_retrieval(torch.ones(3, 2), torch.ones(3, 2), ks=(1, 2, 3))
    assert [found[f"cosine_i2t_recall@{k}"] for k in (1, 2, 3)] == pytest.approx([1 / 3, 2 / 3, 1])


ODD = {
    "no pair": {"relevant": np.zeros((3, 4), bool)},
    "float relevant": {"relevant": torch.ones(3, 4)},
    "no cutoff": {"ks": ()},
    "cutoff 0": {"ks": (1, 0)},
    "cutoff 1.5": {"ks": (1.5,)},
    "other width": {"text_features": torch.ones(4, 3)},
    "a turned matrix": {"relevant": np.ones((4, 3), bool)},
    "no pairs of unequal numbers": {"relevant": None},
    "nan": {"image_features": torch.full((3, 2), torch.nan)},
}


@pytest.mark.parametrize("odd", ODD)
def test_odd_inputs_are_refused_in_words(odd):
    good = {"image_features": torch.ones(3, 2), "text_features": torch.ones(4, 2)}
    good["relevant"] = np.ones((3, 4), bool)
    with pytest.raises(ValueError, match=r"relevant|ks must be|shapes|not finite"):
        evaluate_retrieval(**good | ODD[odd])
    numbers = {name: np.asarray(value) for name, value in good.items()}
    assert evaluate_retrieval(**numbers) == pytest.approx(evaluate_retrieval(**good))
