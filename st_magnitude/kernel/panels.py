"""Plan, Side and Panel: what the tiled engine compares.

* A **side** holds vectors divided by their norms, and their gradients.
* A **panel** is a rectangle of scores: rows of one side, a block of columns of another, and the
  rules of their pairs.
* A **plan** holds the prefixes, terms and sizes that all panels share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch
from st_magnitude.kernel.rules import Rules
from st_magnitude.kernel.terms import Term
from st_magnitude.similarity import COSINE, Similarity

LOG2_E = math.log2(math.e)
MAX_EXPONENT = 100.0  # of 2; a sum of 2^27 such numbers is still finite in float32


@dataclass(frozen=True)
class Plan:
    """The sizes that panels of a softmax share; none depends on the value of a tensor."""

    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # of a prefix, its terms, by falling temperature
    powers: tuple[int, ...]  # of a term, the power of the exponential before it that it is, or 0
    weights: tuple[float, ...]  # of a term, for one row
    tile_rows: int | None  # None: rows_of_a_tile
    bounded: bool  # whether no logit is too large or too small for the exponential of a float32
    product_dtype: torch.dtype | None = None  # of factors of products; None: that of the vectors

    @classmethod
    def of(
        cls,
        terms: Sequence[Term],
        batch: Batch,
        num_rows: float,
        tile_rows: int | None,
        similarity: Similarity,
        product_dtype: torch.dtype | None = None,
    ) -> Plan:
        """The plan of terms for the embeddings of a batch, whose loss is a mean over ``num_rows``.

        Where the ratio of two temperatures is 2 or 3, an exponential is a power of another, which
        is cheaper. The values of temperatures that are tensors stay on the device.
        """
        width = batch.queries.shape[1]
        dims = tuple(sorted({term.dim or width for term in terms}))
        members = []
        powers = [0] * len(terms)
        for dim in dims:
            of_prefix = [i for i, term in enumerate(terms) if (term.dim or width) == dim]
            taus = {i: terms[i].temperature for i in of_prefix}
            numbers = {i: tau for i, tau in taus.items() if not isinstance(tau, Tensor)}
            chain = sorted(numbers, key=lambda i: -numbers[i])
            for before, after in pairwise(chain):
                ratio = numbers[before] / numbers[after]
                is_power = round(ratio) in (2, 3) and abs(ratio - round(ratio)) < 2e-7
                if is_power and not batch.weighs_hard_negatives:
                    powers[after] = round(ratio)
            members.append((*chain, *(i for i in of_prefix if i not in numbers)))
        is_small = all(
            not isinstance(term.temperature, Tensor) and LOG2_E / term.temperature < MAX_EXPONENT
            for term in terms
        )
        adds = batch.weighs_hard_negatives or batch.log_q is not None
        adds = adds or batch.log_q_queries is not None
        bounded = similarity == COSINE and is_small and not adds
        weights = tuple(term.weight / num_rows for term in terms)
        return cls(dims, tuple(members), tuple(powers), weights, tile_rows, bounded, product_dtype)

    @property
    def spans(self) -> list[slice]:
        """The coordinates that each prefix adds to the one before."""
        return [slice(a, b) for a, b in pairwise((0, *self.dims))]

    def per_term(self, prefixes: Sequence[Tensor]) -> Tensor:
        """Numbers of each prefix, (K) x (n,), as numbers of each term, (T, n)."""
        prefix_of = {t: k for k, members in enumerate(self.members) for t in members}
        return torch.stack([prefixes[prefix_of[t]] for t in range(len(self.weights))])


@dataclass
class Side:
    """Vectors divided by their norms, the factors of shorter prefixes, and gradients of both."""

    x: Tensor  # (n, D), D the longest prefix
    scale: Tensor | None = None  # (K - 1, n); None: 1
    grad: Tensor | None = None  # (n, D)
    grad_scale: Tensor | None = None  # (K - 1, n)
    operand: Tensor = field(init=False)  # (n, D), x as matrix products take it

    def __post_init__(self) -> None:
        self.operand = self.x

    @classmethod
    def with_gradients(
        cls, x: Tensor, scale: Tensor | None, needs_x: bool, needs_scale: bool
    ) -> Side:
        grad_scale = torch.zeros_like(scale) if scale is not None and needs_scale else None
        return cls(x, scale, torch.zeros_like(x) if needs_x else None, grad_scale)

    def part(self, rows: slice) -> Side:
        """A view of some of the vectors, whose gradients go into those of the whole."""
        scale = None if self.scale is None else self.scale[:, rows]
        grad = None if self.grad is None else self.grad[rows]
        grad_scale = None if self.grad_scale is None else self.grad_scale[:, rows]
        side = Side(self.x[rows], scale, grad, grad_scale)
        side.operand = self.operand[rows]
        return side


@dataclass(frozen=True)
class Panel:
    """A rectangle of scores: rows, a block of columns, and the rules of their pairs."""

    rows: Side  # (B, D)
    columns: Side  # (M, D)
    rules: Rules
    bias: Tensor | None = None  # (M,), added to the logits
    own: int | None = None  # the column that belongs to row 0, if any; that of row i is i later
    attracts: bool = False  # whether the positives are among the columns
