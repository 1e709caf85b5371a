"""Stored vectors rank as the similarity does, and with a prior as the formula: in numpy, torch and
vector databases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from st_magnitude import Similarity
from st_magnitude.serving import with_prior, with_prior_queries

pytestmark = pytest.mark.usefixtures("one_thread")

SIMILARITIES = ["cosine", "dot", "qnorm", "dnorm", Similarity(query=1.0, document=0.5)]
K = 10


def served(similarity, queries, documents):
    """Queries and documents in float32, divided as the similarity says."""
    similarity = Similarity.named(similarity)
    return similarity.query(queries).float().numpy(), similarity.document(documents).float().numpy()


def matrices(rows):
    return arrays(np.float64, (rows, 5), elements=st.floats(-8, 8, width=32))


def spread(n, dim=16, seed=0, sigma=0.5):
    """Directions with lognormal norms."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * rng.lognormal(sigma=sigma, size=(n, 1))


@pytest.fixture(params=SIMILARITIES, ids=str)
def case(request):
    """Queries and documents as they are served, and the ranking of the similarity itself in
    float64."""
    queries, documents = spread(20, seed=1), spread(300, seed=2)
    expected = np.argsort(-Similarity.named(request.param)(queries, documents).numpy(), axis=1)[
        :, :K
    ]
    return *served(request.param, queries, documents), expected


@given(matrices(3), matrices(6), st.floats(0, 1), st.floats(0, 1))
def test_inner_products_are_the_scores(queries, documents, gamma_query, gamma_document):
    similarity = Similarity(gamma_query, gamma_document)
    q, d = (x.astype(float) for x in served(similarity, queries, documents))
    sizes = np.linalg.norm(similarity.query(queries), axis=1)[:, None]
    sizes = sizes * np.linalg.norm(similarity.document(documents), axis=1)
    assert (np.abs(q @ d.T - similarity(queries, documents).numpy()) <= 1e-6 * sizes + 1e-30).all()


def test_faiss(case):
    faiss = pytest.importorskip("faiss")
    queries, documents, expected = case
    for index in (faiss.IndexFlatIP(16), faiss.IndexHNSWFlat(16, 32, faiss.METRIC_INNER_PRODUCT)):
        if hasattr(index, "hnsw"):
            index.hnsw.efSearch = len(documents)
        index.add(documents)
        np.testing.assert_array_equal(index.search(queries, K)[1], expected)


def test_usearch(case):
    usearch = pytest.importorskip("usearch.index")
    queries, documents, expected = case
    index = usearch.Index(ndim=16, metric="ip", dtype="f32", expansion_search=len(documents))
    index.add(np.arange(len(documents)), documents)
    np.testing.assert_array_equal(index.search(queries, K, exact=True).keys, expected)


def test_qdrant(case):
    qdrant = pytest.importorskip("qdrant_client")
    queries, documents, expected = case
    client = qdrant.QdrantClient(":memory:")
    client.create_collection(
        "docs", qdrant.models.VectorParams(size=16, distance=qdrant.models.Distance.DOT)
    )
    client.upsert(
        "docs", qdrant.models.Batch(ids=list(range(len(documents))), vectors=documents.tolist())
    )
    for query, best in zip(queries, expected, strict=True):
        found = client.query_points("docs", query=query.tolist(), limit=K).points
        assert [point.id for point in found] == best.tolist()
    client.close()


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    """PostgreSQL with pgvector from PyPI, started for these tests."""
    pgserver, psycopg = pytest.importorskip("pgserver"), pytest.importorskip("psycopg")
    server = pgserver.get_server(tmp_path_factory.mktemp("postgres"))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        yield connection
    server.cleanup()


