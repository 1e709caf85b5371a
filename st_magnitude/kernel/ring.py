"""infonce over the documents of all ranks, which pass around the ranks in a ring.

Gathering puts the documents of all W ranks, W·M x D numbers, on every rank. In the ring each rank holds its own
documents, the block at hand and the block that arrives, so its memory does not grow with W. A block makes two
rounds. Send and receive run while the rank works with the block at hand:

1. For each term and each of its rows, a rank carries the log-sum-exp over the blocks seen so far.
2. With it, the softmax of a tile is known at once. The gradient of the rows stays, and the gradient of a block travels
   one hop behind the block. Each rank adds its part, and after W hops the gradient is home.

Scores are computed once in each round: four matrix products, where :mod:`st_magnitude.kernel.infonce` with its gathered
documents takes three.

Source: Cheng et al. 2024, Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss (Inf-CL),
arXiv 2410.17243, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.batch import Batch, Direction, HardnessMode, PartitionMode, SameId
from st_magnitude.kernel.infonce import check_shapes, softmaxes_of, stack_temperatures
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import Judge, Panel, Plan, Side, Softmax
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["agree", "num_ranks", "ring_infonce"]

# The columns of one rank with all that belongs to them, or gradients. The first axis of each tensor counts columns.
Block = dict[str, Tensor]


def num_ranks() -> int:
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agree(device: torch.device, check: Callable[[], Sequence[int]], size: int) -> list[list[int]]:
    """The ``size`` whole numbers that the check returns on each rank. Where it raises on one rank, all ranks raise.

    A rank that raised alone would leave the others waiting for what it should have sent.
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
        raise RuntimeError(f"The batch of rank {failed[0]} was refused; read the error of that process.")
    return [numbers for _, *numbers in everywhere]


