"""prepare, export and load of a MultiVectorEncoder: which tokens are normalised, and what a fresh
process scores."""

import itertools

import pytest
import torch
from _surgery import DISCRETE, DOCUMENTS, QUERIES, in_a_fresh_process, is_stock, types
from _tiny import load_tokens
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.multi_vector_encoder.modules import HierarchicalTokenPooling

import st_magnitude as stm
from st_magnitude.surgery.tokens import normalized_roles


def scored(similarity, raw):
    """MaxSim of raw tokens, one pair at a time, in float64."""
    queries, documents = ([x.double() for x in encode(texts)] for encode, texts in raw)
    return torch.tensor(
        [[similarity(q, d).max(dim=1).values.sum() for d in documents] for q in queries]
    )


def test_saved_models_score_by_their_similarity_in_a_fresh_process(folder, tmp_path):
    raw, expected, paths = load_tokens(folder, normalize=False), [], []
    for name, normalize in itertools.product(DISCRETE, [True, False]):
        similarity = stm.Similarity.named(name)
        model = stm.prepare(load_tokens(folder, normalize), name)
        roles = zip(("query", "document"), similarity.exponents, strict=True)
        assert normalized_roles(model) == {role for role, exponent in roles if exponent == 1}
        both = [(raw.encode_query, QUERIES), (raw.encode_document, DOCUMENTS)]
        expected.append(scored(similarity, both))
        paths.append(stm.export(model, tmp_path / f"{name} {normalize}"))
        assert is_stock(paths[-1])
    _, found = in_a_fresh_process("MultiVectorEncoder", paths, tmp_path / "found.json")
    found = torch.tensor(found).double()
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-4)


def test_preparing_again_and_back(folder):
    model = load_tokens(folder)
    before = types(model)
    for name in (*DISCRETE, "qnorm", "qnorm", "cosine"):
        stm.prepare(model, name)
    assert types(model) == before


@pytest.mark.parametrize(
    ("change", "similarity", "message"),
    [
        (None, stm.Similarity(1, 0.5), r"fractional power.*NormPruning\(exponent"),
        (HierarchicalTokenPooling(2.0), "qnorm", "pools tokens by HierarchicalTokenPooling"),
        (stm.NormPruning(1.0), "qnorm", "pools tokens by NormPruning"),
        (Router({"query": [Normalize("token_embeddings")]}), "qnorm", "The Router of this model"),
    ],
)
def test_what_cannot_be_prepared(folder, change, similarity, message):
    model = load_tokens(folder, normalize=False)
    if change is not None:
        model.append(change)
    before = types(model)
    with pytest.raises(ValueError, match=message):
        stm.prepare(model, similarity)
    assert types(model) == before


def test_a_retriever_of_transformers_normalises_inside(folder):
    model = load_tokens(folder, normalize=False)
    model[0].transformer_task, before = "retrieval", types(model)
    with pytest.raises(ValueError, match="The Transformer of this model normalises tokens itself"):
        stm.prepare(model, "qnorm")
    assert types(stm.prepare(model, "cosine")) == before


def test_what_cannot_be_exported(folder, tmp_path):
    model = stm.prepare(load_tokens(folder), "qnorm")
    model.append(stm.NormPruning(1.0))
    with pytest.raises(ValueError, match="contains NormPruning"):
        stm.export(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
