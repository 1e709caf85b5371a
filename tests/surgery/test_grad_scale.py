"""GradScale: gradients against the formula in float64, where it is put, and the paper's propositions about norms."""

import math

import pytest
import torch
from _tiny import ROWS, load_transformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Dropout
from torch import nn

import st_magnitude as stm
from st_magnitude.modules import ExponentNorm

pytestmark = pytest.mark.usefixtures("one_thread")

POWERS = [1.0, 2.0, 0.5, -1.0, 3]


def leaf(*shape, dtype=torch.float64, scale=1.0):
    return (scale * torch.randn(*shape, dtype=dtype)).requires_grad_()


def cosine_loss(x, y):
    """InfoNCE under cosine, in whatever precision it is given."""
    a, b = x / x.norm(dim=1, keepdim=True), y / y.norm(dim=1, keepdim=True)
    return nn.functional.cross_entropy(5 * a @ b.T, torch.arange(len(x)))


def reference(x, loss, power):
    """|z|^p times the plain gradient, row by row, by hand."""
    (plain,) = torch.autograd.grad(loss(x), x)
    return torch.stack([row.pow(2).sum().sqrt() ** power * g for row, g in zip(x.detach(), plain, strict=True)])


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", POWERS)
def test_gradients_are_scaled_and_values_are_not(power):
    x, y = leaf(6, 5, scale=3.0), torch.randn(6, 5, dtype=torch.float64)
    assert torch.equal(stm.grad_scale(x, power), x)
    (got,) = torch.autograd.grad(cosine_loss(stm.grad_scale(x, power), y), x)
    torch.testing.assert_close(got, reference(x, lambda z: cosine_loss(z, y), power), rtol=1e-12, atol=0)


def test_power_1_takes_the_norm_out_of_a_cosine_gradient():
    x, y = leaf(4, 5), torch.randn(4, 5, dtype=torch.float64)
    gradients = []
    for length in (1.0, 7.0):
        z = (x * length).detach().requires_grad_()
        gradients.append(torch.autograd.grad(cosine_loss(stm.grad_scale(z), y), z)[0])
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)


def test_any_leading_shape():
    x = leaf(2, 3, 4)
    stm.grad_scale(x, 2.0).sum().backward()
    torch.testing.assert_close(x.grad, (x**2).sum(-1, keepdim=True).expand_as(x).detach())


def test_divided_by_the_mean():
    x = leaf(5, 3)
    stm.grad_scale(x, divide_by_mean=True).sum().backward()
    lengths = x.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(x.grad, (lengths / lengths.mean()).expand_as(x))


def test_double_backward_takes_the_factor_as_a_constant():
    x = leaf(4, 3)
    factor = x.detach().norm(dim=1, keepdim=True)
    (first,) = torch.autograd.grad(stm.grad_scale(x).pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), factor * 3 * x.detach() ** 2)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, factor**2 * 6 * x.detach())


def test_torch_func():
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = x.norm(dim=1, keepdim=True) * x.cos()
    torch.testing.assert_close(torch.func.grad(lambda z: stm.grad_scale(z).sin().sum())(x), expected)
    per_row = torch.func.vmap(torch.func.grad(lambda z: stm.grad_scale(z).sin().sum()))
    torch.testing.assert_close(per_row(x), expected)


@pytest.mark.parametrize("power", [1.0, -1.0, 2.0, -10.0, 10.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_extremes_are_finite(power, dtype):
    """Zero rows, norms beyond float16 and tiny ones."""
    big = 3e4 if dtype == torch.float16 else 1e15
    x = torch.tensor([[0.0] * 8, [big] * 8, [1e-7] * 8, [1.0] * 8], dtype=dtype, requires_grad=True)
    out = stm.grad_scale(x, power)
    assert torch.equal(out, x)
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad[3].double(), torch.full((8,), 8 ** (power / 2)).double(), rtol=1e-2, atol=1e-5)


def test_zero_rows_count_as_the_smallest_norm():
    x = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    for power in (1.0, -1.0):
        (gradient,) = torch.autograd.grad(stm.grad_scale(x, power).sum(), x)
        torch.testing.assert_close(gradient, torch.full_like(x, 1e-6**power).detach())


def test_half_precision_norms_are_taken_in_float32():
    x = torch.full((1, 8), 3e4, dtype=torch.float16, requires_grad=True)  # a norm of 85,000 overflows float16
    stm.grad_scale(x, 0.5).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((1, 8), (3e4 * 8**0.5) ** 0.5).half(), rtol=2e-3, atol=0)


