"""SIGReg against LeJEPA's definition and plain autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from _memory import peak_bytes

from st_magnitude import SIGReg


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


@pytest.mark.parametrize("copies", [False, True], ids=["target", "one row"])
def test_the_default_is_a_multiple_of_the_listing(copies):
    """In expectation: 1.5213 N times as much."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1 if copies else 32, 64, generator=generator) for _ in range(40)]
    rows = [x.expand(32, 64).double() for x in rows]
    found = [
        sum(SIGReg(256, None, statistic=name)(x) for x in rows)
        for name in ("epps_pulley", "plain_mean")
    ]
    assert found[0] / found[1] == pytest.approx(1.5213 * 32, rel=0.02)


@pytest.mark.parametrize(
    ("options", "naive"),
    [
        ({}, naive),
        ({"scale": None}, naive),
        ({"statistic": "plain_mean"}, listing),
        ({"statistic": "plain_mean", "scale": None}, listing),
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


def test_holds_a_few_chunks_only():
    """Not N x K x knots."""
    x = torch.randn(2048, 16, requires_grad=True)
    peak = peak_bytes(lambda: SIGReg(2048)(x).backward())
    assert peak < 0.2 * 4 * 2048 * 2048 * 16, peak


def test_directions_follow_the_generator_of_torch():
    """So the state that a Trainer saves makes a resume exact."""
    x, _ = data()
    sigreg, state = SIGReg(32), torch.get_rng_state()
    values = [sigreg(x).item() for _ in range(3)]
    assert len(set(values)) == 3
    torch.set_rng_state(state)
    assert [SIGReg(32)(x).item() for _ in range(3)] == values


def test_evaluation_has_directions_of_its_own():
    x, _ = data()
    state = torch.get_rng_state()
    with torch.no_grad():
        assert SIGReg(32)(x) == SIGReg(32)(x)
    assert torch.equal(torch.get_rng_state(), state)


def test_dims_are_cut_normalised_and_scaled_each():
    x, directions = data(dim=8)
    cut = F.normalize(directions[:3], dim=0)
    expected = (naive(x[:, :3], cut) + naive(x, directions)) / 2
    torch.testing.assert_close(SIGReg(dims=[3, 8])(x, directions), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_float32(shift):
    x, directions = (
        (torch.randn(400, 48) + shift).requires_grad_(),
        F.normalize(torch.randn(48, 256).double(), dim=0),
    )
    value, expected = SIGReg()(x, directions), SIGReg()(x.double(), directions)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(expected.item(), rel=2e-4)
    found, wanted = (torch.autograd.grad(v, x)[0] for v in (value, expected))
    assert (found - wanted).norm() < 2e-4 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_is_off(dtype):
    x, directions = (
        torch.randn(40, 16).to(dtype).requires_grad_(),
        F.normalize(torch.randn(16, 64), dim=0),
    )
    expected = SIGReg()(x.float(), directions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = SIGReg()(x, directions)
    assert torch.equal(value, expected)
    value.backward()
    assert x.grad.dtype == dtype


@pytest.mark.parametrize("scale", ["sqrt_d", None])
def test_zero_rows_and_single_rows(scale):
    x = torch.randn(6, 5)
    x[2] = x[4] = 0
    for rows in (x, x[:1], x[2:3]):
        rows = rows.clone().requires_grad_()
        value = SIGReg(16, scale=scale)(rows)
        value.backward()
        assert value.isfinite()
        assert rows.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 0}, "scale must be one of 'sqrt_d' and None; got 0"),
        ({"dims": (4, 4)}, r"dims must be .* got \[4, 4\]"),
        ({"dims": (3, 6)}, "exceed the 5 dimensions"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        SIGReg(**options)(data()[0])
