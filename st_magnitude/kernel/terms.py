"""Term: a prefix, a temperature and a weight; and Plan, how the tiled engine computes several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral

import torch
from torch import Tensor

from st_magnitude._checks import InputError, at_least, is_number, positive
from st_magnitude.kernel.batch import Batch
from st_magnitude.similarity import COSINE, Similarity

LOG2_E = math.log2(math.e)
MAX_EXPONENT = 100.0  # of 2; a sum of 2^27 such numbers is still finite in float32


@dataclass(frozen=True)
class Term:
    """One summand of a contrastive loss.

    Args:
        dim: Number of leading coordinates to compare; None for all of them.
        temperature: Divisor of the scores: a positive number or, for the function ``infonce``, a
            0-d tensor, which receives a gradient.
        weight: Factor of the term in the sum.

    Raises:
        ValueError: If one of them is no such number.
    """

    dim: int | None = None
    temperature: float | Tensor = 0.05
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.dim is not None:
            at_least("Term.dim", self.dim, 1, " and whole, or None for all dimensions", Integral)
        if not (is_number(self.weight) and math.isfinite(self.weight)):
            raise ValueError(f"Term.weight must be a finite number; got {self.weight!r}.")
        if not isinstance(self.temperature, Tensor):
            positive("Term.temperature", self.temperature)
        elif self.temperature.ndim:
            shape = tuple(self.temperature.shape)
            raise ValueError(f"A learned Term.temperature must be a 0-d tensor; got {shape}.")


def check_terms(terms: Sequence[Term], width: float) -> None:
    """Refuses no terms, other objects, and prefixes of more coordinates than embeddings have."""
    if others := [x for x in terms if not isinstance(x, Term)]:
        raise InputError(f"terms are objects of Term, such as Term(dim=128); got {others[0]!r}.")
    if not terms:
        raise InputError("Give at least one Term, such as terms=[Term(temperature=0.05)].")
    if too_long := sorted({x.dim for x in terms if x.dim is not None and x.dim > width}):
        raise InputError(f"Term dims {too_long} exceed the {width} dimensions of the embeddings.")


def longest_prefix(terms: Sequence[Term]) -> int | None:
    """The number of coordinates that the terms compare; None for all of them."""
    dims = [term.dim for term in terms if term.dim is not None]
    return max(dims, default=None) if len(dims) == len(terms) else None


class Plan:
    """The K prefixes and T terms of a loss, and how the engine computes them. Nothing in a plan
    depends on the value of a tensor."""

    def __init__(
        self,
        terms: Sequence[Term],
        batch: Batch,
        similarity: Similarity,
        num_losses: float,  # the number of rows whose mean loss is the loss of the batch
        tile_rows: int | None,  # None: the default of the device
    ) -> None:
        width = batch.queries.shape[1]
        # prefix by prefix, by falling temperature
        self.terms = sorted(terms, key=lambda term: (term.dim or width, -_number(term)))
        lengths = [term.dim or width for term in self.terms]
        self.dims = tuple(sorted(set(lengths)))  # ascending prefixes
        edges = [*map(lengths.index, self.dims), len(terms)]
        self.members = [range(a, b) for a, b in pairwise(edges)]  # terms of each prefix
        # of each term: its exponential is this power of the one before, or 0
        self.powers = [0, *(_power(before, after) for before, after in pairwise(self.terms))]
        has_biases = batch.log_q is not None or batch.log_q_queries is not None
        self.has_options = has_biases or batch.hardness_strength > 0
        if self.has_options:  # logits are no multiples of scores, nor of those of another term
            self.powers = [0] * len(terms)
        is_small = all(MAX_EXPONENT * _number(term) > LOG2_E for term in terms)
        # whether exponentials of scores are finite and positive in float32
        self.bounded = similarity == COSINE and is_small
        self.hardness_strength = batch.hardness_strength
        self.num_losses = num_losses
        self.tile_rows = tile_rows

    def temperatures(self, like: Tensor) -> Tensor:
        """The temperatures of all terms on the device of a tensor, (T,)."""
        given = [term.temperature for term in self.terms]
        return torch.stack(  # filled on the device, because a copy from the host would wait for it
            [x.to(like) if isinstance(x, Tensor) else like.new_full((), x) for x in given]
        )

    @property
    def spans(self) -> list[slice]:
        """The coordinates that each prefix adds to the one before."""
        return [slice(a, b) for a, b in pairwise((0, *self.dims))]

    def per_term(self, prefixes: Sequence[Tensor]) -> Tensor:
        """Repeats the numbers (n,) of each of K prefixes for all of its terms: (T, n)."""
        repeated = zip(prefixes, self.members, strict=True)
        return torch.stack([x for x, members in repeated for _ in members])


def _number(term: Term) -> float:
    """The temperature; 0 for a tensor, whose value stays on the device."""
    return 0.0 if isinstance(term.temperature, Tensor) else term.temperature


def _power(before: Term, after: Term) -> int:
    """2 or 3 if the exponential of a term is this power of the one before, and 0 otherwise."""
    if before.dim != after.dim or not _number(after):
        return 0
    ratio = _number(before) / _number(after)
    return round(ratio) if round(ratio) in (2, 3) and abs(ratio - round(ratio)) < 2e-7 else 0
