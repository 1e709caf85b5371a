"""What is stored ranks as the similarity does: against float64, and in FAISS, usearch and Qdrant."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from st_magnitude import Similarity
from st_magnitude.serving import augment, augment_queries

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["cosine", "dot", "qnorm", "dnorm"]
SIMILARITIES = [*NAMES, Similarity(query=1.0, document=0.5)]
K = 10

values = st.floats(-8, 8, width=32)
exponents = st.floats(0, 1)


def index_vectors(x, similarity):
    return Similarity.named(similarity).document(x).float().numpy()


def query_vectors(x, similarity):
    return Similarity.named(similarity).query(x).float().numpy()


def matrices(rows):
    return arrays(np.float64, (rows, 5), elements=values)


def spread(n, dim=16, seed=0, sigma=0.5):
    """Directions with lognormal lengths."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, dim))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * rng.lognormal(sigma=sigma, size=(n, 1))


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def squared_distances(q, d):
    return ((q[:, None] - d[None]) ** 2).sum(axis=-1)


@pytest.fixture(params=SIMILARITIES, ids=str)
def case(request):
    """Queries and documents as they are served, and the ranking of the similarity itself in float64."""
    queries, documents = spread(20, seed=1), spread(300, seed=2)
    expected = np.argsort(-Similarity.named(request.param)(queries, documents).numpy(), axis=1)[:, :K]
    return query_vectors(queries, request.param), index_vectors(documents, request.param), expected


# ---- the vectors


@given(matrices(3), matrices(6), exponents, exponents)
def test_inner_products_are_the_scores(queries, documents, gamma_query, gamma_document):
    similarity = Similarity(gamma_query, gamma_document)
    served = query_vectors(queries, similarity).astype(float) @ index_vectors(documents, similarity).astype(float).T
    sizes = np.linalg.norm(similarity.query(queries), axis=1)[:, None]
    sizes = sizes * np.linalg.norm(similarity.document(documents), axis=1)
    assert (np.abs(served - similarity(queries, documents).numpy()) <= 1e-6 * sizes + 1e-30).all()


@given(matrices(3), matrices(6), st.floats(1, 4))
def test_all_documents_get_one_length_and_no_score_changes(queries, documents, room):
    norms = np.linalg.norm(documents, axis=1)
    max_norm = norms.max() * room if norms.max() > 1e-30 else 1.0
    long = augment(documents, max_norm)
    np.testing.assert_allclose(np.linalg.norm(long.astype(float), axis=1), max_norm, rtol=1e-6)
    np.testing.assert_array_equal(long[:, :-1], documents.astype(np.float32))
    served = augment_queries(queries)
    np.testing.assert_array_equal(served[:, :-1], queries.astype(np.float32))
    assert not served[:, -1].any()


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(SIMILARITIES), st.floats(0.05, 1.5), st.floats(1, 3))
def test_inner_product_cosine_and_l2_rank_alike(seed, similarity, sigma, room):
    queries, documents = spread(4, seed=seed, sigma=sigma), spread(50, seed=seed + 1, sigma=sigma)
    scores = Similarity.named(similarity)(queries, documents).numpy()  # float64
    q, d = query_vectors(queries, similarity), index_vectors(documents, similarity)
    d = augment(d, float(np.linalg.norm(d, axis=1).max()) * room).astype(float)
    q = augment_queries(q).astype(float)
    # The rows are rounded to float32: scores that are closer than this may turn around.
    size, length = np.linalg.norm(q, axis=1, keepdims=True), np.linalg.norm(d, axis=1).max()
    for found in (q @ d.T, unit(q) @ unit(d).T, -squared_distances(q, d)):
        order = np.argsort(-found, axis=1)
        ranked = np.take_along_axis(scores, order, axis=1)
        assert (np.diff(ranked, axis=1) <= 1e-6 * length * (size + length)).all()


def test_tensors_lists_and_half_precision_are_taken_alike():
    documents = spread(5, dim=4).astype(np.float16)
    expected = augment(documents)
    assert expected.dtype == np.float32
    assert expected.flags.c_contiguous
    tensor = torch.from_numpy(documents).requires_grad_()
    for given_as in (tensor, list(tensor), documents.tolist(), tensor.double()):
        np.testing.assert_array_equal(augment(given_as), expected)


def test_a_zero_vector_stays_zero():
    assert not index_vectors(np.zeros((1, 3)), "cosine").any()
    np.testing.assert_array_equal(augment([[0.0, 0.0], [3.0, 4.0]]), [[0, 0, 5], [3, 4, 0]])
    assert augment(np.zeros((0, 3)), 1.0).shape == (0, 4)


