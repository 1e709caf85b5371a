"""GradScale against the formula in float64, and cut-initialisation."""

import copy

import numpy as np
import pytest
import torch
from _losses import assert_same_gradients, features, gradients, value_and_gradients
from _surgery import head, routes
from _tiny import raw_embeddings
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize
from torch import nn

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm
from st_magnitude.surgery.gradients import grad_scale


def leaf(*shape, scale=1.0):
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def cosine_loss(x, y):
    """InfoNCE under cosine, in whatever precision it is given."""
    a, b = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
    return nn.functional.cross_entropy(5 * a @ b.T, torch.arange(len(x)))


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5, -1.0, 3])
def test_gradients_are_scaled_and_values_are_not(power):
    x, y = leaf(6, 5, scale=3.0), torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(grad_scale(x, power), x)
    with torch.no_grad():
        assert grad_scale(x, power) is x
    (got,) = torch.autograd.grad(cosine_loss(grad_scale(x, power), y), x)
    (plain,) = torch.autograd.grad(cosine_loss(x, y), x)
    expected = x.detach().pow(2).sum(dim=1, keepdim=True).sqrt() ** power * plain
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_double_backward_takes_the_factor_as_a_constant():
    x = leaf(4, 3)
    factor = x.detach().norm(dim=1, keepdim=True)
    (first,) = torch.autograd.grad(grad_scale(x).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), factor * 3 * x.detach() ** 2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, factor**2 * 6 * x.detach())


