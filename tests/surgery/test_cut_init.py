"""Cut-initialisation of text models and of plain modules."""

import copy

import numpy as np
import pytest
import torch
from _surgery import DOCUMENTS, QUERIES, encode, head, routes, types
from _tiny import load_transformer, save_transformer
from sentence_transformers.base.modules import Dense, Normalize
from torch import nn

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")


def test_cut_of_minilm_is_exact(minilm, caplog):
    """It ends in Normalize, behind which nothing changes; before it norms are a third, and ranks as they were."""
    directions = encode(minilm)
    raw = encode(stm.strip_normalize(copy.deepcopy(minilm)))
    report = stm.cut_init(minilm, c=3.0)
    assert types(minilm) == ["Transformer", "Pooling", "Normalize"]
    assert set(report.parameters) == {f"0.model.encoder.layer.5.output.LayerNorm.{p}" for p in ("weight", "bias")}
    torch.testing.assert_close(encode(minilm), directions, rtol=1e-5, atol=1e-6)
    cut = encode(stm.strip_normalize(minilm))
    torch.testing.assert_close(cut, raw / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(report.norms_after["text"], report.norms_before["text"] / 3, rtol=1e-6)
    assert report.spearman == {"text": 1.0}
    assert "ratio 0.3333" in str(report)
    assert "Spearman of similarities 1.000" in str(report)
    assert not caplog.records


def test_cut_of_the_output_speeds_up_the_last_map_alone(model):
    """Similarities do not change, so layers below get the gradient that they got before."""
    model.double().append(Normalize())
    columns = [dict(model.preprocess(texts)) for texts in (QUERIES, DOCUMENTS)]

    def gradients():
        model.zero_grad()
        stm.CosineRankingLoss(model)([dict(column) for column in columns]).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    before = gradients()
    cut = set(stm.cut_init(model, 3.0).parameters)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, before[name] * (3 if name in cut else 1), rtol=1e-5, atol=1e-7)


def test_cut_of_everything_warns_and_is_told(minilm, caplog):
    report = stm.cut_init(minilm, c=3.0, where="all", probe=QUERIES + DOCUMENTS)
    assert len(report.parameters) == len(list(minilm.parameters()))
    assert report.spearman["text"] < 0.6
    assert ["destroys what it has learned" in record.message for record in caplog.records] == [True]


def fresh(model):
    """The same architecture as it leaves its constructor."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def test_untrained_models_are_cut_without_a_warning(model, caplog):
    before = {name: p.detach().clone() for name, p in fresh(model).named_parameters()}
    stm.cut_init(model, c=4.0, where="all")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] / 4)
    assert not caplog.records


def test_weights_without_a_bias_look_trained_as_well(tmp_path, caplog):
    stm.cut_init(load_transformer(save_transformer(tmp_path, "llama"), "lasttoken"), where="all")
    assert "destroys" in caplog.text


@pytest.mark.parametrize(
    ("kind", "pooling"), [("bert", "cls"), ("llama", "lasttoken"), ("gemma", "lasttoken"), ("t5", "mean")]
)
def test_cut_of_encoders_and_decoders(tmp_path, kind, pooling):
    model = load_transformer(save_transformer(tmp_path, kind), pooling)
    raw = encode(model)
    report = stm.cut_init(model, 9.0)
    torch.testing.assert_close(encode(model), raw / 9, rtol=1e-4, atol=1e-5)
    assert report.spearman["text"] == pytest.approx(1)


def test_cut_of_heads(model):
    model.extend([*head(), Normalize()])
    report = stm.cut_init(model, 3.0, probe=DOCUMENTS)
    assert set(report.parameters) == {"2.linear.weight", "2.linear.bias"}
    assert len(report.norms_before["text"]) == len(DOCUMENTS)


@pytest.mark.parametrize("case", ["shared layers", "tanh", "routes"])
def test_cut_says_so_when_there_is_no_last_affine_map(model, tmp_path, case):
    if case == "shared layers":
        model = load_transformer(save_transformer(tmp_path, "albert"))
    else:
        model.append(Dense(32, 32) if case == "tanh" else routes(head(), head()))
    model.append(Normalize())
    before, modules = copy.deepcopy(model.state_dict()), types(model)
    with pytest.raises(ValueError, match=r"Append a Dense|No last affine map"):
        stm.cut_init(model)
    assert types(model) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_cut_by_choice(model):
    names = [name for name, _ in model.named_parameters() if name.endswith("lin2.weight")]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = stm.cut_init(
        model, 2.0, where=lambda name, parameter: name.endswith("lin2.weight") and parameter.ndim == 2
    )
    assert list(report.parameters) == names
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name] / (2 if name in names else 1))
    with pytest.raises(ValueError, match="no parameter"):
        stm.cut_init(model, where=lambda name, parameter: False)


def test_cut_of_other_modules():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    with pytest.raises(ValueError, match="but not that of Sequential"):
        stm.cut_init(model)
    report = stm.cut_init(model, 2.0, where="all", probe=torch.linspace(-1, 1, 42).view(7, 6).sin())
    assert len(report.parameters) == 4
    assert report.norms_after["output"].mean() < 0.6 * report.norms_before["output"].mean()
    assert stm.cut_init(model, 2.0, where="all").norms_before == {}


@pytest.mark.parametrize(
    ("options", "message"), [({"c": 0}, "positive"), ({"c": float("nan")}, "positive"), ({"where": "last"}, "'last'")]
)
def test_cut_checks_its_arguments(model, options, message):
    with pytest.raises(ValueError, match=message):
        stm.cut_init(model, **options)