def ring_infonce(
    queries: Tensor,
    documents: Tensor,
    terms: Sequence[Term] = (Term(),),
    similarity: Similarity = COSINE,
    directions: Sequence[Direction] = ("query_to_doc",),
    *,
    partition_mode: PartitionMode = "joint",
    hardness_mode: HardnessMode | None = None,
    hardness_strength: float = 0.0,
    exclude: Sequence[Tensor] = (),
    threshold: Callable[[Tensor], Tensor] | None = None,
    guide: tuple[Tensor, Tensor] | None = None,
    positives: Tensor | None = None,
    log_q: Tensor | None = None,
    log_q_queries: Tensor | None = None,
    tile_rows: int | None = None,
) -> Tensor:
    """The part of this rank in the loss of the joined batch: the mean over ranks is the loss of one process.

    Args:
        queries: Embeddings (B, D) of this rank. B may differ from rank to rank.
        documents: Embeddings (M, D) of this rank, the positives first.
        directions: ``"query_to_doc"``, ``"doc_to_query"``, or both with ``partition_mode="per_direction"``.
        exclude: Whole numbers (M,) that identify the documents of all ranks. A document with the number of a query's
            positive is not a negative of that query. Each rank gives as many of these tensors.
        threshold: Function of the scores of the positives (B,), at the longest prefix before the temperature. A
            document that scores above its value (B,) is not a negative of that query.
        guide: Vectors of the queries (B, Dg) and of the documents (M, Dg), whose inner products are the scores that the
            threshold looks at. None: the scores of the embeddings.
        positives: Whole numbers (M,), equal for documents that are positives of the same queries, on all ranks.
        log_q: As in infonce, of the documents (M,) of this rank.
        log_q_queries: As in infonce, of the queries (B,) of this rank.

    The other arguments are as in :func:`~st_magnitude.infonce`, whose value this is with gathered documents and
    batches of one size. The mean of the gradients of all ranks, which DDP takes, is the gradient of the joined batch
    for batches of different sizes too.

    Raises:
        ValueError: As infonce does, and if a softmax runs over several directions. All ranks raise together.
    """
    terms, size = tuple(terms), len(queries)
    batch = Batch(
        queries=queries,
        documents=documents,
        hardness_mode=hardness_mode,
        hardness_strength=hardness_strength,
        exclude=exclude,
        positives=positives,
        log_q=log_q,
        log_q_queries=log_q_queries,
    )

    def own_sizes() -> tuple[int, int]:
        check_shapes(queries, documents, None, None, terms, 0)
        if any(len(softmax) > 1 for softmax in softmaxes_of(directions, partition_mode)):
            raise ValueError(
                f"The ring has one direction in a softmax; got directions={tuple(directions)} and "
                "partition_mode='joint'. Gather the documents, or use partition_mode='per_direction'."
            )
        batch.check(directions)
        return len(queries), len(documents)

    counts = list(zip(*agree(queries.device, own_sizes, 2), strict=True))  # of queries and of documents, per rank
    plan = Plan.of(terms, queries.shape[1], sum(counts[0]) / len(counts[0]), tile_rows)
    travels: Block = {}  # what belongs to documents besides their vectors
    if exclude:
        travels["ids"] = torch.stack(list(exclude), dim=1)  # (M, E)
    if positives is not None:
        travels["labels"] = positives
    of_documents, of_queries = dict(travels), {name: x[:size] for name, x in travels.items()}
    for block, numbers, vectors in ((of_documents, log_q, 1), (of_queries, log_q_queries, 0)):
        if numbers is not None:
            block["bias"] = -numbers.detach().to(batch.dtype)
        if guide is not None:
            block["guide"] = guide[vectors]
    with torch.autocast(queries.device.type, enabled=False):
        q, q_scale = divide_by_norms(queries, plan.dims, similarity.gamma_query)  # (B, D'), (K - 1, B)
        d, d_scale = divide_by_norms(documents, plan.dims, similarity.gamma_document)  # (M, D'), (K - 1, M)
        temperatures = stack_temperatures(terms, q)
        losses = []
        if "query_to_doc" in directions:
            ring = _Ring(plan, counts[1], batch, threshold, of_queries, of_documents)
            losses.append(_RingInfoNCE.apply(ring, temperatures, q, q_scale, d, d_scale))
        if "doc_to_query" in directions:
            own_scale, own = (
                None if d_scale is None else d_scale[:, :size],
                {n: x[:size] for n, x in of_documents.items()},
            )
            ring = _Ring(plan, counts[0], None, threshold, own, of_queries)
            losses.append(_RingInfoNCE.apply(ring, temperatures, d[:size], own_scale, q, q_scale))
    return torch.stack(losses).mean()


