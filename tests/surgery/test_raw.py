"""Raw embeddings: where Normalize or ExponentNorm begins, for encoding and for training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from _lookup import bag
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import Dropout

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.raw import encode_raw, raw_embeddings, raw_features, returns_unit_vectors

TEXTS = ["red red red", "green"]
RAW = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
UNIT = torch.eye(2)


def model_of(*ends):
    return bag(["red", "green"], *ends)


def named(ends):
    return "-".join(type(module).__name__ for module in ends) or "nothing"


def dense():
    """A head that changes nothing."""
    head = Dense(2, 2, bias=False, activation_function=None)
    head.linear.weight.data = torch.eye(2)
    return head


ENDS = [
    [],
    [Dropout(0.5)],
    [ExponentNorm(1.0, 0.5)],
    [Normalize()],
    [Normalize(), Dropout(0.5), ExponentNorm(1.0, 0.5)],
    [Router({"query": [Normalize()], "document": [Normalize(module_output_name="_unit")]})],
    [Router({"query": [ExponentNorm(0.5, 0.5)], "document": [Normalize(), Dropout(0.1)]})],
    [Router({"query": [Normalize()], "document": [Normalize()]}), ExponentNorm(1.0, 0.5)],
    [Router({"query": [dense(), Normalize()], "document": [dense()]})],
]
every_end = pytest.mark.parametrize("ends", ENDS, ids=named)


@every_end
@pytest.mark.parametrize("role", ["query", "document"])
def test_encoding_stops_before_every_normalization_at_the_end(ends, role):
    model = model_of(*ends)
    before, modules = model.encode_query(TEXTS), [*model.modules()]
    torch.testing.assert_close(encode_raw(model, TEXTS, role), RAW, rtol=0, atol=0)
    assert [*model.modules()] == modules
    assert (model.encode_query(TEXTS) == before).all()


@pytest.mark.parametrize("truncate_dim", [None, 1, 2])
@every_end
def test_unit_vectors_are_what_a_model_returns(ends, truncate_dim):
    model = model_of(*ends)
    model.truncate_dim = truncate_dim
    texts = ["red red green", "red green green"]
    both = model.encode_query(texts), model.encode_document(texts)
    norms = torch.from_numpy(np.concatenate(both)).norm(dim=1)
    assert returns_unit_vectors(model) == torch.allclose(norms, torch.ones(4))


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("use", [lambda model: encode_raw(model, TEXTS, "query"), stm.cut_init])
def test_the_training_mode_stays(use, is_training):
    model = model_of(dense(), Dropout(0.5)).train(is_training)
    model[0].train(not is_training)  # such as a part that is frozen
    modes = {module: module.training for module in model.modules()}
    use(model)
    assert {module: module.training for module in modes} == modes


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([], RAW),
        ([ExponentNorm(1.0, 0.5)], RAW),
        ([Normalize()], UNIT),
        ([Normalize(), Dropout(0.5), ExponentNorm(1.0, 0.5)], UNIT),
    ],
)
def test_normalize_is_kept_on_request_and_in_losses(ends, expected):
    model = model_of(*ends)
    torch.testing.assert_close(encode_raw(model, TEXTS, "document", keep_normalize=True), expected)
    features = raw_features(model.eval(), model.preprocess(TEXTS))
    torch.testing.assert_close(features["sentence_embedding"], expected)


def test_an_error_within_the_block_leaves_the_model_as_it_was():
    model = model_of(Normalize())
    with pytest.raises(ZeroDivisionError), raw_embeddings(model):
        _ = 1 / 0
    assert isinstance(model[-1], Normalize)
