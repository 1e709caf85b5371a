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
from st_magnitude.kernel.panels import Panel, panel_of
from st_magnitude.kernel.terms import Plan, Term
from st_magnitude.kernel.tiled import tiled_infonce
from st_magnitude.kernel.vectors import Vectors
from st_magnitude.similarity import Similarity

# Tensors of the columns of one rank, or their gradients, with a row for each column
Block = dict[str, Tensor]
FLOWS = {"x": "grad", "scale": "grad_scale"}  # what has a gradient, and its name
TRAVELS = (*FLOWS, "ids", "positive_id", "bias", "spared")


def ring_infonce(
    batch: Batch,
    terms: Sequence[Term],
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    tile_rows: int | None,
) -> Tensor:
    """This rank's share of the global loss. Its mean over ranks is the loss of the joined batch,
    and the mean of the gradients, which DDP takes, is the gradient of that loss. If one rank has a
    batch that does not fit together, all raise.
    """
    same = _what_travels(batch, terms)

    def check() -> list[int]:
        batch.check([x for directions in softmaxes for x in directions], terms)
        return [len(batch.queries), len(batch.documents), *same.values()]

    of_ranks = agree(batch.queries.device, check, size=2 + len(same))
    num_queries, num_documents, *others = zip(*of_ranks, strict=True)
    for name, numbers in zip(same, others, strict=True):
        if len(set(numbers)) > 1:
            raise ValueError(f"The ranks of a ring differ in the number of {name}: {numbers}.")
    num_losses = sum(num_queries) / len(num_queries) * len(softmaxes)
    plan = Plan.of(terms, batch, similarity, num_losses, tile_rows)
    counts = {"query_to_doc": num_documents, "doc_to_query": num_queries}
    return tiled_infonce(batch, similarity, softmaxes, plan, partial(one_round, batch, counts))


def _what_travels(batch: Batch, terms: Sequence[Term]) -> dict[str, int]:
    """Numbers that have to be equal on all ranks, or one would wait for another."""
    tensors = batch.queries, batch.documents
    numbers = {"dimensions": batch.queries.shape[-1], "bytes": batch.queries.element_size()}
    numbers |= {"terms": len(terms), "ids in exclude": len(batch.excluded_ids)}
    numbers |= {"spares": len(batch.spares), "positives": len(batch.positive_ids)}
    numbers |= {x: getattr(batch, x) is not None for x in ("log_q", "log_q_queries")}
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return numbers | {"gradients": needs}


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
    rows: Vectors,
    columns: Vectors,
    with_gradients: bool,
) -> Iterator[Panel]:
    """The panels of rows with the columns of all ranks; ``counts`` are the sizes of their blocks.

    The gradients of columns travel one hop behind their block, and are home at the end.
    """
    rank, sizes = dist.get_rank(), counts[direction]
    ranks = len(sizes)
    block: Block = {name: getattr(columns, name) for name in TRAVELS}
    block = {name: x.detach() for name, x in block.items() if x is not None}
    of_pairs = torch.linalg.vecdot(rows.x, columns.x[: len(rows.x)])  # (B,)
    flows = {x: name for x, name in FLOWS.items() if with_gradients and x in block}
    returned: Callable[[], Block] | None = None
    for hop in range(ranks):
        # The next block arrives while the rank works with the one at hand.
        arriving = sizes[(rank - hop - 1) % ranks]
        successor = _pass_on(block, arriving) if hop < ranks - 1 else None
        gradient = {name: torch.zeros_like(block[x]) for x, name in flows.items()}
        if hop == 0 and with_gradients:  # continues the gradients that they have as rows
            known = vars(columns).items()
            gradient |= {name: x for name, x in known if name in gradient and x is not None}
            columns.grad = columns.grad_scale = None
        offset = 0 if hop == 0 else None
        # No name holds the vectors, which would stay in memory until the next block has come.
        yield panel_of(batch, direction, rows, Vectors(**block, **gradient), offset, of_pairs)
        if with_gradients:
            if returned is not None:
                _add(gradient, returned())
                returned = None  # frees what has arrived and what was sent
            returned = _pass_on(gradient, arriving)
        if successor is not None:
            block, successor = successor(), None
    if returned is not None:  # after W hops
        home = returned()
        columns.grad, columns.grad_scale = home["grad"], home.get("grad_scale")


def _add(block: Block, other: Block) -> None:
    for name, x in other.items():
        block[name].add_(x)


def _pass_on(block: Block, size: int) -> Callable[[], Block]:
    """Sends a block on; returns a function that awaits its successor with ``size`` columns."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    successor = {name: x.new_empty(size, *x.shape[1:]) for name, x in block.items()}
    sent = [x.contiguous() for x in block.values()]
    operations = [dist.P2POp(dist.isend, x, after) for x in sent]
    operations += [dist.P2POp(dist.irecv, x, before) for x in successor.values()]
    works = dist.batch_isend_irecv(operations)

    def arrived() -> Block:
        for work in works:
            work.wait()
        sent.clear()  # a copy lives until it has left
        return successor

    return arrived
