"""The end of a model, and the size of its embeddings."""

import copy

import pytest
import torch
from _surgery import DOCUMENTS, QUERIES, encode, head, routes, scores, types, unit
from _tiny import load_transformer, save_transformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm
from torch import nn

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.normalize import PROBE, rescale_output
from st_magnitude.surgery.raw import normalizes_output

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_follows_normalize(model):
    model.extend([Normalize(), *head()])
    assert not normalizes_output(model)
    assert types(stm.strip_normalize(model)) == ["Transformer", "Pooling", "Normalize", "Dense"]
    model.extend([Normalize(), Normalize(), ExponentNorm(0.5, 0.5)])
    assert normalizes_output(model)
    for refuses in (stm.LearnableNormLoss, rescale_output):
        with pytest.raises(ValueError, match=r"stm\.strip_normalize\(model\)"):
            refuses(model)
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


# --- rescale_output -------------------------------------------------------------------------------


def check_rescaled(model, parameters_changed, texts=DOCUMENTS):
    """Norms by the factor, cosines not at all, through the named parameters only."""
    before = encode(model, texts).double()
    state = copy.deepcopy(model.state_dict())
    assert before.norm(dim=1).std() > 1e-3
    assert rescale_output(model, 0.3) is model
    after = encode(model, texts).double()
    torch.testing.assert_close(after.norm(dim=1), 0.3 * before.norm(dim=1), rtol=1e-5, atol=0)
    torch.testing.assert_close(unit(after), unit(before), rtol=0, atol=1e-5)
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, state[name])]
    assert {name.split(".", 1)[1] for name in changed} == parameters_changed


@pytest.mark.parametrize(
    ("model_type", "pooling", "changed"),
    [
        ("bert", "mean", "encoder.layer.1.output.LayerNorm"),
        ("distilbert", "cls", "transformer.layer.1.output_layer_norm"),
        ("modernbert", "mean", "final_norm"),
        ("llama", "lasttoken", "norm"),
        ("qwen2", "lasttoken", "norm"),
        ("gemma", "lasttoken", "norm"),  # multiplies by 1 + weight
        ("t5", "mean", "encoder.final_layer_norm"),
    ],
)
def test_rescale_transformers(tmp_path, model_type, pooling, changed):
    parameters = ["weight", "bias"] if model_type in ("bert", "distilbert") else ["weight"]
    model = load_transformer(save_transformer(tmp_path, model_type), pooling)
    check_rescaled(model, {f"model.{changed}.{parameter}" for parameter in parameters})


def test_rescale_heads(model, static_model):
    check_rescaled(static_model, {"embedding.weight"})
    rescale_output(static_model)  # to a mean norm of 1
    assert encode(static_model, PROBE).norm(dim=1).mean().item() == pytest.approx(1, rel=1e-5)
    for activation in (nn.Identity(), nn.ReLU()):
        model.append(Dense(32, 32, activation_function=activation))
        check_rescaled(model, {"linear.weight", "linear.bias"})
    model.append(LayerNorm(32))
    with torch.no_grad():
        model[-1].norm.weight.copy_(torch.rand(32) + 0.5)
        model[-1].norm.bias.normal_()
    check_rescaled(model, {"norm.weight", "norm.bias"})


@pytest.mark.parametrize(
    ("model_type", "end"),
    [
        ("albert", []),  # one layer, one LayerNorm, used twice
        ("distilbert", [Dense(32, 32, activation_function=None, use_residual=True)]),
        ("distilbert", [Dense(32, 32)]),  # tanh
    ],
)
def test_rescale_refuses_what_it_cannot_do(tmp_path, model_type, end):
    model = load_transformer(save_transformer(tmp_path, model_type)).extend(end)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"Append a Dense|No last affine map"):
        rescale_output(model, 0.3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