def test_a_document_that_is_longer_than_the_index_allows():
    documents = spread(50)
    max_norm = float(np.linalg.norm(documents, axis=1).max())
    augment(documents.astype(np.float32), max_norm)
    late = np.concatenate([documents, 1.5 * documents[:1] / np.linalg.norm(documents[0]) * max_norm])
    message = re.escape(f"Document 50 has the norm {1.5 * max_norm:.6g}, more than max_norm = {max_norm:.6g}")
    with pytest.raises(ValueError, match=f"{message}.*rebuild this index .*larger max_norm"):
        augment(late, max_norm)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_max_norm_that_is_none(max_norm):
    with pytest.raises(ValueError, match="positive, finite"):
        augment([[1.0]], max_norm)


def test_bad_input():
    with pytest.raises(ValueError, match=r"x\[None\] for a single vector"):
        augment([1.0, 2.0])
    with pytest.raises(ValueError, match=r"Embeddings must be a matrix \(n, D\), got shape \(1, 2, 3\)"):
        augment_queries(np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="row 1 is not finite"):
        augment([[1.0], [float("nan")]])
    with pytest.raises(ValueError, match="pass max_norm"):
        augment(np.zeros((0, 3)))


# ---- the databases


def test_faiss(case):
    faiss = pytest.importorskip("faiss")
    queries, documents, expected = case
    long, long_queries = augment(documents), augment_queries(queries)
    dim = documents.shape[1]
    graph = faiss.IndexHNSWFlat(dim + 1, 32, faiss.METRIC_INNER_PRODUCT)
    graph.hnsw.efSearch = len(documents)
    for index, stored, sent in [
        (faiss.IndexFlatIP(dim), documents, queries),
        (faiss.IndexFlatIP(dim + 1), long, long_queries),
        (faiss.IndexFlatL2(dim + 1), long, long_queries),
        (graph, long, long_queries),
    ]:
        index.add(stored)
        np.testing.assert_array_equal(index.search(sent, K)[1], expected)


def test_usearch(case):
    usearch = pytest.importorskip("usearch.index")
    queries, documents, expected = case
    long, long_queries = augment(documents), augment_queries(queries)
    for metric, stored, sent in [("ip", documents, queries), ("cos", long, long_queries), ("l2sq", long, long_queries)]:
        index = usearch.Index(ndim=stored.shape[1], metric=metric, dtype="f32", expansion_search=len(documents))
        index.add(np.arange(len(documents)), stored)
        np.testing.assert_array_equal(index.search(sent, K, exact=True).keys, expected)
        found = index.search(sent, K).keys  # by a graph, built by several threads: it need not reach every document
        assert np.mean([len(set(a) & set(b)) / K for a, b in zip(found, expected, strict=True)]) > 0.9


def test_qdrant(case):
    qdrant = pytest.importorskip("qdrant_client")
    models = qdrant.models
    queries, documents, expected = case
    client = qdrant.QdrantClient(":memory:")
    for name, metric, stored, sent in [
        ("plain", models.Distance.DOT, documents, queries),
        ("augmented", models.Distance.COSINE, augment(documents), augment_queries(queries)),
    ]:
        client.create_collection(name, models.VectorParams(size=stored.shape[1], distance=metric))
        client.upsert(name, models.Batch(ids=list(range(len(stored))), vectors=stored.tolist()))
        for query, best in zip(sent, expected, strict=True):
            found = client.query_points(name, query=query.tolist(), limit=K).points
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
    for metric, operator, stored, sent in [
        ("vector_ip_ops", "<#>", documents, queries),
        ("vector_cosine_ops", "<=>", augment(documents), augment_queries(queries)),
    ]:
        postgres.execute("DROP TABLE IF EXISTS docs")
        postgres.execute(f"CREATE TABLE docs (id int PRIMARY KEY, embedding vector({stored.shape[1]}))")
        rows = [(i, str(document.tolist())) for i, document in enumerate(stored)]
        postgres.cursor().executemany("INSERT INTO docs VALUES (%s, %s::vector)", rows)
        search = f"SELECT id, embedding {operator} %(q)s::vector FROM docs ORDER BY 2 LIMIT {K}"

        def answers(search=search, sent=sent):
            return [postgres.execute(search, {"q": str(query.tolist())}).fetchall() for query in sent]

        exact = answers()
        assert [[document for document, _ in found] for found in exact] == expected.tolist()
        if operator == "<#>":
            scores = np.take_along_axis(sent @ stored.T, expected, axis=1)
            np.testing.assert_allclose(-np.array([[score for _, score in found] for found in exact]), scores, rtol=1e-5)
        postgres.execute(f"CREATE INDEX ON docs USING hnsw (embedding {metric})")
        postgres.execute("SET enable_seqscan = off")
        postgres.execute(f"SET hnsw.ef_search = {len(stored)}")
        plan = postgres.execute("EXPLAIN " + search, {"q": str(sent[0].tolist())}).fetchall()
        assert "docs_embedding_idx" in str(plan)
        found = [[document for document, _ in rows] for rows in answers()]
        assert np.mean([len(set(a) & set(b)) / K for a, b in zip(found, expected, strict=True)]) > 0.9
        postgres.execute("SET enable_seqscan = on")
