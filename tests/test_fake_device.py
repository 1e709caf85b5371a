"""Forward passes on devices that this machine lacks: fake CUDA tensors refuse what would wait for the device.

On a FakeTensor, ``.item()``, ``bool()``, ``nonzero`` and boolean indices raise, and so do operands on two devices. The
backward pass needs a real device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import st_magnitude as stm
from st_magnitude import geometry
from st_magnitude.data import task

# ----------------------------------------------- Revela, SIGReg, CLIP, geometry ---------------------------------------


class NoFloat64(TorchDispatchMode):
    """Refuses float64 outside the CPU: Apple's GPUs do not have it, and others are slow at it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            is_double = isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)
            assert not (is_double and value.device.type != "cpu"), f"{function} makes {value.dtype} on {value.device}"
        return result


@pytest.fixture
def fakes() -> Iterator[None]:
    with FakeTensorMode(), NoFloat64():
        yield


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v_norm", [True, False])
def test_a_layer_of_in_batch_attention(dtype: torch.dtype, v_norm: bool) -> None:
    attention = pytest.importorskip("st_magnitude.revela.attention")
    i, j = torch.tensor([[0, 1, 2, 2], [1, 0, 0, 1]], device="cuda")
    neighbours = attention.Neighbours(
        leaf(3, 3),
        [(0, 2, i[:2], j[:2]), (2, 3, i[2:] - 2, j[2:])],
        torch.ones(3, 5, dtype=torch.bool, device="cuda"),
        v_norm,
    )
    query, key, value = (leaf(3, heads, 5, 6, dtype=dtype) for heads in (4, 2, 2))
    found = attention.in_batch_attention(query, key, value, neighbours)
    assert (found.shape, found.dtype, found.device.type) == (query.shape, dtype, "cuda")


@pytest.mark.usefixtures("fakes")
def test_sim_of_revela() -> None:
    revela_loss = pytest.importorskip("st_magnitude.revela.loss")
    groups = torch.tensor([0, 0, 1, 1, 1], device="cuda")
    found = revela_loss.group_similarity(leaf(5, 8), leaf(5, 8), groups, 0.1)
    figures = revela_loss._shape(found, groups)
    assert {value.device.type for value in (found, *figures.values())} == {"cuda"}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("options", [{}, {"dims": (4, 8), "scale": None}, {"views": "per_view"}])
def test_sigreg(options: dict[str, Any]) -> None:
    regularizer = stm.SIGReg(num_directions=16, **options)
    columns = [leaf(6, 8), leaf(6, 8, dtype=torch.bfloat16)]
    value = regularizer.of_columns(columns)
    assert value.device.type == regularizer.last_excess.device.type == "cuda"


@pytest.fixture(params=["cuda", "mps"])
def device(request: pytest.FixtureRequest, fakes: None) -> Iterator[str]:
    with torch.no_grad():  # autograd asks for a device that PyTorch was built for
        yield request.param


def test_geometry_goes_to_the_cpu_before_float64(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function, with numbers put in where the fakes come to NumPy."""
    rng = np.random.default_rng(0)

    def numbers(tensor: Tensor) -> Any:
        assert isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cpu"
        return rng.standard_normal(tuple(tensor.shape))

    monkeypatch.setattr(Tensor, "numpy", numbers)
    monkeypatch.setattr(geometry.direction, "unit_rows", lambda matrix: matrix)  # a Similarity, on the CPU
    rows, sample, other = (torch.randn(*shape, device=device) for shape in ((40, 8), (40,), (40,)))
    for name in ("norms", "mean_cosine", "uniformity", "isoscore", "effective_rank", "explained_variance"):
        getattr(geometry, name)(rows)
    for name in ("cohens_d", "spearman", "paired_bootstrap"):
        getattr(geometry, name)(sample, other)
    geometry.auroc(sample, sample > 0)
    geometry.risk_coverage(sample, sample > 0)
    geometry.adjusted_cohens_d(sample, other, sample > 0)
    geometry.alignment(rows, rows)


def test_encoded_tasks_leave_apples_gpus(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search sums in float64, so it stays on a CUDA device and leaves mps."""
    monkeypatch.setattr(task, "check_finite", lambda *_: None)  # it waits for the device
    found = task.EncodedTask(torch.randn(3, 8, device=device), torch.randn(5, 8, device=device))
    assert found.queries.device.type == found.documents.device.type == {"cuda": "cuda", "mps": "cpu"}[device]