def test_nothing_without_gradients():
    x = leaf(3, 2)
    with torch.no_grad():
        assert stm.grad_scale(x) is x
    assert stm.grad_scale(x, 0.0) is x


@pytest.mark.parametrize("power", [math.nan, math.inf, "1", None])
def test_power_is_a_finite_number(power):
    with pytest.raises(ValueError, match="power"):
        stm.grad_scale(torch.ones(2, 2), power)


@pytest.mark.parametrize("x", [torch.ones(2, 2, dtype=torch.long), torch.tensor(1.0), [[1.0]]])
def test_embeddings_are_floating_point(x):
    with pytest.raises(TypeError, match="floating-point"):
        stm.grad_scale(x)


# --- what the paper says of norms -------------------------------------------------------------------------------------


def test_cosine_gradient_is_sine_over_norm():
    """Proposition 3.1."""
    x, y = leaf(50, 6, scale=4.0), torch.randn(50, 6, dtype=torch.float64)
    cosine = nn.functional.cosine_similarity(x, y)
    (gradient,) = torch.autograd.grad(cosine.sum(), x)
    expected = (1 - cosine.detach() ** 2).sqrt() / x.detach().norm(dim=1)
    torch.testing.assert_close(gradient.norm(dim=1), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close((gradient * x.detach()).sum(dim=1), torch.zeros(50).double(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_norms_never_shrink_in_a_cosine_step(power):
    """Corollary 3.3, for cosine and InfoNCE, with and without GradScale: the step is orthogonal to the point."""
    x, y = leaf(40, 6, scale=2.0), torch.randn(40, 6, dtype=torch.float64)
    for loss in (cosine_loss, lambda a, b: -nn.functional.cosine_similarity(a, b).sum()):
        (gradient,) = torch.autograd.grad(loss(stm.grad_scale(x, power), y), x)
        moved = x.detach() - 0.7 * gradient
        assert (moved.norm(dim=1) >= x.detach().norm(dim=1)).all()
        expected = (x.detach().norm(dim=1) ** 2 + 0.49 * gradient.norm(dim=1) ** 2).sqrt()
        torch.testing.assert_close(moved.norm(dim=1), expected)


def cosine_step(rho, gamma, num_pairs=500):
    """Cosines of pairs of length rho before and after a step on both: (n,), (n,)."""
    x, y = (rho * nn.functional.normalize(torch.randn(num_pairs, 4, dtype=torch.float64)) for _ in range(2))
    x, y = x.requires_grad_(), y.requires_grad_()
    before = nn.functional.cosine_similarity(x, y)
    along_x, along_y = torch.autograd.grad(before.sum(), (x, y))
    return before.detach(), nn.functional.cosine_similarity(x + gamma * along_x, y + gamma * along_y).detach()


@pytest.mark.parametrize("rho", [0.5, 1.0, 4.0, 9.0])
@pytest.mark.parametrize("gamma", [0.01, 0.5, 3.0])
def test_change_of_cosine_is_bounded(rho, gamma):
    """Theorem 3.4: below 2 gamma sin² / rho², for angles up to 90 degrees, and near it where steps are small."""
    before, after = cosine_step(rho, gamma)
    bound = 2 * gamma * (1 - before**2) / rho**2
    acute = before >= 0
    assert (after - before < bound)[acute].all()
    if gamma / rho**2 < 1e-3:
        torch.testing.assert_close(after - before, bound, rtol=0.01, atol=0)
    # All angles: the exact change, which the paper's proof bounds by leaving a positive term out where cos >= 0
    exact = (bound - 2 * (gamma / rho**2) ** 2 * before * (1 - before**2)) / (
        1 + (gamma / rho**2) ** 2 * (1 - before**2)
    )
    torch.testing.assert_close(after - before, exact, rtol=1e-7, atol=1e-12)


def test_obtuse_angles_break_the_bound():
    """As stated, without a condition on the angle, Theorem 3.4 is wrong: the last step of its proof needs cos >= 0."""
    before, after = cosine_step(rho=4.0, gamma=0.5)
    bound = 2 * 0.5 * (1 - before**2) / 16
    assert (after - before > bound)[before < -0.5].all()


# --- on models --------------------------------------------------------------------------------------------------------


def features(model, num_rows=6, num_columns=2):
    columns = zip(*(row[:num_columns] for row in ROWS[:num_rows]), strict=True)
    return [dict(model.preprocess(list(column))) for column in columns]


def gradients(model, loss, inputs=None):
    model.zero_grad()
    loss(features(model) if inputs is None else inputs, None).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def expected_gradients(model, power, similarity=stm.COSINE, scale=20.0):
    """By hand: through the raw embeddings, whose gradients are multiplied by |z|^p."""
    model.zero_grad()
    raw = [nn.Sequential(*list(model)[:2])(column)["sentence_embedding"] for column in features(model)]
    loss = nn.functional.cross_entropy(scale * similarity(*raw), torch.arange(len(raw[0])))
    upstream = torch.autograd.grad(loss, raw, retain_graph=True)
    torch.autograd.backward(raw, [g * z.detach().norm(dim=1, keepdim=True) ** power for g, z in zip(upstream, raw)])  # noqa: B905
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, expected, **tolerance):
    assert got.keys() == expected.keys()
    assert any(g.abs().max() > 1e-6 for g in expected.values())
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], **tolerance)


