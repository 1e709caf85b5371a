"""plan_batch: which batch fits the device, and how long an epoch takes, from two short steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.util import batch_to_device

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.finetune.run import make_trainer, reading, training_rows
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.result import Result, Table
from st_magnitude.surgery.export import load

__all__ = ["BatchPlan", "plan_batch"]

SIZES = (4, 16)  # pairs in the two steps
ADAM = 8  # bytes of the optimizer for each parameter
SAFE = 0.9  # share of the device's memory that a plan uses


@dataclass(frozen=True)
class BatchPlan(Result):
    """Time and memory of a training step as straight lines in the number of pairs.

    Memory is measured on the longest texts of the data and time on average ones. Both are None where they are unknown:
    the memory of a step is measured on CUDA devices only.
    """

    device: str
    pairs: int  # in an epoch
    columns: int  # texts in a row
    batch_size: int  # of the settings
    fixed_seconds: float
    seconds_per_pair: float
    fixed_bytes: float | None  # weights, gradients and the state of the optimizer
    bytes_per_pair: float | None
    capacity: float | None  # bytes of the device

    @property
    def largest_batch(self) -> int | None:
        """The most pairs of a step without gradient caching."""
        if self.capacity is None or self.fixed_bytes is None or not self.bytes_per_pair:
            return None
        return max(0, int((SAFE * self.capacity - self.fixed_bytes) / self.bytes_per_pair))

    @property
    def largest_mini_batch(self) -> int | None:
        """The most texts that go through the model at a time with gradient caching, which does one column at a time."""
        return None if self.largest_batch is None else self.largest_batch * self.columns

    def seconds(self, batch_size: int) -> float:
        """Seconds of a step without caching."""
        return self.fixed_seconds + self.seconds_per_pair * batch_size

    def tables(self) -> Iterable[Table]:
        """The time of a step and of an epoch, and the batches that fit."""
        size, most = self.batch_size, self.largest_batch
        rows: list[list[Any]] = [[f"one step of {size:,} pairs", f"{self.seconds(size):.2f} s"]]
        steps = max(1, self.pairs // size)
        rows.append([f"an epoch, {steps:,} steps", _time(steps * self.seconds(size))])
        rows.append(["the same with gradient caching, about", _time(4 / 3 * steps * self.seconds(size))])
        note = "The memory of a step is measured on CUDA devices only."
        if most is not None and self.capacity is not None:
            rows.append(["largest batch (--batch-size)", most])
            rows.append(["largest --mini-batch-size with caching", self.largest_mini_batch])
            note = f"{SAFE:.0%} of {self.capacity / 1e9:.0f} GB, by the longest texts of the data."
        yield Table([f"on {self.device}", ""], rows, note=note)


def plan_batch(model: SentenceTransformer | str, data: RetrievalData, config: TrainConfig | None = None) -> BatchPlan:
    """Measures forward and backward passes of 4 and 16 pairs on a copy of the model, and trains nothing.

    Args:
        model: The model to train, or its folder or hub id.
        data: Training data.
        config: Settings of the run: the loss, its options and ``max_length`` count.

    Example:
        ::

            plan = plan_batch("sentence-transformers/all-MiniLM-L6-v2", data, TrainConfig(batch_size=256))
            print(plan, plan.largest_batch)
    """
    config = config or TrainConfig()
    model = load(model) if isinstance(model, str) else deepcopy(model)
    rows = training_rows(data, config.negatives, config.seed)
    longest = sorted(range(len(rows)), key=lambda i: -sum(len(text) for text in rows[i].values()))
    sizes = [min(size, len(rows)) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder, reading(model, config.max_length):
        trainer = make_trainer(model, data, rows, config, Path(folder), save_strategy="no", disable_tqdm=True)
        _step(trainer, rows.select(range(sizes[1])))  # warms up
        times = [min(_step(trainer, rows.select(range(size)))[0] for _ in range(2)) for size in sizes]
        peaks = [_step(trainer, rows.select(longest[:size]))[1] for size in sizes]
    seconds, each = _line(sizes, times)
    device, capacity = trainer.model.device, None
    fixed = per_pair = None
    if peaks[0] is not None and peaks[1] is not None:
        fixed, per_pair = _line(sizes, [float(peak) for peak in peaks if peak is not None])
        fixed += ADAM * sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        capacity = float(torch.cuda.mem_get_info(device)[1])
    return BatchPlan(
        str(device), len(rows), len(rows.column_names), config.batch_size, seconds, each, fixed, per_pair, capacity
    )


def _step(trainer: SentenceTransformerTrainer, rows: Dataset) -> tuple[float, int | None]:
    """Seconds and peak bytes of one forward and backward pass without caching."""
    model: Any = trainer.model
    loss: Any = trainer.loss
    loss.uses_gradient_cache = False
    device = model.device
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    batch: Any = trainer.data_collator(list(rows))
    features, _ = trainer.collect_features(batch_to_device(batch, device))
    with torch.autocast(device.type, torch.bfloat16) if trainer.args.bf16 else nullcontext():
        value = loss(features, None)
    torch.stack(list(value.values()) if isinstance(value, dict) else [value]).sum().backward()
    if is_cuda:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated(device) if is_cuda else None
    model.zero_grad()
    return seconds, peak


def _line(x: list[int], y: list[float]) -> tuple[float, float]:
    """Intercept and slope, neither below 0."""
    slope = max(0.0, (y[1] - y[0]) / max(1, x[1] - x[0]))
    return max(0.0, y[0] - slope * x[0]), slope


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
