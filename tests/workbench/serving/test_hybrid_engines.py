"""The fusions of examples/weight_in_engines.py rank as ours does."""

import json
import random
import runpy
from collections import Counter
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS, bm25_run
from st_magnitude.workbench.judging.choice import fusions

EXAMPLE = Path(__file__).parents[3] / "examples" / "weight_in_engines.py"
ENGINES = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


WAYS = [(0.3, "words", True), (0.4, "4-grams", False)]


@pytest.fixture(params=[*WAYS, pytest.param((0.6, "words", False), marks=pytest.mark.slow)])
def names(request, tmp_path):
    """300 documents, of which each search finds 100 at most, and the weight that a search reads."""
    weight, tokens, is_cosine = request.param
    rng = random.Random(f"{weight} {tokens}")
    vocabulary = ["".join(letters) for letters in product("bdfgklmn", "aeiou", "kmrst")]
    odds = [1 / (i + 9) for i in range(len(vocabulary))]
    texts = [rng.choices(vocabulary, odds, k=i // 3 + 3) for i in range(300)]  # few equal scores
    corpus = {f"d{i:03}": " ".join(words) for i, words in enumerate(texts)}
    asked = {f"q{i}": " ".join(rng.sample(vocabulary, 3)) for i in range(8)}
    asked["q8"] = "bak bok bok bok"  # a word counts as often as it is asked for
    data = RetrievalData(asked, corpus, {})
    vectors = np.random.default_rng(0).standard_normal((309, 8)).astype(np.float32)
    if is_cosine:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    documents, queries = vectors[:300], vectors[300:]
    scored = [(np.arange(300), row) for row in queries.astype(float) @ documents.T.astype(float)]
    dense = Ranking.of(data, list(data.queries), scored, 100)
    lexical = bm25_run(data, tokenizer=TOKENS[tokens])
    fused = fusions(dense, {tokens: lexical}, is_cosine)
    how, expected = next(pair for pair in fused.items() if pair[0].weight == weight)
    (tmp_path / "deploy.json").write_text(json.dumps({"model": ".", "how": asdict(how)}))
    names = {"data": data, "corpus": [*corpus.values()], "documents": documents, "queries": queries}
    names |= {"dense": dense, "lexical": lexical, "expected": expected}
    names["of_model"], names["of_bm25"], names["how"] = ENGINES.read_weights(tmp_path)
    return names


def questions(names):
    """The id of each query, its text and vector, and the places of our best ten with scores."""
    for query, vector in zip(names["data"].queries, names["queries"], strict=True):
        ours = [(int(i[1:]), score) for i, score in names["expected"][query].items()][:10]
        yield query, names["data"].queries[query], vector, ours


def check(found, ours):
    assert [document for document, _ in found] == [document for document, _ in ours]
    np.testing.assert_allclose([score for _, score in found], [s for _, s in ours], rtol=1e-5)


def test_qdrant(names):
    """By its own text index, and for all tokens by sparse vectors."""
    qdrant = pytest.importorskip("qdrant_client")
    models = qdrant.models
    parts = [{} for _ in names["corpus"]]
    words = {}
    for word, i, part in ENGINES.postings(names["corpus"], names["how"]["tokens"]):
        parts[i][words.setdefault(word, len(words))] = part
    client = qdrant.QdrantClient(":memory:")
    dense = {"": models.VectorParams(size=8, distance=models.Distance.DOT)}
    sparse = {"bm25": models.SparseVectorParams()}
    client.create_collection("docs", dense, sparse_vectors_config=sparse)
    client.create_payload_index("docs", "text", models.TextIndexParams(type="text", scoring=True))
    points = []
    for i, part in enumerate(parts):
        vector = models.SparseVector(indices=[*part], values=[*part.values()])
        vectors = {"": names["documents"][i].tolist(), "bm25": vector}
        text = {"text": names["corpus"][i]}
        points.append(models.PointStruct(id=i, vector=vectors, payload=text))
    client.upsert("docs", points)
    of_model, of_bm25 = names["of_model"], names["of_bm25"]
    for query, question, vector, ours in questions(names):
        counts = Counter(TOKENS[names["how"]["tokens"]](question))
        counts = {words[word]: float(count) for word, count in counts.items() if word in words}
        asked = models.SparseVector(indices=[*counts], values=[*counts.values()])
        found = ENGINES.qdrant(client, vector, asked, of_model, of_bm25, using="bm25")
        check([(point.id, point.score) for point in found], ours)
        if names["how"]["tokens"] == "words" and query != "q8":
            asked = ENGINES.qdrant_text(question)
            found = ENGINES.qdrant(client, vector, asked, of_model, of_bm25 / 2.5)
            check([(point.id, point.score) for point in found], ours)


@pytest.fixture(scope="module")
def postgres(tmp_path_factory):
    pgserver = pytest.importorskip("pgserver")
    psycopg = pytest.importorskip("psycopg")
    server = pgserver.get_server(tmp_path_factory.mktemp("pg"))
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        yield connection.cursor()
    server.cleanup()


def test_pgvector(names, postgres):
    postgres.execute("DROP TABLE IF EXISTS docs, postings")
    postgres.execute("CREATE TABLE docs (id bigint, embedding vector(8))")
    postgres.execute("CREATE TABLE postings (word text, id bigint, part float8)")
    rows = [(i, str(row.tolist())) for i, row in enumerate(names["documents"])]
    postgres.executemany("INSERT INTO docs VALUES (%s, %s)", rows)
    rows = [*ENGINES.postings(names["corpus"], names["how"]["tokens"])]
    postgres.executemany("INSERT INTO postings VALUES (%s, %s, %s)", rows)
    for _, question, vector, ours in questions(names):
        asked = {"query": str(vector.tolist()), "words": TOKENS[names["how"]["tokens"]](question)}
        asked |= {name: names[name] for name in ("of_model", "of_bm25")}
        check(postgres.execute(ENGINES.PGVECTOR, asked).fetchall(), ours)


def test_requests_add_up(names):
    """Elasticsearch and OpenSearch, with the arithmetic of their sources, and any engine."""
    weights = names["of_model"], names["of_bm25"]
    request = ENGINES.elasticsearch(names["queries"][0], "", *weights)
    of_model, of_bm25 = (one["weight"] for one in request["retriever"]["linear"]["retrievers"])
    assert "Math.max(_score - 1, 0)" in json.dumps(request)
    (processor,) = ENGINES.opensearch(names["how"])["phase_results_processors"]
    scaling, mean = (step["parameters"] for step in processor["normalization-processor"].values())
    bounds = zip(*(scaling[f"{end}_bounds"] for end in ("lower", "upper")), strict=True)
    limits = [(low["min_score"], high["max_score"]) for low, high in bounds]
    for query, _, _, ours in questions(names):
        found = names["dense"][query], names["lexical"][query]
        ids = [f"d{place:03}" for place, _ in ours]
        assert ENGINES.add_scores(*found, *weights) == ids
        for document, (_, score) in zip(ids, ours, strict=True):
            s, bm25 = (ranking.get(document, 0.0) for ranking in found)
            assert of_model * max(1 + s - 1, 0) + of_bm25 * 2.5 * bm25 == pytest.approx(score)
            scaled = [
                (min(max(value, low), high) - low) / (high - low)
                for value, (low, high) in zip((1 + s, bm25), limits, strict=True)
            ]
            assert 3 * np.dot(mean["weights"], scaled) == pytest.approx(score)
