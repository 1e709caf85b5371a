"""SIGReg against LeJEPA's definition and plain autograd in float64, and its mean over all
directions against quadrature."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from _memory import peak_bytes
from torch.autograd import gradcheck

from st_magnitude import SIGReg
from st_magnitude.losses import isotropy

STATISTICS = ("epps_pulley", "plain_mean")
EXACT_AND_DRAWN = pytest.mark.parametrize("num_directions", [None, 16])


def data(n=9, dim=5, num_directions=7, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, dim, generator=generator, dtype=dtype) + 0.4
    directions = torch.randn(dim, num_directions, generator=generator, dtype=dtype)
    return x.requires_grad_(), directions / directions.norm(dim=0)


def naive(x, directions, scale="sqrt_d"):
    """The definition on tensors, for autograd, with t = 0 among the knots."""
    t = torch.linspace(0, 3, 17, dtype=torch.float64)
    phi = (-t.square() / 2).exp()
    w = 2 * t[1] * phi
    w[[0, -1]] /= 2
    if scale is not None:
        x = F.normalize(x, dim=1) * math.sqrt(x.shape[1])
    angles = (x @ directions)[..., None] * t  # (n, K, T)
    error = (angles.cos().mean(0) - phi) ** 2 + angles.sin().mean(0) ** 2
    return (error @ w).mean() * len(x)


def listing(x, directions, scale="sqrt_d"):
    """The plain mean over 16 knots and all directions, by Euler's formula."""
    if scale is not None:
        x = math.sqrt(x.shape[1]) * x / x.norm(dim=1, keepdim=True)
    errors = [
        ((1j * t * (x @ directions)).exp().mean(0) - math.exp(-(t**2) / 2)).abs() ** 2
        for t in (3 * k / 15 for k in range(16))
    ]
    return torch.stack(errors).mean()


