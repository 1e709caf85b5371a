"""The memory of a step, and of a process."""

from __future__ import annotations

import multiprocessing
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext
from typing import TypeVar

import torch

MIB = 2**20
T = TypeVar("T")


def peak_bytes(step: Callable[[], object], device: str = "cpu") -> int:
    """The most that the tensors of a step take at a time, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
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


def process_peak() -> int:
    """The most that this process has held so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def forget_peak() -> int:
    """What this process holds now, in bytes, from which `process_peak` counts anew. Linux only."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return process_peak()


def fresh_processes() -> ForkServerContext:
    """Processes forked from one that has imported the libraries and no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sentence_transformers", "st_magnitude"])
    return context


def in_a_process(function: Callable[..., T], *arguments: object) -> T:
    """The result of the function in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=fresh_processes()) as pool:
        return pool.submit(function, *arguments).result()
