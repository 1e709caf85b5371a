"""SIGReg against loops over Python floats, plain autograd, the blog's listing, and Monte Carlo; the other penalties."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import gamma, jv
from torch.utils._python_dispatch import TorchDispatchMode

from st_magnitude import SIGReg, covariance_penalty, geometry, norm_variance_penalty
from st_magnitude.losses import _sigreg

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = [
    {},
    {"scale": None},
    {"scale": 2.5},
    {"window": False},
    {"scale_by_n": False},
    {"target": "sphere"},
    {"target": "sphere", "scale": 1.5},
    {"num_knots": 2, "t_max": 1.3},
    {"num_knots": 3},
    {"num_knots": 10, "t_max": 4.0},
]
IDS = [" ".join(f"{k}={v}" for k, v in options.items()) or "default" for options in OPTIONS]
both = pytest.mark.parametrize("options", OPTIONS, ids=IDS)


def data(n=9, dim=5, num_directions=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator, dtype=dtype) + 0.4
    directions = torch.randn(dim, num_directions, generator=generator, dtype=dtype)
    return x.requires_grad_(), directions / directions.norm(dim=0)


def sphere_marginal(dim, s):
    """Lambda_D by Bessel's function, and by its definition for one dimension."""
    if s == 0 or dim == 1:
        return math.cos(s)
    order = dim / 2 - 1
    return gamma(dim / 2) * (2 / s) ** order * jv(order, s)


def settings(dim, num_knots=17, t_max=3.0, window=True, target="gaussian", scale="sqrt_d", **_):
    """(t, w, phi) at every knot, t = 0 included, and the length of rows."""
    radius = math.sqrt(dim) if scale == "sqrt_d" else scale
    dt = t_max / (num_knots - 1)
    found = []
    for k in range(num_knots):
        t = k * dt
        weight = dt if k in (0, num_knots - 1) else 2 * dt
        weight *= math.exp(-t * t / 2) if window else 1
        found.append((t, weight, math.exp(-t * t / 2) if target == "gaussian" else sphere_marginal(dim, t * radius)))
    return found, radius


def scaled(rows, radius):
    return [[v * radius / math.hypot(*row) for v in row] if radius else row for row in rows]


def loop(x, directions, scale_by_n=True, **options):
    """The definition, one number at a time."""
    knots, radius = settings(x.shape[1], **options)
    rows, total = scaled(x.tolist(), radius), 0.0
    for a in directions.T.tolist():
        projections = [sum(u * v for u, v in zip(row, a, strict=True)) for row in rows]
        for t, w, phi in knots:
            real = sum(math.cos(t * p) for p in projections) / len(rows)
            imaginary = sum(math.sin(t * p) for p in projections) / len(rows)
            total += w * ((real - phi) ** 2 + imaginary**2)
    return total / directions.shape[1] * (len(rows) if scale_by_n else 1)


def loop_exact(x, scale_by_n=True, **options):
    """The closed form, one pair at a time."""
    dim, n = x.shape[1], len(x)
    knots, radius = settings(dim, **options)
    rows, total = scaled(x.tolist(), radius), 0.0
    for t, w, phi in knots:
        pairs = sum(sphere_marginal(dim, t * math.dist(a, b)) for a in rows for b in rows) / n**2
        singles = sum(sphere_marginal(dim, t * math.hypot(*a)) for a in rows) / n
        total += w * (pairs - 2 * phi * singles + phi**2)
    return total * (n if scale_by_n else 1)


