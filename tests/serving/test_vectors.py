"""Stored vectors rank as the similarity does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from st_magnitude import Similarity


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
