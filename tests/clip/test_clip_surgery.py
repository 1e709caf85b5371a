"""cut_init and attach_grad_scale on models with an image and a text tower."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")


class Clip(nn.Module):
    """The names of open_clip: a ViT's or a ResNet's projection, a text projection, a logit scale."""

    def __init__(self, kind):
        super().__init__()
        self.visual = nn.Module()
        if kind == "vit":
            self.visual.proj = nn.Parameter(torch.randn(6, 4))
        else:
            self.visual.attnpool = nn.Module()
            self.visual.attnpool.c_proj = nn.Linear(6, 4)
        self.token_embedding = nn.Embedding(9, 6)
        self.text_projection = nn.Parameter(torch.randn(6, 4)) if kind == "vit" else nn.Linear(6, 4)
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(2.5)), nn.Parameter(torch.tensor(-1.0))
        self.tail = nn.Identity()

    def project(self, x, projection):
        return x @ projection if isinstance(projection, nn.Parameter) else projection(x)

    def encode_image(self, image, normalize=False):
        projection = self.visual.proj if hasattr(self.visual, "proj") else self.visual.attnpool.c_proj
        return self.tail(self.project(image, projection))

    def encode_text(self, text, normalize=False):
        return self.project(self.token_embedding(text).mean(1), self.text_projection)


CLIP_PROBE = torch.linspace(-1, 1, 42).view(7, 6).sin(), torch.arange(21).view(7, 3) % 9


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_cut_of_clip_projections(kind):
    model = Clip(kind).double()
    image, text = model.encode_image(CLIP_PROBE[0].double()), model.encode_text(CLIP_PROBE[1])
    report = stm.cut_init(model, 3.0, probe=(CLIP_PROBE[0].double(), CLIP_PROBE[1]))
    torch.testing.assert_close(model.encode_image(CLIP_PROBE[0].double()), image / 3)
    torch.testing.assert_close(model.encode_text(CLIP_PROBE[1]), text / 3)
    assert len(report.parameters) == (2 if kind == "vit" else 4)
    assert set(report.spearman) == {"image", "text"}
    assert (model.logit_scale.item(), model.logit_bias.item()) == (2.5, -1.0)


def test_cut_of_all_spares_logit_scale_and_ties():
    model = Clip("vit")
    model.twin = nn.Module()
    model.twin.weight = model.token_embedding.weight  # tied by identity
    model.view = nn.Parameter(model.text_projection.detach())  # and by storage
    embedding, projection = model.token_embedding.weight.detach().clone(), model.text_projection.detach().clone()
    report = stm.cut_init(model, 5.0, where="all", probe=CLIP_PROBE)
    torch.testing.assert_close(model.token_embedding.weight.detach(), embedding / 5)
    torch.testing.assert_close(model.text_projection.detach(), projection / 5)
    assert (model.logit_scale.item(), model.logit_bias.item()) == (2.5, -1.0)
    assert not {"logit_scale", "logit_bias", "twin.weight", "view"} & set(report.parameters)


def test_cut_of_clip_that_is_not_linear_at_the_end_is_undone():
    model = Clip("vit")
    model.tail = nn.Tanh()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="something nonlinear"):
        stm.cut_init(model, probe=CLIP_PROBE)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("dtype", "c"), [(torch.float32, 3.0), (torch.float64, 3.0), (torch.bfloat16, 4.0)])
def test_cut_of_a_real_open_clip(open_clip_model, dtype, c):
    model = open_clip_model.to(dtype).eval()
    before = copy.deepcopy(model.state_dict())
    images, tokens = torch.randn(7, 3, 16, 16, dtype=dtype), torch.randint(1, 40, (9, 6))
    with torch.no_grad():
        raw, scores = (model.encode_image(images), model.encode_text(tokens)), model.get_logits(images, tokens)[0]
    report = stm.cut_init(model, c)  # its own probe
    assert set(report.parameters) == {"visual.proj", "text_projection"}
    assert report.spearman == {"image": 1.0, "text": 1.0}
    for role, norms in report.norms_before.items():
        np.testing.assert_allclose(report.norms_after[role], norms / c, rtol=1e-5)
    for name, value in model.state_dict().items():  # logit_scale among those that stay
        assert torch.equal(value, before[name] / c if name in report.parameters else before[name]), name
    with torch.no_grad():
        for x, cut in zip(raw, (model.encode_image(images), model.encode_text(tokens)), strict=True):
            torch.testing.assert_close(cut, x / c)
        assert torch.equal(model.get_logits(images, tokens)[0].argsort(), scores.argsort())


CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class TinyClip(nn.Module):
    """The names of open_clip's CLIP, and its way of normalising."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Linear(5, 4)
        self.token_embedding = nn.Embedding(9, 5)
        self.text_projection = nn.Parameter(torch.randn(5, 4))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, image, normalize=False):
        x = self.visual(image)
        return nn.functional.normalize(x, dim=-1) if normalize else x

    def encode_text(self, text, normalize=False):
        x = self.token_embedding(text).mean(1) @ self.text_projection
        return nn.functional.normalize(x, dim=-1) if normalize else x

    def forward(self, image, text):
        logits = self.logit_scale.exp() * self.encode_image(image, normalize=True) @ self.encode_text(text, True).T
        return nn.functional.cross_entropy(logits, torch.arange(len(image)))


