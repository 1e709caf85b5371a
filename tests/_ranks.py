"""Functions that run on several gloo processes, which are forks of this one."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException, start_processes

from st_magnitude._upstream import SINCE_6_2

PATIENCE = 200  # seconds
needs_fork = pytest.mark.skipif(
    sys.platform != "linux", reason="forks processes that have used torch"
)


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of the function by rank; a rank that fails fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = num_ranks, Path(folder), function, arguments
        ranks = start_processes(
            _one_rank, arguments, num_ranks, join=False, daemon=True, start_method="fork"
        )
        for _ in range(PATIENCE):
            try:
                if ranks.join(1):  # which raises what a rank raised
                    break
            except ProcessRaisedException as error:
                if not SINCE_6_2 and "sentence-transformers 6.2 or later" in str(error):
                    pytest.skip("this release caches gradients on one rank only")
                raise
        else:
            for process in ranks.processes:
                process.kill()
            raise TimeoutError("a rank waits")
        return [
            torch.load(Path(folder) / f"rank{rank}.pt", weights_only=False)
            for rank in range(num_ranks)
        ]


def _one_rank(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], arguments: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # which the Trainer wants
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )
    torch.save(function(*arguments), folder / f"rank{rank}.pt")
    # The group ends with the process, which runs no destructors: in torch 2.6 destroying it joins
    # gloo's threads with the GIL, for which one that still drops a tensor waits.
