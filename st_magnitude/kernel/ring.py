"""infonce over the documents of all ranks, which pass around the ranks in a ring.

Gathering puts the documents of all W ranks, W·M x D numbers, on every rank. In the ring each rank holds its own
documents, the block at hand and the block that arrives, so its memory does not grow with W. A block makes two
rounds. Send and receive run while the rank works with the block at hand:

1. For each term and each of its rows, a rank carries the largest logit and the sum of exponentials over the blocks seen
   so far. After W blocks they are the log-sum-exp over all documents.
2. With it, the softmax of a tile is known at once. The gradient of the rows stays, and the gradient of a block travels
   one hop behind the block. Each rank adds its part, and after W hops the gradient is home.

Scores are computed once in each round: four matrix products, where :mod:`st_magnitude.kernel.infonce` with its gathered
documents takes three.

Source: Cheng et al. 2024, Breaking the Memory Barrier: Near Infinite Batch Size Scaling for Contrastive Loss (Inf-CL),
arXiv 2410.17243, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.infonce import Direction, check_priors, check_shapes
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import divide_by_norms, of_both_sides, prefixes_of, rows_of_a_tile
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["agree", "num_ranks", "ring_infonce"]

_LOG2_E = math.log2(math.e)

# The columns of one rank, with the factors of their prefixes and their ids, or the gradients of the first two. The
# first axis of each tensor counts columns.
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
    direction: Direction = "query_to_document",
    *,
    hardness: float | tuple[float, float] = 0.0,
    exclude: Sequence[Tensor] = (),
    threshold: Callable[[Tensor], Tensor] | None = None,
    log_q: Tensor | None = None,
    log_q_queries: Tensor | None = None,
    tile_rows: int | None = None,
) -> Tensor:
    """The part of this rank in the loss of the joined batch: the mean over ranks is the loss of one process.

    Args:
        queries: Embeddings (B, D) of this rank. B may differ from rank to rank.
        documents: Embeddings (M, D) of this rank, the positives first.
        exclude: Whole numbers (M,) that identify the documents of all ranks. A document with the number of a query's
            positive is not a negative of that query. Each rank gives as many of these tensors.
        threshold: Function of the scores of the positives (B,), at the longest prefix before the temperature. A
            document that scores above its value (B,) is not a negative of that query.
        log_q: As in infonce, of the documents (M,) of this rank.
        log_q_queries: As in infonce, of the queries (B,) of this rank.

    The other arguments are as in :func:`~st_magnitude.infonce`, whose value this is with gathered documents and
    batches of one size. The mean of the gradients of all ranks, which DDP takes, is the gradient of the joined batch
    for batches of different sizes too.

    Raises:
        ValueError: As infonce does. All ranks raise together.
    """
    terms = tuple(terms)

    def own_sizes() -> tuple[int, int]:
        check_shapes(queries, documents, None, None, terms, direction, 0)
        check_priors(log_q, log_q_queries, documents, queries)
        return len(queries), len(documents)

    counts = list(zip(*agree(queries.device, own_sizes, 2), strict=True))  # of queries and of documents, per rank
    dims, members = prefixes_of(terms, queries.shape[1])
    forward, backward = (
        _Plan(
            dims=dims,
            members=members,
            weights=tuple(t.weight * len(counts[0]) / sum(counts[0]) for t in terms),
            hardness=alpha,
            tile_rows=tile_rows or rows_of_a_tile(queries.device, len(documents)),
            counts=count,
            threshold=threshold,
        )
        for alpha, count in zip(of_both_sides(hardness), reversed(counts), strict=True)
    )
    ids = torch.stack(list(exclude), dim=1) if exclude else None  # (M, E)
    own_ids = None if ids is None else ids[: len(queries)]
    log_q, log_q_queries = check_priors(log_q, log_q_queries, documents, queries)
    with torch.autocast(queries.device.type, enabled=False):
        q, q_scale = divide_by_norms(queries, forward.dims, similarity.gamma_query)  # (B, D'), (K - 1, B)
        d, d_scale = divide_by_norms(documents, forward.dims, similarity.gamma_document)  # (M, D'), (K - 1, M)
        temperatures = torch.stack([torch.as_tensor(t.temperature, dtype=q.dtype, device=q.device) for t in terms])
        losses = []
        if direction in ("query_to_document", "both"):
            losses.append(_Ring.apply(q, d, q_scale, d_scale, temperatures, own_ids, ids, log_q, forward))
        if direction in ("document_to_query", "both"):
            own, own_scale = d[: len(q)], None if d_scale is None else d_scale[:, : len(q)]
            swapped = own, q, own_scale, q_scale, temperatures, own_ids, own_ids, log_q_queries, backward
            losses.append(_Ring.apply(*swapped))
    return losses[0] if len(losses) == 1 else (losses[0] + losses[1]) / 2


@dataclass(frozen=True)
class _Plan:
    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # per prefix, the terms that use it
    weights: tuple[float, ...]  # per term, of one row
    hardness: float
    tile_rows: int
    counts: tuple[int, ...]  # per rank, its columns
    threshold: Callable[[Tensor], Tensor] | None


class _Ring(torch.autograd.Function):
    """The sum of all terms for plain inner products, as in the kernel; the forward pass takes the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,  # (B, D), D the longest prefix
        columns: Tensor,  # (M, D), the positives of the rows first
        row_scale: Tensor | None,  # (K - 1, B)
        column_scale: Tensor | None,  # (K - 1, M)
        temperatures: Tensor,  # (T,)
        row_ids: Tensor | None,  # (B, E)
        column_ids: Tensor | None,  # (M, E)
        log_q: Tensor | None,  # (M,)
        plan: _Plan,
    ) -> Tensor:
        own = {"columns": columns.contiguous()}
        if column_scale is not None:
            own["scale"] = column_scale.T.contiguous()  # (M, K - 1)
        if column_ids is not None:
            own["ids"] = column_ids
        if log_q is not None:
            own["bias"] = log_q * -_LOG2_E
        with torch.autocast(rows.device.type, enabled=False):
            walk = _Walk(rows, row_scale, row_ids, own, temperatures, plan)
            loss = walk.loss()
            gradients = walk.gradients(ctx.needs_input_grad[4]) if any(ctx.needs_input_grad) else ()
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*(g if g is None else g * grad_output for g in ctx.saved_tensors), None, None, None, None)


