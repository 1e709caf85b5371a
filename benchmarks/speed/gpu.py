"""The losses on a GPU: time, peak memory, and the share of the device's speed; `make gpu` runs this
after the tests.

    python benchmarks/speed/gpu.py [--quick] [--device cpu]

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
from collections.abc import Callable, Sequence

import torch
from benchmarks.speed.kernel import TEMPERATURES, Embedded, seconds
from benchmarks.speed.memory import MIB, peak_bytes
from benchmarks.studies.estimates import markdown
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from torch import Tensor

from st_magnitude import Term, infonce

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


def cell(run: Callable[[], None], size: int, dim: int, device: str, peak: float) -> str:
    """What a loss costs; "-" if it does not fit into the memory."""
    try:
        time = seconds({"step": run}, 5, device)["step"]
        memory = peak_bytes(run, device)
    except torch.OutOfMemoryError:
        return "-"
    return f"{time * 1e3:.3g} / {memory / MIB:.0f} / {6 * size**2 * dim / time / peak:.2f}"


def table(sizes: Sequence[int], dims: Sequence[int], device: str, peak: float) -> list[str]:
    rows = []
    for dim in dims:
        for size in sizes:
            runs = steps(size, dim, device)
            rows.append([size, dim, *(cell(x, size, dim, device, peak) for x in runs.values())])
            print(f"B = {size}, D = {dim} is done", flush=True)
    return markdown(["B", "D", *runs], rows, "rr")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="small sizes only")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here: try --device cpu --quick")
    peak = peak_speed(device, 256 if arguments.quick else 8192)
    sizes, dims = ((64, 128), (32,)) if arguments.quick else (SIZES, DIMS)
    lines = table(sizes, dims, device, peak)
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"\n{name}, torch {torch.__version__}, {peak / 1e12:.3g} TFLOP/s in bfloat16\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
