"""Two gloo processes of test_isotropy.py: `torchrun --nproc_per_node 2 _two_ranks_sigreg.py MODEL OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from _tiny import ROWS, load_transformer
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.losses import regularizers as module

CASES: dict[str, dict] = {
    "default": {},
    "knots": {"num_directions": 48, "num_knots": 16, "t_max": 4.0},
    "raw": {"scale": None},
    "dims": {"dims": (8, 32)},
    "alone": {"gather": False},
}
SPLIT = 5  # rank 0 has 5 rows, rank 1 the other 9
STRETCH = 4.0  # of the rows of rank 1, where length counts: what a rank reads off its own rows is wrong for the others
NUM_ROWS = 14


def columns_of(rows: list[tuple]) -> list[list[str]]:
    return [[row[i] for row in rows] for i in range(3)]


def one_step(folder: str, options: dict, cached: bool) -> dict:
    """Value, excess and gradients of this rank's rows, in a model as the Trainer wraps it."""
    model = load_transformer(folder).double()
    rank = dist.get_rank()
    rows = [row[:3] for row in (ROWS[:NUM_ROWS][SPLIT:] if rank else ROWS[:SPLIT])]
    features = [dict(model.preprocess(column)) for column in columns_of(rows)]
    sigreg = stm.SIGReg(**options)
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(rank)  # the directions are nevertheless those of rank 0
    if cached:
        loss = stm.SIGRegInfoNCE(model, 1.0, sigreg=sigreg, scale=1e-9, mini_batch_size=2)  # of InfoNCE no gradient
        loss.model = wrapped
        value = loss(features)
        parts = {name: part.item() for name, part in value.items()}
        torch.stack(list(value.values())).sum().backward()
    else:
        value = sigreg(torch.cat([x * (STRETCH if rank else 1) for x in embed_columns(wrapped, features)]))
        parts = {"sigreg": value.item()}
        value.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"value": parts["sigreg"], "excess": sigreg.last_excess.item(), "gradients": gradients}


def main(folder: str, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module._CHUNK["cpu"] = 2**12  # several chunks of directions, each with a reduction of its own
    results = {(name, cached): one_step(folder, o, cached) for name, o in CASES.items() for cached in (False, True)}
    torch.save(results, output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
