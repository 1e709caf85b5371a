"""The recipes of docs/recipes.md and docs/serving.md that need other packages.

The frameworks are in no extra: the nightly job installs them.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from _tiny import ROWS, load_transformer, save_transformer

DOCS = Path(__file__).parents[2] / "docs"


def block(page, section):
    """The first block of a section that the tests of docs do not run; "" is above all sections."""
    text = (DOCS / page).read_text(encoding="utf-8")
    parts = re.split(r"^#{2,3} (.*)\n", text, flags=re.MULTILINE)
    sections = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    found = re.search(r"^```py\n(.*?)^```", sections[section], flags=re.MULTILINE | re.DOTALL)
    return found[1]


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The names that the first block of recipes.md defines; it saves my-retriever."""
    monkeypatch.chdir(tmp_path)
    load_transformer(save_transformer(tmp_path / "transformer")).save_pretrained("base")
    namespace: dict = {}
    exec(
        block("recipes.md", "").replace("sentence-transformers/all-MiniLM-L6-v2", "base"), namespace
    )
    return namespace


@pytest.mark.parametrize(
    ("section", "package"),
    [
        ("LangChain", "langchain_huggingface"),
        ("LlamaIndex", "llama_index.embeddings.huggingface"),
        ("Haystack", "haystack_integrations.components.embedders.sentence_transformers"),
    ],
)
def test_a_framework_serves_what_the_model_computes(names, section, package):
    """Every recipe asserts so by check_serving."""
    pytest.importorskip(package)
    exec(block("recipes.md", section), names)


def test_ray_and_spark(names):
    pandas = pytest.importorskip("pandas")
    exec(block("recipes.md", "Ray and Spark"), names)
    texts = [text for row in ROWS for text in row[1:3]]
    frame = pandas.DataFrame({"_id": range(len(texts)), "text": texts})
    found = names["Embedder"]("my-retriever")(frame)
    assert found["_id"].tolist() == list(range(len(texts)))
    expected = names["model"].encode_document(texts)
    embeddings = np.array(found["embedding"].tolist())
    np.testing.assert_allclose(embeddings, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("section", "packages"), [("Milvus", ["pymilvus", "milvus_lite"]), ("LanceDB", ["lancedb"])]
)
def test_databases(section, packages, tmp_path, monkeypatch):
    """The first hit and its score belong to the inner product, not to cosine or L2."""
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    documents = np.array([[1.0, 0.1], [3.0, 3.0], [0.9, 0.0]], dtype=np.float32)
    names = {"documents": documents, "queries": np.array([[1.0, 0.0]], dtype=np.float32)}
    exec(block("serving.md", section), names)
    found = names["hits"][0][0] if section == "Milvus" else names["found"][0]
    score = found["distance"] if section == "Milvus" else 1 - found["_distance"]
    assert (found["id"], score) == (1, pytest.approx(3.0))
