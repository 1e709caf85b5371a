"""The processes that train together, each of which is a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist


def num_ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(device: torch.device, check: Callable[[], Sequence[int]], size: int) -> list[list[int]]:
    """The ``size`` whole numbers that the check returns on each rank.

    Where it raises on one rank, all raise, because one alone would leave the others waiting.
    """
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