@pytest.mark.parametrize("power", [1.0, -1.0, 2.0, -10.0, 10.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extremes_are_finite(power, dtype):
    """Zero rows, norms beyond float16 and tiny ones."""
    big = 3e4 if dtype == torch.float16 else 1e15
    x = torch.tensor([[0.0] * 8, [big] * 8, [1e-7] * 8, [1.0] * 8], dtype=dtype, requires_grad=True)
    out = grad_scale(x, power)
    assert torch.equal(out, x)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.dtype == dtype
    if dtype == torch.float64:
        assert x.grad[0].tolist() == pytest.approx([1e-6**power] * 8)
    assert x.grad[3].tolist() == pytest.approx([8 ** (power / 2)] * 8, rel=1e-2, abs=1e-5)


def expected_gradients(model, power, similarity, scale):
    """By hand: through the raw embeddings, whose gradients are multiplied by |z|^p."""
    model.zero_grad()
    raw = raw_embeddings(model, features(model, 6))
    loss = nn.functional.cross_entropy(scale * similarity(*raw), torch.arange(len(raw[0])))
    upstream = torch.autograd.grad(loss, raw, retain_graph=True)
    factors = [z.detach().norm(dim=1, keepdim=True) ** power for z in raw]
    torch.autograd.backward(raw, [g * factor for g, factor in zip(upstream, factors, strict=True)])
    return gradients(model)


@pytest.mark.parametrize("mini_batch_size", [None, 4], ids=["plain", "cached"])
@pytest.mark.parametrize(
    ("tail", "similarity", "power"),
    [
        ([], stm.COSINE, -0.5),
        ([Normalize()], stm.COSINE, 1.0),
        ([ExponentNorm(1.0, 0.5)], stm.Similarity(1.0, 0.5), 1.0),
    ],
)
def test_before_the_end_of_a_model(model, mini_batch_size, tail, similarity, power):
    model.double()
    expected = expected_gradients(model, power, similarity, scale=3.0)
    model.extend(tail).double()
    loss = stm.MagnitudeRankingLoss(model, similarity, scale=3.0, mini_batch_size=mini_batch_size)
    _, plain = value_and_gradients(model, loss(features(model, 6)))
    with stm.attach_grad_scale(model, power):
        _, scaled = value_and_gradients(model, loss(features(model, 6)))
    model.insert(len(model) - len(tail), stm.GradScale(power))
    _, by_module = value_and_gradients(model, loss(features(model, 6)))
    assert_same_gradients(by_module, scaled, rtol=0, atol=0)
    with pytest.raises(ValueError, match="already"):
        stm.attach_grad_scale(model)
    del model[len(model) - len(tail) - 1]
    assert any(gradient.abs().max() > 1e-6 for gradient in expected.values())
    assert_same_gradients(scaled, expected, rtol=1e-5, atol=1e-7)
    _, removed = value_and_gradients(model, loss(features(model, 6)))
    torch.testing.assert_close(removed, plain, rtol=0, atol=0)


def test_routes(model):
    model.append(routes(head(Normalize()), head(Normalize())))
    stm.attach_grad_scale(model)
    hooked = [type(m).__name__ for m in model.modules() if m._forward_hooks]
    assert hooked == ["Dense", "Dense"]


def test_refused_behind_a_normalization_and_twice():
    class Unit(nn.Module):
        def forward(self, x):
            return nn.functional.normalize(x)

    model = nn.Sequential(nn.Linear(4, 3), Unit())
    handle = stm.attach_grad_scale(model)
    with pytest.raises(ValueError, match="already"):
        stm.attach_grad_scale(model)
    for wrong in (model, nn.Sequential(Unit(), nn.Identity(), stm.GradScale())):
        with pytest.raises(ValueError, match="have norm 1"):
            wrong(torch.randn(5, 4, requires_grad=True))
    handle.close()
    stm.attach_grad_scale(model[0])
    model(torch.randn(5, 4))


def test_a_saved_model_has_no_grad_scale(minilm, tmp_path):
    """export leaves it out; a checkpoint of a Trainer keeps it, and loads."""
    expected = minilm.encode("tea")
    minilm.insert(2, stm.GradScale(0.5))
    stm.export(minilm, tmp_path / "exported")
    assert isinstance(minilm[2], stm.GradScale)
    minilm.save_pretrained(str(tmp_path / "checkpoint"))
    plain = SentenceTransformer(str(tmp_path / "exported"), device="cpu")
    again = stm.load(tmp_path / "checkpoint", device="cpu")
    assert [type(part) for part in plain] == [type(part) for part in minilm if part != minilm[2]]
    assert again[2].power == 0.5
    for model in (plain, again):
        np.testing.assert_allclose(model.encode("tea"), expected, atol=1e-6)


def test_other_outputs():
    class Outputs(nn.Linear):
        kind = "tensor"

        def forward(self, x):
            y = super().forward(x)
            return {"tensor": y, "dict": {"sentence_embedding": y}, "tuple": (y, y)}[self.kind]

    model = Outputs(3, 2)
    stm.attach_grad_scale(model, 2.0)
    x = torch.randn(4, 3)
    for model.kind in ("tensor", "dict"):
        out = model(x)
        y = out if model.kind == "tensor" else out["sentence_embedding"]
        (gradient,) = torch.autograd.grad(y.sum(), model.bias)
        torch.testing.assert_close(gradient, (y.detach() ** 2).sum().expand(2))
    model.kind = "tuple"  # CLIP's output has the embeddings of two encoders
    with pytest.raises(TypeError, match=r"call grad_scale"):
        model(x)


def test_cut_divides_every_weight_or_those_of_a_choice(minilm, caplog):
    """It warns of a model that is trained, and not of a head that is named."""
    before = copy.deepcopy(minilm.state_dict())
    assert stm.cut_init(minilm, where=lambda name, _: "layer.5" in name) is minilm
    assert not caplog.records
    for name, parameter in minilm.named_parameters():
        assert torch.equal(parameter, before[name] / (3 if "layer.5" in name else 1))
    stm.cut_init(minilm, c=2.0)
    for name, parameter in minilm.named_parameters():
        assert torch.equal(parameter, before[name] / (3 if "layer.5" in name else 1) / 2)
    assert "looks trained" in caplog.text
    with pytest.raises(ValueError, match="no parameter"):
        stm.cut_init(minilm, where=lambda name, parameter: False)


def test_cut_of_other_modules():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    for options in ({"where": "last"}, {"c": 0}):
        with pytest.raises(ValueError, match=r"'last'|positive"):
            stm.cut_init(model, **options)
    before = [p.detach().clone() for p in model.parameters()]
    model.logit_scale = nn.Parameter(torch.tensor(2.5))
    model.logit_bias = nn.Parameter(torch.tensor(-10.0))
    model.append(norm := ExponentNorm(0.3, 0.8))
    exponents = norm.similarity.exponents
    stm.cut_init(model, 2.0)
    assert (model.logit_scale.item(), model.logit_bias.item()) == (2.5, -10.0)  # no weights
    assert norm.similarity.exponents == exponents
    model = model[:3]
    assert all(torch.equal(p, old / 2) for p, old in zip(model.parameters(), before, strict=True))
