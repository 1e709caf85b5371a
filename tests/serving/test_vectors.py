"""Stored vectors rank as the similarity does."""

import numpy as np
import pytest

from st_magnitude import Similarity


def spread(n, seed):
    """Directions of 16 dimensions with lognormal norms."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, 16)) * rng.lognormal(sigma=0.5, size=(n, 1))


@pytest.mark.parametrize(
    "similarity", ["cosine", "dot", "qnorm", "dnorm", Similarity(1.0, 0.5)], ids=str
)
def test_inner_products_are_the_scores(similarity):
    similarity = Similarity.named(similarity)
    queries, documents = spread(20, seed=1), spread(300, seed=2)
    documents[7] = 0
    scores = similarity(queries, documents).numpy()
    queries = similarity.query(queries).float().numpy()
    documents = similarity.document(documents).float().numpy()
    np.testing.assert_allclose(queries @ documents.T, scores, rtol=1e-4, atol=1e-5)
    faiss = pytest.importorskip("faiss")
    expected = np.argsort(-scores, axis=1)[:, :10]
    for index in (faiss.IndexFlatIP(16), faiss.IndexHNSWFlat(16, 32, faiss.METRIC_INNER_PRODUCT)):
        if hasattr(index, "hnsw"):
            index.hnsw.efSearch = len(documents)
        index.add(documents)
        np.testing.assert_array_equal(index.search(queries, 10)[1], expected)