@pytest.mark.parametrize(
    ("options", "naive"),
    [
        ({}, naive),
        ({"num_directions": 1, "scale": None}, naive),
        ({"statistic": "plain_mean"}, listing),
        ({"statistic": "plain_mean", "num_directions": 1, "scale": None}, listing),
    ],
    ids=["default", "raw", "listing", "raw listing"],
)
@pytest.mark.parametrize("size", [{}, {"n": 300, "num_directions": 500}], ids=["one", "three"])
def test_value_and_gradient_equal_the_definition(options, naive, size):
    """In one chunk of directions, and in three of which the last is smaller."""
    x, directions = data(**size)
    expected = naive(x, directions, options.get("scale", "sqrt_d"))
    value = SIGReg(**options)(x, directions)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(3 * y, x) for y in (value, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


# --- over all directions --------------------------------------------------------------------------


def quadrature(x, statistic):
    """The mean over all directions, with sin(θ)^(D - 2) as the density of the angle θ between a
    direction and a vector."""
    dim = x.shape[1]
    x = math.sqrt(dim) * x / np.linalg.norm(x, axis=1, keepdims=True)
    nodes, shares = np.polynomial.legendre.leggauss(400)
    angles = (nodes + 1) * np.pi / 2
    shares = shares * np.sin(angles) ** (dim - 2)
    shares = shares / shares.sum()

    def mean_cosine(lengths):  # of t a · v over directions a, from t |v|
        return np.cos(lengths[..., None] * np.cos(angles)) @ shares

    total = 0.0
    knots = np.linspace(0, 3, 16 if statistic == "plain_mean" else 17)
    for t in knots[1:]:
        weight = 1 / 16
        if statistic == "epps_pulley":
            weight = 2 * knots[1] * math.exp(-(t**2) / 2) * (0.5 if t == 3 else 1)
        pairs = mean_cosine(t * np.linalg.norm(x[:, None] - x, axis=2)).mean()
        alone = mean_cosine(t * np.linalg.norm(x, axis=1)).mean()
        total += weight * (pairs - 2 * math.exp(-(t**2) / 2) * alone + math.exp(-(t**2)))
    return total if statistic == "plain_mean" else len(x) * total


def odd_rows(dim, n=9):
    """Rows of which two are equal and two opposite."""
    x = data(n, dim)[0].detach()
    x[1], x[2] = x[0], -x[0]
    return x


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("dim", [2, 3, 96, 1024])
@pytest.mark.parametrize("side", [4, 256], ids=["tiles", "one tile"])
def test_the_mean_over_all_directions_equals_quadrature(monkeypatch, statistic, dim, side):
    monkeypatch.setitem(isotropy.SIDE, "cpu", side)
    sigreg = SIGReg(statistic=statistic)
    for x in (odd_rows(dim), data(n=1, dim=dim)[0]):
        value = sigreg(x)
        assert value.dtype == torch.float64
        assert value.item() == pytest.approx(quadrature(x.detach().numpy(), statistic), rel=1e-7)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_one_dimension_has_one_direction(statistic):
    x, sigreg = odd_rows(1), SIGReg(statistic=statistic)
    torch.testing.assert_close(sigreg(x), sigreg(x, torch.ones(1, 1)), rtol=1e-7, atol=0)


@pytest.mark.parametrize("options", [{}, {"statistic": "plain_mean"}, {"dims": [2, 5]}])
def test_gradcheck(monkeypatch, options):
    """In tiles on and off the diagonal, of which the last is smaller."""
    monkeypatch.setitem(isotropy.SIDE, "cpu", 4)
    x = odd_rows(5)
    assert gradcheck(SIGReg(**options), torch.cat([x, x[5:] + 1]).requires_grad_())


def test_all_directions_have_no_second_derivative():
    x, _ = data()
    with pytest.raises(RuntimeError, match=r"no second derivative.*SIGReg\(1024\)"):
        torch.autograd.grad(SIGReg()(x), x, create_graph=True)


@pytest.mark.parametrize(
    ("sigreg", "bound"),
    [(SIGReg(2048), 0.2 * 4 * 2048 * 2048 * 16), (SIGReg(), 0.15 * 4 * 2048 * 2048)],
    ids=["drawn", "exact"],
)
def test_memory(sigreg, bound):
    """Neither N x K x knots nor N x N."""
    x = torch.randn(2048, 16, requires_grad=True)
    peak = peak_bytes(lambda: sigreg(x).backward())
    assert peak < bound, peak


# --- drawn directions -----------------------------------------------------------------------------


def test_directions_follow_the_generator_of_torch():
    """So the state that a Trainer saves makes a resume exact."""
    x, _ = data()
    sigreg, state = SIGReg(32), torch.get_rng_state()
    values = [sigreg(x).item() for _ in range(3)]
    assert len(set(values)) == 3
    torch.set_rng_state(state)
    assert [SIGReg(32)(x).item() for _ in range(3)] == values


@pytest.mark.parametrize(("sigreg", "learns"), [(SIGReg(32), False), (SIGReg(), True)])
def test_evaluation_and_all_directions_draw_nothing(sigreg, learns):
    x, _ = data()
    state = torch.get_rng_state()
    with torch.set_grad_enabled(learns):
        assert sigreg(x) == sigreg(x)
    assert torch.equal(torch.get_rng_state(), state)


# --- both -----------------------------------------------------------------------------------------


def test_dims_are_cut_normalised_and_scaled_each():
    x, directions = data(dim=8)
    cut = F.normalize(directions[:3], dim=0)
    expected = (naive(x[:, :3], cut) + naive(x, directions)) / 2
    torch.testing.assert_close(SIGReg(dims=[3, 8])(x, directions), expected, rtol=1e-12, atol=0)
    expected = (SIGReg()(x[:, :3]) + SIGReg()(x)) / 2
    torch.testing.assert_close(SIGReg(dims=[3, 8])(x), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", [0.0, 1.0])
@EXACT_AND_DRAWN
def test_float32(shift, num_directions):
    x = (torch.randn(400, 48) + shift).requires_grad_()
    directions = num_directions and F.normalize(torch.randn(48, num_directions).double(), dim=0)
    value, expected = SIGReg()(x, directions), SIGReg()(x.double(), directions)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=2e-4)
    found, wanted = (torch.autograd.grad(v, x)[0] for v in (value, expected))
    assert (found - wanted).norm() < 2e-4 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@EXACT_AND_DRAWN
def test_autocast_is_off(dtype, num_directions):
    x = torch.randn(40, 16).to(dtype).requires_grad_()
    directions = num_directions and F.normalize(torch.randn(16, num_directions), dim=0)
    expected = SIGReg()(x.float(), directions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SIGReg()(x, directions)
    assert torch.equal(value, expected)
    value.backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("sigreg", [SIGReg(), SIGReg(16), SIGReg(16, scale=None)])
def test_zero_rows_and_single_rows(sigreg):
    x = torch.randn(6, 5)
    x[2] = x[4] = 0
    for rows in (x, x[:1], x[2:3]):
        rows = rows.clone().requires_grad_()
        value = sigreg(rows)
        value.backward()
        assert value.isfinite()
        assert rows.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0}, "scale must be one of 'sqrt_d' and None; got 0"),
        ({"scale": None}, r"Give a number of directions: SIGReg\(1024, scale=None\)"),
        ({"num_directions": 0}, "at least 1 or None, which takes all directions; got 0"),
        ({"dims": (4, 4)}, r"dims must be .* got \[4, 4\]"),
        ({"dims": (3, 6)}, "exceed the 5 dimensions"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SIGReg(**options)(data()[0])
