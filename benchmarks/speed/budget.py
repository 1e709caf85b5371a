"""The memory of the loss by a formula, and as measured on a CPU.

    python benchmarks/speed/budget.py

B queries and B documents a rank, D dimensions, one term, cosine, float32, beyond the embeddings and
their gradients:

    one process   4 (2 B D + T)      T = 2 h M, the scores and slopes of a tile of
    gathering     4 (3 W B D + T)    h = max(256, 2^20 / M) rows, at most B, and M = W B columns

and 4 MiB for the workspace of libraries, which we fitted. K prefixes make K + 1 of the 2 in T, and
several temperatures one more.

Each rank is a gloo process with one thread. Memory is the peak of its resident set during a step
less what was there before, which includes the inputs, and less their gradients; the largest of all
ranks counts. It reads /proc, so it runs on Linux only.
"""

import math
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.speed.memory import MIB, fresh_processes
from benchmarks.studies.estimates import markdown
from sentence_transformers.util import all_gather_with_grad
from torch import Tensor

from st_magnitude import infonce

# (ranks, B, D)
SETTINGS = (
    (1, 2048, 384),
    (1, 2048, 1024),
    (1, 4096, 768),
    (1, 8192, 384),
    (2, 1024, 1024),
    (2, 2048, 768),
    (4, 1024, 1024),
    (4, 2048, 768),
)
WORKSPACE = 4 * MIB
PLANNED = ((1, 4096, 768), (8, 4096, 768), (1, 32768, 1024), (8, 32768, 1024))


def tile(rows: int, columns: int) -> int:
    """Numbers in the two buffers of a tile of scores."""
    most = max(256, 2**20 // columns)
    height = math.ceil(rows / math.ceil(rows / most))
    return 2 * height * columns


def expected(ranks: int, rows: int, dim: int) -> int:
    """Bytes of the loss on one rank."""
    blocks = 2 if ranks == 1 else 3 * ranks
    return 4 * (blocks * rows * dim + tile(rows, ranks * rows)) + WORKSPACE


def gathering(queries: Tensor, documents: Tensor) -> Tensor:
    return infonce(queries, all_gather_with_grad(documents), offset=dist.get_rank() * len(queries))


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(rank: int, num_ranks: int, store: str, rows: int, dim: int) -> int:
    """Bytes beyond inputs and gradients of one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    loss = gathering if num_ranks > 1 else infonce
    generator = torch.Generator().manual_seed(rank)

    def inputs(n: int) -> list[Tensor]:
        return [torch.randn(n, dim, generator=generator).requires_grad_() for _ in range(2)]

    loss(*inputs(64)).backward()  # threads, libraries, connections
    pair = inputs(rows)
    memory = []
    for _ in range(4):
        for x in pair:
            x.grad = None
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = resident("VmRSS")
        loss(*pair).backward()
        memory.append(resident("VmHWM") - before - 8 * rows * dim)
    dist.destroy_process_group()
    return max(memory)


def on_ranks(num_ranks: int, rows: int, dim: int) -> int:
    """The largest memory of the ranks, each a fresh process with the libraries loaded."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # what is freed goes back to the system at once
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(num_ranks, mp_context=fresh_processes()) as pool,
    ):
        ranks = [
            pool.submit(measure, rank, num_ranks, f"{folder}/store", rows, dim)
            for rank in range(num_ranks)
        ]
        return max(rank.result() for rank in ranks)


def main() -> None:
    rows = []
    for ranks, size, dim in SETTINGS:
        measured = on_ranks(ranks, size, dim)
        formula = expected(ranks, size, dim)
        cells = (formula / MIB, measured / MIB, formula / measured)
        rows.append([str(ranks), f"{size:,}", str(dim), *(f"{x:.2f}" for x in cells)])
    print("\n".join(markdown(["processes", "B", "D", "MiB", "measured", "ratio"], rows)))
    rows = []
    for ranks, size, dim in PLANNED:
        planned = expected(ranks, size, dim) / MIB
        rows.append([str(ranks), f"{size:,}", str(dim), f"{planned:,.0f}"])
    print("\n".join(markdown(["processes", "B", "D", "MiB"], rows)))


if __name__ == "__main__":
    main()
