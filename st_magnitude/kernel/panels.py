"""Side and Panel: what the tiled engine compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Above, Batch, Direction, Ids
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.kernel.plan import Plan

# (a slice of the rows, their scores (n, M)) -> numbers (n, M) in memory of its own
Rule = Callable[[slice, Tensor], Tensor]


@dataclass
class Side:
    """n texts: their vectors divided by norms, the gradients of these, and what rules need."""

    x: Tensor  # (n, D), D the longest prefix
    scale: Tensor | None = None  # (K - 1, n), factors of the shorter prefixes; None: 1
    grad: Tensor | None = None  # (n, D); None: not needed
    grad_scale: Tensor | None = None  # (K - 1, n)
    ids: Tensor | None = None  # (n, E): texts that share one do not count for each other
    label: Tensor | None = None  # (n,): documents with the label of a positive are positives, too
    bias: Tensor | None = None  # (n,), added to the logits of columns
    guide: Tensor | None = None  # (n, Dg), the embeddings of a guide
    spared: Tensor | None = None  # (n,): a pair that shares one is never too close

    def part(self, rows: slice) -> Side:
        """A view of some of the texts, whose gradients go into those of the whole."""
        views = {name: x[rows] for name, x in vars(self).items() if x is not None}
        for name in {"scale", "grad_scale"} & views.keys():
            views[name] = vars(self)[name][:, rows]
        return Side(**views)


def side_of(
    batch: Batch,
    plan: Plan,
    vectors: Tensor,
    gamma: float | Tensor,
    *,
    is_query: bool,
    first: int,
    is_block: bool,
) -> Side:
    """The side of the queries or documents of pairs from number ``first`` on.

    From here on every score is a plain inner product: the norms of the longest prefix are divided
    out, and the norms of shorter prefixes are factors of rows and columns. A query has the label
    of its positive. In a block of a ring ids may repeat on other ranks, although they are different
    here.
    """
    x, scale = divide_by_norms(vectors, plan.dims, gamma)
    number = len(x)

    def of_side(given: Tensor) -> Tensor:
        """The rows of the side, of what is given for them alone or for all pairs."""
        return given if len(given) == number else given[first : first + number]

    def of_ids(given: Sequence[Ids]) -> list[Tensor]:
        found = [ids for ids in given if is_block or _may_repeat(ids)]
        return [of_side(ids.queries if is_query else ids.documents) for ids in found]

    with torch.no_grad():
        ids = of_ids(batch.excluded_ids)
        labels = of_ids([] if batch.positives is None else [Ids(batch.positives, batch.positives)])
        log_q = batch.log_q_queries if is_query else batch.log_q
        guides = batch.above.guide if batch.above is not None else None
        spared = of_ids(batch.spares)
        return Side(
            x=x,
            scale=scale,
            grad=_zeros(x),
            grad_scale=_zeros(scale),
            ids=torch.stack(ids, dim=1) if ids else None,
            label=labels[0] if labels else None,
            bias=None if log_q is None else -of_side(log_q).to(x.dtype),
            guide=None if guides is None else of_side(guides[0 if is_query else 1]),
            spared=spared[0] if spared else None,
        )


def _zeros(x: Tensor | None) -> Tensor | None:
    """Memory for the gradient of a tensor that needs one."""
    return torch.zeros_like(x) if x is not None and x.requires_grad else None


def _may_repeat(ids: Ids) -> bool:
    """Whether texts may share an id; on a GPU the answer would keep the host waiting."""
    if ids.documents.device.type != "cpu":
        return True
    is_of_pairs = ids.queries is ids.documents
    every = ids.documents if is_of_pairs else torch.cat([ids.queries, ids.documents])
    return len(every.unique()) < len(every)


@dataclass(frozen=True)
class Panel:
    """A rectangle of scores: rows, a block of columns, and the rules of their pairs."""

    rows: Side  # (B, D)
    columns: Side  # (M, D)
    own: int | None  # the column of the positive of row 0, if any; that of row i is i later
    excluded: tuple[Rule, ...]  # columns left out of the softmax, unless they are positives
    targets: Rule | None = None  # what share each column has; None: the own column has all


def panel_of(
    batch: Batch,
    direction: Direction,
    rows: Side,
    columns: Side,
    own: int | None,
    of_own: Tensor | None = None,
) -> Panel:
    """The panel of rows (B,), which are queries or their positives, and a block of columns (M,).

    Args:
        of_own: The scores (B,) of the positives, where the block may lack them.
    """
    excluded: list[Rule] = []
    if rows.ids is not None and columns.ids is not None:
        pairs = zip(rows.ids.unbind(dim=1), columns.ids.unbind(dim=1), strict=True)
        excluded += [same_id(row, column, rows.x.dtype) for row, column in pairs]
    same_label: Rule | None = None
    if rows.label is not None and columns.label is not None:
        same_label = same_id(rows.label, columns.label, rows.x.dtype)
    if direction in ("query_to_query", "doc_to_doc"):
        assert own is not None  # a ring has neither direction
        # a text does not count for itself or for a text of its pair
        excluded.append(_same_pair(batch, rows, columns, own))
        excluded += [] if same_label is None else [same_label]
        return Panel(rows, columns, None, tuple(excluded))
    if batch.above is not None:
        excluded.append(_too_close(batch.above, rows, columns, own, of_own))
    targets = same_label or _named(batch, direction, own)
    return Panel(rows, columns, own, tuple(excluded), targets)


# --- the rules ------------------------------------------------------------------------------------


def same_id(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Rule:
    """The columns (M,) with the id of the row (B,), compared as small floats, which takes a quarter
    of the time of comparing integers into booleans."""
    ordered, order = torch.cat([rows, columns]).sort()
    steps = (ordered != ordered.roll(1)).to(dtype).cumsum(dim=0)
    numbers = torch.empty_like(steps).scatter_(0, order, steps)
    return _equal(numbers[: len(rows)], numbers[len(rows) :])


def _equal(rows: Tensor, columns: Tensor) -> Rule:
    """The columns (M,) with the number of the row (B,), both floats."""
    return lambda tile, scores: torch.eq(columns, rows[tile, None], out=torch.empty_like(scores))


def _same_pair(batch: Batch, rows: Side, columns: Side, own: int) -> Rule:
    """The columns (M,) of the pair of the row, of texts of the same kind."""

    def pairs(side: Side, first: int) -> Tensor:
        numbers = first + torch.arange(len(side.x), device=side.x.device)
        return (numbers % batch.num_pairs).to(rows.x.dtype)

    return _equal(pairs(rows, batch.offset), pairs(columns, batch.offset - own))


def _too_close(
    above: Above, rows: Side, columns: Side, own: int | None, of_own: Tensor | None
) -> Rule:
    """The columns that score above the threshold, but for those that are spared."""
    spared: Rule | None = None
    if rows.spared is not None and columns.spared is not None:
        spared = same_id(rows.spared, columns.spared, rows.x.dtype)

    def rule(tile: slice, scores: Tensor) -> Tensor:
        if rows.guide is not None and columns.guide is not None:
            scores = rows.guide[tile] @ columns.guide.T
        if own is not None:
            positives = scores.diagonal(own + tile.start)
        else:
            assert of_own is not None
            positives = of_own[tile]
        too_close = (scores > above.threshold(positives)[:, None]).to(rows.x.dtype)
        return too_close if spared is None else too_close.mul_(spared(tile, scores) == 0)

    return rule


def _named(batch: Batch, direction: Direction, own: int | None) -> Rule | None:
    """The columns that targets name; a row that names none has its own column."""
    given = batch.targets_queries if direction == "doc_to_query" else batch.targets
    if given is None and isinstance(batch.targets, Tensor):
        given = batch.targets[:, batch.own].T
    if given is None:
        return None
    of_rows = given.__getitem__ if isinstance(given, Tensor) else given

    def rule(tile: slice, scores: Tensor) -> Tensor:
        targets = of_rows(tile).to(scores.dtype, copy=True)
        targets.diagonal(own + tile.start).add_(targets.sum(dim=1) == 0)
        return targets

    return rule
