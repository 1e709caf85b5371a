"""The processes (ranks) that train together, and the engines around a model: FSDP and DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from transformers import Trainer


def num_ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(device: torch.device, check: Callable[[], Sequence[int]], size: int) -> list[list[int]]:
    """Gathers the ``size`` whole numbers that the check returns on each rank. Where it raises on
    one rank, all raise, because one alone would leave the others waiting."""
    problem, numbers = None, [0] * (size + 1)
    try:
        numbers = [1, *check()]
    except Exception as error:
        problem = error
    mine = torch.tensor(numbers, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    if problem is not None:
        raise problem
    everywhere = [x.tolist() for x in found]
    if failed := [rank for rank, (fine, *_) in enumerate(everywhere) if not fine]:
        raise RuntimeError(
            f"The batch of rank {failed[0]} was refused; read the error of that process."
        )
    return [numbers for _, *numbers in everywhere]


def shares_passes(model: nn.Module) -> bool:
    """Whether ranks wait for each other in each forward pass of a model, in which DDP broadcasts
    buffers and FSDP gathers weights."""
    if num_ranks() == 1:
        return False
    is_wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    return is_wrapped or engine_of(model) is not None


def largest_of_ranks(model: nn.Module, number: int) -> int:
    """The largest number of the ranks that share the passes of a model."""
    if not shares_passes(model):
        return number
    largest = torch.tensor(int(number), device=next(model.parameters()).device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def engine_of(model: Any) -> str | None:
    """The engine around a model, by the names of classes, whose import takes long or needs
    DeepSpeed: ``"FSDP"``, ``"DeepSpeed ZeRO-3"`` (or another stage), or None."""
    if type(model).__name__ == "DeepSpeedEngine":
        return f"DeepSpeed ZeRO-{model.zero_optimization_stage()}"
    classes = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    return "FSDP" if classes & {"FSDPModule", "FullyShardedDataParallel"} else None


def engine_of_trainer(trainer: Trainer) -> str | None:
    """The engine that a Trainer is about to put around its model."""
    if trainer.is_deepspeed_enabled:
        return f"DeepSpeed ZeRO-{trainer.accelerator.state.deepspeed_plugin.zero_stage}"
    return "FSDP" if trainer.is_fsdp_enabled else None
