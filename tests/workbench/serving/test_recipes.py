"""The recipes of examples/databases.py and examples/frameworks.py, which need other packages.

The frameworks are in no extra: the nightly job installs them.
"""

import runpy
from pathlib import Path

import httpx
import numpy as np
import pytest
from _tiny import load_transformer, save_transformer

import st_magnitude as stm

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def folder(tmp_path):
    """A saved model that keeps its norms and has prompts."""
    model = stm.prepare(load_transformer(save_transformer(tmp_path / "transformer")), "qnorm")
    model.prompts = {"query": "query: ", "document": "passage: "}
    return str(stm.export(model, tmp_path / "model"))


@pytest.mark.parametrize(
    ("framework", "package"),
    [
        ("langchain", "langchain_huggingface"),
        ("llama_index", "llama_index.embeddings.huggingface"),
        ("haystack", "haystack_integrations.components.embedders.sentence_transformers"),
    ],
)
def test_a_framework_serves_what_the_model_computes(folder, framework, package):
    pytest.importorskip(package)
    recipes = runpy.run_path(str(EXAMPLES / "frameworks.py"))
    assert stm.check_serving(recipes["FRAMEWORKS"][framework](folder), folder).same


@pytest.mark.parametrize(
    ("database", "packages"),
    [
        ("usearch", ["usearch"]),
        ("pgvector", ["pgserver", "psycopg"]),
        ("milvus", ["pymilvus", "milvus_lite"]),
        ("lancedb", ["lancedb"]),
    ],
)
def test_databases(database, packages, tmp_path, monkeypatch):
    """The first hit and its score belong to the inner product, not to cosine or L2."""
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    documents = np.array([[1.0, 0.1], [3.0, 3.0], [0.9, 0.0]], dtype=np.float32)
    find = runpy.run_path(str(EXAMPLES / "databases.py"))["DATABASES"][database]
    ids, scores = find(documents, np.array([1.0, 0.0], dtype=np.float32), k=2)
    assert (ids[0], scores[0]) == (1, pytest.approx(3.0))


def test_tei_and_elasticsearch_keep_norms(monkeypatch):
    sent = {}

    def answer(method, url, json):
        sent[method, url.rpartition(":")[2].partition("?")[0]] = json
        hits = {"hits": {"hits": [{"_id": "1", "_score": 26.0}]}}
        rows = [[3.0, 4.0] for _ in json.get("inputs", ())] or hits
        return httpx.Response(200, json=rows, request=httpx.Request(method, url))

    monkeypatch.setattr(httpx, "post", lambda url, json: answer("POST", url, json))
    monkeypatch.setattr(httpx, "request", answer)
    recipes = runpy.run_path(str(EXAMPLES / "databases.py"))
    vectors = recipes["embed"](["a dog", "a cat"])
    assert recipes["elasticsearch"](vectors, vectors[0]) == ([1], [25.0])
    assert sent["POST", "8080/embed"]["normalize"] is False
    (field,) = sent["PUT", "9200/docs"]["mappings"]["properties"].values()
    assert field == {"type": "dense_vector", "dims": 2, "similarity": "max_inner_product"}
    assert sent["PUT", "9200/docs/_doc/1"] == {"embedding": [3.0, 4.0]}
