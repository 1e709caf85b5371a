"""infonce over the documents of all ranks, which pass around the ranks in a ring.

Gathering puts the documents of all W ranks, W·M x D numbers, on every rank. In the ring each rank
holds its own documents, the block at hand and the block that arrives, so its memory does not grow
with W. A block makes two rounds. Send and receive run while the rank works with the block at hand:

1. For each term and each of its rows, a rank carries the log-sum-exp over the blocks seen so far.
2. With it, the softmax of a tile is known at once. The gradient of the rows stays, and the gradient
   of a block travels one hop behind the block. Each rank adds its part, and after W hops the
   gradient is home.

Scores are computed once in each round: four matrix products, where
:mod:`st_magnitude.kernel.infonce` with its gathered documents takes three.

Source: Cheng et al. 2024, Breaking the Memory Barrier: Near Infinite Batch Size Scaling for
    Contrastive Loss (Inf-CL), arXiv 2410.17243, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Direction, PartitionMode
from st_magnitude.kernel.infonce import Precision, check_terms, product_dtype, softmaxes_of
from st_magnitude.kernel.panels import Panel, Plan, Side
from st_magnitude.kernel.rules import Marks, marks_of, rules_of
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiled import tiled_infonce
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["agree", "num_ranks", "ring_infonce"]

# The columns of one rank with all that belongs to them, or gradients, along the first axis
Block = dict[str, Tensor]
FLOWS = ("x", "scale")  # what has a gradient


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
    everywhere: list[list[int]] = torch.stack(found).tolist()
    if failed := [rank for rank, (fine, *_) in enumerate(everywhere) if not fine]:
        raise RuntimeError(
            f"The batch of rank {failed[0]} was refused; read the error of that process."
        )
    return [numbers for _, *numbers in everywhere]


def ring_infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    directions: Sequence[Direction] = ("query_to_doc",),
    *,
    partition_mode: PartitionMode = "joint",
    tile_rows: int | None = None,
    precision: Precision = "float32",
    **others: Any,
) -> Tensor:
    """The part of this rank in the loss of the joined batch, which is the mean over ranks.

    Args:
        queries: Embeddings (B, D) of this rank. B may differ from rank to rank.
        documents: Embeddings (M, D) of this rank, the positives first.
        directions: ``"query_to_doc"``, ``"doc_to_query"``, or both with
            ``partition_mode="per_direction"``, because a softmax has one direction.
        **others: Of :func:`~st_magnitude.infonce`, for the queries and documents of this rank:
            ``hardness_mode``, ``hardness_strength``, ``log_q``, ``log_q_queries``, integer
            ``positives``, and for ``exclude`` integer ids, as many on all ranks, and an `Above`.
            Ids are those of the documents of all ranks.

    The value is that of infonce with gathered documents and batches of one size. The mean of the
    gradients of all ranks, which DDP takes, is the gradient of the joined batch for batches of
    different sizes too.

    Raises:
        ValueError: As infonce does, but on all ranks together.
    """
    terms = tuple(terms)
    batch = Batch(queries, documents, **others)

    def own_sizes() -> tuple[int, int]:
        batch.check(directions)
        check_terms(terms, queries.shape[1])
        if batch.targets is not None or batch.targets_queries is not None:
            raise ValueError(
                "The ring takes integer ids as positives, but no targets. Gather the documents"
                " instead."
            )
        return len(queries), len(documents)

    softmaxes = softmaxes_of(directions, partition_mode)
    # per rank, the numbers of queries and of documents
    sizes = list(zip(*agree(queries.device, own_sizes, 2), strict=True))
    num_rows = sum(sizes[0]) / len(sizes[0])
    plan = Plan.of(terms, batch, num_rows, tile_rows, similarity, product_dtype(precision))
    rings: dict[Direction, Ring] = {
        "query_to_doc": Ring(batch, "query_to_doc", sizes[1]),
        "doc_to_query": Ring(batch, "doc_to_query", sizes[0]),
    }
    return tiled_infonce(batch, terms, similarity, softmaxes, plan, blocks=rings.__getitem__)


@dataclass(frozen=True)
class Ring:
    """The blocks of columns that pass around the ranks."""

    batch: Batch
    direction: Direction
    counts: tuple[int, ...]  # per rank, its columns

    def __call__(self, own: Panel, with_gradients: bool) -> Iterator[Panel]:
        """One round. With gradients, those of the columns of all ranks are home at its end."""
        ranks = len(self.counts)
        side = own.columns
        to_query = self.direction == "doc_to_query"
        of_rows = marks_of(self.batch, not to_query, self.batch.own, is_block=True)
        of_columns = marks_of(self.batch, to_query, slice(0, len(side.x)), is_block=True)
        of_own = self._scores_of_positives(own, of_rows, of_columns)
        block: Block = {k: x for k, x in vars(of_columns).items() if x is not None}
        block["x"] = side.x.contiguous()
        if side.scale is not None:
            block["scale"] = side.scale.T.contiguous()  # (M, K - 1)
        if with_gradients:
            side.grad = side.grad_scale = None  # to be replaced by what arrives
        returned = None
        for hop in range(ranks):
            # The next block arrives while the rank works with the one at hand.
            successor = self._pass_on(block, hop) if hop < ranks - 1 else None
            flows = [name for name in FLOWS if with_gradients and name in block]
            gradient = {name: torch.zeros_like(block[name]) for name in flows}
            marks = Marks(**{name: x for name, x in block.items() if name not in FLOWS})
            place = own.own if hop == 0 else None
            rules = rules_of(
                self.batch, self.direction, of_rows, marks, place, of_own, is_other_rank=hop > 0
            )
            yield Panel(own.rows, _side(block, gradient), rules, marks.bias, place, attracts=True)
            if with_gradients:
                if returned is not None:
                    _add(gradient, returned())
                    returned = None  # frees what has arrived and what was sent
                returned = self._pass_on(gradient, hop)
            if successor is not None:
                block, successor = successor(), None
        if returned is not None:  # after W hops
            home = _side(returned(), {})
            side.grad, side.grad_scale = home.x, home.scale

    def _scores_of_positives(self, own: Panel, of_rows: Marks, of_columns: Marks) -> Tensor:
        """The scores that a threshold looks at, of the guide or of the longest prefix: (B,)."""
        rows, columns = own.rows.x, own.columns.x
        if of_rows.guide is not None and of_columns.guide is not None:
            rows, columns = of_rows.guide, of_columns.guide
        return torch.linalg.vecdot(rows, columns[: len(rows)])

    def _pass_on(self, block: Block, hop: int) -> Callable[[], Block]:
        """Sends what belongs to the block on; returns a function that awaits its successor."""
        rank, counts = dist.get_rank(), self.counts
        before, after = (rank - 1) % len(counts), (rank + 1) % len(counts)
        size = counts[(rank - hop - 1) % len(counts)]
        successor = {name: x.new_empty(size, *x.shape[1:]) for name, x in block.items()}
        operations = [dist.P2POp(dist.isend, x, after) for x in block.values()]
        operations += [dist.P2POp(dist.irecv, x, before) for x in successor.values()]
        works = dist.batch_isend_irecv(operations)

        def arrived() -> Block:
            for work in works:
                work.wait()
            return successor

        return arrived


def _side(block: Block, gradient: Block) -> Side:
    """The vectors of a block with their factors, which are (K - 1, M) in a panel."""
    scale, grad_scale = (x["scale"].T if "scale" in x else None for x in (block, gradient))
    return Side(
        block["x"], None if scale is None else scale.contiguous(), gradient.get("x"), grad_scale
    )


def _add(block: Block, other: Block) -> None:
    for name, x in other.items():
        block[name].add_(x)
