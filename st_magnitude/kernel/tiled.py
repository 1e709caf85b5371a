"""The tiled engine of :func:`~st_magnitude.infonce`, which never holds a B x M matrix.

It has four concepts. A **side** is n texts with their vectors and gradients. A **panel** is a
rectangle of scores, rows of one side against columns of another, with rules about their pairs
(:mod:`st_magnitude.kernel.panels`). The **plan** holds prefixes and terms. A **softmax** holds the
sums of each row so far (:mod:`st_magnitude.kernel.softmax`).

This module arranges the panels of a batch, and :mod:`st_magnitude.kernel.tiles` takes them in. The
gradients are known together with the loss, so the backward pass only scales them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.batch import Batch, Direction
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.kernel.panels import Panel, Side, panel_of, side_of
from st_magnitude.kernel.softmax import Plan, Softmax
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import visit
from st_magnitude.similarity import Similarity


class Round(Protocol):
    """An iterator of blocks of columns that rows meet one after another."""

    def __call__(
        self, direction: Direction, rows: Side, columns: Side, with_gradients: bool
    ) -> Iterator[Panel]: ...


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
    """The mean loss of softmaxes, with a ring over the columns of all ranks.

    The first direction of a softmax has the positives; the others add columns.
    """
    with torch.autocast(batch.queries.device.type, enabled=False):
        # From here on every score is a plain inner product: the norms of the longest prefix are
        # divided out first, and the norms of shorter prefixes are factors of rows and columns.
        gamma_query, gamma_document = similarity.gamma_query, similarity.gamma_document
        vectors = [
            *divide_by_norms(batch.queries, plan.dims, gamma_query),  # (B, D'), (K - 1, B)
            *divide_by_norms(batch.documents, plan.dims, gamma_document),
        ]
        to_query = any(direction.endswith("query") for d in softmaxes for direction in d)
        if batch.all_queries is not None and to_query:
            vectors += divide_by_norms(batch.all_queries, plan.dims, gamma_query)
        temperatures = _stack_temperatures(plan.terms, batch.queries)
        tensors = [temperatures, *vectors]
        needs = [x is not None and x.requires_grad for x in tensors]
        needs = [torch.is_grad_enabled() and need for need in needs]
        with torch.no_grad():
            loss, gradients = _with_gradients(batch, softmaxes, plan, ring, tensors, needs)
        return _Known.apply(loss, gradients, *tensors)


def _with_gradients(
    batch: Batch,
    softmaxes: Sequence[tuple[Direction, ...]],
    plan: Plan,
    ring: Round | None,
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss and the gradients of the tensors that need them."""
    # The sides, with memory for the gradients that all softmaxes add up.
    detached = [x if x is None else x.detach() for x in tensors]
    temperatures, *vectors = detached
    sides = []
    kinds = (True, batch.offset), (False, 0), (True, 0)  # queries, documents, all_queries
    for number, (x, scale) in enumerate(zip(vectors[::2], vectors[1::2], strict=True)):
        side = side_of(batch, plan, x, scale, *kinds[number], ring is not None)
        side.grad = torch.zeros_like(x) if needs[2 * number + 1] else None
        side.grad_scale = torch.zeros_like(scale) if needs[2 * number + 2] else None
        sides.append(side)
    queries, documents, all_queries = sides if len(sides) == 3 else (*sides, sides[0])

    row_weights = temperatures.new_ones(len(queries.x))
    if batch.weights is not None:
        row_weights = batch.weights.detach().to(row_weights)
    losses = []
    grad_temperatures = torch.zeros_like(temperatures) if needs[0] else None
    for directions in softmaxes:
        # A panel for each direction. Query i and its positive have the number offset + i.
        compared = []
        for direction in directions:
            from_query, to_query = direction.startswith("query"), direction.endswith("query")
            rows = queries if from_query else documents.part(batch.own)
            columns = all_queries if to_query else documents
            own = 0 if columns is queries else batch.offset
            compared.append((direction, rows, columns, None if from_query == to_query else own))

        # All columns in one visit; those of a ring pass twice, for the sums and for the gradients.
        softmax = Softmax(plan, temperatures, row_weights, needs[0])
        if ring is None:
            panels = [panel_of(batch, *sides_and_own) for sides_and_own in compared]
            visit(softmax, panels, finds_sums=True, adds_gradients=any(needs))
        else:
            direction, rows, columns, _ = compared[0]
            for panel in ring(direction, rows, columns, with_gradients=False):
                visit(softmax, [panel], finds_sums=True, adds_gradients=False)
                del panel  # frees the block before the next one is asked for
            if any(needs):
                for panel in ring(direction, rows, columns, with_gradients=True):
                    visit(softmax, [panel], finds_sums=False, adds_gradients=True)
                    del panel
        losses.append(softmax.loss())
        if grad_temperatures is not None:
            grad_temperatures += softmax.grad_temperatures()
    gradients = [grad_temperatures, *(g for side in sides for g in (side.grad, side.grad_scale))]
    return torch.stack(losses).sum(), gradients


def _stack_temperatures(terms: Sequence[Term], like: Tensor) -> Tensor:
    """The temperatures of all terms on the device of a tensor, (T,)."""
    temperatures = []
    for term in terms:
        if isinstance(term.temperature, Tensor):
            temperatures.append(term.temperature.to(like))
        else:  # filled on the device, because a copy from the host would wait for it
            temperatures.append(like.new_full((), term.temperature))
    return torch.stack(temperatures)
