"""A training step does not wait for the device: forward passes on fake CUDA tensors, whose values cannot be read."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from st_magnitude import Similarity, Term, infonce


@pytest.fixture(autouse=True)
def fake():
    """Tensors without values: item(), tolist(), nonzero(), unique(), bool() and mixed devices raise."""
    with FakeTensorMode():
        yield


def on_device(*shape, dtype=torch.float32):
    return torch.empty(shape, device="cuda", dtype=dtype, requires_grad=dtype.is_floating_point)


def test_values_cannot_be_read():
    with pytest.raises(Exception, match="local_scalar_dense"):
        on_device(3).sum().item()


OPTIONS = {
    "plain": {},
    "hardness": {"hardness": 0.5},
    "ids": {"exclude": lambda: on_device(10, dtype=torch.int64)},
    "function": {"exclude": lambda: lambda rows, scores: scores > scores.diagonal(2 + rows.start)[:, None] + 0.1},
    "labels": {"positives": lambda: on_device(10, dtype=torch.int64), "hardness": 0.5},
    "pairs": {"positives": lambda: on_device(4, 10, dtype=torch.bool)},
    "log_q": {"log_q": lambda: on_device(10), "log_q_queries": lambda: on_device(6)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("is_learned", [False, True])
def test_infonce(options, is_learned):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    if "positives" not in options or options["positives"].dtype != torch.bool:
        options["all_queries"] = on_device(6, 8)
    elif "log_q_queries" in options:
        options["log_q_queries"] = on_device(4)
    terms, similarity = [Term(dim, tau) for dim in (3, None) for tau in (0.1, 0.05)], Similarity(1, 0)
    if is_learned:
        terms = [Term(term.dim, on_device() + 0.1) for term in terms]
        similarity = Similarity(on_device(), on_device())
    loss = infonce(on_device(4, 8), on_device(10, 8), terms, similarity, "both", 2, tile_rows=3, **options)
    assert loss.shape == ()
    assert loss.device.type == "cuda"
