"""Panel: a rectangle of scores in the tiled engine, and the rules of its pairs.

Its rows and columns are vectors: embeddings divided by norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Above, Batch, Direction, Ids
from st_magnitude.similarity import safe_norm, without_autocast

# (a slice of the rows, their scores (n, M)) -> numbers (n, M) in memory of its own
Rule = Callable[[slice, Tensor], Tensor]


@dataclass
class Vectors:
    """n embeddings divided by norms, the gradients of these, and what rules need."""

    x: Tensor  # (n, D), D the longest prefix
    scale: Tensor | None = None  # (n, K - 1), factors of the shorter prefixes; None: 1
    grad: Tensor | None = None  # (n, D); None: not needed
    grad_scale: Tensor | None = None  # (n, K - 1)
    ids: Tensor | None = None  # (n, E): texts that share one are not negatives of each other
    positive_id: Tensor | None = None  # (n,): documents with the id of a positive are positives
    bias: Tensor | None = None  # (n,), added to the logits of columns
    spared: Tensor | None = None  # (n,): pairs that share one are never too close

    def part(self, rows: slice) -> Vectors:
        """A view of some rows that shares gradient memory."""
        return Vectors(**{name: x[rows] for name, x in vars(self).items() if x is not None})


def vectors_of(
    batch: Batch,
    dims: tuple[int, ...],
    embeddings: Tensor,
    gamma: float | Tensor,
    *,
    is_query: bool,
    first: int,
) -> Vectors:
    """Divides queries or documents of pairs from number ``first`` on by the norms of the longest
    prefix; those of shorter prefixes are factors of rows and columns."""
    x, scale = divide_by_norms(embeddings, dims, gamma)
    number = len(x)

    def part_of(given: Tensor) -> Tensor:
        """The rows of these vectors, from values for them alone or for all pairs."""
        return given if len(given) == number else given[first : first + number]

    def of_ids(given: Sequence[Ids]) -> Tensor | None:  # (n, E)
        found = [part_of(ids.queries if is_query else ids.documents) for ids in given]
        return torch.stack(found, dim=1) if found else None

    with torch.no_grad():
        log_q = batch.log_q_queries if is_query else batch.log_q
        return Vectors(
            x=x,
            scale=scale,
            grad=_zeros(x),
            grad_scale=_zeros(scale),
            ids=of_ids(batch.excluded_ids),
            positive_id=of_ids(batch.positive_ids),
            bias=None if log_q is None else -part_of(log_q).to(x.dtype),
            spared=of_ids(batch.spares),
        )


def _zeros(x: Tensor | None) -> Tensor | None:
    """Memory for the gradient of a tensor that needs one."""
    return torch.zeros_like(x) if x is not None and x.requires_grad else None


@dataclass(frozen=True)
class Panel:
    """A rectangle of scores: rows, columns, and the rules of their pairs."""

    rows: Vectors  # (B, D)
    columns: Vectors  # (M, D)
    offset: int | None  # the positive of row i is column offset + i; None: it is not here
    excluded: tuple[Rule, ...]  # columns left out of the softmax, unless they are positives
    targets: Rule | None = None  # what share each column has; None: column offset + i has all


def panel_of(
    batch: Batch,
    direction: Direction,
    rows: Vectors,
    columns: Vectors,
    offset: int,
) -> Panel:
    """The panel of rows (B,), which are queries or their positives, and columns (M,)."""
    excluded = _same_ids(rows.ids, columns.ids, rows.x.dtype)
    same_positive = _same_ids(rows.positive_id, columns.positive_id, rows.x.dtype)
    if direction in ("query_to_query", "doc_to_doc"):
        # a text does not count for itself or for a text of its pair
        excluded += [_same_pair(batch, rows, columns, offset), *same_positive]
        return Panel(rows, columns, None, tuple(excluded))
    if batch.above is not None:
        excluded.append(_too_close(batch.above, rows, columns, offset))
    targets = same_positive[0] if same_positive else _named(batch, direction, offset)
    return Panel(rows, columns, offset, tuple(excluded), targets)


# --- the rules ------------------------------------------------------------------------------------


def _same_ids(rows: Tensor | None, columns: Tensor | None, dtype: torch.dtype) -> list[Rule]:
    """A rule for each of E ids, (B, E) and (M, E): the columns with the id of the row. Comparing
    them as small floats takes a quarter of the time of integers and booleans."""
    if rows is None or columns is None:
        return []
    rules = []
    for ids in torch.cat([rows, columns]).unbind(dim=1):
        ordered, order = ids.sort()
        steps = (ordered != ordered.roll(1)).to(dtype).cumsum(dim=0)
        numbers = torch.empty_like(steps).scatter_(0, order, steps)
        rules.append(_equal(numbers[: len(rows)], numbers[len(rows) :]))
    return rules


def _equal(rows: Tensor, columns: Tensor) -> Rule:
    """The columns (M,) with the number of the row (B,), both floats."""
    return lambda tile, scores: torch.eq(columns, rows[tile, None], out=torch.empty_like(scores))


def _same_pair(batch: Batch, rows: Vectors, columns: Vectors, offset: int) -> Rule:
    """The columns that belong to the pair of the row, if both are queries or both documents."""

    def pairs(vectors: Vectors, first: int) -> Tensor:
        numbers = first + torch.arange(len(vectors.x), device=vectors.x.device)
        return (numbers % batch.num_pairs).to(rows.x.dtype)

    return _equal(pairs(rows, batch.offset), pairs(columns, batch.offset - offset))


def _too_close(above: Above, rows: Vectors, columns: Vectors, offset: int) -> Rule:
    """The columns that score above the threshold and are not spared."""
    spared = _same_ids(rows.spared, columns.spared, rows.x.dtype)

    def rule(tile: slice, scores: Tensor) -> Tensor:
        positives = scores.diagonal(offset + tile.start)
        too_close = (scores > above.threshold(positives)[:, None]).to(rows.x.dtype)
        for same in spared:
            too_close.mul_(same(tile, scores) == 0)
        return too_close

    return rule


def _named(batch: Batch, direction: Direction, offset: int) -> Rule | None:
    """The targets of the rows; a row of zeros has its positive as the only one."""
    given = batch.targets_queries if direction == "doc_to_query" else batch.targets
    if given is None and isinstance(batch.targets, Tensor):
        given = batch.targets[:, batch.pairs].T
    if given is None:
        return None
    of_rows = given.__getitem__ if isinstance(given, Tensor) else given

    def rule(tile: slice, scores: Tensor) -> Tensor:
        targets = of_rows(tile).to(scores.dtype, copy=True)
        targets.diagonal(offset + tile.start).add_(targets.sum(dim=1) == 0)
        return targets

    return rule


# --- the division, with a backward pass that holds little memory ----------------------------------


def divide_by_norms(
    x: Tensor, dims: tuple[int, ...], gamma: float | Tensor
) -> tuple[Tensor, Tensor | None]:
    """x / |x|^gamma of the longest prefix, (n, D'), and the factors of shorter ones, (n, K - 1)."""
    x = x[:, : dims[-1]]
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return x, None
    with torch.no_grad():
        norms = torch.cat([safe_norm(x[:, :dim]) for dim in dims], dim=1)  # (n, K)
    divided, scales = _DivideByNorms.apply(x, torch.as_tensor(gamma, dtype=x.dtype), norms, dims)
    return divided, scales if len(dims) > 1 else None


class _DivideByNorms(torch.autograd.Function):
    """x / |x|^gamma, (n, D), and (|x| / |x[:dim]|)^gamma of all prefixes but the last, (n, K - 1).

    Autograd of the same formulas holds several temporaries of the size of x, which set the peak
    memory of a large batch. This backward pass holds only the gradient.
    """

    @staticmethod
    def forward(
        x: Tensor, gamma: Tensor, norms: Tensor, dims: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        longest = norms[:, -1:]  # (n, 1)
        scales = (longest / norms[:, :-1]) ** gamma  # (n, K - 1)
        return x * longest**-gamma, scales

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, gamma, norms, ctx.dims = inputs
        ctx.save_for_backward(x, gamma, norms, output[1])

    @staticmethod
    def backward(ctx: Any, grad_divided: Tensor, grad_scales: Tensor) -> tuple[Tensor | None, ...]:
        x, gamma, norms, scales = ctx.saved_tensors
        longest = norms[:, -1:]  # (n, 1)
        with without_autocast(x):
            grad = grad_divided * longest**-gamma
            whole = torch.linalg.vecdot(x, grad)[:, None]  # d loss / d -log |x|^gamma, (n, 1)
            parts = grad_scales * scales  # d loss / d log of the scales, (n, K - 1)
            of_scales = (parts * (longest / norms[:, :-1]).log()).sum()
            grad_gamma = of_scales - (whole * longest.log()).sum()
            # The derivative of log |x| is x / |x|^2, in the coordinates of the prefix. One of the
            # two norms is divided out at the end, because the square of a small norm is 0.
            rest = whole - parts.sum(dim=1, keepdim=True)  # (n, 1)
            shares = torch.cat([parts, rest], dim=1)  # (n, K)
            coefficients = gamma * shares * (longest / norms) / norms  # (n, K)
            grad *= longest
            for k, (start, stop) in enumerate(pairwise((0, *ctx.dims))):
                block = slice(start, stop)
                coefficient = coefficients[:, k:].sum(dim=1, keepdim=True)
                grad[:, block].addcmul_(x[:, block], coefficient, value=-1)
            grad /= longest
        return grad, grad_gamma, None, None
