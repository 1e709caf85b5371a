"""The blocks of docs/recipes.md and the recipes of docs/serving.md that need other packages, where
these are installed.

The frameworks are in no extra: install them next to the package, as docs/recipes.md names them.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from _tiny import ROWS, load_transformer, save_transformer

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")

DOCS = Path(__file__).parents[2] / "docs"
TEXTS = [text for row in ROWS for text in row[1:3]]


def blocks(page: str) -> dict[str, list[str]]:
    """The blocks of a page that the tests of docs do not run, by their section."""
    sections = re.split(
        r"^#{2,3} (.*)\n", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    named = zip(["", *sections[1::2]], sections[::2], strict=True)
    return {
        name: re.findall(r"^```py\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
        for name, text in named
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a random model whose norms vary, as published: it normalises nothing."""
    folder = tmp_path_factory.mktemp("base")
    load_transformer(save_transformer(folder / "transformer")).save_pretrained(
        str(folder / "model")
    )
    return folder / "model"


@pytest.fixture
def names(base, tmp_path, monkeypatch):
    """The names that the first block of recipes.md defines; my-retriever is in the working
    directory."""
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    [setup] = blocks("recipes.md")[""]
    exec(setup.replace("sentence-transformers/all-MiniLM-L6-v2", str(base)), namespace)
    return namespace


def run(section, names, page="recipes.md"):
    """Runs the recipe. Those of recipes.md assert that check_serving finds no difference."""
    exec(compile(blocks(page)[section][0], section, "exec"), names)


def findings(embed):
    return {finding.name for finding in stm.check_serving(embed, "my-retriever").findings}


def ranks_by(search, model):
    """Findings about a store, for ``search(vector, k)`` that returns row numbers."""

    def rows(vectors, k):
        return np.array([search(v.tolist(), k) for v in vectors])

    return {finding.name for finding in stm.check_serving(rows, model, documents=TEXTS).findings}


def test_langchain(names):
    wrappers = pytest.importorskip("langchain_huggingface")
    run("LangChain", names)
    plain = wrappers.HuggingFaceEmbeddings(model_name="my-retriever")
    assert findings(lambda texts, role: plain.embed_documents(texts)) == {"prompt missing"}
    plain.encode_kwargs["normalize_embeddings"] = True
    assert "norms lost" in findings(lambda texts, role: plain.embed_documents(texts))

    stores = pytest.importorskip("langchain_core.vectorstores")
    store = stores.InMemoryVectorStore.from_texts(
        TEXTS, names["embeddings"], ids=[str(i) for i in range(len(TEXTS))]
    )
    found = ranks_by(
        lambda v, k: [int(d.id) for d in store.similarity_search_by_vector(v, k)], names["model"]
    )
    assert "metric" in found


def test_llama_index(names):
    wrappers = pytest.importorskip("llama_index.embeddings.huggingface")
    run("LlamaIndex", names)
    plain = wrappers.HuggingFaceEmbedding("my-retriever")
    assert findings(lambda texts, role: plain.get_text_embedding_batch(texts)) >= {
        "norms lost",
        "prompt missing",
    }

    core = pytest.importorskip("llama_index.core")
    store = pytest.importorskip("llama_index.core.vector_stores")
    simple = store.SimpleVectorStore()
    vectors = names["embedding"].get_text_embedding_batch(TEXTS)
    rows = enumerate(zip(TEXTS, vectors, strict=True))
    simple.add(
        [
            core.schema.TextNode(id_=str(i), text=text, embedding=vector)
            for i, (text, vector) in rows
        ]
    )

    def search(vector, k):
        return [
            int(i)
            for i in simple.query(
                store.VectorStoreQuery(query_embedding=vector, similarity_top_k=k)
            ).ids
        ]

    assert "metric" in ranks_by(search, names["model"])


def test_haystack(names):
    embedders = pytest.importorskip(
        "haystack_integrations.components.embedders.sentence_transformers"
    )
    run("Haystack", names)
    plain = embedders.SentenceTransformersTextEmbedder(model="my-retriever", progress_bar=False)
    assert findings(lambda texts, role: [plain.run(text)["embedding"] for text in texts]) == {
        "prompt missing"
    }

    memory = pytest.importorskip("haystack.document_stores.in_memory")
    store = memory.InMemoryDocumentStore()
    made = names["documents"].run(
        [names["Document"](id=str(i), content=t) for i, t in enumerate(TEXTS)]
    )["documents"]
    store.write_documents(made)
    assert not ranks_by(
        lambda v, k: [int(d.id) for d in store.embedding_retrieval(v, top_k=k)], names["model"]
    )


def test_ray_and_spark(names):
    pandas = pytest.importorskip("pandas")
    run("Ray and Spark", names)
    found = names["Embedder"]("my-retriever")(
        pandas.DataFrame({"_id": range(len(TEXTS)), "text": TEXTS})
    )
    assert found["_id"].tolist() == list(range(len(TEXTS)))
    expected = names["model"].encode_document(TEXTS)
    np.testing.assert_allclose(
        np.array(found["embedding"].tolist()), expected, rtol=1e-5, atol=5e-6
    )


@pytest.mark.parametrize("section", ["Milvus", "LanceDB"])
def test_databases(section, tmp_path, monkeypatch):
    """The first hit and its score belong to the inner product; cosine and L2 have another first
    hit."""
    for package in {"Milvus": ("pymilvus", "milvus_lite"), "LanceDB": ("lancedb",)}[section]:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    documents = np.array([[1.0, 0.1], [3.0, 3.0], [0.9, 0.0]], dtype=np.float32)
    names = {"documents": documents, "queries": np.array([[1.0, 0.0]], dtype=np.float32)}
    run(section, names, "serving.md")
    found = names["hits"][0][0] if section == "Milvus" else names["found"][0]
    score = found["distance"] if section == "Milvus" else 1 - found["_distance"]
    assert (found["id"], score) == (1, pytest.approx(3.0))
