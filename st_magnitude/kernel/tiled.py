"""The tiled engine of :func:`~st_magnitude.infonce`, which never holds a B x M matrix.

A *tile* is some rows of the *panels* that share a softmax (:mod:`st_magnitude.kernel.panels`).
Their scores lie in one buffer, panel after panel. Logits are in base 2, because exp2 is several
times as fast as exp in PyTorch on a CPU. docs/kernel.md says what else makes it fast.

A **score** is an inner product of a row and a column. A **slope** is d loss / d score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Direction
from st_magnitude.kernel.panels import Panel, Vectors, panel_of, vectors_of
from st_magnitude.kernel.terms import LOG2_E, Plan
from st_magnitude.similarity import Similarity, without_autocast

NO_SECOND_DERIVATIVE = (
    "The tiled engine of infonce has no second derivative, which create_graph=True and torch.func"
    " ask for. Use backend='plain'."
)


class Known(torch.autograd.Function):
    """A loss with known gradients, which backward multiplies by the outer gradient.

    ``Known.apply(loss, gradients, refusal, *tensors)``: the refusal is what a second derivative
    raises.
    """

    @staticmethod
    def forward(
        loss: Tensor, gradients: Sequence[Tensor | None], refusal: str, *tensors: Tensor | None
    ) -> Tensor:
        return loss.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1])
        ctx.refusal = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # these gradients would be constants
            raise RuntimeError(ctx.refusal)
        return None, None, None, *(g if g is None else g * grad_output for g in ctx.saved_tensors)


def tiled_infonce(
    batch: Batch,
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
    plan: Plan,
) -> Tensor:
    """The mean loss of softmaxes."""
    with without_autocast(batch.queries):
        divided = partial(vectors_of, batch, plan.dims)
        queries = divided(batch.queries, similarity.gamma_query, is_query=True, first=batch.offset)
        documents = divided(batch.documents, similarity.gamma_document, is_query=False, first=0)
        vectors = [queries, documents]
        if batch.all_queries is not None:
            gamma = similarity.gamma_query
            vectors.append(divided(batch.all_queries, gamma, is_query=True, first=0))
        temperatures = plan.temperatures(batch.queries)
        tensors = [temperatures, *(x for v in vectors for x in (v.x, v.scale))]
        learns = any(x is not None and x.requires_grad for x in tensors)

        with torch.no_grad():
            found = []
            for directions in softmaxes:
                softmax = Softmax(plan, temperatures, batch)
                compared = [_compared(batch, direction, *vectors) for direction in directions]
                visit(softmax, [panel_of(batch, *x) for x in compared], learns)
                found.append(softmax.loss())
            loss, of_terms = (torch.stack(x).sum(dim=0) for x in zip(*found, strict=True))
            gradients = [of_terms, *(x for v in vectors for x in (v.grad, v.grad_scale))]
        known: Tensor = Known.apply(loss, gradients, NO_SECOND_DERIVATIVE, *tensors)
        return known


def _compared(
    batch: Batch,
    direction: Direction,
    queries: Vectors,
    documents: Vectors,
    all_queries: Vectors | None = None,
) -> tuple[Direction, Vectors, Vectors, int]:
    """A direction with its rows and columns, and the column of the positive of row 0."""
    rows = queries if direction.startswith("query") else documents.part(batch.pairs)
    columns = documents if direction.endswith("doc") else all_queries or queries
    return direction, rows, columns, 0 if columns is queries else batch.offset


class Softmax:
    """The softmax of each row over all columns. Logits are relative to that of the pair of the row,
    because in float32 the difference of two large, rounded logits is not exact."""

    def __init__(self, plan: Plan, temperatures: Tensor, batch: Batch) -> None:
        row_weights = temperatures.new_ones(len(batch.queries))  # (B,)
        if batch.weights is not None:
            row_weights = batch.weights.detach().to(row_weights)
        self.plan = plan
        self.inverse = 1 / temperatures[:, None]  # (T, 1)
        self.rates = (self.inverse + plan.hardness_strength) * LOG2_E  # (T, 1), of exponents of 2
        of_terms = [temperatures.new_full((1,), term.weight) for term in plan.terms]
        # (T, B), weights of the rows' losses in the loss of the batch
        self.weights = torch.stack(of_terms) * row_weights / plan.num_losses
        self.grad_per_probability = self.weights * self.inverse  # (T, B)
        self.log_sums = torch.zeros_like(self.weights)  # (T, B), of exponentials, to base 2
        self.pair_scores = [torch.zeros_like(row_weights) for _ in plan.dims]  # (K) x (B,)
        self.pair_biases = torch.zeros_like(row_weights)  # (B,)
        # Sums over the positives of a row: weighted scores of each prefix and biases, and targets
        self.scores = [torch.zeros_like(row_weights) for _ in plan.dims]  # (K) x (B,)
        self.biases = torch.zeros_like(row_weights)  # (B,)
        self.targets = torch.ones_like(row_weights)  # (B,)
        self.grad_inverse = torch.zeros_like(temperatures)  # (T,)
        self.learns_temperatures = temperatures.requires_grad

    def logits(self, k: int, t: int, tile: slice, scores: Tensor) -> Tensor:
        """The logits of negatives with scores (n,) of prefix k in term t, but for their biases, to
        base 2."""
        logits = (scores - self.pair_scores[k][tile]) * self.inverse[t] - self.pair_biases[tile]
        return LOG2_E * (logits + self.plan.hardness_strength * scores)

    def set_positives(
        self, k: int, tile: slice, targets: Tensor, scores: Tensor, shift: Tensor
    ) -> None:
        """Sets the sum of scores by targets (n, M) for prefix k; scores lack a shift (n,)."""
        of_positives = torch.linalg.vecdot(targets, scores)  # (n,)
        self.scores[k][tile] = of_positives + targets.sum(dim=1) * shift

    def grad_per_target(self, k: int, tile: slice) -> Tensor:
        """The gradient of a unit target in all terms of a prefix, (n,)."""
        members = self.plan.members[k]
        of_terms = self.grad_per_probability[members.start : members.stop, tile]
        return of_terms.sum(dim=0) / self.targets[tile]

    def loss(self) -> tuple[Tensor, Tensor]:
        """The sum over terms and rows of w · (log-sum-exp of logits - mean logit of positives), and
        its gradient by the temperatures, (T,)."""
        means = self.plan.per_term(self.scores) / self.targets
        of_positives = means * self.inverse + self.biases / self.targets  # (T, B)
        loss = ((self.log_sums / LOG2_E - of_positives) * self.weights).sum()
        grad_inverse = self.grad_inverse - (means * self.weights).sum(dim=1)
        return loss, -grad_inverse * self.inverse[:, 0] ** 2


def visit(softmax: Softmax, panels: Sequence[Panel], adds_gradients: bool) -> None:
    """Finds the softmax of each row over all panels, of which the first one has the positives, and
    adds to the gradients."""
    plan = softmax.plan
    num_rows = len(panels[0].rows.x)
    edges = [0, *accumulate(len(panel.columns.x) for panel in panels)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    num_columns = edges[-1]
    most = plan.tile_rows
    if most is None:  # enough for products at full speed, but on a CPU few enough for the cache
        most = 1024 if softmax.inverse.is_cuda else max(256, 2**20 // num_columns)
    height = math.ceil(num_rows / math.ceil(num_rows / most))  # tiles of the same size
    # Memory for the scores of each prefix, for slopes, and for exponentials if their slopes add up
    num_buffers = len(plan.dims) + (2 if max(map(len, plan.members)) > 1 else 1)
    memory = [panels[0].rows.x.new_empty(height, num_columns) for _ in range(num_buffers)]
    for start in range(0, num_rows, height):
        tile = slice(start, min(start + height, num_rows))
        buffers = [x[: tile.stop - tile.start] for x in memory]
        _visit_tile(softmax, panels, parts, tile, buffers, adds_gradients)


# Rows of a tile, columns, and where their scores lie in the buffer
Block = tuple[Vectors, Vectors, slice]


def _visit_tile(
    softmax: Softmax,
    panels: Sequence[Panel],
    parts: Sequence[slice],  # where the columns of a panel are
    tile: slice,
    buffers: list[Tensor],  # (n, M) each, with the columns of all panels
    adds_gradients: bool,
) -> None:
    plan, offset, longest = softmax.plan, panels[0].offset, len(softmax.plan.dims) - 1
    assert offset is not None  # of the first panel, which has the positives
    scores, slopes = buffers[: longest + 1], buffers[longest + 1]  # (K) x (n, M), (n, M)
    blocks = [(x.rows.part(tile), x.columns, part) for x, part in zip(panels, parts, strict=True)]
    # The scores of all prefixes. Those of columns that rules leave out become very low.
    for block in blocks:
        _multiply(plan, block, scores)
    targets = _apply_rules(panels, parts, tile, scores)  # (n, M) of the first panel
    bias = _biases([panel.columns for panel in panels])  # (M,)
    _start(softmax, offset, tile, [x[:, parts[0]] for x in scores], targets, bias)

    # From the longest prefix to the shortest: the slope of a shorter one takes the memory of the
    # scores of the longer one, which nothing needs any more.
    for k in range(longest, -1, -1):
        slope = slopes if k == longest else scores[k + 1]
        powers = buffers[-1] if len(buffers) > longest + 2 else slope  # exponentials
        pair = softmax.pair_scores[k][tile]  # (n,)
        best = _best(plan, scores[k])  # (n,)
        relative = _relative(plan, scores[k], best, scores[k] if k == longest else powers)
        if targets is not None:
            softmax.set_positives(k, tile, targets, relative[:, parts[0]], best - pair)

        # The softmax of each term: its log-sum-exp, and its probabilities.
        for t in plan.members[k]:
            anchor = softmax.logits(k, t, tile, best)  # (n,)
            if plan.powers[t]:  # of the exponentials of the term before
                powers.pow_(plan.powers[t])
            else:
                if k < longest and t > plan.members[k][0]:
                    relative = _relative(plan, scores[k], best, powers)
                torch.mul(relative, softmax.rates[t], out=powers)
                if plan.has_options:
                    anchor += _apply_options(powers, anchor, bias, offset, tile)
                powers.exp2_()
            total = powers.sum(dim=1)  # (n,)
            softmax.log_sums[t, tile] = total.log2() + anchor
            if not adds_gradients:
                continue
            # The probability of a column over its exponential; a logarithm of the sum would round.
            share = 1 / total
            if softmax.learns_temperatures:
                shift = pair - best if k == longest else pair
                expected = torch.linalg.vecdot(powers, scores[k]) - shift * total
                softmax.grad_inverse[t] += (expected * share * softmax.weights[t, tile]).sum()
            share = (share * softmax.grad_per_probability[t, tile])[:, None]
            if t == plan.members[k][0]:
                torch.mul(powers, share, out=slope)
            else:
                slope.addcmul_(powers, share)

        # Less the targets; then the slope becomes that of the product.
        if adds_gradients:
            unit = softmax.grad_per_target(k, tile)  # (n,)
            _subtract_targets(slope[:, parts[0]], unit, offset, tile, targets)
            if k < longest:
                _finish_prefix(blocks, k, scores[k], slope)
    if adds_gradients:
        _add_gradients(plan, blocks, scores, slopes)


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
        x[:, part].mul_(rows.scale[:, k, None])
    if columns.scale is not None:
        x[:, part].mul_(columns.scale[:, k].contiguous())  # strides would be slow


def _apply_rules(
    panels: Sequence[Panel], parts: Sequence[slice], tile: slice, scores: Sequence[Tensor]
) -> Tensor | None:
    """Makes the scores of excluded columns very low. Returns the targets (n, M) of the first panel,
    not yet divided by their sums; None if each row has one positive."""
    found = []
    for panel, part in zip(panels, parts, strict=True):
        longest = scores[-1][:, part]
        targets = None if panel.targets is None else panel.targets(tile, longest)
        found.append(targets)
        excluded = _excluded(panel, tile, longest, targets)
        if excluded is not None:
            # far below every other score, but finite, because 0 times infinity would not be 0
            low = torch.finfo(longest.dtype).min / 16
            for x in scores:  # masked_fill_ takes several times as long
                x[:, part].add_(excluded, alpha=low)
    return found[0]


def _excluded(panel: Panel, tile: slice, scores: Tensor, targets: Tensor | None) -> Tensor | None:
    """1 for columns that a rule leaves out, 0 for others and positives; None without rules."""
    mask: Tensor | None = None
    for rule in panel.excluded:
        said = rule(tile, scores)
        mask = said if mask is None else torch.maximum(mask, said, out=mask)
    if mask is None:
        return None
    if targets is not None:
        mask.mul_(targets == 0)
    if panel.offset is not None:
        mask.diagonal(panel.offset + tile.start).zero_()
    return mask


def _start(
    softmax: Softmax,
    offset: int,
    tile: slice,
    scores: list[Tensor],  # (K) x (n, M)
    targets: Tensor | None,
    bias: Tensor | None,  # (>= M,)
) -> None:
    """Sets scores, biases and targets of positives, which are in the first panel of a tile."""
    for pairs, of_prefix in zip(softmax.pair_scores, scores, strict=True):
        pairs[tile] = of_prefix.diagonal(offset + tile.start)
    if bias is not None:
        softmax.pair_biases[tile] = bias[offset + tile.start : offset + tile.stop]
    if targets is None:
        return
    total = targets.sum(dim=1)  # (n,)
    softmax.targets[tile] = total
    if bias is not None:
        of_positives = targets @ bias[: targets.shape[1]]
        softmax.biases[tile] = of_positives - total * softmax.pair_biases[tile]


def _biases(columns: Sequence[Vectors]) -> Tensor | None:  # (M,)
    if all(side.bias is None for side in columns):
        return None
    return torch.cat([c.x.new_zeros(len(c.x)) if c.bias is None else c.bias for c in columns])


def _best(plan: Plan, scores: Tensor) -> Tensor:
    """The best score of each row, (n,), or 0 where no exponential can overflow."""
    return scores.new_zeros(len(scores)) if plan.bounded else scores.amax(dim=1)


def _relative(plan: Plan, scores: Tensor, best: Tensor, buffer: Tensor) -> Tensor:
    """Scores less the best one of their row, (n, M), in a buffer: the gradients of the factors of a
    shorter prefix need the scores themselves."""
    return scores if plan.bounded else torch.sub(scores, best[:, None], out=buffer)


def _apply_options(
    logits: Tensor, best: Tensor, bias: Tensor | None, offset: int, tile: slice
) -> Tensor:
    """Adds what makes logits (n, M) more than a multiple of scores: biases, and pairs without
    hardness. Returns the largest of each row, (n,), which they become relative to: the sum of
    exponentials then neither vanishes nor overflows. ``best`` (n,) is the logit of a negative with
    the best score, less that of the pair."""
    if bias is not None:
        logits.add_(bias * LOG2_E)
    logits.diagonal(offset + tile.start).copy_(-best)
    largest = logits.amax(dim=1)
    logits.sub_(largest[:, None])
    return largest


def _subtract_targets(
    slope: Tensor, unit: Tensor, offset: int, tile: slice, targets: Tensor | None
) -> None:
    """Subtracts the targets from the probabilities, in units of the slope (n, M)."""
    if targets is not None:
        slope.addcmul_(targets, unit[:, None], value=-1)
    else:
        slope.diagonal(offset + tile.start).sub_(unit)


def _finish_prefix(blocks: Sequence[Block], k: int, scores: Tensor, slope: Tensor) -> None:
    """Adds the gradients of a prefix's factors; the slope becomes that of the product."""
    for block in blocks:
        rows, columns, part = block
        if rows.grad_scale is not None or columns.grad_scale is not None:
            moments = scores[:, part].mul_(slope[:, part])  # (n, M)
            for vectors, dim in ((rows, 1), (columns, 0)):
                if vectors.grad_scale is not None and vectors.scale is not None:
                    vectors.grad_scale[:, k] += moments.sum(dim=dim) / vectors.scale[:, k]
        _multiply_factors(block, k, slope)


def _add_gradients(
    plan: Plan, blocks: Sequence[Block], scores: Sequence[Tensor], slopes: Tensor
) -> None:
    """Adds to the gradients of rows and columns, after all softmaxes, because each product drives
    the scores out of the cache. The slopes add up from the longest prefix on; those of a shorter
    one are in the memory of the scores of the longer one."""
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
