"""The softmax of a tile: scores, probabilities and gradients of some rows, in flat steps.

A tile is some rows of the panels that share a softmax. Their scores lie in one buffer, panel after
panel. Logits are in base 2, because exp2 is several times as fast as exp in PyTorch on a CPU.
docs/kernel.md says what else makes it fast.

A **score** is an inner product of a row and a column. A **slope** is d loss / d score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from st_magnitude.kernel.panels import Panel, Side
from st_magnitude.kernel.softmax import LOG2_E, Plan, Softmax


def rows_of_a_tile(device: torch.device, num_columns: int) -> int:
    """The default height of a tile: rows enough for matrix products at full speed, but on a CPU
    few enough for the cache."""
    return 1024 if device.type == "cuda" else max(256, 2**20 // num_columns)


def visit(
    softmax: Softmax, panels: Sequence[Panel], *, finds_sums: bool, adds_gradients: bool
) -> None:
    """Takes panels into the softmax of their rows, and adds what they contribute to the gradients.

    One visit does both if it has all panels of a row. Otherwise a first round of visits finds the
    sums, and a second one adds the gradients. The positives are in the first panel.
    """
    plan = softmax.plan
    num_rows = len(panels[0].rows.x)
    num_columns = sum(len(panel.columns.x) for panel in panels)
    most = plan.tile_rows or rows_of_a_tile(softmax.inverse.device, num_columns)
    height = math.ceil(num_rows / math.ceil(num_rows / most))  # tiles of the same size
    # Memory for the scores of each prefix, for slopes, and for exponentials if their slopes add up
    num_buffers = len(plan.dims) + (2 if max(map(len, plan.members)) > 1 else 1)
    memory = [panels[0].rows.x.new_empty(height, num_columns) for _ in range(num_buffers)]
    for start in range(0, num_rows, height):
        tile = slice(start, min(start + height, num_rows))
        buffers = [x[: tile.stop - tile.start] for x in memory]
        _visit_tile(softmax, panels, tile, buffers, finds_sums, adds_gradients)


# Rows of a tile, columns, and where their scores lie in the buffer
Block = tuple[Side, Side, slice]


def _visit_tile(
    softmax: Softmax,
    panels: Sequence[Panel],
    tile: slice,
    buffers: list[Tensor],  # (n, M) each, with the columns of all panels
    finds_sums: bool,
    adds_gradients: bool,
) -> None:
    plan, first, longest = softmax.plan, panels[0], len(softmax.plan.dims) - 1
    scores, slopes = buffers[: longest + 1], buffers[longest + 1]  # (K) x (n, M), (n, M)
    blocks = _blocks(panels, tile)
    parts = [part for _, _, part in blocks]

    # The scores of all prefixes. Those of columns that rules leave out become very low.
    for block in blocks:
        _multiply(plan, block, scores)
    targets = _apply_rules(panels, parts, tile, scores)  # (n, M) of the first panel
    if finds_sums:
        _attract(softmax, first, tile, [x[:, parts[0]] for x in scores], targets)
    factor, top = _factor([panel.columns for panel in panels])

    # From the longest prefix to the shortest: the slope of a shorter one takes the memory of the
    # scores of the longer one, which nothing needs any more.
    for k in range(longest, -1, -1):
        slope = slopes if k == longest else scores[k + 1]
        powers = buffers[-1] if len(buffers) > longest + 2 else slope  # exponentials
        best = _relative(plan, scores[k])  # (n,)

        # The softmax of each term: its log-sum-exp, and its probabilities, which pull at scores.
        for t in plan.members[k]:
            anchor = _exponentials(softmax, t, scores[k], best, powers) + top  # (n,)
            total = powers.sum(dim=1) if factor is None else powers @ factor  # (n,)
            if finds_sums:
                softmax.add(t, tile, total.log2() + anchor)
            if not adds_gradients:
                continue
            share = (anchor - softmax.log_sums[t, tile]).exp2_()  # (n,), probability of the anchor
            if softmax.learns_temperatures:
                weighted = powers if factor is None else powers * factor
                expected = torch.linalg.vecdot(weighted, scores[k]) + best * total
                softmax.grad_inverse[t] += (expected * share * softmax.weights[t, tile]).sum()
            share = (share * softmax.pulls[t, tile])[:, None]
            if t == plan.members[k][0]:
                torch.mul(powers, share, out=slope)
            else:
                slope.addcmul_(powers, share)

        # The targets push, and the slope becomes that of the product.
        if adds_gradients:
            if factor is not None:
                slope.mul_(factor)
            push = softmax.pushes(k, tile)  # (n,)
            _subtract_targets(slope[:, parts[0]], push, first.own, tile, targets)
            if k < longest:
                _finish_prefix(plan, blocks, k, scores[k], best, slope)
    if adds_gradients:
        _add_gradients(plan, blocks, scores, slopes)


def _blocks(panels: Sequence[Panel], tile: slice) -> list[Block]:
    edges = [0, *accumulate(len(panel.columns.x) for panel in panels)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    of_panels = zip(panels, parts, strict=True)
    return [(panel.rows.part(tile), panel.columns, part) for panel, part in of_panels]


def _multiply(plan: Plan, block: Block, scores: Sequence[Tensor]) -> None:
    """Writes the scores of all prefixes, (K) x (n, M), at the cost of one matrix product: a longer
    prefix only adds the coordinates that the shorter one lacks."""
    rows, columns, part = block
    shorter = scores[0][:, part]  # which the first product does not read
    for k, span in enumerate(plan.spans):
        longer = scores[k][:, part]
        torch.addmm(shorter, rows.x[:, span], columns.x[:, span].T, beta=min(k, 1), out=longer)
        shorter = longer
    for k, x in enumerate(scores[:-1]):
        _multiply_factors(block, k, x)


def _multiply_factors(block: Block, k: int, x: Tensor) -> None:
    """Multiplies numbers (n, M) by the factors that a shorter prefix has."""
    rows, columns, part = block
    if rows.scale is not None:
        x[:, part].mul_(rows.scale[k][:, None])
    if columns.scale is not None:
        x[:, part].mul_(columns.scale[k])


def _apply_rules(
    panels: Sequence[Panel], parts: Sequence[slice], tile: slice, scores: Sequence[Tensor]
) -> Tensor | None:
    """Makes the scores of excluded columns very low.

    Returns the targets (n, M) of the first panel, not yet divided by their sums; None: the own
    column alone.
    """
    found = []
    for panel, part in zip(panels, parts, strict=True):
        longest = scores[-1][:, part]
        targets = None if panel.targets is None else panel.targets(tile, longest)
        found.append(targets)
        excluded = _excluded(panel, tile, longest, targets)
        if excluded is not None:
            low = torch.finfo(excluded.dtype).min * 2.0**-40  # 0 times infinity would not be 0
            for x in scores:
                x[:, part].add_(excluded, alpha=low)
    return found[0]


def _excluded(panel: Panel, tile: slice, scores: Tensor, targets: Tensor | None) -> Tensor | None:
    """How many rules leave out a column, (n, M), and 0 for positives; None without rules."""
    mask: Tensor | None = None
    for rule in panel.excluded:
        said = rule(tile, scores)
        mask = said if mask is None else mask.add_(said)
    if mask is None:
        return None
    if targets is not None:
        mask.mul_(targets == 0)
    if panel.own is not None:
        mask.diagonal(panel.own + tile.start).zero_()
    return mask


def _attract(
    softmax: Softmax, panel: Panel, tile: slice, scores: list[Tensor], targets: Tensor | None
) -> None:
    """Adds the positives of a tile to the sums of its rows."""
    bias, own = panel.columns.bias, panel.own
    if targets is None and own is None:  # the block of another rank
        return

    def of_positives(numbers: Tensor) -> Tensor:
        """The sum of numbers (n, M) times targets, (n,)."""
        if targets is not None:
            return torch.linalg.vecdot(targets, numbers)
        assert own is not None
        return numbers.diagonal(own + tile.start)

    softmax.targets[tile] += 1 if targets is None else targets.sum(dim=1)
    for sums, of_prefix in zip(softmax.scores, scores, strict=True):
        sums[tile] += of_positives(of_prefix)
    if bias is not None:
        softmax.biases[tile] += of_positives(bias.expand_as(scores[0]))


def _factor(columns: Sequence[Side]) -> tuple[Tensor | None, Tensor | float]:
    """The exponentials of the biases of all columns, (M,), over the largest, and its logarithm.

    A bias of the logits is a factor of the exponentials, which leaves powers of them alone. No
    factor exceeds 1, so the best score of a row is still a safe shift.
    """
    if all(side.bias is None for side in columns):
        return None, 0.0
    biases = [side.x.new_zeros(len(side.x)) if side.bias is None else side.bias for side in columns]
    bias = torch.cat(biases)
    return (bias - bias.max()).exp(), bias.max() * LOG2_E


def _relative(plan: Plan, scores: Tensor) -> Tensor:
    """Subtracts the best score of each row unless no exponential can overflow; returns it, (n,)."""
    if plan.bounded:
        return scores.new_zeros(len(scores))
    best = scores.amax(dim=1)
    scores.sub_(best[:, None])
    return best


def _exponentials(softmax: Softmax, t: int, scores: Tensor, best: Tensor, powers: Tensor) -> Tensor:
    """Writes 2 ** (logit - anchor) of a term for all columns into powers; returns anchors (n,)."""
    rate = softmax.inverse[t] * LOG2_E
    if softmax.plan.powers[t]:  # of the exponentials of the term before
        powers.pow_(softmax.plan.powers[t])
    else:
        torch.mul(scores, rate, out=powers)
        powers.exp2_()
    return best * rate


def _subtract_targets(
    slope: Tensor, push: Tensor, own: int | None, tile: slice, targets: Tensor | None
) -> None:
    """Subtracts the targets from the probabilities, in units of the slope (n, M)."""
    if targets is not None:
        slope.addcmul_(targets, push[:, None], value=-1)
    elif own is not None:
        slope.diagonal(own + tile.start).sub_(push)


def _finish_prefix(
    plan: Plan, blocks: Sequence[Block], k: int, scores: Tensor, best: Tensor, slope: Tensor
) -> None:
    """Adds the gradients of a prefix's factors; the slope becomes that of the product."""
    for block in blocks:
        rows, columns, part = block
        if rows.grad_scale is not None or columns.grad_scale is not None:
            moments = scores[:, part]  # (n, M)
            if not plan.bounded:
                moments.add_(best[:, None])
            moments.mul_(slope[:, part])
            for side, dim in ((rows, 1), (columns, 0)):
                if side.grad_scale is not None and side.scale is not None:
                    side.grad_scale[k] += moments.sum(dim=dim) / side.scale[k]
        _multiply_factors(block, k, slope)


def _add_gradients(
    plan: Plan, blocks: Sequence[Block], scores: Sequence[Tensor], slopes: Tensor
) -> None:
    """Adds to the gradients of rows and columns, after all softmaxes, because each product drives
    the scores out of the cache.

    A coordinate belongs to every prefix that reaches it, so the slopes add up from the longest
    prefix on. Those of a shorter one are in the memory of the scores of the longer one.
    """
    longest = len(plan.dims) - 1
    for k in range(longest, -1, -1):
        if k < longest:
            slopes.add_(scores[k + 1])
        span = plan.spans[k]
        for rows, columns, part in blocks:
            if rows.grad is not None:
                rows.grad[:, span].addmm_(slopes[:, part], columns.x[:, span])
            if columns.grad is not None:
                columns.grad[:, span].addmm_(slopes[:, part].T, rows.x[:, span])