class _RingInfoNCE(torch.autograd.Function):
    """The loss of one softmax of each row; the forward pass takes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        ring: _Ring,
        temperatures: Tensor,  # (T,)
        rows: Tensor,  # (B, D), D the longest prefix
        row_scale: Tensor | None,  # (K - 1, B)
        columns: Tensor,  # (M, D), the positives of the rows first
        column_scale: Tensor | None,  # (K - 1, M)
    ) -> Tensor:
        needs = ctx.needs_input_grad[1:]
        side = Side.with_gradients(rows, row_scale, any(needs), any(needs))
        own = {"columns": columns.contiguous(), **ring.of_columns}
        if column_scale is not None:
            own["scale"] = column_scale.T.contiguous()  # (M, K - 1)
        softmax = Softmax(ring.plan, temperatures, ring.panel(side, own, 0, None), needs[0])
        ring.find_sums(side, own, softmax)
        if any(needs):
            home = ring.gradients(side, own, softmax)
            grad_scale = home["scale"].T if "scale" in home else None
            gradients = (softmax.grad_temperatures(), side.grad, side.grad_scale, home["columns"], grad_scale)
            ctx.save_for_backward(*gradients)
        return softmax.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(g if g is None else g * grad_output for g in ctx.saved_tensors))


@dataclass(frozen=True)
class _Ring:
    """The ranks, and what passes around them."""

    plan: Plan
    counts: tuple[int, ...]  # per rank, its columns
    hard: Batch | None  # whose documents weigh more the more similar they are
    threshold: Callable[[Tensor], Tensor] | None
    of_rows: Block  # what belongs to the rows besides their vectors
    of_columns: Block

    def panel(
        self, rows: Side, block: Block, hop: int, softmax: Softmax | None, gradient: Block | None = None
    ) -> Panel:
        """The panel of the rows of this rank and a block; without ``softmax``, only what the positives need."""
        scale, grads = block.get("scale"), gradient or {}
        grad_scale = grads["scale"].T if "scale" in grads else None
        columns = Side(
            block["columns"], None if scale is None else scale.T.contiguous(), grads.get("columns"), grad_scale
        )
        same = {}
        for name in ("ids", "labels"):
            if name in block:
                of_rows, of_columns = (x[name].reshape(len(x[name]), -1).T for x in (self.of_rows, block))
                pairs = zip(of_rows, of_columns, strict=True)
                same[name] = tuple(SameId.of(*pair, rows.x.dtype) for pair in pairs)
        judges: tuple[Judge, ...] = same.get("ids", ())
        mode = None if self.hard is None else self.hard.hardness_mode
        strength = 0.0 if self.hard is None or mode is None else self.hard.hardness_strength
        if self.threshold is not None and softmax is not None:
            judges = (*judges, self._too_close(block, softmax))
        return Panel(
            rows,
            columns,
            own=0 if hop == 0 else None,
            attracts=True,
            judges=judges,
            kept=same["labels"][0] if "labels" in same else None,
            hardness=0.0 if hop > 0 and mode == "hard_negatives" else strength,
            bare=self.hard.bare() if hop == 0 and self.hard is not None else None,
            bias=block.get("bias"),
        )

    def _too_close(self, block: Block, softmax: Softmax) -> Judge:
        """A judge: the columns that score above the threshold."""
        assert self.threshold is not None
        if "guide" not in block:
            limits = self.threshold(softmax.scores[-1])  # (B,)
            return lambda rows, scores: scores > limits[rows, None]
        queries, own = self.of_rows["guide"], self.of_columns["guide"]
        limits = self.threshold((queries * own[: len(queries)]).sum(dim=1))
        return lambda rows, scores: queries[rows] @ block["guide"].T > limits[rows, None]

    def around(self, own: Block) -> Iterator[tuple[int, Block]]:
        """The blocks of all ranks, beginning with this rank. The next one arrives while the caller has one at hand."""
        block, ranks = own, len(self.counts)
        for hop in range(ranks):
            arrived = self._pass_on(block, hop) if hop < ranks - 1 else None
            yield hop, block
            if arrived is not None:
                block, arrived = arrived(), None

    def find_sums(self, rows: Side, own: Block, softmax: Softmax) -> None:
        """The first round, after which the log-sum-exp of each row is known."""
        for hop, block in self.around(own):
            softmax.visit([self.panel(rows, block, hop, softmax)], finds_sums=True, adds_gradients=False)

    def gradients(self, rows: Side, own: Block, softmax: Softmax) -> Block:
        """The second round, after which the gradients of this rank's block are home."""
        arrived = None
        for hop, block in self.around(own):
            gradient: Block = {name: torch.zeros_like(x) for name, x in block.items() if name in ("columns", "scale")}
            softmax.visit([self.panel(rows, block, hop, softmax, gradient)], finds_sums=False, adds_gradients=True)
            if arrived is not None:
                _add(gradient, arrived())
                arrived = None  # frees what has arrived and what was sent
            arrived = self._pass_on(gradient, hop)
        assert arrived is not None
        return arrived()  # after W hops

    def _pass_on(self, block: Block, hop: int) -> Callable[[], Block]:
        """Sends what belongs to the block at hand to the next rank; returns a function that waits for its successor."""
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


def _add(block: Block, other: Block) -> None:
    for name, x in other.items():
        block[name].add_(x)
