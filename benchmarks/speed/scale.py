"""The infonce kernel at large batches: time and memory against B, up to 65,536 x 1024 on a CPU.

    python benchmarks/speed/scale.py [1024] [384] [minilm] [--largest B] [--device cuda]

Forward and backward on embeddings (B queries, B documents, D dimensions), cosine, float32:

- ``one term`` and ``nine terms`` (3 dims x 3 temperatures): infonce;
- ``naive``: normalise, a B x B matrix of logits, cross_entropy, as MultipleNegativesRankingLoss
  does;
- ``two-sided``: tiles of rows and of columns, log-sum-exp carried along, scores computed again in
  the backward pass: the scheme of Inf-CL (arXiv 2410.17243) in plain PyTorch. It holds no tile as
  wide as B, and takes four products where the kernel takes three (five, where rows and columns get
  their gradients in passes of their own, as on a GPU);
- ``floor``: the kernel's three matrix products alone, in its tiles (up to eight of them, in
  proportion).

Each row is a process of its own. Memory is its peak (resident set, or CUDA's allocator) during the
step less what was there before, which includes the inputs, and less the gradients. Time is CPU time
of all threads, the least of several steps for small B: other jobs on the machine hardly count. On a
GPU it is elapsed time. Steps and floor take turns.

Then a training step of MiniLM with gradient caching (GradCache, arXiv 2101.06983): caching bounds
the activations of the encoder, the kernel bounds what the softmax over the whole batch takes.

What was expected is on the page, docs/research/kernel.md.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.studies.estimates import markdown
from torch import Tensor

from st_magnitude import Term, infonce
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.kernel.tiles import rows_of_a_tile

TEMPERATURE = 0.05
TEMPERATURES = (0.03, 0.06, 0.1)
SIDE = 1024  # of the square tiles of two-sided
MIB = 2**20

# --- the losses -----------------------------------------------------------------------------------


def one_term(queries: Tensor, documents: Tensor) -> Tensor:
    return infonce(queries, documents, [Term(temperature=TEMPERATURE)])


def nine_terms(queries: Tensor, documents: Tensor) -> Tensor:
    dim = queries.shape[1]
    return infonce(
        queries, documents, [Term(k, t) for k in (dim // 4, dim // 2, dim) for t in TEMPERATURES]
    )


def naive(queries: Tensor, documents: Tensor) -> Tensor:
    logits = F.normalize(queries) @ F.normalize(documents).T / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(queries), device=queries.device))


def two_sided(queries: Tensor, documents: Tensor) -> Tensor:
    # the kernel's own division by norms, so that the tiles alone make the difference
    dims = (queries.shape[1],)
    return _TwoSided.apply(
        divide_by_norms(queries, dims, 1.0)[0], divide_by_norms(documents, dims, 1.0)[0]
    )


class _TwoSided(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Tensor) -> Tensor:
        log_sums = []
        for q in rows.split(SIDE):
            peak, total = q.new_full((len(q),), -math.inf), q.new_zeros(len(q))
            for d in columns.split(SIDE):
                scores = (q @ d.T).div_(TEMPERATURE)
                new_peak = torch.maximum(peak, scores.amax(dim=1))
                total.mul_((peak - new_peak).exp()).add_(
                    scores.sub_(new_peak[:, None]).exp_().sum(dim=1)
                )
                peak = new_peak
            log_sums.append(total.log_().add_(peak))
        log_sum = torch.cat(log_sums)  # (B,)
        ctx.save_for_backward(rows, columns, log_sum)
        return (log_sum - torch.linalg.vecdot(rows, columns) / TEMPERATURE).mean()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns, log_sum = ctx.saved_tensors
        grad_rows, grad_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        factor = grad_output / (TEMPERATURE * len(rows))
        for q, z, grad_q, i in zip(
            *(x.split(SIDE) for x in (rows, log_sum, grad_rows)), range(len(rows)), strict=False
        ):
            for d, grad_d, j in zip(
                *(x.split(SIDE) for x in (columns, grad_columns)), range(len(rows)), strict=False
            ):
                slope = (q @ d.T).div_(TEMPERATURE).sub_(z[:, None]).exp_()
                if i == j:
                    slope.diagonal().sub_(1)
                slope.mul_(factor)
                grad_q.addmm_(slope, d)
                grad_d.addmm_(slope.T, q)
        return grad_rows, grad_columns


LOSSES = {"one term": one_term, "nine terms": nine_terms, "two-sided": two_sided, "naive": naive}

# --- measuring ------------------------------------------------------------------------------------


class Clock:
    """CPU time of all threads; on a GPU, elapsed time."""

    def __init__(self, device: str) -> None:
        self.device = device

    def __call__(self, step: Callable[[], None]) -> float:
        now = time.process_time if self.device == "cpu" else time.perf_counter
        began = now()
        step()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return now() - began


def peak_memory(device: str) -> int:
    """The most that this process has held so far, in bytes."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def floor_pass(queries: Tensor, documents: Tensor) -> tuple[Callable[[], None], float]:
    """The kernel's products for up to eight of its tiles, and how many times that is the whole."""
    height = min(rows_of_a_tile(queries.device, len(queries)), len(queries))
    tiles = min(8, len(queries) // height)
    rows, columns = queries.detach(), documents.detach()
    scores, grad_rows = rows.new_empty(height, len(columns)), rows.new_empty(height, rows.shape[1])
    grad_columns = torch.zeros_like(columns)

    def run() -> None:
        for tile in rows[: tiles * height].split(height):
            torch.mm(tile, columns.T, out=scores)
            torch.mm(scores, columns, out=grad_rows)
            grad_columns.addmm_(scores.T, tile)

    return run, len(queries) / (tiles * height)


def measure(name: str, size: int, dim: int, device: str) -> dict[str, float]:
    """Seconds, seconds of the floor, bytes beyond inputs and gradients, bytes of the process,
    seconds elapsed."""
    clock, loss = Clock(device), LOSSES[name]
    generator = torch.Generator(device).manual_seed(0)

    def inputs(n: int) -> list[Tensor]:
        return [
            torch.randn(n, dim, device=device, generator=generator).requires_grad_()
            for _ in range(2)
        ]

    loss(*inputs(64)).backward()  # threads, libraries
    pair = inputs(size)

    def step() -> None:
        for x in pair:
            x.grad = None
        loss(*pair).backward()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before, began = peak_memory(device), time.perf_counter()
    seconds = clock(step)
    elapsed, peak = time.perf_counter() - began, peak_memory(device)
    run, share = floor_pass(*pair)
    run()
    floor = clock(run)
    for _ in range(min(12, int(2e11 / (6 * size * size * dim)))):  # about a second or two each
        seconds, floor = min(seconds, clock(step)), min(floor, clock(run))
    return {
        "seconds": seconds,
        "floor": floor * share,
        "memory": peak - before - 8 * size * dim,
        "process": peak,
        "elapsed": elapsed,
    }


def training_step(size: int, mini_batch_size: int | None) -> dict[str, float]:
    """MiniLM on pairs of texts of 6 tokens: seconds, seconds of the kernel alone, bytes beyond
    model and gradients."""
    from benchmarks.data.docstrings import bundled_minilm
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    from st_magnitude import CosineRankingLoss, prepare

    logging.disable_progress_bar()
    clock = Clock("cpu")
    model = prepare(SentenceTransformer(bundled_minilm(), device="cpu"), "cosine")
    model.max_seq_length = 16
    model.train()
    loss = CosineRankingLoss(model, mini_batch_size=mini_batch_size)

    def features(n: int) -> list[dict[str, Tensor]]:
        return [
            model.preprocess([f"{kind} number {i:05d} of many" for i in range(n)])
            for kind in ("question", "answer")
        ]

    loss(features(8), None).backward()
    batch = features(size)
    before = peak_memory("cpu")
    seconds = clock(lambda: loss(batch, None).backward())
    memory = peak_memory("cpu") - before
    pair = [torch.randn(size, 384, requires_grad=True) for _ in range(2)]
    return {
        "seconds": seconds,
        "kernel": clock(lambda: one_term(*pair).backward()),
        "memory": memory,
    }


def in_a_process(function: Callable[..., dict[str, float]], *arguments: Any) -> dict[str, float]:
    """What the function returns in a fresh process, forked from one that has imported the libraries
    and no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sentence_transformers", "st_magnitude"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def exponent(sizes: list[int], values: list[float]) -> float:
    """b of values ~ sizes^b, by least squares on the logarithms of the upper half."""
    upper = slice(len(sizes) // 2, None)
    return float(np.polyfit(np.log(sizes[upper]), np.log(values[upper]), 1)[0])


# --- tables ---------------------------------------------------------------------------------------


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_header(*cells: str) -> None:
    print_row(*cells)
    print("|" + " ---: |" * len(cells))


def expected_bytes(name: str, size: int, dim: int, device: str) -> float:
    """Beyond inputs and gradients: normalised embeddings and tiles."""
    tiles, rows = {"one term": 2, "nine terms": 5}[name], rows_of_a_tile(torch.device(device), size)
    return 8 * size * dim + 4 * tiles * (size if size <= 2 * rows else rows) * size


def scaling(sizes: list[int], dim: int, limits: dict[str, int], device: str) -> None:
    """The table of one D, and the exponents."""
    found: dict[str, dict[int, dict[str, float]]] = {name: {} for name in LOSSES}
    print(f"\nD = {dim}\n")
    head = ("B", "loss", "seconds", ": floor", ": one term", "MiB", "expected", "process, MiB")
    print_header(*head)
    for size in sizes:
        for name in (name for name, limit in limits.items() if size <= limit):
            row = found[name][size] = in_a_process(measure, name, size, dim, device)
            ratios = (row["floor"], found["one term"][size]["seconds"])
            expected = ""
            if name in ("one term", "nine terms"):
                expected = f"{expected_bytes(name, size, dim, device) / MIB:.0f}"
            print_row(
                size,
                name,
                f"{row['seconds']:.3g}",
                *(f"{row['seconds'] / x:.2f}" for x in ratios),
                f"{row['memory'] / MIB:.0f}",
                expected,
                f"{row['process'] / MIB:.0f}",
            )
    rows = []
    for name, by_size in found.items():
        if len(by_size) > 3:
            there = list(by_size)
            keys = ("seconds", "memory")
            growth = [exponent(there, [x[key] for x in by_size.values()]) for key in keys]
            upper = there[len(there) // 2 :]
            ends = f"{upper[0]} to {upper[-1]}"
            rows.append([name, ends, *(f"{value:.2f}" for value in growth)])
    head = ["exponents over the upper half of B", "B", "time", "memory"]
    print("\n".join(["", *markdown(head, rows, "ll")]))
    largest, row = list(found["naive"].items())[-1]
    print(f"\nnaive at B = {largest}: {row['memory'] / (4 * largest**2):.1f} matrices of B x B")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", help="of 1024, 384 (dimensions) and minilm; all by default"
    )
    parser.add_argument(
        "--largest", type=int, help="the largest B (default 65,536; 262,144 on a GPU)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    parts = arguments.parts or ["1024", "384", "minilm"]
    if unknown := set(parts) - {"1024", "384", "minilm"}:
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}: choose of 1024, 384 and minilm"
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no GPU here; leave it out")
    # Threads that wait sleep, so that waiting is no CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    top = arguments.largest or (2**18 if arguments.device == "cuda" else 2**16)
    if top < 1024:
        parser.error(f"--largest is at least 1,024, the smallest B; got {top}")
    sizes = [2**k for k in range(10, top.bit_length())]
    fewer = max(2**13, top // 4)
    limits = {"one term": top, "nine terms": fewer, "two-sided": fewer, "naive": 2**14}
    print(
        f"torch {torch.__version__}, {arguments.device}, {torch.get_num_threads()} threads,"
        " float32, cosine"
    )
    for part in parts:
        if part != "minilm":
            scaling(sizes, int(part), limits, arguments.device)
    if "minilm" in parts and arguments.device == "cpu":
        print("\nA training step of MiniLM, pairs of texts of 6 tokens:\n")
        print_header("pairs", "mini_batch_size", "seconds", "kernel : step", "MiB beyond the model")
        steps: list[tuple[int, int | None]] = [(256, None), (256, 64), (1024, 64), (4096, 64)]
        for size, mini_batch_size in steps:
            row = in_a_process(training_step, size, mini_batch_size)
            share, memory = f"{row['kernel'] / row['seconds']:.3f}", f"{row['memory'] / MIB:.0f}"
            print_row(size, mini_batch_size or "none", f"{row['seconds']:.3g}", share, memory)


if __name__ == "__main__":
    main()
