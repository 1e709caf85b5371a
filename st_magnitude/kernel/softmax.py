"""Plan and Softmax: the terms of a loss, and what is known of the softmax of each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from st_magnitude.kernel.batch import Batch
from st_magnitude.kernel.terms import Term
from st_magnitude.similarity import COSINE, Similarity

LOG2_E = math.log2(math.e)
MAX_EXPONENT = 100.0  # of 2; a sum of 2^27 such numbers is still finite in float32


@dataclass(frozen=True)
class Plan:
    """The K prefixes and T terms of a loss, and how the engine computes them. Nothing in a plan
    depends on the value of a tensor."""

    dims: tuple[int, ...]  # ascending prefixes
    terms: tuple[Term, ...]  # prefix by prefix, by falling temperature
    members: tuple[range, ...]  # of a prefix, the places of its terms
    powers: tuple[int, ...]  # of a term, the power of the exponential before it that it is, or 0
    num_losses: float  # losses of rows whose mean is the loss of the batch
    tile_rows: int | None  # None: rows_of_a_tile
    bounded: bool  # whether no logit is too large or too small for the exponential of a float32

    @classmethod
    def of(
        cls,
        terms: Sequence[Term],
        batch: Batch,
        similarity: Similarity,
        num_losses: float,
        tile_rows: int | None,
    ) -> Plan:
        width = batch.queries.shape[1]
        ordered = sorted(terms, key=lambda term: (term.dim or width, -_number(term)))
        lengths = [term.dim or width for term in ordered]
        dims = tuple(sorted(set(lengths)))
        edges = [*map(lengths.index, dims), len(terms)]
        powers = [0, *(_power(before, after) for before, after in pairwise(ordered))]
        for first in edges[:-1]:
            powers[first] = 0
        has_biases = batch.log_q is not None or batch.log_q_queries is not None
        is_small = all(MAX_EXPONENT * _number(term) > LOG2_E for term in terms)
        return cls(
            dims=dims,
            terms=tuple(ordered),
            members=tuple(range(a, b) for a, b in pairwise(edges)),
            powers=tuple(powers),
            num_losses=num_losses,
            tile_rows=tile_rows,
            bounded=similarity == COSINE and is_small and not has_biases,
        )

    @property
    def spans(self) -> list[slice]:
        """The coordinates that each prefix adds to the one before."""
        return [slice(a, b) for a, b in pairwise((0, *self.dims))]

    def per_term(self, prefixes: Sequence[Tensor]) -> Tensor:
        """Numbers of each prefix, (K) x (n,), as numbers of each term, (T, n)."""
        repeated = zip(prefixes, self.members, strict=True)
        return torch.stack([x for x, members in repeated for _ in members])


def _number(term: Term) -> float:
    """The temperature; 0 for a tensor, whose value stays on the device."""
    return 0.0 if isinstance(term.temperature, Tensor) else term.temperature


def _power(before: Term, after: Term) -> int:
    """2 or 3 if the exponential of a term is this power of the one before, which is cheaper."""
    if not _number(after):
        return 0
    ratio = _number(before) / _number(after)
    return round(ratio) if round(ratio) in (2, 3) and abs(ratio - round(ratio)) < 2e-7 else 0


class Softmax:
    """The sums of each row over the columns so far: the log-sum-exp, and the attraction of its
    positives."""

    def __init__(self, plan: Plan, temperatures: Tensor, batch: Batch) -> None:
        row_weights = temperatures.new_ones(len(batch.queries))  # (B,)
        if batch.weights is not None:
            row_weights = batch.weights.detach().to(row_weights)
        self.plan = plan
        self.inverse = 1 / temperatures[:, None]  # (T, 1)
        of_terms = [temperatures.new_full((1,), term.weight) for term in plan.terms]
        # (T, B), of a row's loss in the loss of the batch
        self.weights = torch.stack(of_terms) * row_weights / plan.num_losses
        self.pulls = self.weights * self.inverse  # (T, B), d loss / d score of a probability of 1
        self.log_sums = torch.full_like(self.weights, -torch.inf)  # (T, B), to base 2
        # Sums over the positives of a row: weighted scores of each prefix and biases, and targets
        self.scores = [torch.zeros_like(row_weights) for _ in plan.dims]  # (K) x (B,)
        self.biases = torch.zeros_like(row_weights)  # (B,)
        self.targets = torch.zeros_like(row_weights)  # (B,)
        self.grad_inverse = torch.zeros_like(temperatures)  # (T,)
        self.learns_temperatures = temperatures.requires_grad

    def add(self, t: int, tile: slice, log_sums: Tensor) -> None:
        """Adds the log-sum-exp (n,) of more columns to those of some rows."""
        known = self.log_sums[t, tile]  # a view
        torch.logaddexp2(known, log_sums, out=known)

    def pushes(self, k: int, tile: slice) -> Tensor:
        """How much a target of 1 raises a score in all terms of a prefix, (n,)."""
        members = self.plan.members[k]
        return self.pulls[members.start : members.stop, tile].sum(dim=0) / self.targets[tile]

    def loss(self) -> Tensor:
        """The sum over terms and rows of w · (log-sum-exp of logits - mean logit of positives)."""
        means = self.plan.per_term(self.scores) / self.targets
        attraction = means * self.inverse + self.biases / self.targets  # (T, B)
        return ((self.log_sums / LOG2_E - attraction) * self.weights).sum()

    def grad_temperatures(self) -> Tensor:
        """The gradient of the temperatures, (T,)."""
        means = self.plan.per_term(self.scores) / self.targets
        return -(self.grad_inverse - (means * self.weights).sum(dim=1)) * self.inverse[:, 0] ** 2
