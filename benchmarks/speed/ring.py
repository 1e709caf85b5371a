"""Negatives of all ranks, gathered and in a ring: time and memory of a rank against the number of
ranks, on a CPU.

    python benchmarks/speed/ring.py

Forward and backward on embeddings (B queries and B documents a rank, D dimensions), cosine, one
term, float32, gloo:

- ``gathering``: what ``gather_across_devices=True`` does, all_gather_with_grad and infonce;
- ``ring``: what ``gather_across_devices="ring"`` does.

Each rank is a process with one thread. Memory is the peak of its resident set during the step less
what was there before, which includes the inputs, and less their gradients; the largest of all ranks
counts. Time is the CPU time of a rank, the mean over the ranks of the least of several steps,
because the ranks share two cores with other jobs. It reads /proc, so it runs on Linux only.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.speed.memory import MIB, fresh_processes
from benchmarks.studies.estimates import markdown
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor

from st_magnitude import infonce


def gathering(queries: Tensor, documents: Tensor) -> Tensor:
    return infonce(queries, all_gather_with_grad(documents), offset=dist.get_rank() * len(queries))


ROWS, DIM, RANKS = 2048, 1024, (1, 2, 4)  # queries and documents of a rank
LOSSES = {"gathering": gathering, "ring": partial(infonce, backend="ring")}


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(
    name: str, rank: int, num_ranks: int, store: str, rows: int, dim: int
) -> tuple[float, float]:
    """CPU seconds, and bytes beyond inputs and gradients, of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    loss = LOSSES[name] if num_ranks > 1 else infonce  # one rank alone has nothing to gather
    generator = torch.Generator().manual_seed(rank)

    def inputs(n: int) -> list[Tensor]:
        return [torch.randn(n, dim, generator=generator).requires_grad_() for _ in range(2)]

    loss(*inputs(64)).backward()  # threads, libraries, connections
    pair = inputs(rows)
    seconds, memory = [], []
    for _ in range(4):
        for x in pair:
            x.grad = None
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, began = resident("VmRSS"), time.process_time()
        loss(*pair).backward()
        seconds.append(time.process_time() - began)
        memory.append(resident("VmHWM") - before - 8 * rows * dim)
    dist.destroy_process_group()
    return min(seconds), max(memory)


def on_ranks(name: str, num_ranks: int, rows: int = ROWS, dim: int = DIM) -> tuple[float, float]:
    """The mean of the seconds and the largest memory of the ranks, each a fresh process with the
    libraries loaded."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # what is freed goes back to the system at once
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, mp_context=fresh_processes()) as pool,
    ):
        ranks = [
            pool.submit(measure, name, rank, num_ranks, f"{folder}/store", rows, dim)
            for rank in range(num_ranks)
        ]
        seconds, memory = zip(*(rank.result() for rank in ranks), strict=True)
    return sum(seconds) / num_ranks, max(memory)


def main() -> None:
    print(f"torch {torch.__version__}, {ROWS} x {DIM} a rank\n")
    found = []
    for num_ranks in RANKS:
        gathered, ring = (on_ranks(name, num_ranks) for name in LOSSES)
        times = [f"{gathered[0]:.3g}", f"{ring[0]:.3g}", f"{ring[0] / gathered[0]:.2f}"]
        sizes = [f"{x[1] / MIB:.0f}" for x in (gathered, ring)]
        found.append([num_ranks, *times, *sizes, f"{ring[1] / gathered[1]:.2f}"])
    head = "ranks|gathering, s|ring, s|ring : gathering|gathering, MiB|ring, MiB|ring : gathering"
    print("\n".join(markdown(head.split("|"), found, "r")))


if __name__ == "__main__":
    main()
