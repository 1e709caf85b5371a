"""The end of a model, and the size of its embeddings."""

import pytest
import torch
from _surgery import QUERIES, encode, head, routes, scores, types, unit
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Dropout

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import normalizes_output


def test_what_follows_normalize(model):
    model.extend([Normalize(), *head()])
    assert not normalizes_output(model)
    assert types(stm.strip_normalize(model)) == ["Transformer", "Pooling", "Normalize", "Dense"]
    model.extend([Normalize(), Normalize(), ExponentNorm(0.5, 0.5)])
    assert normalizes_output(model)
    assert types(stm.strip_normalize(model)) == ["Transformer", "Pooling", "Normalize", "Dense"]
    model.extend([Normalize(), Dropout(0.1)])
    assert normalizes_output(model)
    with pytest.raises(ValueError, match="followed by Dropout"):
        stm.strip_normalize(model)


@pytest.mark.parametrize("before", [list, lambda: [Normalize()], lambda: [ExponentNorm(0.5, 0.5)]])
@pytest.mark.parametrize(
    ("similarity", "tail", "function"),
    [
        ("cosine", "Normalize", "cosine"),
        ("dot", "Pooling", "dot"),
        ("qnorm", "Pooling", "dot"),
        ("dnorm", "Pooling", "cosine"),
        (stm.Similarity(1.0, 0.4), "ExponentNorm", "dot"),
        (stm.Similarity(0.3, 1.0), "Pooling", "cosine"),
    ],
)
def test_prepare(model, before, similarity, tail, function):
    raw_queries = encode(model, QUERIES)
    raw_documents = encode(model)
    model.extend(before())
    for _ in range(2):
        assert stm.prepare(model, similarity) is model
        assert types(model) == ["Transformer", "Pooling", *([] if tail == "Pooling" else [tail])]
        assert model.similarity_fn_name == function
    # Whatever the tail, the scores rank as the similarity does
    query, document = stm.Similarity.named(similarity).exponents
    queries = unit(raw_queries) * raw_queries.norm(dim=1, keepdim=True) ** (1 - query)
    documents = unit(raw_documents) * raw_documents.norm(dim=1, keepdim=True) ** (1 - document)
    expected = queries @ documents.T
    assert torch.equal(scores(model).argsort(dim=1), expected.argsort(dim=1))


def by_routes(model):
    """Embeddings by the route of queries, then by that of documents."""
    both = model.encode_query, model.encode_document
    return torch.cat([encode_by(QUERIES, convert_to_tensor=True) for encode_by in both])


@pytest.mark.parametrize("end", [[], [Normalize()]])
def test_routes_are_stripped(model, end):
    """One that normalises is enough: a loss of magnitude would see its unit embeddings."""
    model.append(routes(head(Normalize()), head(*end)))
    assert normalizes_output(model)
    stm.prepare(model, "cosine")
    directions = by_routes(model)
    stm.prepare(model, "qnorm")
    assert not normalizes_output(model)
    assert model.similarity_fn_name == "dot"
    assert by_routes(model).norm(dim=1).std() > 0
    torch.testing.assert_close(unit(by_routes(model)), directions)


def test_a_route_of_nothing_but_normalize(model):
    model.append(routes(head(Normalize()), [Normalize()]))
    with pytest.raises(ValueError, match=r"'document'.*del model\[-1\]"):
        stm.strip_normalize(model)
    assert [len(route) for route in model[-1].sub_modules.values()] == [2, 1]  # all or nothing
