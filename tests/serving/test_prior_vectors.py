"""The prior as one more dimension: its inner products are the explicit formula, in numpy, torch and FAISS."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import st_magnitude as stm
from st_magnitude.serving import with_prior, with_prior_queries

pytestmark = pytest.mark.usefixtures("one_thread")

values = st.floats(-8, 8, width=32)


def explicit(queries, documents, log_p, weight):
    """q · d + weight · log p(d), one pair after the other: (Q, N)."""
    return np.array([[sum(q * d) + weight * p for d, p in zip(documents, log_p, strict=True)] for q in queries])


def matrices(rows):
    return arrays(np.float64, (rows, 5), elements=values)


@given(matrices(3), matrices(7), arrays(np.float64, 7, elements=st.floats(-20, 0)), st.floats(-2, 2))
def test_inner_products_are_the_formula(queries, documents, log_p, weight):
    expected = explicit(queries, documents, log_p, weight)
    stored, sent = with_prior(documents, log_p, weight), with_prior_queries(queries)
    assert (stored.shape, sent.shape) == ((7, 6), (3, 6))
    np.testing.assert_allclose(sent @ stored.T, expected, rtol=1e-12, atol=1e-9)
    tensors = with_prior(torch.from_numpy(documents), torch.from_numpy(log_p), weight)
    assert torch.equal(tensors, torch.from_numpy(stored))
    assert torch.equal(with_prior_queries(torch.from_numpy(queries)), torch.from_numpy(sent))


@pytest.mark.parametrize("similarity", ["cosine", "dot", "qnorm"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_an_index_ranks_by_the_formula(similarity, weight):
    rng = np.random.default_rng(0)
    similarity = stm.Similarity.named(similarity)
    queries = similarity.query(rng.standard_normal((20, 16))).numpy()
    documents = similarity.document(2 * rng.standard_normal((300, 16))).numpy()
    log_p = np.log(rng.dirichlet(np.full(300, 0.3)) + 1e-4)
    expected = np.argsort(-explicit(queries, documents, log_p, weight), axis=1)[:, :10]
    stored = with_prior(documents.astype(np.float32), log_p, weight)
    sent = with_prior_queries(queries.astype(np.float32))
    np.testing.assert_array_equal(np.argsort(-(sent @ stored.T), axis=1)[:, :10], expected)
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(17)
    index.add(stored)
    np.testing.assert_array_equal(index.search(sent, 10)[1], expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_kind_and_dtype_are_kept(dtype):
    documents, log_p = torch.randn(3, 2).to(getattr(torch, dtype)), [-1.0, -2.0, -3.0]
    for stored in (with_prior(documents, log_p, 1.0), with_prior_queries(documents)):
        assert stored.dtype == documents.dtype
        assert torch.equal(stored[:, :2], documents)
    if dtype != "bfloat16":
        array = documents.numpy()
        assert with_prior(array, torch.tensor(log_p), 1.0).dtype == with_prior_queries(array).dtype == array.dtype


@pytest.mark.parametrize(
    ("documents", "log_p", "weight", "says"),
    [
        (np.ones(3), [0.0], 1.0, r"documents must be a matrix .* got shape \(3,\)"),
        (np.ones((3, 2)), [0.0, -1.0], 1.0, r"each of 3 documents; got an array of shape \(2,\)"),
        (np.ones((2, 2)), [0.0, -np.inf], 1.0, "Smooth the counts"),
        (np.ones((1, 2)), [0.0], np.nan, "weight must be a finite number, got nan"),
    ],
)
def test_what_it_cannot_use(documents, log_p, weight, says):
    with pytest.raises(ValueError, match=says):
        with_prior(documents, log_p, weight)
