"""The losses on a GPU: versions, tests, time, peak memory, and the share of the device's speed;
`make gpu` runs this, in at most 15 minutes.

    python benchmarks/speed/gpu.py [--quick] [--device cpu] [--output runs]

It prints Markdown to paste into an issue, and writes it to gpu.md and the same as JSON to gpu.json.
Sizes that do not end in time are left out.

Forward and backward on embeddings, under autocast to bfloat16, as in a training with bf16=True.
MNRL and CachedMNRL then multiply in bfloat16. Ours leave autocast and multiply in float32, or in
TF32 where the script says so (`torch.set_float32_matmul_precision("high")`). A cell is ms / MiB /
share. MiB is the peak beyond inputs and the gradients that a step begins with. The share is 6 B² D
operations, three matrix products, over the time and over the speed of the largest product that is
timed here, in bfloat16: shares of one device can be compared.

Expected, before measuring: one term in TF32 at most 2 x the time of MNRL from B = 4,096; in float32
at most 2 x its own floor of three float32 products; memory of one term linear in B, and under 1/10
of MNRL's from B = 16,384.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from benchmarks.speed.kernel import TEMPERATURES, Embedded, seconds
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.speed.trimming import SHAPES, model_of
from benchmarks.studies.estimates import markdown
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor

from st_magnitude import Term, infonce

ROOT = Path(__file__).parents[2]
SIZES, DIMS = tuple(2**power for power in range(10, 17)), (768, 1024)


def peak_speed(device: str, size: int) -> float:
    """Floating-point operations per second of a square product in bfloat16."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds({"product": lambda: a @ b}, 10, device)["product"]


def steps(size: int, dim: int, device: str) -> dict[str, Callable[[], None]]:
    """For every loss a step: forward and backward."""
    torch.manual_seed(0)
    queries, documents = (
        torch.randn(size, dim, device=device, requires_grad=True) for _ in range(2)
    )
    columns = [{"sentence_embedding": x} for x in (queries, documents)]
    nine = [Term(k, temperature) for k in (dim // 4, dim // 2, dim) for temperature in TEMPERATURES]
    plain = MultipleNegativesRankingLoss(Embedded(dim))
    cached = CachedMultipleNegativesRankingLoss(Embedded(dim), mini_batch_size=1024)

    def tf32() -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return infonce(queries, documents)  # it takes the gradients in its forward pass
        finally:
            torch.set_float32_matmul_precision(before)

    losses: dict[str, Callable[[], Tensor]] = {
        "MNRL": lambda: plain(columns, None),
        "CachedMNRL": lambda: cached.calculate_loss([[queries], [documents]], with_backward=True),
        "one term": lambda: infonce(queries, documents),
        "one term, TF32": tf32,
        "nine terms": lambda: infonce(queries, documents, nine),
    }

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            queries.grad = documents.grad = None
            with torch.autocast(device, torch.bfloat16):
                value = loss()
            if value.requires_grad:  # the cached loss has taken its gradients
                value.backward()

        return run

    return {name: step(loss) for name, loss in losses.items()}


def cell(
    run: Callable[[], None], size: int, dim: int, device: str, peak: float
) -> dict[str, float] | None:
    """Time and memory of a loss; None if it does not fit into the memory."""
    try:
        time = seconds({"step": run}, 5, device)["step"]
        memory = peak_bytes(run, device)
    except torch.OutOfMemoryError:
        return None
    return {"ms": time * 1e3, "MiB": memory / MIB, "share": 6 * size**2 * dim / time / peak}


def measure(
    sizes: Sequence[int], dims: Sequence[int], device: str, peak: float, end: float
) -> list[dict[str, Any]]:
    """The cells of every size and number of dimensions that ends in time."""
    rows: list[dict[str, Any]] = []
    spent = 0.0
    for size in sizes:
        for dim in dims:
            start = perf_counter()
            if start + 5 * spent > end:  # twice the size takes four times as long
                print(f"no time is left for B = {size}, D = {dim}", flush=True)
                return rows
            runs = steps(size, dim, device)
            cells = {name: cell(run, size, dim, device, peak) for name, run in runs.items()}
            rows.append({"B": size, "D": dim, "losses": cells})
            spent = perf_counter() - start
            print(f"B = {size}, D = {dim} took {spent:.0f} s", flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            "{ms:.3g} / {MiB:.0f} / {share:.2f}".format(**found) if found else "-"
            for found in row["losses"].values()
        ]
        lines.append([row["B"], row["D"], *cells])
    return markdown(["B", "D", *rows[0]["losses"]], lines, "rr")


def tokens_of_a_pass(device: str) -> int:
    """How many tokens cost as much as one more forward and backward pass of 6 layers of 384
    dimensions: the overhead in st_magnitude/losses/groups.py."""
    model = model_of(*SHAPES["6 layers, as all-MiniLM-L6"]).to(device)

    def step(texts: int, length: int) -> Callable[[], None]:
        ids = torch.randint(2, 30_000, (texts, length), device=device)

        def run() -> None:
            features = {"input_ids": ids.clone(), "attention_mask": torch.ones_like(ids)}
            model(features)["sentence_embedding"].sum().backward()

        return run

    few, many = (1, 8), (16, 128)
    times = seconds({"few": step(*few), "many": step(*many)}, 5, device)
    of_a_token = (times["many"] - times["few"]) / (16 * 128 - 8)
    return round(times["few"] / of_a_token - 8)


def tested(device: str) -> str:
    """The last line of pytest about the tests on a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-k", device]
    command.append("tests/kernel/test_gpu.py")
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(found.stdout + found.stderr, flush=True)
    return found.stdout.strip().rpartition("\n")[2]


def main(given: Sequence[str] | None = None) -> None:
    start = perf_counter()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    parser.add_argument("--minutes", type=float, default=14, help="after which no size begins")
    parser.add_argument("--output", type=Path, default=ROOT / "runs")
    options = parser.parse_args(given)
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: try --device cpu --quick")
    packages = ("st-magnitude", "sentence-transformers", "transformers", "torch")
    versions = {name: version(name) for name in packages}
    versions |= {"python": platform.python_version(), "CUDA": str(torch.version.cuda)}
    peak = peak_speed(device, 256 if options.quick else 8192)
    record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "tests": tested(device),
        "TFLOP/s in bfloat16": round(peak / 1e12, 3),
        "tokens that a pass costs": tokens_of_a_pass(device),
    }
    sizes, dims = ((64, 128), (32,)) if options.quick else (SIZES, DIMS)
    rows = measure(sizes, dims, device, peak, start + 60 * options.minutes)
    record["minutes"] = round((perf_counter() - start) / 60, 1)
    lines = [f"- {name}: {value}" for name, value in record.items()]
    lines += ["", "A cell is ms / MiB / share of the speed in bfloat16.", "", *table(rows), ""]
    text = "\n".join(lines)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "gpu.md").write_text(text, encoding="utf-8")
    stored = json.dumps(record | {"rows": rows}, indent=1)
    (options.output / "gpu.json").write_text(stored, encoding="utf-8")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
