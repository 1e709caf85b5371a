"""The recipes of docs/serving.md and of examples/frameworks.py that need other packages.

The frameworks are in no extra: the nightly job installs them.
"""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
from _tiny import load_transformer, save_transformer

import st_magnitude as stm

DOCS = Path(__file__).parents[3] / "docs"


def block(section):
    """The first block of a section."""
    text = (DOCS / "serving.md").read_text(encoding="utf-8")
    parts = re.split(r"^#{2,3} (.*)\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    return re.search(r"^```py.*?\n(.*?)^```", sections[section], re.MULTILINE | re.DOTALL)[1]


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
    recipes = runpy.run_path(str(DOCS.parent / "examples" / "frameworks.py"))
    assert stm.check_serving(recipes["FRAMEWORKS"][framework](folder), folder).same


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
    exec(block(section), names)
    found = names["hits"][0][0] if section == "Milvus" else names["found"][0]
    score = found["distance"] if section == "Milvus" else 1 - found["_distance"]
    assert (found["id"], score) == (1, pytest.approx(3.0))