def naive(x, directions, scale_by_n=True, **options):
    """The definition on tensors, for autograd."""
    knots, radius = settings(x.shape[1], **options)
    t, w, phi = torch.tensor(knots, dtype=x.dtype).T
    x = x if radius is None else F.normalize(x, dim=1) * radius
    angles = (x @ directions)[..., None] * t  # (n, K, T)
    error = (angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2
    return (error @ w).mean() * (len(x) if scale_by_n else 1)


# --- given directions -------------------------------------------------------------------------------------------------


@both
def test_value_and_gradient_equal_the_definition(options):
    x, directions = data()
    value = SIGReg(**options)(x, directions)
    assert value.item() == pytest.approx(loop(x, directions, **options), rel=1e-12)
    expected = naive(x, directions, **options)
    assert expected.item() == pytest.approx(value.item(), rel=1e-12)  # so that its gradient is the right one
    (3 * value).backward()
    torch.testing.assert_close(x.grad, *torch.autograd.grad(3 * expected, x), rtol=1e-10, atol=1e-12)


@both
@pytest.mark.parametrize("exact", [False, True])
def test_gradcheck(options, exact):
    x, directions = data(n=5, dim=4, num_directions=3)
    sigreg = SIGReg("exact" if exact else 1024, **options)
    assert torch.autograd.gradcheck(lambda x: sigreg(x, None if exact else directions), x)


@pytest.mark.parametrize("num_knots", range(2, 42))
def test_any_number_of_knots(num_knots):
    x, directions = data(n=4, num_directions=2)
    value = SIGReg(num_knots=num_knots)(x, directions)
    assert value.item() == pytest.approx(loop(x, directions, num_knots=num_knots), rel=1e-12)


def test_few_planes():
    """Of the angles whose cosine and sine are computed: 5 for 17 knots, not 16."""
    assert [sum(_sigreg._basis(knots - 1)) for knots in (2, 3, 16, 17, 65)] == [1, 2, 5, 5, 11]


@pytest.mark.parametrize("chunk", [1, 20, 27, 10**6])
def test_chunks_do_not_matter(monkeypatch, chunk):
    x, directions = data()
    expected = naive(x, directions)
    monkeypatch.setattr(_sigreg, "_CHUNK", {"cpu": chunk})
    value = SIGReg()(x, directions)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    value.backward()
    torch.testing.assert_close(x.grad, *torch.autograd.grad(expected, x), rtol=1e-10, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most numbers in a tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.parametrize("num_directions", [512, "exact"])
def test_holds_a_few_tiles_only(monkeypatch, num_directions):
    """Not N x K x knots, not even N x K or N x N."""
    monkeypatch.setattr(_sigreg, "_CHUNK", {"cpu": 2**11})
    monkeypatch.setattr(_sigreg, "_TILE", {"cpu": 2**11})
    x = torch.randn(512, 16, requires_grad=True)
    with Largest() as seen:
        SIGReg(num_directions)(x).backward()
    assert 2**11 <= seen.numel <= 8 * 2**11


def test_blog():
    """The listing of the blog post, as printed but for its directions, which are given."""
    embeddings, directions = data(n=12, dim=6, num_directions=16)
    z = F.normalize(embeddings, p=2, dim=-1)
    z = z * math.sqrt(6)
    projections = z @ directions
    knots = torch.linspace(0.0, 3.0, 16, dtype=z.dtype)
    tx = projections.unsqueeze(-1) * knots
    target = torch.exp(-0.5 * knots.square()).unsqueeze(0)
    loss = ((tx.cos().mean(dim=0) - target).square() + tx.sin().mean(dim=0).square()).mean()
    sigreg = SIGReg.preset("blog")
    torch.testing.assert_close(sigreg(embeddings, directions), loss, rtol=1e-12, atol=0)
    assert sigreg.num_directions == 16
    assert SIGReg.preset("blog", num_directions=256).num_directions == 256


def test_lejepa():
    """17 knots on [0, 3], the one-sided trapezoid doubled, a Gaussian window, times N; embeddings as they are."""
    x, directions = data()
    t = torch.linspace(0, 3, 17, dtype=x.dtype)
    phi = torch.exp(-t.square() / 2)
    angles = (x @ directions)[..., None] * t
    error = (angles.cos().mean(0) - phi).square() + angles.sin().mean(0).square()
    expected = 2 * torch.trapezoid(error * phi, t).mean() * len(x)
    torch.testing.assert_close(SIGReg.preset("lejepa")(x, directions), expected, rtol=1e-12, atol=0)


def test_presets_are_named():
    with pytest.raises(ValueError, match="'lejepa' and 'blog'; got 'vicreg'"):
        SIGReg.preset("vicreg")


# --- all directions ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("dim", [1, 2, 3, 8])
def test_exact_value_equals_the_definition(options, dim):
    x, _ = data(n=6, dim=dim)
    assert SIGReg("exact", **options)(x).item() == pytest.approx(loop_exact(x, **options), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("scale", ["sqrt_d", None])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_exact_is_the_mean_over_directions(scale, shift):
    """200,000 of them, each by epps_pulley."""
    x, directions = data(n=10, dim=12, num_directions=200_000)
    x = x.detach() + shift
    rows = F.normalize(x, dim=1) * 12**0.5 if scale else x
    values = np.concatenate([geometry.epps_pulley(rows @ part) for part in directions.split(20_000, dim=1)])
    error = values.std() / math.sqrt(len(values))
    exact = SIGReg("exact", scale=scale)(x).item()
    assert abs(values.mean() - exact) < 4 * error
    assert error < 0.01 * exact


def test_exact_gradient_is_the_mean_over_directions():
    x, directions = data(n=8, dim=6, num_directions=100_000)
    expected = torch.stack(
        [torch.autograd.grad(SIGReg(scale=None)(x, part), x)[0] for part in directions.split(1000, dim=1)]
    )
    (found,) = torch.autograd.grad(SIGReg("exact", scale=None)(x), x)
    assert ((found - expected.mean(0)).abs() < 5 * expected.std(0) / 10).all()


@pytest.mark.parametrize("dim", [1, 2, 3, 64, 768, 4096])
def test_sphere_characteristic(dim):
    s = np.linspace(0, 60, 50)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # Bessel's form overflows at 768
        expected = np.array([sphere_marginal(dim, v) for v in s])
    expected = np.where(np.isfinite(expected), expected, 0)
    if dim >= 768:  # by the density of a_1 on a fine grid
        a = np.linspace(-1, 1, 200_001)
        density = np.exp((dim - 3) / 2 * np.log1p(-np.minimum(a * a, 1 - 1e-15)))
        expected = np.array([np.average(np.cos(v * a), weights=density) for v in s])
    np.testing.assert_allclose(_sigreg.sphere_characteristic(dim, s), expected, rtol=0, atol=1e-12)


def test_exact_of_long_embeddings():
    """As they are, with sharper functions of the distance: still right, or refused."""
    x, _ = data(n=6, dim=8)
    x = 20 * x.detach()
    assert SIGReg("exact", scale=None)(x).item() == pytest.approx(loop_exact(x, scale=None), rel=1e-9)
    with pytest.raises(ValueError, match="Give a scale, or a number of directions"):
        SIGReg("exact", scale=None)(1e4 * x)
    with pytest.raises(ValueError, match="finite"):
        SIGReg("exact", scale=None)(x / 0)


# --- distribution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 30, 300])
def test_null_expectation(n):
    """1.0525 at any N."""
    sigreg = SIGReg()
    assert sigreg.null_expectation(n, 5) == pytest.approx(1.0525, abs=5e-5)
    assert SIGReg(scale_by_n=False).null_expectation(n, 5) == pytest.approx(1.0525 / n, abs=5e-5)
    samples = np.random.default_rng(0).normal(size=(n, 600_000 // n))
    values = geometry.epps_pulley(samples)
    assert abs(values.mean() - sigreg.null_expectation(n, 5)) < 4 * values.std() / math.sqrt(len(values))


@pytest.mark.parametrize("dim", [2, 4])
def test_target_sphere_is_what_normalised_rows_reach(dim):
    values = {"sphere": [], "gaussian": []}
    for seed in range(60):
        x = torch.randn(64, dim, generator=torch.Generator().manual_seed(seed))
        for target, found in values.items():
            found.append(SIGReg("exact", target=target)(x).item())
    mean, error = np.mean(values["sphere"]), np.std(values["sphere"]) / 60**0.5
    assert abs(mean - SIGReg(target="sphere").null_expectation(64, dim)) < 4 * error
    assert np.mean(values["gaussian"]) > SIGReg().null_expectation(64, dim) + 4 * error


@pytest.mark.parametrize("num_directions", [64, "exact"])
@pytest.mark.parametrize("scale_by_n", [True, False])
def test_excess(num_directions, scale_by_n):
    x, _ = data()
    options = {"num_directions": num_directions, "scale_by_n": scale_by_n, "target": "sphere", "dims": (3, 5)}
    sigreg = SIGReg(**options)
    assert sigreg.last_excess is None
    value = sigreg(x)
    null = (sigreg.null_expectation(9, 3) + sigreg.null_expectation(9, 5)) / 2
    assert sigreg.last_excess.item() == pytest.approx(value.item() - null)
    assert not sigreg.last_excess.requires_grad


@pytest.mark.parametrize("num_directions", [64, "exact"])
def test_opens_a_cone(num_directions):
    x = (0.2 * torch.randn(64, 16) + torch.randn(16)).requires_grad_()
    before, sigreg = geometry.isoscore(F.normalize(x, dim=1)), SIGReg(num_directions)
    optimizer = torch.optim.Adam([x], lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        sigreg(x).backward()
        optimizer.step()
    assert sigreg.last_excess < 0
    assert geometry.isoscore(F.normalize(x, dim=1)) > max(0.75, before + 0.1)
    assert abs(geometry.mean_cosine(x)) < 0.02


# --- directions -------------------------------------------------------------------------------------------------------


def test_directions_come_from_the_step_alone():
    x, _ = data()
    first, again, other = SIGReg(32), SIGReg(32), SIGReg(32, seed=1)
    values = [first(x).item() for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    np.random.seed(5)
    assert [again(x).item() for _ in range(3)] == values
    assert len({*values, *(other(x).item() for _ in range(3))}) == 6
    torch.set_rng_state(state)
    SIGReg(32)(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_going_on_from_a_number_of_calls():
    x, _ = data()
    sigreg, resumed = SIGReg(32), SIGReg(32)
    values = [sigreg(x).item() for _ in range(4)]
    resumed.num_calls = 2
    assert [resumed(x).item(), resumed(x).item()] == values[2:]
    again = SIGReg(32)
    again.load_state_dict(sigreg.state_dict())
    assert again.num_calls == 4


def test_evaluation_has_directions_of_its_own():
    x, _ = data()
    sigreg, undisturbed = SIGReg(32), SIGReg(32)
    values, evaluations = [], []
    for _ in range(3):
        values.append(sigreg(x).item())
        with torch.no_grad():
            evaluations += [sigreg(x).item(), sigreg(x).item()]
    assert values == [undisturbed(x).item() for _ in range(3)]
    assert len(set(evaluations)) == 1


def test_directions_are_uniform_unit_columns():
    directions = SIGReg(20_000)._draw(torch.zeros(1, 3, dtype=torch.float64))
    torch.testing.assert_close(directions.norm(dim=0), torch.ones(20_000, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(directions @ directions.T / 20_000, torch.eye(3).double() / 3, rtol=0, atol=0.01)
    assert directions.mean(dim=1).abs().max() < 0.02
    torch.testing.assert_close(SIGReg(20_000)._draw(torch.zeros(1, 3)), directions.float())


# --- prefixes and views -----------------------------------------------------------------------------------------------


def test_dims_are_cut_normalised_and_scaled_each():
    x, directions = data(dim=8)
    cut = F.normalize(directions[:3], dim=0)
    expected = (naive(x[:, :3], cut) + naive(x, directions)) / 2
    torch.testing.assert_close(SIGReg(dims=[3, 8])(x, directions), expected, rtol=1e-12, atol=0)
    exact = (SIGReg("exact")(x[:, :3]) + SIGReg("exact")(x)) / 2
    torch.testing.assert_close(SIGReg("exact", dims=[3, 8])(x), exact)


@pytest.mark.parametrize("num_directions", [16, "exact"])
def test_views(num_directions):
    columns = [data(n=n, seed=n)[0] for n in (4, 4, 7)]
    pooled, per_view = (SIGReg(num_directions, views=views) for views in ("pooled", "per_view"))
    torch.testing.assert_close(pooled.of_columns(columns), SIGReg(num_directions)(torch.cat(columns)))
    single = [SIGReg(num_directions)(x) for x in columns]  # the same directions for each: the first call
    torch.testing.assert_close(per_view.of_columns(columns), sum(single) / 3)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_directions", [256, "exact"])
@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_float32(num_directions, shift):
    x = (torch.randn(400, 48) + shift).requires_grad_()
    value, expected = SIGReg(num_directions)(x), SIGReg(num_directions)(x.double())
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=2e-4)
    found, wanted = (torch.autograd.grad(v, x)[0] for v in (value, expected))
    assert (found - wanted).norm() < 2e-4 * wanted.norm()


@pytest.mark.parametrize("num_directions", [64, "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_is_off(num_directions, dtype):
    x = torch.randn(40, 16).to(dtype).requires_grad_()
    expected = SIGReg(num_directions)(x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SIGReg(num_directions)(x)
    assert torch.equal(value, expected)
    value.backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("num_directions", [16, "exact"])
@pytest.mark.parametrize("scale", ["sqrt_d", None])
def test_zero_rows_and_single_rows(num_directions, scale):
    x = torch.randn(6, 5)
    x[2] = x[4] = 0
    for rows in (x, x[:1], x[2:3]):
        rows = rows.clone().requires_grad_()
        value = SIGReg(num_directions, scale=scale)(rows)
        value.backward()
        assert value.isfinite()
        assert rows.grad.isfinite().all()


def test_length_matters_only_without_a_scale():
    x, directions = data()
    longer = x * torch.arange(1, 10)[:, None]
    torch.testing.assert_close(SIGReg()(longer, directions), SIGReg()(x, directions))
    assert SIGReg(scale=None)(longer, directions) > 1.5 * SIGReg(scale=None)(x, directions)


def test_nan_is_passed_on():
    x = torch.full((4, 5), math.nan)
    assert SIGReg()(x).isnan()
    assert SIGReg("exact")(x).isnan()


def test_copies_and_prints():
    sigreg = SIGReg("exact", scale=2.0)
    sigreg(data()[0])
    assert copy.deepcopy(sigreg).last_excess == sigreg.last_excess
    assert "num_directions='exact'" in repr(sigreg)
    assert "scale=2.0" in repr(sigreg)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_directions": 0}, "num_directions must be .* got 0"),
        ({"num_directions": "all"}, "'exact'; got 'all'"),
        ({"num_knots": 1}, "num_knots must be at least 2"),
        ({"t_max": 0.0}, "t_max must be positive, got 0"),
        ({"t_max": math.inf}, "t_max must be positive, got inf"),
        ({"scale": 0}, "scale must be a positive number or 'sqrt_d' or None; got 0"),
        ({"scale": "d"}, "scale must be .* got 'd'"),
        ({"target": "cube"}, "'gaussian' and 'sphere'; got 'cube'"),
        ({"target": "sphere", "scale": None}, "Give scale='sqrt_d'"),
        ({"views": "both"}, "'pooled' and 'per_view'; got 'both'"),
        ({"dims": ()}, r"dims must be .* got \[\]"),
        ({"dims": (0, 4)}, r"dims must be .* got \[0, 4\]"),
        ({"dims": (4, 4)}, r"dims must be .* got \[4, 4\]"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SIGReg(**options)


def test_inputs_are_checked():
    x, directions = data()
    for bad in (x[0], x[:0], x[None]):
        with pytest.raises(ValueError, match="at least one row"):
            SIGReg()(bad)
    with pytest.raises(ValueError, match="exceed the 5 dimensions"):
        SIGReg(dims=(3, 6))(x)
    with pytest.raises(ValueError, match=r"columns \(5, K\); got shape \(7, 5\)"):
        SIGReg()(x, directions.T)
    with pytest.raises(ValueError, match="off by 1"):
        SIGReg()(x, 2 * directions)
    with pytest.raises(ValueError, match="Leave directions out"):
        SIGReg("exact")(x, directions)


# --- the other penalties ----------------------------------------------------------------------------------------------


def test_covariance_penalty():
    x, _ = data()
    covariance = np.cov(x.detach().numpy().T)
    expected = sum(covariance[a, b] ** 2 for a in range(5) for b in range(5) if a != b) / 5
    assert covariance_penalty(x).item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(covariance_penalty, x)
    assert covariance_penalty(x[:1]) == 0


def test_norm_variance_penalty():
    x, _ = data()
    norms = geometry.norms(x)
    assert norm_variance_penalty(x).item() == pytest.approx(geometry.coefficient_of_variation(norms) ** 2, rel=1e-12)
    assert torch.autograd.gradcheck(norm_variance_penalty, x)
    zero = torch.zeros(3, 4, requires_grad=True)
    norm_variance_penalty(zero).backward()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("penalty", [covariance_penalty, norm_variance_penalty])
def test_penalties_in_float32(penalty):
    x = torch.randn(20, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = penalty(x.bfloat16())
    assert torch.equal(value, penalty(x.bfloat16().float()))