class _Walk:
    """The two rounds of a ring. Logits are in base 2. The positive of a row counts apart from its scores."""

    def __init__(
        self,
        rows: Tensor,
        row_scale: Tensor | None,
        row_ids: Tensor | None,
        own: Block,
        temperatures: Tensor,
        plan: _Plan,
    ) -> None:
        self.rows, self.row_scale, self.row_ids, self.own, self.plan = rows, row_scale, row_ids, own, plan
        self.last = len(plan.dims) - 1
        self.spans = [slice(a, b) for a, b in pairwise((0, *plan.dims))]
        self.tiles = [slice(a, min(a + plan.tile_rows, len(rows))) for a in range(0, len(rows), plan.tile_rows)]
        self.low = torch.finfo(rows.dtype).min * 2.0**-40  # the score of what is not a negative; 0 times it is 0

        # Memory for scores of each prefix, and for powers of them
        num_buffers = len(plan.dims) + (2 if max(map(len, plan.members)) > 1 else 1)
        *self.buffers, self.spare = (rows.new_empty(self.tiles[0].stop * max(plan.counts)) for _ in range(num_buffers))

        row_factors = rows.new_ones(len(plan.dims), len(rows))  # (K, B)
        if row_scale is not None:
            row_factors[:-1] = row_scale
        parts = [torch.linalg.vecdot(rows[:, span], own["columns"][: len(rows), span]) for span in self.spans]
        self.diagonal = torch.stack(parts).cumsum(dim=0)  # scores of the positives, without row_factors, (K, B)
        if "scale" in own:
            self.diagonal[:-1] *= own["scale"][: len(rows)].T
        positives = self.diagonal * row_factors  # (K, B)
        self.threshold = None if plan.threshold is None else plan.threshold(positives[-1])  # (B,)
        prefix_of = {t: k for k, members in enumerate(plan.members) for t in members}
        factors, positives = (x[[prefix_of[t] for t in range(len(temperatures))]] for x in (row_factors, positives))
        weights, inverse = rows.new_tensor(plan.weights)[:, None], 1 / temperatures[:, None]  # (T, 1)
        self.inverse, self.weights, self.positive_scores = inverse, weights, positives  # (T, 1), (T, 1), (T, B)
        self.positives = positives * inverse * _LOG2_E  # logits
        if "bias" in own:
            self.positives += own["bias"][: len(rows)]
        self.rates = factors * (inverse + plan.hardness) * _LOG2_E  # d logit / d score of a negative
        self.pulls = factors * inverse * weights  # d loss / d score, but for the softmax

    def loss(self) -> Tensor:
        """The first round. It leaves the log-sum-exp of each term and row, (T, B)."""
        peaks, totals = self.positives.clone(), torch.ones_like(self.positives)
        for hop, block in enumerate(self._around()):
            for tile in self.tiles:
                for scores, members in zip(self._scores(tile, block, hop), self.plan.members, strict=True):
                    best = scores.amax(dim=1)
                    for t in members:
                        above = best * self.rates[t, tile]
                        if "bias" in block:
                            above += block["bias"].max()
                        above = torch.maximum(peaks[t, tile], above)
                        total = self._powers(scores, t, tile, above, block, self.spare).sum(dim=1)
                        totals[t, tile] = totals[t, tile] * (peaks[t, tile] - above).exp2_() + total
                        peaks[t, tile] = above
        self.log_sums = totals.log2_().add_(peaks)
        return ((self.log_sums - self.positives) * (self.weights / _LOG2_E)).sum()

    def gradients(self, of_temperatures: bool) -> tuple[Tensor | None, ...]:
        """The second round: the gradients of rows, columns, row_scale, column_scale and temperatures."""
        surplus = (self.positives - self.log_sums).exp2_().sub_(1)  # softmax of the positives, less 1, (T, B)
        self.positive_slopes = surplus * self.pulls
        self.grad_inverse = (surplus * self.positive_scores * self.weights).sum(dim=1) if of_temperatures else None
        self.grad_rows = torch.zeros_like(self.rows)
        self.grad_row_scale = None if self.row_scale is None else torch.zeros_like(self.row_scale)
        arrived = None
        for hop, block in enumerate(self._around()):
            gradient: Block = {n: torch.zeros_like(x) for n, x in block.items() if n in ("columns", "scale")}
            for tile in self.tiles:
                self._add_gradients(tile, block, hop, gradient)
            if arrived is not None:
                _add(gradient, arrived())
                arrived = None  # frees what has arrived and what was sent
            arrived = self._pass_on(gradient, hop)
        home = arrived()  # type: ignore[misc]  # after W hops
        grad_scale = home["scale"].T if "scale" in home else None
        grad_temperatures = None if self.grad_inverse is None else -self.grad_inverse * self.inverse[:, 0] ** 2
        return self.grad_rows, home["columns"], self.grad_row_scale, grad_scale, grad_temperatures

    # --- one tile ---------------------------------------------------------------------------------------------------

    def _scores(self, tile: slice, block: Block, hop: int) -> list[Tensor]:
        """The scores (n, M) of each prefix, without row_factors; only negatives have any."""
        shape = tile.stop - tile.start, len(block["columns"])
        scores = [_view(buffer, shape) for buffer in self.buffers[: len(self.spans)]]
        for k, span in enumerate(self.spans):
            rows, columns = self.rows[tile, span], block["columns"][:, span]
            torch.addmm(scores[max(k - 1, 0)], rows, columns.T, beta=float(k > 0), out=scores[k])
        masks = [] if self.threshold is None else [scores[-1] > self.threshold[tile, None]]
        if "ids" in block and self.row_ids is not None:
            masks += [x[tile, None] == ids for x, ids in zip(self.row_ids.T, block["ids"].T, strict=True)]
        for k, x in enumerate(scores):
            if k < self.last and "scale" in block:
                x.mul_(block["scale"][:, k].contiguous())
            for mask in masks:
                x.masked_fill_(mask, self.low)
            if hop == 0:
                x.diagonal(tile.start).fill_(self.low)
        return scores

    def _powers(self, scores: Tensor, term: int, tile: slice, above: Tensor, block: Block, buffer: Tensor) -> Tensor:
        """2 ** (logits - above) of a term in the memory of the buffer: (n, M), (n,) -> (n, M)."""
        rate, powers = self.rates[term, tile, None], _view(buffer, scores.shape)
        if "bias" in block:
            torch.addcmul(block["bias"], scores, rate, out=powers)
        else:
            torch.mul(scores, rate, out=powers)
        return powers.sub_(above[:, None]).exp2_()

    def _add_gradients(self, tile: slice, block: Block, hop: int, gradient: Block) -> None:
        """Adds what a tile contributes to the gradients of rows and of the block."""
        slopes: list[Tensor] = []  # d loss / d products of each prefix
        for k, scores in enumerate(self._scores(tile, block, hop)):
            members = list(self.plan.members[k])
            for t in members:
                into, pull = self.spare if t == members[0] else self.buffers[-1], self.pulls[t, tile]
                softmax = self._powers(scores, t, tile, self.log_sums[t, tile], block, into)
                if self.grad_inverse is not None:
                    self.grad_inverse[t] += torch.linalg.vecdot(softmax, scores) @ pull / self.inverse[t, 0]
                if t == members[0]:
                    slope = softmax.mul_(pull[:, None])
                else:
                    slope.addcmul_(softmax, pull[:, None])
            if hop == 0:
                scores.diagonal(tile.start).copy_(self.diagonal[k, tile])
                slope.diagonal(tile.start).copy_(self.positive_slopes[members, tile].sum(dim=0))
            if k < self.last and self.row_scale is not None and self.grad_row_scale is not None:
                self.grad_row_scale[k, tile] += torch.linalg.vecdot(slope, scores) / self.row_scale[k, tile]
            if k < self.last and "scale" in block:
                factor = block["scale"][:, k].contiguous()
                gradient["scale"][:, k] += scores.mul_(slope).sum(dim=0) / factor
                slope.mul_(factor)
            slopes.append(slope)
            self.buffers[k], self.spare = self.spare, self.buffers[k]  # nothing needs these scores any more

        # A block of coordinates belongs to every prefix that reaches it: add up the slopes, the longest prefix first.
        slope = slopes[-1]
        for k in range(self.last, -1, -1):
            if k < self.last:
                slope.add_(slopes[k])
            self.grad_rows[tile, self.spans[k]].addmm_(slope, block["columns"][:, self.spans[k]])
            gradient["columns"][:, self.spans[k]].addmm_(slope.T, self.rows[tile, self.spans[k]])

    # --- the ring ---------------------------------------------------------------------------------------------------

    def _around(self) -> Iterator[Block]:
        """The blocks of all ranks, beginning with this rank. The next one arrives while the caller has one at hand."""
        block, ranks = self.own, len(self.plan.counts)
        for hop in range(ranks):
            arrived = self._pass_on(block, hop) if hop < ranks - 1 else None
            yield block if self._repeats(block, hop) else {name: x for name, x in block.items() if name != "ids"}
            if arrived is not None:
                block, arrived = arrived(), None

    def _repeats(self, block: Block, hop: int) -> bool:
        """Whether a column other than the positive of a row has the id of that row."""
        if self.row_ids is None:
            return False
        pairs = zip(self.row_ids.T, block["ids"].T, strict=True)
        return any(int(torch.isin(ids, own).sum()) > (len(own.unique()) if hop == 0 else 0) for own, ids in pairs)

    def _pass_on(self, block: Block, hop: int) -> Callable[[], Block]:
        """Sends what belongs to the block at hand to the next rank; returns a function that waits for its successor."""
        rank, counts = dist.get_rank(), self.plan.counts
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


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """The beginning of a buffer as a contiguous matrix."""
    return buffer[: math.prod(shape)].view(*shape)


def _add(block: Block, other: Block) -> None:
    for name, x in other.items():
        block[name].add_(x)
