"""The kernel on a GPU: `make gpu`; elsewhere the same tests run small on the CPU."""

import importlib
import json
import re
from importlib.metadata import version

import pytest
import torch

from st_magnitude import Similarity, Term, infonce

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here")
OPTIONS = {
    "plain": {},
    "nine terms": {"terms": [Term(dim, tau) for dim in (8, 16, None) for tau in (0.05, 0.1, 0.2)]},
    "exponents": {"similarity": Similarity(0.5, 0.25)},
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def device(request):
    return request.param


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_kernel_against_float64_on_the_cpu(device, options):
    size, dim = (48, 32) if device == "cpu" else (2048, 256)
    exact = [torch.randn(size, dim, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected, loss = infonce(*exact, **options, backend="plain"), infonce(*found, **options)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss.double().cpu(), expected, rtol=1e-4, atol=1e-4)
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(
            x.grad.double().cpu(), y.grad, rtol=1e-3, atol=1e-3 * y.grad.abs().max().item()
        )


def test_encoders_of_make_gpu(device):
    """Padded tokens and forward calls are counted, twice for a loss that embeds twice."""
    gpu = importlib.import_module("benchmarks.speed.gpu")
    rows, overheads = gpu.measure_encoders(["tiny"], (4, 8), device, float("inf"))
    assert overheads.keys() == {"tiny"}
    assert [(row["data"], row["batch"]) for row in rows if row["attention"] == "sdpa"] == [
        (data, batch) for data in gpu.LENGTHS for batch in (4, 8)
    ]
    for row in rows:
        queries, documents = gpu.texts_of(row["data"], row["batch"])
        padded = [len(x) * max(len(text.split()) for text in x) for x in (queries, documents)]
        cells = row["losses"]
        assert cells.keys() == {"MNRL", "CachedMNRL", "keep", "default"}
        assert all(min(cell.values()) > 0 for cell in cells.values())
        if row["attention"] == "sdpa":
            assert (cells["MNRL"]["tokens"], cells["MNRL"]["passes"]) == (sum(padded), 2)
            assert cells["CachedMNRL"]["tokens"] == 2 * sum(padded)
    assert len(gpu.encoder_table(rows)) == 2 + len(rows)


@pytest.mark.slow
def test_make_gpu(device, tmp_path, capsys):
    """Versions, tests and the table, to paste and to read by a program, in a dry run."""
    gpu = importlib.import_module("benchmarks.speed.gpu")
    gpu.main(["--quick", "--device", device, "--output", str(tmp_path)])
    pasted = (tmp_path / "gpu.md").read_text()
    assert pasted in capsys.readouterr().out
    assert re.search(r"- tests: \d+ passed.*", pasted)
    assert "| 128 | 32 |" in pasted
    assert "| tiny | sdpa | XQuAD | 8 |" in pasted
    stored = json.loads((tmp_path / "gpu.json").read_text())
    assert f"torch {version('torch')}" in stored["versions"]
    assert [(row["B"], row["D"]) for row in stored["rows"]] == [(64, 32), (128, 32)]
    assert stored["rows"][0]["losses"].keys() >= {"MNRL", "CachedMNRL", "one term"}
