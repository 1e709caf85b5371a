"""The tiled engine of :func:`~st_magnitude.infonce`, which never holds a B x M matrix.

The concepts are :class:`~st_magnitude.kernel.panels.Side`, ``Panel`` and ``Plan``, and
:class:`~st_magnitude.kernel.tiles.Softmax`, what is known of each row so far. This module arranges
the panels of a batch and hands them to autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.batch import Batch, Direction
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.kernel.panels import Panel, Plan, Side
from st_magnitude.kernel.rules import marks_of, rules_of
from st_magnitude.kernel.terms import Term
from st_magnitude.kernel.tiles import Softmax, visit
from st_magnitude.similarity import Similarity


class Blocks(Protocol):
    """An iterator of blocks of columns that the rows of a panel meet one after another."""

    def __call__(self, own: Panel, with_gradients: bool) -> Iterator[Panel]: ...


class InfoNCE(torch.autograd.Function):
    """The loss of one softmax of each row; the forward pass takes the gradients.

    ``tensors`` are vectors and factors of each side in turn, which ``arrange`` makes into panels,
    the positives' first. Without ``blocks`` these panels are all of the softmax. With it they are
    the first block, and all blocks pass twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        arrange: Callable[[list[Side]], list[Panel]],
        blocks: Blocks | None,
        row_weights: Tensor,  # (B,)
        hardness: float,
        temperatures: Tensor,  # (T,)
        *tensors: Any,
    ) -> Tensor:
        learns_temperatures, *needs = ctx.needs_input_grad[5:]
        parts = zip(tensors[::2], tensors[1::2], needs[::2], needs[1::2], strict=True)
        sides = [Side.with_gradients(*part) for part in parts]
        panels = arrange(sides)
        softmax = Softmax(plan, temperatures, row_weights, learns_temperatures, hardness)
        adds_gradients = learns_temperatures or any(needs)
        if blocks is None:
            visit(softmax, panels, finds_sums=True, adds_gradients=adds_gradients)
        else:
            for panel in blocks(panels[0], with_gradients=False):
                visit(softmax, [panel], finds_sums=True, adds_gradients=False)
                del panel  # frees the block before the next one is asked for
            if adds_gradients:
                for panel in blocks(panels[0], with_gradients=True):
                    visit(softmax, [panel], finds_sums=False, adds_gradients=True)
                    del panel
        gradients = (gradient for side in sides for gradient in (side.grad, side.grad_scale))
        ctx.save_for_backward(softmax.grad_temperatures(), *gradients)
        return softmax.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (g if g is None else g * grad_output for g in ctx.saved_tensors)
        return None, None, None, None, None, *gradients


# The sides of a direction: whose rows are compared with whose columns
ROWS: dict[Direction, str] = {
    "query_to_doc": "queries",
    "query_to_query": "queries",
    "doc_to_query": "own_documents",
    "doc_to_doc": "own_documents",
}
COLUMNS: dict[Direction, str] = {
    "query_to_doc": "documents",
    "query_to_query": "all_queries",
    "doc_to_query": "all_queries",
    "doc_to_doc": "documents",
}


def tiled_infonce(
    batch: Batch,
    terms: Sequence[Term],
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    plan: Plan,
    blocks: Callable[[Direction], Blocks] | None = None,
) -> Tensor:
    """The mean loss of softmaxes, with ``blocks`` over the columns of all ranks.

    The first direction of a softmax has the positives; the others add columns.
    """
    given = {
        "queries": batch.queries,
        "documents": batch.documents,
        "all_queries": batch.all_queries,
        "own_documents": batch.own_documents,
    }
    home = {name: name for name, x in given.items() if x is not None}
    home.setdefault("all_queries", "queries")
    home.setdefault("own_documents", "documents")
    losses = []
    with torch.autocast(batch.queries.device.type, enabled=False):
        # From here on every score is a plain inner product: the norms of the longest prefix are
        # divided out first, and the norms of shorter prefixes are factors of rows and columns.
        vectors = {}
        for name, x in given.items():
            if x is not None:
                is_query = name.endswith("queries")
                gamma = similarity.gamma_query if is_query else similarity.gamma_document
                vectors[name] = divide_by_norms(x, plan.dims, gamma)  # (n, D'), (K - 1, n)
        like = vectors["queries"][0]
        temperatures = _stack_temperatures(terms, like)
        row_weights = like.new_ones(len(like))
        if batch.weights is not None:
            row_weights = batch.weights.detach().to(like)
        for directions in softmaxes:
            names = (name for d in directions for name in (ROWS[d], COLUMNS[d]))
            used = dict.fromkeys(home[name] for name in names)
            arrange = partial(_panels, batch, directions, home, list(used), blocks is not None)
            around = None if blocks is None else blocks(directions[0])
            tensors = [x for name in used for x in vectors[name]]
            arguments = plan, arrange, around, row_weights, batch.hardness_strength, temperatures
            losses.append(InfoNCE.apply(*arguments, *tensors))
    return torch.stack(losses).mean()


def _panels(
    batch: Batch,
    directions: Sequence[Direction],
    home: dict[str, str],
    used: Sequence[str],
    is_block: bool,
    sides: Sequence[Side],
) -> list[Panel]:
    """The panels of a softmax, from the sides that it uses."""
    side = dict(zip(used, sides, strict=True))
    panels: list[Panel] = []
    for direction in directions:
        from_query, to_query = ROWS[direction] == "queries", COLUMNS[direction] == "all_queries"
        rows = side[home[ROWS[direction]]]
        columns = side[home[COLUMNS[direction]]]
        if not from_query and batch.own_documents is None:
            rows = rows.part(batch.own)
        # Query i and its positive have the number offset + i.
        numbers = batch.own if to_query and batch.all_queries is None else slice(0, len(columns.x))
        own = None if from_query == to_query else batch.offset - numbers.start
        of_rows = marks_of(batch, from_query, batch.own, is_block)
        of_columns = marks_of(batch, to_query, numbers, is_block)
        rules = rules_of(batch, direction, of_rows, of_columns, own)
        panels.append(Panel(rows, columns, rules, of_columns.bias, own, attracts=not panels))
    return panels


def _stack_temperatures(terms: Sequence[Term], like: Tensor) -> Tensor:
    """The temperatures of all terms on the device of a tensor, (T,)."""
    temperatures = []
    for term in terms:
        if isinstance(term.temperature, Tensor):
            temperatures.append(term.temperature.to(like))
        else:  # filled on the device, because a copy from the host would wait for it
            temperatures.append(like.new_full((), term.temperature))
    return torch.stack(temperatures)
