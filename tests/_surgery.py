"""Helpers of the tests of model surgery: what a model ends in, and what it says."""

from _tiny import ROWS
from sentence_transformers.base.modules import Dense, Router

QUERIES = [row[0] for row in ROWS[:6]]
DOCUMENTS = [row[1] for row in ROWS[:6]]


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
