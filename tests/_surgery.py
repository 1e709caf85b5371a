"""Helpers of the tests of model surgery: what a model ends in, and what it says, also once it is
saved."""

import json
import subprocess
import sys

from _tiny import ROWS
from sentence_transformers.base.modules import Dense, Router

QUERIES = [row[0] for row in ROWS[:6]]
DOCUMENTS = [row[1] for row in ROWS[:6]]
DISCRETE = ["cosine", "dot", "qnorm", "dnorm"]

FRESH_PROCESS = """
import json, sys
sys.modules["st_magnitude"] = None  # an import of it fails from here on
from sentence_transformers import SentenceTransformer
folders, queries, documents = json.load(sys.stdin)
found = []
for folder in folders:
    model = SentenceTransformer(folder, device="cpu")
    scores = model.similarity(model.encode_query(queries), model.encode_document(documents))
    found.append((model.similarity_fn_name, scores.tolist()))
json.dump(found, open(sys.argv[1], "w"))
"""


def in_a_fresh_process(folders, output):
    """The similarity that each saved model names, and its scores, where this package cannot be
    imported."""
    given = json.dumps([[str(folder) for folder in folders], QUERIES, DOCUMENTS])
    command = [sys.executable, "-c", FRESH_PROCESS, str(output)]
    subprocess.run(command, input=given, text=True, check=True, timeout=300)
    return zip(*json.loads(output.read_text()), strict=True)


def is_stock(folder):
    """Whether sentence-transformers has every class of a saved model."""
    modules = json.loads((folder / "modules.json").read_text())
    return all(module["type"].startswith("sentence_transformers.") for module in modules)


def encode(model, texts=DOCUMENTS):
    return model.encode(texts, convert_to_tensor=True)


def scores(model):
    """By whatever function the model names, as its users will."""
    queries, documents = model.encode_query(QUERIES), model.encode_document(DOCUMENTS)
    return model.similarity(queries, documents)


def types(model):
    return [type(module).__name__ for module in model]


def unit(embeddings):
    return embeddings / embeddings.norm(dim=1, keepdim=True)


def routes(query, document):
    return Router({"query": query, "document": document}, default_route="document")


def head(*more):
    return [Dense(32, 32, activation_function=None), *more]