def test_pgvector(case, postgres):
    queries, documents, expected = case
    postgres.execute("DROP TABLE IF EXISTS docs")
    postgres.execute("CREATE TABLE docs (id int PRIMARY KEY, embedding vector(16))")
    rows = [(i, str(document.tolist())) for i, document in enumerate(documents)]
    postgres.cursor().executemany("INSERT INTO docs VALUES (%s, %s::vector)", rows)
    search = (
        "SELECT id, -(embedding <#> %(q)s::vector) FROM docs ORDER BY embedding <#> %(q)s::vector"
        f" LIMIT {K}"
    )
    sent = [{"q": str(query.tolist())} for query in queries]
    exact = [postgres.execute(search, query).fetchall() for query in sent]
    assert [[document for document, _ in found] for found in exact] == expected.tolist()
    scores = np.take_along_axis(queries @ documents.T, expected, axis=1)
    np.testing.assert_allclose(
        [[score for _, score in found] for found in exact], scores, rtol=1e-5
    )
    postgres.execute("CREATE INDEX ON docs USING hnsw (embedding vector_ip_ops)")
    postgres.execute("SET enable_seqscan = off")
    postgres.execute(f"SET hnsw.ef_search = {len(documents)}")
    assert "docs_embedding_idx" in str(postgres.execute("EXPLAIN " + search, sent[0]).fetchall())
    found = [
        [document for document, _ in postgres.execute(search, query).fetchall()] for query in sent
    ]
    assert np.mean([len(set(a) & set(b)) / K for a, b in zip(found, expected, strict=True)]) > 0.9
    postgres.execute("SET enable_seqscan = on")


# --- the prior as one more dimension --------------------------------------------------------------


def explicit(queries, documents, log_p, weight):
    """q · d + weight · log p(d), one pair after the other: (Q, N)."""
    return np.array(
        [[sum(q * d) + weight * p for d, p in zip(documents, log_p, strict=True)] for q in queries]
    )


@given(
    matrices(3), matrices(7), arrays(np.float64, 7, elements=st.floats(-20, 0)), st.floats(-2, 2)
)
def test_inner_products_with_a_prior_are_the_formula(queries, documents, log_p, weight):
    expected = explicit(queries, documents, log_p, weight)
    stored, sent = with_prior(documents, log_p, weight), with_prior_queries(queries)
    assert (stored.shape, sent.shape) == ((7, 6), (3, 6))
    np.testing.assert_allclose(sent @ stored.T, expected, rtol=1e-12, atol=1e-9)
    tensors = with_prior(torch.from_numpy(documents), torch.from_numpy(log_p), weight)
    assert torch.equal(tensors, torch.from_numpy(stored))
    assert torch.equal(with_prior_queries(torch.from_numpy(queries)), torch.from_numpy(sent))


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_an_index_ranks_by_the_prior(case, weight):
    queries, documents, _ = case
    log_p = np.log(np.random.default_rng(0).dirichlet(np.full(300, 0.3)) + 1e-4)
    expected = np.argsort(
        -explicit(queries.astype(float), documents.astype(float), log_p, weight), axis=1
    )[:, :K]
    stored, sent = with_prior(documents, log_p, weight), with_prior_queries(queries)
    assert stored.dtype == sent.dtype == np.float32
    np.testing.assert_array_equal(np.argsort(-(sent @ stored.T), axis=1)[:, :K], expected)
    faiss = pytest.importorskip("faiss")
    index = faiss.IndexFlatIP(17)
    index.add(stored)
    np.testing.assert_array_equal(index.search(sent, K)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_kind_and_dtype_are_kept(dtype):
    documents, log_p = torch.randn(3, 2).to(dtype), [-1.0, -2.0, -3.0]
    for stored in (with_prior(documents, log_p, 1.0), with_prior_queries(documents)):
        assert stored.dtype == dtype
        assert torch.equal(stored[:, :2], documents)


@pytest.mark.parametrize(
    ("log_p", "weight"), [([-1.0], 1.0), ([0.0, -np.inf], 1.0), ([0.0, -1.0], np.nan)]
)
def test_a_prior_that_is_missing_or_infinite(log_p, weight):
    with pytest.raises(
        ValueError, match=r"one finite number for each of 2 documents.* Smooth the counts"
    ):
        with_prior(np.ones((2, 2)), log_p, weight)
