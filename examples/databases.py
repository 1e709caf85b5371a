"""Databases that rank by the inner product: usearch, pgvector, Milvus, LanceDB and Elasticsearch.

Copy what you need. Each function stores documents (n, D) and returns the ids and the inner products
of the k best for one query (D,). Divide both before, as docs/serving.md says, which has FAISS and
Qdrant. `embed` asks text-embeddings-inference for vectors that keep their norms.
"""

import tempfile

import numpy as np


def usearch(documents, query, k=3):
    """pip install usearch"""
    from usearch.index import Index

    # name the dtype: the default can be bf16
    index = Index(ndim=documents.shape[1], metric="ip", dtype="f32")
    index.add(np.arange(len(documents)), documents)
    found = index.search(query, k)
    return found.keys.tolist(), (1 - found.distances).tolist()


def pgvector(documents, query, k=3):
    """pip install pgserver psycopg: PostgreSQL with pgvector in a folder"""
    import pgserver
    import psycopg

    server = pgserver.get_server(tempfile.mkdtemp())
    connection = psycopg.connect(server.get_uri(), autocommit=True)
    connection.execute("CREATE EXTENSION vector")
    connection.execute(
        f"CREATE TABLE docs (id bigint PRIMARY KEY, embedding vector({documents.shape[1]}))"
    )
    insert = "INSERT INTO docs VALUES (%s, %s::vector)"
    rows = [(i, str(vector.tolist())) for i, vector in enumerate(documents)]
    connection.cursor().executemany(insert, rows)
    connection.execute("CREATE INDEX ON docs USING hnsw (embedding vector_ip_ops)")
    nearest = "SELECT id, -(embedding <#> %(q)s::vector) FROM docs"
    nearest += " ORDER BY embedding <#> %(q)s::vector LIMIT %(k)s"
    found = connection.execute(nearest, {"q": str(query.tolist()), "k": k}).fetchall()
    connection.close()
    server.cleanup()
    return [row[0] for row in found], [row[1] for row in found]


def milvus(documents, query, k=3):
    """pip install pymilvus milvus-lite"""
    from pymilvus import MilvusClient

    client = MilvusClient("docs.db")  # a file: milvus-lite
    client.create_collection("docs", dimension=documents.shape[1], metric_type="IP")
    client.insert("docs", [{"id": i, "vector": d.tolist()} for i, d in enumerate(documents)])
    (hits,) = client.search("docs", data=[query.tolist()], limit=k)
    return [hit["id"] for hit in hits], [hit["distance"] for hit in hits]


def lancedb(documents, query, k=3):
    """pip install lancedb: name "dot" in each search, and when you create an index"""
    import lancedb

    rows = [{"id": i, "vector": d.tolist()} for i, d in enumerate(documents)]
    table = lancedb.connect(tempfile.mkdtemp()).create_table("docs", rows)
    found = table.search(query.tolist()).distance_type("dot").limit(k).to_list()
    return [row["id"] for row in found], [1 - row["_distance"] for row in found]


def embed(texts, url="http://localhost:8080"):
    """Vectors of text-embeddings-inference, which normalises unless the request forbids it."""
    import httpx

    body = {"inputs": texts, "normalize": False, "truncate": True}
    return np.array(httpx.post(f"{url}/embed", json=body).raise_for_status().json())


def elasticsearch(documents, query, k=3, url="http://localhost:9200"):
    """Elasticsearch 8.11 or later, whose score is q · d + 1 where q · d is at least 0."""
    import httpx

    def call(method, path, **body):
        answer = httpx.request(method, f"{url}/{path}", **body)
        return answer.raise_for_status().json()

    field = {"type": "dense_vector", "dims": len(query), "similarity": "max_inner_product"}
    call("PUT", "docs", json={"mappings": {"properties": {"embedding": field}}})
    for i, vector in enumerate(documents):
        call("PUT", f"docs/_doc/{i}?refresh=true", json={"embedding": vector.tolist()})
    knn = {"field": "embedding", "query_vector": query.tolist(), "k": k}
    hits = call("GET", "docs/_search", json={"knn": knn})["hits"]["hits"]
    return [int(hit["_id"]) for hit in hits], [hit["_score"] - 1 for hit in hits]


DATABASES = {"usearch": usearch, "pgvector": pgvector, "milvus": milvus, "lancedb": lancedb}
