"""The prior as one more dimension: its inner products are the explicit formula, in numpy, torch and FAISS."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import st_magnitude as stm
from st_magnitude.serving import with_prior, with_prior_queries

pytestmark = pytest.mark.usefixtures("one_thread")


def explicit(queries, documents, log_p, weight):
    """q · d + weight · log p(d), one pair after the other: (Q, N)."""
    return np.array([[sum(q * d) + weight * p for d, p in zip(documents, log_p, strict=True)] for q in queries])


def matrices(rows):
    return arrays(np.float64, (rows, 5), elements=st.floats(-8, 8, width=32))


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
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_an_index_ranks_by_the_formula(similarity, weight):
    rng = np.random.default_rng(0)
    similarity = stm.Similarity.named(similarity)
    queries = similarity.query(rng.standard_normal((20, 16))).numpy()
    documents = similarity.document(2 * rng.standard_normal((300, 16))).numpy()
    log_p = np.log(rng.dirichlet(np.full(300, 0.3)) + 1e-4)
    expected = np.argsort(-explicit(queries, documents, log_p, weight), axis=1)[:, :10]
    stored = with_prior(documents.astype(np.float32), log_p, weight)
    sent = with_prior_queries(queries.astype(np.float32))
    assert stored.dtype == sent.dtype == np.float32
    np.testing.assert_array_equal(np.argsort(-(sent @ stored.T), axis=1)[:, :10], expected)
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(17)
    index.add(stored)
    np.testing.assert_array_equal(index.search(sent, 10)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kind_and_dtype_are_kept(dtype):
    documents, log_p = torch.randn(3, 2).to(dtype), [-1.0, -2.0, -3.0]
    for stored in (with_prior(documents, log_p, 1.0), with_prior_queries(documents)):
        assert stored.dtype == dtype
        assert torch.equal(stored[:, :2], documents)


@pytest.mark.parametrize(("log_p", "weight"), [([-1.0], 1.0), ([0.0, -np.inf], 1.0), ([0.0, -1.0], np.nan)])
def test_a_prior_that_is_missing_or_infinite(log_p, weight):
    with pytest.raises(ValueError, match=r"one finite number for each of 2 documents.* Smooth the counts"):
        with_prior(np.ones((2, 2)), log_p, weight)
