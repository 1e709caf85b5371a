"""Rules: which columns of a tile are no negatives of its rows, are positives, or weigh more.

A rule is a function of a slice of rows and their scores (n, M), which returns numbers (n, M). Rules
about texts compare what is known about rows and columns (`Marks`), which travels with the columns
in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Direction, Judge, as_sequence
from st_magnitude.similarity import at_least_float32


@dataclass(frozen=True)
class Marks:
    """What is known about n texts besides their vectors. None: no rule depends on it."""

    owner: Tensor  # (n,), the number of the pair, as a float
    ids: Tensor | None = None  # (n, E): texts that share one of them are no negatives of each other
    label: Tensor | None = None  # (n,): documents with the label of a positive are positives, too
    bias: Tensor | None = None  # (n,), added to the logits of columns
    guide: Tensor | None = None  # (n, Dg), the embeddings of a guide


def marks_of(batch: Batch, is_query: bool, rows: slice, is_block: bool) -> Marks:
    """What is known about queries or documents of pairs; a query has the ids of its positive.

    In a block of a ring ids may repeat on other ranks, although they are different here.
    """
    dtype = at_least_float32(batch.queries[:0]).dtype
    device = batch.queries.device
    ids = [x[rows] for x in batch.excluded_ids if is_block or _may_repeat(x)]
    label = batch.positives
    if label is not None and (label.dtype == torch.bool or not (is_block or _may_repeat(label))):
        label = None
    bias = batch.log_q_queries if is_query else batch.log_q
    if bias is not None:
        covers_own_only = is_query and batch.all_queries is None
        bias = -bias.detach().to(dtype)
        bias = bias if covers_own_only else bias[rows]
    guide = None
    if batch.above is not None and batch.above.guide is not None:
        of_queries, of_documents = batch.above.guide
        guide = of_queries if is_query else of_documents
        guide = guide if is_query and len(guide) == rows.stop - rows.start else guide[rows]
    return Marks(
        (torch.arange(rows.start, rows.stop, device=device) % batch.num_pairs).to(dtype),
        torch.stack(ids, dim=1) if ids else None,
        label if label is None else label[rows],
        bias,
        guide,
    )


def _may_repeat(ids: Tensor) -> bool:
    """Whether columns may share an id; on a GPU the answer would keep the host waiting."""
    return ids.device.type != "cpu" or len(ids.unique()) < len(ids)


def same_id(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Judge:
    """The columns (M,) with the id of the row (B,).

    Any integers become small floats without a wait for the device, because comparing floats into
    floats takes a quarter of the time of comparing integers into booleans.
    """
    ordered, order = torch.cat([rows, columns]).sort()
    steps = (ordered != ordered.roll(1)).to(dtype).cumsum(dim=0)
    numbers = torch.empty_like(steps).scatter_(0, order, steps)
    return equal(numbers[: len(rows)], numbers[len(rows) :])


def equal(rows: Tensor, columns: Tensor) -> Judge:
    """The columns (M,) with the number of the row (B,), both floats."""
    return lambda tile, scores: torch.eq(columns, rows[tile, None], out=torch.empty_like(scores))


def unequal(rows: Tensor, columns: Tensor) -> Judge:
    """The columns (M,) with another number than the row (B,), both floats."""
    return lambda tile, scores: torch.ne(columns, rows[tile, None], out=torch.empty_like(scores))


def too_close(
    batch: Batch, rows: Marks, columns: Marks, own: int | None, of_own: Tensor | None
) -> Judge:
    """The columns that score above the threshold of :class:`~st_magnitude.kernel.batch.Above`.

    ``own`` is the column that belongs to the first row. If it is not among the columns, ``of_own``
    are the scores (B,) of the positives.
    """
    above = batch.above
    assert above is not None

    def judge(tile: slice, scores: Tensor) -> Tensor:
        if rows.guide is not None and columns.guide is not None:
            scores = rows.guide[tile] @ columns.guide.T
        if own is None and of_own is not None:
            positives = of_own[tile]
        else:
            positives = scores.diagonal((own or 0) + tile.start)
        return scores > above.threshold(positives)[:, None]

    return judge


@dataclass(frozen=True)
class Rules:
    """The rules of one direction for one block of columns."""

    excluded: tuple[Judge, ...] = ()  # columns left out of the softmax, unless they are positives
    targets: Judge | None = None  # the share of the target; None: the own column has all of it
    hard: Judge | None = None  # columns that weigh more, unless they are positives


def rules_of(
    batch: Batch,
    direction: Direction,
    rows: Marks,
    columns: Marks,
    own: int | None,
    of_own: Tensor | None = None,
    is_other_rank: bool = False,
) -> Rules:
    """The rules for rows (B,), which are queries or their positives, and a block of columns (M,).

    Args:
        batch: The batch of the rows.
        direction: Such as ``"query_to_doc"``.
        rows: Marks of the rows.
        columns: Marks of the columns.
        own: The column that belongs to the first row, if it is among the columns.
        of_own: The scores (B,) of the positives, where they are not among the columns.
        is_other_rank: Whether the columns are those of another rank, with pairs of its own.
    """
    dtype = rows.owner.dtype
    excluded: list[Judge] = []
    if rows.ids is not None and columns.ids is not None:
        pairs = zip(rows.ids.unbind(dim=1), columns.ids.unbind(dim=1), strict=True)
        excluded += [same_id(of_row, of_column, dtype) for of_row, of_column in pairs]
    same_label: Judge | None = None
    if rows.label is not None and columns.label is not None:
        same_label = same_id(rows.label, columns.label, dtype)
    if direction in ("query_to_query", "doc_to_doc"):
        # a text is no negative of itself or of a text of its pair
        excluded.append(equal(rows.owner, columns.owner))
        if same_label is not None:
            excluded.append(same_label)
        return Rules(tuple(excluded))
    functions: Sequence[Judge] = batch.excluding_functions
    if direction == "doc_to_query":
        functions = as_sequence(batch.exclude_queries)
    excluded += [_fresh(function) for function in functions]
    if batch.above is not None:
        excluded.append(too_close(batch, rows, columns, own, of_own))
    return Rules(
        tuple(excluded),
        same_label or _targets(batch, direction),
        _hard(batch, rows, columns, is_other_rank) if direction == "query_to_doc" else None,
    )


def _fresh(function: Judge) -> Judge:
    """What a function of the caller says, in memory that the engine may write to."""
    return lambda tile, scores: function(tile, scores).to(scores.dtype, copy=True)


def _targets(batch: Batch, direction: Direction) -> Judge | None:
    """The targets that matrices or functions name."""
    named = batch.targets_queries if direction == "doc_to_query" else batch.targets
    if callable(named) and not isinstance(named, Tensor):
        return _of_rows(named)
    if named is None:
        named = batch.targets if batch.targets is not None else batch.positives
        if not isinstance(named, Tensor) or named.ndim != 2:
            return None
        named = named[:, batch.own].T if direction == "doc_to_query" else named
    return _of_rows(named.__getitem__)


def _of_rows(function: Callable[[slice], Tensor]) -> Judge:
    return lambda tile, scores: function(tile)


def _hard(batch: Batch, rows: Marks, columns: Marks, is_other_rank: bool) -> Judge | None:
    """The negatives that weigh more. In a ring those of other ranks belong to other queries."""
    if not batch.weighs_hard_negatives:
        return None
    in_batch = batch.hardness_mode == "in_batch_negatives"
    if batch.hardness_mode == "all_negatives" or (is_other_rank and in_batch):
        return lambda tile, scores: torch.ones_like(scores)
    if in_batch:
        return unequal(rows.owner, columns.owner)
    return None if is_other_rank else equal(rows.owner, columns.owner)
