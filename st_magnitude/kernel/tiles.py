"""The softmax of a tile: scores, probabilities and gradients of some rows, in flat steps.

A tile is some rows of the panels that share a softmax. Their scores lie in one buffer, panel after
panel, so the softmax does not know panels. Three things make it fast (docs/kernel.md): a longer
prefix adds a block of columns to the product of the shorter one, all temperatures of a prefix share
its scores, and the gradient is taken while a tile is at hand. Logits are in base 2, because exp2 is
several times as fast as exp in PyTorch on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from st_magnitude.kernel.panels import LOG2_E, Panel, Plan


def rows_of_a_tile(device: torch.device, num_columns: int) -> int:
    """The default height of a tile: enough rows for matrix products at full speed.

    On a CPU a tile should also stay in the cache, and many small tiles cost more in calls than they
    compute: a tile has a million scores, but at least 256 rows.
    """
    return 1024 if device.type == "cuda" else max(256, 2**20 // num_columns)


class Softmax:
    """The sums of each row so far: the log-sum-exp, and the attraction of its positives.

    Args:
        plan: Prefixes, terms and weights.
        temperatures: (T,).
        row_weights: (B,).
        learns_temperatures: Whether the gradient of the temperatures is needed.
        hardness: Strength of the weight of hard negatives.
    """

    def __init__(
        self,
        plan: Plan,
        temperatures: Tensor,
        row_weights: Tensor,
        learns_temperatures: bool,
        hardness: float,
    ) -> None:
        self.plan = plan
        self.hardness = hardness
        self.inverse = 1 / temperatures[:, None]  # (T, 1)
        of_terms = torch.stack([temperatures.new_full((1,), w) for w in plan.weights])  # (T, 1)
        self.weights = of_terms * row_weights  # (T, B), of a row's loss in the loss of the batch
        self.pulls = self.weights * self.inverse  # (T, B), d loss / d score of a probability of 1
        self.log_sums = torch.full_like(self.weights, -torch.inf)  # (T, B), to base 2
        # Sums over the positives of a row: weighted scores of each prefix and biases, and targets
        self.scores = [torch.zeros_like(row_weights) for _ in plan.dims]  # (K) x (B,)
        self.biases = torch.zeros_like(row_weights)  # (B,)
        self.targets = torch.zeros_like(row_weights)  # (B,)
        self.grad_inverse = torch.zeros_like(temperatures) if learns_temperatures else None  # (T,)

    def loss(self) -> Tensor:
        """The sum over terms and rows of w · (log-sum-exp of logits - mean logit of positives)."""
        means = self.plan.per_term(self.scores) / self.targets
        attraction = means * self.inverse + self.biases / self.targets  # (T, B)
        return ((self.log_sums / LOG2_E - attraction) * self.weights).sum()

    def grad_temperatures(self) -> Tensor | None:
        """The gradient of the temperatures, (T,)."""
        if self.grad_inverse is None:
            return None
        means = self.plan.per_term(self.scores) / self.targets
        return -(self.grad_inverse - (means * self.weights).sum(dim=1)) * self.inverse[:, 0] ** 2


def visit(
    softmax: Softmax, panels: Sequence[Panel], *, finds_sums: bool, adds_gradients: bool
) -> None:
    """Takes panels into the softmax of their rows, and adds what they contribute to the gradients.

    One visit does both if it has all panels of a row. Otherwise a first round of visits finds the
    sums, and a second one adds the gradients.
    """
    plan = softmax.plan
    for side in (side for panel in panels for side in (panel.rows, panel.columns)):
        side.operand = side.operand.to(plan.product_dtype or side.x.dtype)  # once for all tiles
    num_rows = len(panels[0].rows.x)
    num_columns = sum(len(panel.columns.x) for panel in panels)
    most = plan.tile_rows or rows_of_a_tile(softmax.inverse.device, num_columns)
    height = math.ceil(num_rows / math.ceil(num_rows / most))  # tiles of the same size
    # Memory for the scores of each prefix, for slopes, and for exponentials if their slopes add up
    num_buffers = len(plan.dims) + (2 if max(map(len, plan.members)) > 1 else 1)
    memory = [panels[0].rows.x.new_empty(height, num_columns) for _ in range(num_buffers)]
    bias = _joint_bias(panels)
    for start in range(0, num_rows, height):
        tile = slice(start, min(start + height, num_rows))
        buffers = [x[: tile.stop - tile.start] for x in memory]
        _visit_tile(softmax, panels, bias, tile, buffers, finds_sums, adds_gradients)


def _joint_bias(panels: Sequence[Panel]) -> Tensor | None:
    """The biases of all columns, (M,), or None if there are none."""
    if all(panel.bias is None for panel in panels):
        return None
    biases = []
    for panel in panels:
        zeros = panel.columns.x.new_zeros(len(panel.columns.x))
        biases.append(zeros if panel.bias is None else panel.bias)
    return torch.cat(biases)


def _visit_tile(
    softmax: Softmax,
    panels: Sequence[Panel],
    bias: Tensor | None,
    tile: slice,
    buffers: list[Tensor],  # (n, M) each, with the columns of all panels
    finds_sums: bool,
    adds_gradients: bool,
) -> None:
    plan = softmax.plan
    num_prefixes = len(plan.dims)
    scores = buffers[:num_prefixes]  # (K) x (n, M)
    slope = buffers[num_prefixes]  # (n, M), d loss / d score of a prefix
    powers = buffers[-1]  # (n, M), exponentials; the memory of slope where a prefix has one term

    # Scores of all prefixes. Where a rule leaves a column out, its score is very low.
    edges = [0, *accumulate(len(panel.columns.x) for panel in panels)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    targets: list[Tensor | None] = []
    hard: Tensor | None = None  # (n, M), 1 for hard negatives
    for panel, part in zip(panels, parts, strict=True):
        of_panel = [x[:, part] for x in scores]
        _compare(plan, panel, tile, of_panel)
        of_targets = _targets(panel, tile, of_panel[-1])
        hard = _hard_negatives(panel, part, tile, scores[-1], of_targets, hard)
        _leave_out(panel, tile, of_panel, of_targets)
        targets.append(of_targets if panel.attracts else None)
        if finds_sums and panel.attracts:
            _add_attraction(softmax, panel, tile, of_panel, of_targets)

    # Probabilities of each prefix, which pull at the scores, and the targets, which push.
    for k, members in enumerate(plan.members):
        best = _add_probabilities(
            softmax, k, tile, scores[k], hard, bias, slope, powers, finds_sums, adds_gradients
        )
        if not adds_gradients:
            continue
        push = softmax.pulls[list(members), tile].sum(dim=0) / softmax.targets[tile]  # (n,)
        for panel, part, of_targets in zip(panels, parts, targets, strict=True):
            if panel.attracts:
                _subtract_targets(slope[:, part], push, panel.own, tile, of_targets)
            if k < num_prefixes - 1:
                _finish_prefix(panel, k, tile, scores[k][:, part], best, slope[:, part])
        # The slope takes the place of the scores, which nothing needs any more.
        if powers is slope:
            powers = scores[k]
        scores[k], slope = slope, scores[k]

    # One product for the rows and one for the columns of each panel.
    if adds_gradients:
        for panel, part in zip(panels, parts, strict=True):
            _add_gradients(plan, panel, tile, [x[:, part] for x in scores])


def _add_probabilities(
    softmax: Softmax,
    k: int,
    tile: slice,
    scores: Tensor,  # (n, M), of the prefix; left relative to the best score of the row
    hard: Tensor | None,
    bias: Tensor | None,
    slope: Tensor,
    powers: Tensor,
    finds_sums: bool,
    adds_gradients: bool,
) -> Tensor | None:
    """The softmax of the terms of a prefix: log-sum-exps, and d loss / d score but for the targets.

    Returns the best scores of the rows (n,), or None if the scores are as they were.
    """
    plan = softmax.plan
    # A bias of the logits is a factor of the exponentials, which leaves powers of them alone. No
    # factor exceeds 1, so the best score of a row is still a safe shift.
    factor = None if bias is None else (bias - bias.max()).exp()  # (M,)
    top = 0 if bias is None else bias.max() * LOG2_E
    penalty = None if hard is None else (scores * hard).mul_(softmax.hardness * LOG2_E)
    # Exponentials are relative to the best score of the row, unless none can overflow.
    best = scores.new_zeros(len(scores)) if plan.bounded else scores.amax(dim=1)  # (n,)
    if not plan.bounded:
        scores.sub_(best[:, None])
    for number, t in enumerate(plan.members[k]):
        rate = softmax.inverse[t] * LOG2_E
        anchor = _exponentials(plan.powers[t], scores, rate, best, penalty, powers) + top
        total = powers.sum(dim=1) if factor is None else powers @ factor  # (n,)
        log_sums = softmax.log_sums[t, tile]  # a view
        if finds_sums:
            torch.logaddexp2(log_sums, total.log2() + anchor, out=log_sums)
        if not adds_gradients:
            continue
        probability = (anchor - log_sums).exp2_()  # (n,), of a column with the anchor's logit
        if softmax.grad_inverse is not None:
            weighted = powers if factor is None else powers * factor
            expected = torch.linalg.vecdot(weighted, scores) + best * total
            softmax.grad_inverse[t] += (expected * probability * softmax.weights[t, tile]).sum()
        share = (probability * softmax.pulls[t, tile])[:, None]
        if number == 0:
            torch.mul(powers, share, out=slope)
        else:
            slope.addcmul_(powers, share)
    if adds_gradients and factor is not None:
        slope.mul_(factor)
    return None if plan.bounded else best


def _compare(plan: Plan, panel: Panel, tile: slice, scores: list[Tensor]) -> None:
    """Writes the scores of all prefixes, (K) x (n, M).

    A longer prefix only adds the coordinates that the shorter one lacks, so all prefixes together
    cost one matrix product.
    """
    rows, columns = panel.rows.part(tile), panel.columns
    for k, span in enumerate(plan.spans):
        shorter = scores[k - 1] if k else None
        _product(rows.operand[:, span], columns.operand[:, span].T, shorter, scores[k])
    for k in range(len(scores) - 1):
        if rows.scale is not None:
            scores[k].mul_(rows.scale[k][:, None])
        if columns.scale is not None:
            scores[k].mul_(columns.scale[k])


def _targets(panel: Panel, tile: slice, scores: Tensor) -> Tensor | None:
    """Targets of the columns, (n, M), not yet divided by their sums; None: the own column alone."""
    if panel.rules.targets is None:
        return None
    targets = panel.rules.targets(tile, scores).to(scores.dtype, copy=True)
    if panel.own is not None:  # the positive of a row that names none
        targets.diagonal(panel.own + tile.start).add_(targets.sum(dim=1) == 0)
    return targets


def _hard_negatives(
    panel: Panel,
    part: slice,
    tile: slice,
    scores: Tensor,
    targets: Tensor | None,
    hard: Tensor | None,
) -> Tensor | None:
    """The hard negatives of all panels so far, (n, M), with those of one more."""
    if panel.rules.hard is None:
        return hard
    hard = torch.zeros_like(scores) if hard is None else hard
    hard[:, part] = panel.rules.hard(tile, scores[:, part])
    _spare_positives(hard[:, part], panel, tile, targets)
    return hard


def _leave_out(panel: Panel, tile: slice, scores: list[Tensor], targets: Tensor | None) -> None:
    """Makes the scores of the columns that rules exclude very low."""
    excluded: Tensor | None = None
    for rule in panel.rules.excluded:
        said = rule(tile, scores[-1]).to(scores[-1].dtype)
        excluded = said if excluded is None else excluded.add_(said)
    if excluded is None:
        return
    _spare_positives(excluded, panel, tile, targets)
    low = torch.finfo(excluded.dtype).min * 2.0**-40  # with infinity, 0 times it would not be 0
    for of_prefix in scores:
        of_prefix.add_(excluded, alpha=low)


def _spare_positives(mask: Tensor, panel: Panel, tile: slice, targets: Tensor | None) -> None:
    """Sets a mask (n, M) to 0 at the own column and at all positives of a row."""
    if targets is not None:
        mask.mul_(targets == 0)
    if panel.own is not None:
        mask.diagonal(panel.own + tile.start).zero_()


def _add_attraction(
    softmax: Softmax, panel: Panel, tile: slice, scores: list[Tensor], targets: Tensor | None
) -> None:
    """Adds the positives of a tile to the sums of its rows."""
    if targets is not None:
        softmax.targets[tile] += targets.sum(dim=1)
        for sums, of_prefix in zip(softmax.scores, scores, strict=True):
            sums[tile] += torch.linalg.vecdot(targets, of_prefix)
        if panel.bias is not None:
            softmax.biases[tile] += targets @ panel.bias
    elif panel.own is not None:
        first = panel.own + tile.start
        softmax.targets[tile] += 1
        for sums, of_prefix in zip(softmax.scores, scores, strict=True):
            sums[tile] += of_prefix.diagonal(first)
        if panel.bias is not None:
            softmax.biases[tile] += panel.bias[first : first + tile.stop - tile.start]


def _exponentials(
    power: int, scores: Tensor, rate: Tensor, best: Tensor, penalty: Tensor | None, powers: Tensor
) -> Tensor:
    """Writes 2 ** (logit - anchor) of all columns into powers; returns the anchors (n,)."""
    anchor = best * rate
    if power:
        powers.pow_(power)
        return anchor
    torch.mul(scores, rate, out=powers)
    if penalty is not None:
        powers.add_(penalty)
        largest = powers.amax(dim=1)
        powers.sub_(largest[:, None])
        anchor = anchor + largest
    powers.exp2_()
    return anchor


def _subtract_targets(
    slope: Tensor, push: Tensor, own: int | None, tile: slice, targets: Tensor | None
) -> None:
    """Subtracts the targets from the probabilities, in units of the slope (n, M)."""
    if targets is not None:
        slope.addcmul_(targets, push[:, None], value=-1)
    elif own is not None:
        slope.diagonal(own + tile.start).sub_(push)


def _finish_prefix(
    panel: Panel, k: int, tile: slice, scores: Tensor, best: Tensor | None, slope: Tensor
) -> None:
    """Adds the gradients of a shorter prefix's factors; the slope becomes that of the product."""
    rows, columns = panel.rows.part(tile), panel.columns
    if rows.grad_scale is not None or columns.grad_scale is not None:
        moments = scores if best is None else scores.add_(best[:, None])
        moments.mul_(slope)  # (n, M)
        if rows.grad_scale is not None and rows.scale is not None:
            rows.grad_scale[k] += moments.sum(dim=1) / rows.scale[k]
        if columns.grad_scale is not None and columns.scale is not None:
            columns.grad_scale[k] += moments.sum(dim=0) / columns.scale[k]
    if rows.scale is not None:
        slope.mul_(rows.scale[k][:, None])
    if columns.scale is not None:
        slope.mul_(columns.scale[k])


def _add_gradients(plan: Plan, panel: Panel, tile: slice, slopes: list[Tensor]) -> None:
    """Adds to the gradients of rows and columns.

    A span of coordinates belongs to every prefix that reaches it, so the slopes add up from the
    longest prefix on.
    """
    rows, columns = panel.rows.part(tile), panel.columns
    slope = slopes[-1]
    for k, span in reversed(list(enumerate(plan.spans))):
        if slope is not slopes[k]:
            slope.add_(slopes[k])
        pulls = slope.to(rows.operand.dtype)
        if rows.grad is not None:
            _product(pulls, columns.operand[:, span], rows.grad[:, span], rows.grad[:, span])
        if columns.grad is not None:
            _product(pulls.T, rows.operand[:, span], columns.grad[:, span], columns.grad[:, span])


def _product(left: Tensor, right: Tensor, base: Tensor | None, out: Tensor) -> None:
    """out = base + left @ right. Operands of fewer digits are multiplied in their own type."""
    if left.dtype == out.dtype:
        start = out if base is None else base
        torch.addmm(start, left, right, beta=float(base is not None), out=out)
    elif base is None:
        out.copy_(left @ right)
    else:
        torch.add(base, left @ right, out=out)
