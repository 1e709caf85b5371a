"""The engine of :func:`~st_magnitude.infonce` and the ring: softmaxes over panels, tile by tile. See docs/kernel.md.

A softmax runs over one or several *panels*, rows that are compared with a block of columns. A *tile* is a panel for
some of the rows. Logits are in base 2, because exp2 is several times as fast as exp in PyTorch on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from st_magnitude.kernel.terms import LOG2_E, Plan

# (rows, their scores (n, M)) -> (n, M), booleans or 0 and 1: True for columns that do not count as negatives of a row
Judge = Callable[[slice, Tensor], Tensor]


def rows_of_a_tile(device: torch.device, num_columns: int) -> int:
    """The default height of a tile: enough rows for matrix products at full speed.

    On a CPU a tile should also stay in the cache, and many small tiles cost more in calls than they compute: a tile
    has a million scores, but at least 256 rows.
    """
    return 1024 if device.type == "cuda" else max(256, 2**20 // num_columns)


@dataclass
class Side:
    """Vectors divided by their norms, the factors that turn them into shorter prefixes, and the gradients of both."""

    x: Tensor  # (n, D), D the longest prefix
    scale: Tensor | None = None  # (K - 1, n); None: 1
    grad: Tensor | None = None
    grad_scale: Tensor | None = None
    about: dict[str, Tensor] = field(default_factory=dict)  # what else belongs to the vectors, (n, ...)
    operand: Tensor = field(init=False)  # (n, D), x as matrix products take it

    def __post_init__(self) -> None:
        self.operand = self.x

    @classmethod
    def with_gradients(cls, x: Tensor, scale: Tensor | None, needs_x: bool, needs_scale: bool) -> Side:
        grad_scale = torch.zeros_like(scale) if scale is not None and needs_scale else None
        return cls(x, scale, torch.zeros_like(x) if needs_x else None, grad_scale)

    def part(self, rows: slice) -> Side:
        """A view of some of the vectors, whose gradients go into those of the whole."""
        scale, grad_scale = (None if s is None else s[:, rows] for s in (self.scale, self.grad_scale))
        about = {name: x[rows] for name, x in self.about.items()}
        side = Side(self.x[rows], scale, None if self.grad is None else self.grad[rows], grad_scale, about)
        side.operand = self.operand[rows]
        return side

    def factors(self, num_prefixes: int) -> list[Tensor]:
        """The factors of all prefixes, (K) x (n,)."""
        ones = self.x.new_ones(len(self.x))
        return [ones] * num_prefixes if self.scale is None else [*self.scale, ones]


@dataclass(frozen=True)
class Panel:
    """Rows, a block of columns, and what is special about some of their pairs."""

    rows: Side  # (B, D)
    columns: Side  # (M, D)
    own: int | None = None  # the column that belongs to the first row; that of row i is i further on. None: no column
    attracts: bool = False  # whether positives are among the columns
    judges: tuple[Judge, ...] = ()  # the columns to leave out
    kept: Judge | None = None  # other columns that stay, and are further positives if the panel attracts
    own_attracts: Tensor | None = None  # (B,), 0 for rows whose own column is not among several positives; None: 1
    hardness: float = 0.0  # a negative counts exp(hardness · s) times
    bare: Judge | None = None  # columns without that weight
    bias: Tensor | None = None  # (M,), added to the logits


class Softmax:
    """The log-sum-exp of each term and row over all panels, the loss, and the gradients.

    The positive of a row counts apart from the scores of the panels, so no tile has to treat it specially.

    Args:
        plan: Prefixes, terms and weights.
        temperatures: (T,).
        panel: The panel, or the part of it, that has the positives on its diagonal.
    """

    def __init__(self, plan: Plan, temperatures: Tensor, panel: Panel, learns_temperatures: bool) -> None:
        rows, start = panel.rows, panel.own or 0
        own, num_prefixes = panel.columns.part(slice(start, start + len(rows.x))), len(plan.dims)
        self.plan, self.inverse = plan, 1 / temperatures[:, None]  # (T, 1)
        self.weights = torch.stack([temperatures.new_full((1,), w) for w in plan.weights])  # (T, 1)
        self.grad_inverse = torch.zeros_like(temperatures) if learns_temperatures else None

        # The positives: products of prefixes without and with the factors of the rows, (K) x (B,), and logits (T, B)
        products = accumulate(torch.bmm(rows.x[:, None, span], own.x[:, span, None]).flatten() for span in plan.spans)
        self.products = [p * factor for p, factor in zip(products, own.factors(num_prefixes), strict=True)]
        self.scores = [p * factor for p, factor in zip(self.products, rows.factors(num_prefixes), strict=True)]
        self.bias = torch.zeros_like(self.scores[0])  # (B,)
        if panel.bias is not None:
            self.bias += panel.bias[start : start + len(rows.x)]
        self.positives = (plan.per_term(self.scores) * self.inverse + self.bias) * LOG2_E
        self.log_sums = self.positives.clone()  # over what the panels have shown so far

        # With several positives: their number, and the sums of their scores and biases, so far
        self.own = torch.ones_like(self.bias) if panel.own_attracts is None else panel.own_attracts
        self.counts = self.own.clone()
        self.several = panel.attracts and panel.kept is not None
        self.sums = [scores * self.own for scores in self.scores] if self.several else []
        self.bias_sums = self.bias * self.own

    def loss(self) -> Tensor:
        """The sum over terms and rows of -log softmax at the positive, or its mean over several positives."""
        attraction = self.positives
        if self.several:
            means = self.plan.per_term(self.sums) / self.counts
            attraction = (means * self.inverse + self.bias_sums / self.counts) * LOG2_E
        return ((self.log_sums - attraction) * (self.weights / LOG2_E)).sum()

    def grad_temperatures(self) -> Tensor | None:
        """The gradient of the temperatures, (T,)."""
        if self.grad_inverse is None:
            return None
        gradient = self.grad_inverse
        if self.several:
            surplus = self.plan.per_term(self.scores) - self.plan.per_term(self.sums) / self.counts
            gradient = gradient + (surplus * self.weights).sum(dim=1)
        return -gradient * self.inverse[:, 0] ** 2

    def visit(self, panels: Sequence[Panel], *, finds_sums: bool, adds_gradients: bool) -> None:
        """Takes panels into the log-sum-exp, and adds what they contribute to the gradients.

        One visit does both if it has all panels of a row. Otherwise a first round of visits finds the sums, and a
        second one adds the gradients.
        """
        for side in (side for panel in panels for side in (panel.rows, panel.columns)):
            side.operand = side.operand.to(self.plan.product_dtype or side.x.dtype)  # once for all tiles
        num_rows, edges = len(panels[0].rows.x), [0, *accumulate(len(panel.columns.x) for panel in panels)]
        most = self.plan.tile_rows or rows_of_a_tile(self.inverse.device, edges[-1])
        height = math.ceil(num_rows / math.ceil(num_rows / most))  # tiles of the same size
        # Memory for the scores of each prefix, for slopes, and for exponentials if their slopes add up
        num_buffers = len(self.plan.dims) + (2 if max(map(len, self.plan.members)) > 1 else 1)
        memory = [panels[0].rows.x.new_empty(height, edges[-1]) for _ in range(num_buffers)]
        for start in range(0, num_rows, height):
            rows = slice(start, min(start + height, num_rows))
            views = ([x[: rows.stop - start, a:b] for x in memory] for a, b in pairwise(edges))
            tiles = [Tile(self, panel, rows, buffers) for panel, buffers in zip(panels, views, strict=True)]
            for tile in tiles:
                tile.compare(finds_sums)
            for k, members in enumerate(self.plan.members):
                for tile in tiles:
                    tile.begin(k)
                for t in members:
                    for tile in tiles:
                        log_sum = tile.exponentials(t)
                        if finds_sums:
                            torch.logaddexp2(tile.log_sums[t], log_sum, out=tile.log_sums[t])
                    if adds_gradients:
                        for tile in tiles:
                            tile.add_slope(t)
                if adds_gradients:
                    for tile in tiles:
                        tile.end()
            if adds_gradients:
                for tile in tiles:
                    tile.add_gradients()


class Tile:
    """Some rows of a panel: their scores (n, M), and the slopes d loss / d score.

    Scores and slopes lack the factor of the row for a shorter prefix, which goes into rates and pulls instead.
    """

    def __init__(self, softmax: Softmax, panel: Panel, rows: slice, buffers: list[Tensor]) -> None:
        self.softmax, self.plan, self.panel, self.rows = softmax, softmax.plan, panel, rows
        self.side = panel.rows.part(rows)
        num_prefixes = len(self.plan.dims)
        self.scores, self.free, self.spare = buffers[:num_prefixes], buffers[num_prefixes], buffers[-1]
        self.factors = self.side.factors(num_prefixes)  # (K) x (n,)
        factors = self.plan.per_term(self.factors) * softmax.inverse  # (T, n)
        self.log_sums = softmax.log_sums[:, rows].unbind()  # (T) x (n,), views
        self.pulls = (factors * softmax.weights).unbind()  # (T) x (n,), d loss / d score, but for the softmax
        self.own = None if panel.own is None else panel.own + rows.start
        self.diagonal = self.own if panel.attracts else None  # of the positives
        self.hardness = panel.hardness if panel.kept is None and panel.bare is None else 0.0  # of all columns
        rates = factors * LOG2_E  # d logit / d score
        if self.hardness:
            rates += self.plan.per_term(self.factors) * (self.hardness * LOG2_E)
        self.rates = rates.unbind()  # (T) x (n,)
        self.bounded = self.plan.bounded and panel.bias is None and not panel.hardness
        # A bias of the logits is a factor of the exponentials, which leaves powers of them alone. No factor exceeds 1,
        # so the best score of a row is still a safe shift.
        self.top = None if panel.bias is None else panel.bias.max() * LOG2_E
        self.prior = None if panel.bias is None else (panel.bias - panel.bias.max()).exp()  # (M,)

    def compare(self, finds_sums: bool) -> None:
        """Computes the scores of all prefixes; those of positives and of excluded columns become very low."""
        panel, columns, softmax = self.panel, self.panel.columns, self.softmax
        # A longer prefix only adds the coordinates that the shorter one lacks, so all prefixes together cost one
        # matrix product.
        for k, span in enumerate(self.plan.spans):
            shorter = self.scores[k - 1] if k else None
            _product(self.side.operand[:, span], columns.operand[:, span].T, shorter, self.scores[k])

        self.kept = self._mask(panel.kept)
        excluded = self._mask(*panel.judges)
        if excluded is not None and self.kept is not None:
            excluded.mul_(1 - self.kept)
        bare = self._mask(panel.kept, panel.bare) if panel.hardness else None
        self.hard = None if bare is None else 1 - bare.clamp_(max=1)  # where a weight counts, if not everywhere

        further = self.kept if finds_sums and panel.attracts else None  # positives besides the diagonal
        if further is not None:
            softmax.counts[self.rows] += further.sum(dim=1)
            if panel.bias is not None:
                softmax.bias_sums[self.rows] += further @ panel.bias
        low = torch.finfo(self.scores[0].dtype).min * 2.0**-40  # with infinity, 0 times it would not be 0
        for k, scores in enumerate(self.scores):
            if columns.scale is not None and k < len(columns.scale):
                scores.mul_(columns.scale[k])
            if further is not None:
                softmax.sums[k][self.rows] += torch.linalg.vecdot(further, scores) * self.factors[k]
            if excluded is not None:
                scores.add_(excluded, alpha=low)
            if self.diagonal is not None:
                scores.diagonal(self.diagonal).fill_(low)

    def _mask(self, *judges: Judge | None) -> Tensor | None:
        """What the judges say of these scores, as numbers (n, M) that are 0 for False, and for a row's own column."""
        scores, mask = self.scores[-1], None
        for judge in judges:
            if judge is not None:
                said = judge(self.rows, scores).to(scores.dtype)
                mask = said if mask is None else mask.add_(said)
        if mask is not None and self.own is not None:
            mask.diagonal(self.own).zero_()
        return mask

    def begin(self, prefix: int) -> None:
        """Takes the scores of a prefix relative to the best one of their row, unless no exponential can overflow."""
        self.prefix, scores = prefix, self.scores[prefix]
        self.penalty = None
        if self.hard is not None:
            weight = self.factors[prefix] * (self.panel.hardness * LOG2_E)
            self.penalty = (scores * self.hard).mul_(weight[:, None])
        self.best = scores.new_zeros(len(scores)) if self.bounded else scores.amax(dim=1)  # (n,)
        if not self.bounded:
            scores.sub_(self.best[:, None])
        self.slope: Tensor | None = None
        self.powers = self.spare if len(self.plan.members[prefix]) > 1 else self.free

    def exponentials(self, term: int) -> Tensor:
        """Computes 2 ** (logit - anchor) for all columns; returns the log-sum-exp of the row, (n,)."""
        scores, powers, rate = self.scores[self.prefix], self.powers, self.rates[term]
        self.anchor = self.best * rate
        if self.plan.powers[term] and not self.panel.hardness:
            powers.pow_(self.plan.powers[term])
        else:
            torch.mul(scores, rate[:, None], out=powers)
            if self.penalty is not None:
                powers.add_(self.penalty)
                largest = powers.amax(dim=1)
                powers.sub_(largest[:, None])
                self.anchor += largest
            powers.exp2_()
        if self.prior is None or self.top is None:
            self.total = powers.sum(dim=1)
        else:
            self.total = powers @ self.prior
            self.anchor += self.top
        return self.total.log2() + self.anchor

    def add_slope(self, term: int) -> None:
        """Adds softmax times pull to the slopes, because the exponentials are gone after this term."""
        softmax, rows, powers = self.softmax, self.rows, self.powers
        probability = (self.anchor - self.log_sums[term]).exp2_()  # of a column with the anchor's logit
        if softmax.grad_inverse is not None:
            weighted = powers if self.prior is None else powers * self.prior
            expected = torch.linalg.vecdot(weighted, self.scores[self.prefix]) + self.best * self.total
            surplus = expected * self.factors[self.prefix] - softmax.scores[self.prefix][rows] * self.total
            softmax.grad_inverse[term] += (surplus * probability).sum() * softmax.weights[term, 0]
        share = (probability * self.pulls[term])[:, None]
        if self.slope is None:
            self.slope = torch.mul(powers, share, out=self.free)
        else:
            self.slope.addcmul_(powers, share)

    def end(self) -> None:
        """Completes the slopes of a prefix, and the gradients of its factors."""
        k, softmax, rows, columns = self.prefix, self.softmax, self.side, self.panel.columns
        scores, slope = self.scores[k], self.free
        if self.prior is not None:
            slope.mul_(self.prior)
        if self.kept is not None and self.panel.attracts:
            pull = torch.stack([self.pulls[t] for t in self.plan.members[k]]).sum(dim=0) / softmax.counts[self.rows]
            slope.addcmul_(self.kept, pull[:, None], value=-1)
        if k < len(self.plan.dims) - 1 and (rows.grad_scale is not None or columns.grad_scale is not None):
            moments = scores.mul_(slope) if self.bounded else scores.add_(self.best[:, None]).mul_(slope)
            if rows.grad_scale is not None:
                rows.grad_scale[k] += moments.sum(dim=1) / self.factors[k]
            if columns.grad_scale is not None and columns.scale is not None:
                columns.grad_scale[k] += moments.sum(dim=0) / columns.scale[k]
        if columns.scale is not None and k < len(columns.scale):
            slope.mul_(columns.scale[k])
        self.scores[k], self.free = slope, scores  # nothing needs these scores any more

    def _add_positives(self, diagonal: int) -> None:
        """Puts the slopes of the positives into the diagonals, and adds them to the gradients of the factors."""
        softmax, rows, columns = self.softmax, self.side, self.panel.columns
        own = columns.part(slice(diagonal, diagonal + len(rows.x)))
        probabilities = (softmax.positives[:, self.rows] - softmax.log_sums[:, self.rows]).exp2_()  # (T, n)
        surpluses = (probabilities - softmax.own[self.rows] / softmax.counts[self.rows]).unbind()
        for k, members in enumerate(self.plan.members):
            slope = torch.stack([surpluses[t] * self.pulls[t] for t in members]).sum(dim=0)
            if own.scale is None or k == len(own.scale):
                self.scores[k].diagonal(diagonal).copy_(slope)
            else:
                self.scores[k].diagonal(diagonal).copy_(slope * own.scale[k])
            if k < len(self.plan.dims) - 1:
                moments = slope * softmax.products[k][self.rows]
                if rows.grad_scale is not None:
                    rows.grad_scale[k] += moments / self.factors[k]
                if own.grad_scale is not None and own.scale is not None:
                    own.grad_scale[k] += moments / own.scale[k]

    def add_gradients(self) -> None:
        """Adds to the gradients of rows and columns, after `end` of all prefixes.

        A span of coordinates belongs to every prefix that reaches it, so the slopes add up from the longest prefix on.
        """
        if self.diagonal is not None:
            self._add_positives(self.diagonal)
        rows, columns, slope = self.side, self.panel.columns, self.scores[-1]
        for k, span in reversed(list(enumerate(self.plan.spans))):
            if slope is not self.scores[k]:
                slope.add_(self.scores[k])
            pulls = slope.to(rows.operand.dtype)
            for grad, left, right in ((rows.grad, pulls, columns.operand), (columns.grad, pulls.T, rows.operand)):
                if grad is not None:
                    _product(left, right[:, span], grad[:, span], grad[:, span])


