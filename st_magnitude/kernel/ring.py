"""infonce over the documents of all ranks, which pass around the ranks in a ring.

Each of the W ranks holds its own documents, the block at hand and the block that arrives, so its
memory does not grow with W. A block makes two rounds. It travels while the rank works with another:

1. A rank finds the log-sum-exp of its rows, block by block.
2. With it, the softmax of a tile is known at once. The gradient of the rows stays, and the gradient
   of a block travels one hop behind it. Each rank adds its part; after W hops it is home.

Scores are computed in each round: four matrix products, where gathered documents take three.

Source: Cheng et al. 2024, Breaking the Memory Barrier: Near Infinite Batch Size Scaling for
    Contrastive Loss (Inf-CL), arXiv 2410.17243, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from st_magnitude._distributed import agree
from st_magnitude.kernel.batch import Batch, Direction
from st_magnitude.kernel.panels import Panel, Side, panel_of
from st_magnitude.kernel.plan import Plan
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiled import tiled_infonce
from st_magnitude.similarity import Similarity

# The columns of one rank with all that belongs to them, or gradients, along the first axis
Block = dict[str, Tensor]
FLOWS = ("x", "scale")  # what has a gradient
TRAVELS = ("x", "ids", "label", "bias", "guide", "spared")


def ring_infonce(
    batch: Batch,
    terms: Sequence[Term],
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    tile_rows: int | None,
    check: Callable[[], tuple[int, int]],
) -> Tensor:
    """This rank's share of the loss of the joined batch, whose mean over ranks is that loss. The
    mean of the gradients, which DDP takes, is the gradient of the joined batch.

    ``check`` checks the batch of this rank and returns its B and M. If it raises on one, all raise.
    """
    num_queries, num_documents = zip(*agree(batch.queries.device, check, 2), strict=True)
    num_losses = sum(num_queries) / len(num_queries) * len(softmaxes)
    plan = Plan.of(terms, batch, similarity, num_losses, tile_rows)
    counts = {"query_to_doc": num_documents, "doc_to_query": num_queries}
    return tiled_infonce(batch, similarity, softmaxes, plan, partial(one_round, batch, counts))


def refuse_in_ring(name: str, softmaxes: Sequence[Sequence[Direction]], **given: object) -> None:
    """Refuses what a ring ignores; ``name`` is the argument that asks for the ring."""
    ignored = [other for other, value in given.items() if value is not None]
    if any(len(directions) > 1 for directions in softmaxes):
        ignored.append("joint softmax; partition_mode='per_direction' has one for each direction")
    if ignored:
        raise ValueError(
            f"{name}='ring' takes no {ignored[0]}. Gather the documents of all ranks instead."
        )


def one_round(
    batch: Batch,
    counts: dict[str, tuple[int, ...]],
    direction: Direction,
    rows: Side,
    columns: Side,
    with_gradients: bool,
) -> Iterator[Panel]:
    """The panels of rows with the columns of all ranks, which the ``counts`` of a direction number.

    With gradients, those of the columns travel one hop behind their block, and are home at the end.
    """
    rank, sizes = dist.get_rank(), counts[direction]
    ranks = len(sizes)
    block: Block = {name: getattr(columns, name) for name in TRAVELS}
    block = {name: x.detach() for name, x in block.items() if x is not None}
    if columns.scale is not None:
        block["scale"] = columns.scale.T.contiguous()  # (M, K - 1)
    of_own = _scores_of_positives(rows, columns)
    flows = [name for name in FLOWS if with_gradients and name in block]
    returned: Callable[[], Block] | None = None
    for hop in range(ranks):
        # The next block arrives while the rank works with the one at hand.
        arriving = sizes[(rank - hop - 1) % ranks]
        successor = _pass_on(block, arriving) if hop < ranks - 1 else None
        gradient = {name: torch.zeros_like(block[name]) for name in flows}
        if hop == 0 and with_gradients:  # goes on from what they have as rows of a direction
            if columns.grad is not None:
                gradient["x"] = columns.grad
            if columns.grad_scale is not None:
                gradient["scale"] = columns.grad_scale.T.contiguous()
            columns.grad = columns.grad_scale = None
        own = 0 if hop == 0 else None
        # No name holds the side, which the next block would find in memory otherwise.
        yield panel_of(batch, direction, rows, _side(block, gradient), own, of_own)
        if with_gradients:
            if returned is not None:
                _add(gradient, returned())
                returned = None  # frees what has arrived and what was sent
            returned = _pass_on(gradient, arriving)
        if successor is not None:
            block, successor = successor(), None
    if returned is not None:  # after W hops
        home = _side(returned(), {})
        columns.grad, columns.grad_scale = home.x, home.scale


def _add(block: Block, other: Block) -> None:
    for name, x in other.items():
        block[name].add_(x)


def _scores_of_positives(rows: Side, columns: Side) -> Tensor:
    """The scores that a threshold looks at, of the guide or of the longest prefix: (B,)."""
    left, right = rows.x, columns.x
    if rows.guide is not None and columns.guide is not None:
        left, right = rows.guide, columns.guide
    return torch.linalg.vecdot(left, right[: len(left)])


def _side(block: Block, gradient: Block) -> Side:
    """A block, whose factors are (K - 1, M) in a side, with memory for its gradients."""
    marks = {name: x for name, x in block.items() if name not in FLOWS}
    return Side(
        x=block["x"],
        scale=block["scale"].T.contiguous() if "scale" in block else None,
        grad=gradient.get("x"),
        grad_scale=gradient["scale"].T if "scale" in gradient else None,
        **marks,
    )


def _pass_on(block: Block, size: int) -> Callable[[], Block]:
    """Sends a block on; returns a function that awaits its successor with ``size`` columns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    successor = {name: x.new_empty(size, *x.shape[1:]) for name, x in block.items()}
    operations = [dist.P2POp(dist.isend, x, after) for x in block.values()]
    operations += [dist.P2POp(dist.irecv, x, before) for x in successor.values()]
    works = dist.batch_isend_irecv(operations)

    def arrived() -> Block:
        for work in works:
            work.wait()
        return successor

    return arrived
