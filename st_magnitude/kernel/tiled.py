"""The tiled engine of :func:`~st_magnitude.infonce`, which never holds a B x M matrix.

It has four concepts: sides and panels (:mod:`st_magnitude.kernel.panels`), the plan and the softmax
(:mod:`st_magnitude.kernel.softmax`). This module arranges the panels of a batch, and
:mod:`st_magnitude.kernel.tiles` takes them in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.batch import Batch, Direction
from st_magnitude.kernel.panels import Panel, Side, panel_of, side_of
from st_magnitude.kernel.softmax import Plan, Softmax
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import visit
from st_magnitude.similarity import Similarity

# (direction, rows, columns, whether gradients are added) -> the blocks of columns that rows meet
Round = Callable[[Direction, Side, Side, bool], Iterator[Panel]]


class _Known(torch.autograd.Function):
    """The loss as a function of the tensors whose gradients are given."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: Sequence[Tensor | None], *tensors: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(g if g is None else g * grad_output for g in ctx.saved_tensors)


def tiled_infonce(
    batch: Batch,
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    plan: Plan,
    ring: Round | None = None,
) -> Tensor:
    """The mean loss of softmaxes, with a ring over the columns of all ranks."""
    with torch.autocast(batch.queries.device.type, enabled=False):
        of = partial(side_of, batch, plan, is_block=ring is not None)
        queries = of(batch.queries, similarity.gamma_query, is_query=True, first=batch.offset)
        documents = of(batch.documents, similarity.gamma_document, is_query=False, first=0)
        sides = [queries, documents]
        if batch.all_queries is not None:
            sides.append(of(batch.all_queries, similarity.gamma_query, is_query=True, first=0))
        temperatures = _stack_temperatures(plan.terms, batch.queries)
        tensors = [temperatures, *(x for side in sides for x in (side.x, side.scale))]
        learns = any(x is not None and x.requires_grad for x in tensors)

        with torch.no_grad():
            found = []
            for directions in softmaxes:
                softmax = Softmax(plan, temperatures, batch)
                compared = [_compared(batch, direction, *sides) for direction in directions]
                if ring is None:
                    panels = [panel_of(batch, *arguments) for arguments in compared]
                    visit(softmax, panels, finds_sums=True, adds_gradients=learns)
                else:
                    direction, rows, columns, _ = compared[0]
                    _visit_blocks(softmax, partial(ring, direction, rows, columns), learns)
                found.append(softmax)
            loss = torch.stack([softmax.loss() for softmax in found]).sum()
            gradients: list[Tensor | None] = [None]
            if temperatures.requires_grad:
                gradients = [torch.stack([x.grad_temperatures() for x in found]).sum(dim=0)]
            gradients += [x for side in sides for x in (side.grad, side.grad_scale)]
        return _Known.apply(loss, gradients, *tensors)


def _compared(
    batch: Batch,
    direction: Direction,
    queries: Side,
    documents: Side,
    all_queries: Side | None = None,
) -> tuple[Direction, Side, Side, int]:
    """A direction with its rows and columns, and the column that belongs to row 0."""
    rows = queries if direction.startswith("query") else documents.part(batch.own)
    if direction.endswith("doc"):
        return direction, rows, documents, batch.offset
    if all_queries is not None:
        return direction, rows, all_queries, batch.offset
    return direction, rows, queries, 0


def _visit_blocks(
    softmax: Softmax, blocks: Callable[[bool], Iterator[Panel]], adds_gradients: bool
) -> None:
    """Takes in the columns of a ring, which pass twice: for the sums and for the gradients."""
    for is_second in (False, True) if adds_gradients else (False,):
        for panel in blocks(is_second):
            visit(softmax, [panel], finds_sums=not is_second, adds_gradients=is_second)
            del panel  # frees the block before the next one is asked for


def _stack_temperatures(terms: Sequence[Term], like: Tensor) -> Tensor:
    """The temperatures of all terms on the device of a tensor, (T,)."""
    temperatures = []
    for term in terms:
        if isinstance(term.temperature, Tensor):
            temperatures.append(term.temperature.to(like))
        else:  # filled on the device, because a copy from the host would wait for it
            temperatures.append(like.new_full((), term.temperature))
    return torch.stack(temperatures)
