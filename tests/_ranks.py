"""Functions that run on several gloo processes, which are forks of this one."""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

PATIENCE = 200  # seconds
needs_fork = pytest.mark.skipif(
    sys.platform != "linux", reason="forks processes that have used torch"
)


def on_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of the function by rank; a rank that fails fails the test."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=_one_rank,
                args=(rank, num_ranks, Path(folder), function, arguments),
                daemon=True,
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(PATIENCE)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            process.kill()
        errors = [path.read_text() for path in Path(folder).glob("error*")]
        assert not errors, "\n\n".join(errors)
        assert codes == [0] * num_ranks, "a rank waits, or was aborted"
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
    try:
        torch.save(function(*arguments), folder / f"rank{rank}.pt")
    except Exception:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