def _product(left: Tensor, right: Tensor, base: Tensor | None, out: Tensor) -> None:
    """out = base + left @ right. Operands of fewer digits than out are multiplied in their own type."""
    if left.dtype == out.dtype:
        torch.addmm(out if base is None else base, left, right, beta=float(base is not None), out=out)
    elif base is None:
        out.copy_(left @ right)
    else:
        torch.add(base, left @ right, out=out)


class Blocks(Protocol):
    """An iterator of blocks of columns that the rows of a panel meet one after another."""

    def __call__(self, own: Panel, softmax: Softmax, with_gradients: bool) -> Iterator[Panel]: ...


class InfoNCE(torch.autograd.Function):
    """The loss of one softmax of each row; the forward pass takes the gradients.

    ``tensors`` are vectors and factors of each side in turn, which ``arrange`` makes into panels, the positives' first.
    Without ``blocks`` these panels are all of the softmax. With it they are the first block, and all blocks pass twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        arrange: Callable[[list[Side]], list[Panel]],
        blocks: Blocks | None,
        temperatures: Tensor,  # (T,)
        *tensors: Any,
    ) -> Tensor:
        needs = ctx.needs_input_grad[3:]
        parts = zip(tensors[::2], tensors[1::2], needs[1::2], needs[2::2], strict=True)
        sides = [Side.with_gradients(*part) for part in parts]
        panels = arrange(sides)
        softmax = Softmax(plan, temperatures, panels[0], needs[0])
        if blocks is None:
            softmax.visit(panels, finds_sums=True, adds_gradients=any(needs))
        else:
            for panel in blocks(panels[0], softmax, with_gradients=False):
                softmax.visit([panel], finds_sums=True, adds_gradients=False)
                del panel  # frees the block before the next one is asked for
            if any(needs):
                for panel in blocks(panels[0], softmax, with_gradients=True):
                    softmax.visit([panel], finds_sums=False, adds_gradients=True)
                    del panel
        gradients = (gradient for side in sides for gradient in (side.grad, side.grad_scale))
        ctx.save_for_backward(softmax.grad_temperatures(), *gradients)
        return softmax.loss()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *(g if g is None else g * grad_output for g in ctx.saved_tensors))