def test_clip():
    model = TinyClip().double()
    image, text = torch.randn(6, 5, dtype=torch.float64), torch.randint(9, (6, 3))
    raw = [model.encode_image(image), model.encode_text(text)]
    a, b = (nn.functional.normalize(x, dim=-1) for x in raw)
    loss = nn.functional.cross_entropy(model.logit_scale.exp() * a @ b.T, torch.arange(6))
    upstream = torch.autograd.grad(loss, raw, retain_graph=True)
    scaled = [g * x.detach().norm(dim=1, keepdim=True) for g, x in zip(upstream, raw, strict=True)]
    weights = [model.visual.weight, model.text_projection]
    expected = torch.autograd.grad(raw, weights, scaled, retain_graph=True)
    value = loss.item()

    handle = stm.attach_grad_scale(model)
    with pytest.raises(ValueError, match="already"):
        stm.attach_grad_scale(model)
    for which in (model, copy.deepcopy(model)):  # a copy scales its own weights
        which.zero_grad()
        result = which(image, text)
        assert result.item() == pytest.approx(value, rel=1e-12)
        result.backward()
        for weight, gradient in zip([which.visual.weight, which.text_projection], expected, strict=True):
            torch.testing.assert_close(weight.grad, gradient, **CLOSE)
    handle.remove()
    model.zero_grad()
    model(image, text).backward()
    assert not torch.allclose(model.visual.weight.grad, expected[0])


OUTPUTS = {
    "image": (lambda model, image, text: model.encode_image(image), "visual.conv1.weight"),
    "text": (lambda model, image, text: model.encode_text(text), "token_embedding.weight"),
    "image of forward": (lambda model, image, text: model(image, text)[0], "visual.conv1.weight"),
    "text of forward": (lambda model, image, text: model(image, text)[1], "token_embedding.weight"),
}


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("output", OUTPUTS)
def test_a_real_open_clip(open_clip_model, output, power):
    """Row by row, |z|^p times the plain gradient for the raw z, also where forward has normalised it."""
    model, (encode, name) = open_clip_model.double(), OUTPUTS[output]
    inputs = torch.randn(5, 3, 16, 16, dtype=torch.float64), torch.randint(1, 40, (5, 6))
    weight, upstream = model.get_parameter(name), torch.randn(5, 12, dtype=torch.float64)
    lengths = OUTPUTS[output.partition(" ")[0]][0](model, *inputs).detach().norm(dim=1)
    assert lengths.std() > 0.01

    def rows():
        x = encode(model, *inputs)  # (5, 12)
        return x, [torch.autograd.grad(z @ u, weight, retain_graph=True)[0] for z, u in zip(x, upstream, strict=True)]

    value, plain = rows()
    with stm.attach_grad_scale(model, power):
        scaled_value, scaled = rows()
    torch.testing.assert_close(scaled_value, value, **CLOSE)
    for found, gradient, length in zip(scaled, plain, lengths, strict=True):
        torch.testing.assert_close(found, length**power * gradient, **CLOSE)


def test_coca_is_refused():
    model = TinyClip()
    model._encode_image = None
    with pytest.raises(ValueError, match=r"stm\.grad_scale\(features\)"):
        stm.attach_grad_scale(model)
