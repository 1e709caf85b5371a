"""Stored vectors rank as the similarity does, and with a prior as the formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from st_magnitude import Similarity
from st_magnitude.serving import with_prior, with_prior_queries


def served(similarity, queries, documents):
    """Queries and documents in float32, divided as the similarity says."""
    similarity = Similarity.named(similarity)
    return similarity.query(queries).float().numpy(), similarity.document(documents).float().numpy()


def matrices(rows):
    return arrays(np.float64, (rows, 5), elements=st.floats(-8, 8, width=32))


def spread(n, seed):
    """Directions of 16 dimensions with lognormal norms."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 16))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * rng.lognormal(sigma=0.5, size=(n, 1))


@given(matrices(3), matrices(6), st.floats(0, 1), st.floats(0, 1))
def test_inner_products_are_the_scores(queries, documents, gamma_query, gamma_document):
    similarity = Similarity(gamma_query, gamma_document)
    q, d = (x.astype(float) for x in served(similarity, queries, documents))
    sizes = np.linalg.norm(similarity.query(queries), axis=1)[:, None]
    sizes = sizes * np.linalg.norm(similarity.document(documents), axis=1)
    assert (np.abs(q @ d.T - similarity(queries, documents).numpy()) <= 1e-6 * sizes + 1e-30).all()


@pytest.mark.parametrize(
    "similarity", ["cosine", "dot", "qnorm", "dnorm", Similarity(1.0, 0.5)], ids=str
)
def test_faiss(similarity):
    faiss = pytest.importorskip("faiss")
    queries = spread(20, seed=1)
    documents = spread(300, seed=2)
    scores = Similarity.named(similarity)(queries, documents).numpy()
    expected = np.argsort(-scores, axis=1)[:, :10]
    queries, documents = served(similarity, queries, documents)
    for index in (faiss.IndexFlatIP(16), faiss.IndexHNSWFlat(16, 32, faiss.METRIC_INNER_PRODUCT)):
        if hasattr(index, "hnsw"):
            index.hnsw.efSearch = len(documents)
        index.add(documents)
        np.testing.assert_array_equal(index.search(queries, 10)[1], expected)


@given(
    matrices(3), matrices(7), arrays(np.float64, 7, elements=st.floats(-20, 0)), st.floats(-2, 2)
)
def test_inner_products_with_a_prior_are_the_formula(queries, documents, log_p, weight):
    expected = queries @ documents.T + weight * log_p
    stored = with_prior(documents, log_p, weight)
    sent = with_prior_queries(queries)
    assert (stored.shape, sent.shape) == ((7, 6), (3, 6))
    np.testing.assert_allclose(sent @ stored.T, expected, rtol=1e-12, atol=1e-9)
    tensors = with_prior(torch.from_numpy(documents), torch.from_numpy(log_p), weight)
    assert torch.equal(tensors, torch.from_numpy(stored))
    assert torch.equal(with_prior_queries(torch.from_numpy(queries)), torch.from_numpy(sent))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kind_and_dtype_are_kept(dtype):
    documents = torch.randn(3, 2).to(dtype)
    for stored in (with_prior(documents, [-1.0, -2.0, -3.0], 1.0), with_prior_queries(documents)):
        assert stored.dtype == dtype
        assert torch.equal(stored[:, :2], documents)


@pytest.mark.parametrize(
    ("log_p", "weight"), [([-1.0], 1.0), ([0.0, -np.inf], 1.0), ([0.0, -1.0], np.nan)]
)
def test_a_prior_that_is_missing_or_infinite(log_p, weight):
    with pytest.raises(ValueError, match=r"one finite number for each of 2 documents"):
        with_prior(np.ones((2, 2)), log_p, weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float16])
def test_a_prior_that_the_type_of_the_vectors_cannot_hold(dtype):
    documents = torch.ones(2, 2, dtype=dtype)
    for vectors in (documents, documents.numpy()):
        with pytest.raises(ValueError, match="quantize" if dtype != torch.float16 else "float32"):
            with_prior(vectors, [-1.0, -7.0], weight=1e4)
