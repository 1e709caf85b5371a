"""The infonce kernel at large batches: time and memory against B, up to 65,536 x 1024 on a CPU.

    python benchmarks/speed/scale.py

Forward and backward on embeddings (B queries, B documents, D dimensions), cosine, float32:

- ``one term``: infonce;
- ``naive``: normalise, a B x B matrix of logits, cross_entropy, as MultipleNegativesRankingLoss
  does, up to B = 16,384.

Each row is a process of its own. Memory is its peak during the step less what was there before,
which includes the inputs, and less the gradients. Time is CPU time of all threads, the least of
several steps for small B: other jobs on the machine hardly count.
"""

from __future__ import annotations

import os
import time

import torch
import torch.nn.functional as F
from benchmarks.speed.memory import MIB, in_a_process, process_peak
from benchmarks.studies.estimates import markdown
from torch import Tensor

from st_magnitude import infonce


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    logits = F.normalize(queries) @ F.normalize(documents).T * 20
    return F.cross_entropy(logits, torch.arange(len(queries)))


LOSSES = {"one term": infonce, "naive": naive}
DIM = 1024
LIMITS = {"one term": 2**16, "naive": 2**14}


def measure(name: str, size: int) -> dict[str, float]:
    """CPU seconds, and bytes beyond inputs and gradients."""
    loss = LOSSES[name]
    generator = torch.Generator().manual_seed(0)

    def inputs(n: int) -> list[Tensor]:
        return [torch.randn(n, DIM, generator=generator).requires_grad_() for _ in range(2)]

    def step() -> float:
        for x in pair:
            x.grad = None
        began = time.process_time()
        loss(*pair).backward()
        return time.process_time() - began

    loss(*inputs(64)).backward()  # threads, libraries
    pair = inputs(size)
    before = process_peak()
    seconds = step()
    peak = process_peak()
    for _ in range(min(12, int(2e11 / (6 * size * size * DIM)))):  # about a second or two each
        seconds = min(seconds, step())
    return {"seconds": seconds, "memory": peak - before - 8 * size * DIM}


def main() -> None:
    # Threads that wait sleep: else waiting is CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, D = {DIM}\n")
    rows = []
    for name, limit in LIMITS.items():
        sizes = [2**k for k in range(10, limit.bit_length())]
        found = [in_a_process(measure, name, size) for size in sizes]
        for size, x in zip(sizes, found, strict=True):
            rows.append([name, size, f"{x['seconds']:.3g}", f"{x['memory'] / MIB:.0f}"])
    print("\n".join(markdown(["loss", "B", "CPU s", "MiB"], rows)))


if __name__ == "__main__":
    main()
