"""Panel: a rectangle of scores in the tiled engine, and the rules of its pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Above, Batch, Direction
from st_magnitude.kernel.vectors import Vectors

# (a slice of the rows, their scores (n, M)) -> numbers (n, M) in memory of its own
Rule = Callable[[slice, Tensor], Tensor]


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
