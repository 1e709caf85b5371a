"""Memory and time of the patched MultipleNegativesRankingLoss, forward and backward, as ratios to
its default.

    PYTHONPATH=<patched checkout of sentence-transformers> OMP_NUM_THREADS=1 python measure.py
    [--sizes 512 2048]

Embeddings of B anchors and B positives with 384 dimensions. Memory is the peak of what a step
allocates beyond its inputs. Time is the processor time of the process, which other programs on the
machine disturb little, in the fastest of several rounds in which the variants take turns. Each
value and gradient is first compared with the default's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn

DIM = 384
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def peak_bytes(step: Callable[[], None]) -> int:
    """The most that was allocated at a time during a step, beyond what was there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def fastest(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            began = time.process_time()
            step()
            best[name] = min(best[name], time.process_time() - began)
    return best


def measure(size: int, directions: tuple[str, ...], chunk_size: int) -> None:
    torch.manual_seed(0)
    embeddings = [torch.randn(size, DIM, requires_grad=True) for _ in range(2)]
    # no duplicates: the same loss
    hashes = [torch.arange(size) + column * size for column in range(2)]
    variants = {
        "default": {},
        f"chunk_size={chunk_size}": {"chunk_size": chunk_size},
        "mask_duplicates": {"mask_duplicates": True},
        "both": {"chunk_size": chunk_size, "mask_duplicates": True},
    }
    losses = {
        name: MultipleNegativesRankingLoss(nn.Identity(), directions=directions, **options)
        for name, options in variants.items()
    }

    def results(name: str) -> list[Tensor]:
        given = hashes if losses[name].mask_duplicates else None
        value = losses[name].compute_loss_from_embeddings(embeddings, None, given)
        return [value.detach(), *torch.autograd.grad(value, embeddings)]

    steps = {name: lambda name=name: results(name) for name in losses}
    expected = results("default")
    for name in losses:
        torch.testing.assert_close(results(name), expected, rtol=1e-4, atol=1e-6)
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    times = fastest(steps, rounds=max(2, 16384 // size))
    for name in losses:
        print(
            f"{size:>6} {len(directions):>10} {name:<16} {peaks[name] / 2**20:>9.1f}"
            f" {times[name]:>9.3f} {peaks[name] / peaks['default']:>8.3f}"
            f" {times[name] / times['default']:>6.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[512, 2048, 8192], help="batch sizes"
    )
    parser.add_argument("--chunk-size", type=int, default=256)
    arguments = parser.parse_args()
    print(
        f"{'B':>6} {'directions':>10} {'variant':<16} {'peak MiB':>9} {'seconds':>9}"
        f" {'x memory':>8} {'x time':>6}"
    )
    for size in arguments.sizes:
        measure(size, ("query_to_doc",), arguments.chunk_size)
    for size in arguments.sizes:
        if size <= 2048:  # six score matrices' worth at B = 8192 is beyond a small machine
            measure(size, FOUR, arguments.chunk_size)


if __name__ == "__main__":
    main()