CLOSE = {"rtol": 1e-9, "atol": 1e-12}


@pytest.mark.parametrize("ends_in_normalize", [False, True])
@pytest.mark.parametrize("power", [1.0, -0.5])
def test_before_normalize(model, ends_in_normalize, power):
    model.double()
    expected = expected_gradients(model, power)
    if ends_in_normalize:
        model.append(Normalize())
    loss = MultipleNegativesRankingLoss(model)
    plain = gradients(model, loss)
    with stm.attach_grad_scale(model, power):
        assert_same(gradients(model, loss), expected, **CLOSE)
    assert_same(gradients(model, loss), plain, rtol=0, atol=0)  # removed


def test_dropout_and_two_normalizations_are_looked_behind(model):
    model.double()
    expected = expected_gradients(model, 1.0)
    model.extend([Normalize(), Normalize()])
    stm.attach_grad_scale(model)
    assert_same(gradients(model, MultipleNegativesRankingLoss(model)), expected, **CLOSE)


def test_exponent_norm_gives_losses_scaled_raw_embeddings(model):
    model.double()
    similarity = stm.Similarity(1.0, 0.5)
    expected = expected_gradients(model, 1.0, similarity, scale=3.0)
    model.append(ExponentNorm(1.0, 0.5).double())
    stm.attach_grad_scale(model)
    loss = stm.MagnitudeRankingLoss(model, similarity, scale=3.0)
    assert_same(gradients(model, loss), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mini_batch_size", [1, 4])
def test_cached_losses_agree_with_plain_ones(model, mini_batch_size):
    model.double().append(Normalize())
    stm.attach_grad_scale(model)
    plain = gradients(model, stm.CosineRankingLoss(model))
    cached = gradients(model, stm.CosineRankingLoss(model, mini_batch_size=mini_batch_size))
    assert_same(cached, plain, rtol=1e-6, atol=1e-8)


def test_nothing_changes_in_what_is_encoded_or_saved(model, tmp_path):
    model.append(Normalize())
    texts = [row[0] for row in ROWS]
    before, keys = model.encode(texts), list(model.state_dict())
    stm.attach_grad_scale(model)
    assert (model.encode(texts) == before).all()
    assert list(model.state_dict()) == keys
    model.save_pretrained(str(tmp_path))
    loaded = type(model)(str(tmp_path), device="cpu")
    assert all(not module._forward_hooks for module in loaded.modules())


def test_routes(model):
    def route():
        return [Dense(32, 8, activation_function=None), Normalize()]

    model.append(Router({"query": route(), "document": route()}, default_route="document"))
    stm.attach_grad_scale(model)
    hooked = [type(m).__name__ for m in model.modules() if m._forward_hooks]
    assert hooked == ["Dense", "Dense"]


@pytest.mark.parametrize("where", [2, 3])
def test_refused_behind_normalize(model, where):
    model.extend([Normalize(), Dropout(0.1)] if where == 2 else [ExponentNorm(0.5, 0.5), Normalize()])
    with pytest.raises(ValueError, match="Leave `after` out"):
        stm.attach_grad_scale(model, after=model[where])
    stm.attach_grad_scale(model, after=model[1]).remove()


def test_refused_behind_a_normalization_nobody_knows():
    class Unit(nn.Module):
        def forward(self, x):
            return nn.functional.normalize(x)

    model = nn.Sequential(nn.Linear(4, 3), Unit())
    stm.attach_grad_scale(model)
    with pytest.raises(ValueError, match="have norm 1"):
        model(torch.randn(5, 4))


def test_refused_twice_strangers_and_powers(model):
    handle = stm.attach_grad_scale(model)
    with pytest.raises(ValueError, match="already"):
        stm.attach_grad_scale(model)
    handle.remove()
    handle.remove()
    stm.attach_grad_scale(model).remove()
    with pytest.raises(ValueError, match="not a module of this model"):
        stm.attach_grad_scale(model, after=nn.Identity())
    with pytest.raises(ValueError, match="power"):
        stm.attach_grad_scale(model, math.nan)


def test_other_outputs():
    class Outputs(nn.Linear):
        kind = "tensor"

        def forward(self, x):
            y = super().forward(x)
            return {"tensor": y, "tuple": (y, 1), "dict": {"sentence_embedding": y}, "other": [y]}[self.kind]

    model = Outputs(3, 2)
    stm.attach_grad_scale(model, 2.0)
    x = torch.randn(4, 3)
    gradients = []
    for kind in ("tensor", "tuple", "dict"):
        model.kind = kind
        y = model(x)
        y = y if kind == "tensor" else y[0] if kind == "tuple" else y["sentence_embedding"]
        model.zero_grad()
        y.sum().backward()
        gradients.append(model.bias.grad.clone())
        torch.testing.assert_close(gradients[-1], (y.detach() ** 2).sum().expand(2))
    model.kind = "other"
    with pytest.raises(TypeError, match=r"stm\.grad_scale"):
        model(x)


def test_autocast(model):
    model.append(Normalize())
    loss = MultipleNegativesRankingLoss(model)

    def under_autocast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return gradients(model, loss)

    plain = under_autocast()
    stm.attach_grad_scale(model)
    got, expected = under_autocast(), gradients(model, loss)
    last = "0.model.transformer.layer.1.output_layer_norm.weight"
    last = last if last in got else next(reversed(got))
    cosine = nn.functional.cosine_similarity(got[last].flatten(), expected[last].flatten(), dim=0)
    assert cosine > 0.98
    assert got[last].norm() > 2 * plain[last].norm()  # norms are above 2


@pytest.mark.slow
def test_compile(folder):
    torch._dynamo.reset()
    model = load_transformer(folder).double()
    model.append(Normalize())
    inputs = features(model)[0]
    stm.attach_grad_scale(model)

    def gradient(forward):
        model.zero_grad()
        forward(dict(inputs))["sentence_embedding"][:, 0].sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    eager = gradient(model)
    assert_same(gradient(torch.compile(model, backend="eager")), eager, rtol=1e-9, atol=1e-12)


def test_wrapped_models_are_looked_into(model):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model.append(Normalize())
    stm.attach_grad_scale(Wrapper(model))
    assert model[1]._forward_hooks


def one_rank(rank, folder, output):
    """Half of the batch, in a model as the Trainer wraps it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{output}/init", rank=rank, world_size=2)
    model = load_transformer(folder).double()
    model.append(Normalize())
    stm.attach_grad_scale(model)
    loss = stm.CosineRankingLoss(model, mini_batch_size=2)
    loss.model = nn.parallel.DistributedDataParallel(model)
    columns = zip(*(row[:2] for row in ROWS[4 * rank : 4 * rank + 4]), strict=True)
    loss([dict(model.preprocess(list(column))) for column in columns]).backward()
    torch.save({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, f"{output}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes(folder, tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(folder), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert_same(ranks[0], ranks[1], rtol=0, atol=0)
    model = load_transformer(folder).double()
    model.append(Normalize())
    stm.attach_grad_scale(model)
    parts = []
    for rank in range(2):
        columns = zip(*(row[:2] for row in ROWS[4 * rank : 4 * rank + 4]), strict=True)
        inputs = [dict(model.preprocess(list(column))) for column in columns]
        parts.append(gradients(model, stm.CosineRankingLoss(model), inputs))
    assert_same(ranks[0], {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}, rtol=1e-5, atol=1e-8)
