"""Term: a prefix of the embedding, a temperature and a weight; and the plan of a loss, which is a sum of terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from st_magnitude._checks import at_least, positive
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["LearnedTemperature", "Term"]

LOG2_E = math.log2(math.e)
MAX_EXPONENT = 100.0  # of 2; a sum of 2^27 such numbers is still finite in float32


class LearnedTemperature(float):
    """A temperature that a ranking loss learns. As a number, it is the temperature where the loss starts.

    It starts at 0.05 by default. Every such term has its own temperature. The loss learns its logarithm
    and keeps it at 0.01 or more, as CLIP keeps its logit scale, 1 / temperature, at 100 or less.

    With :func:`~st_magnitude.attach` the log of a Trainer has ``temperature``. Several terms are numbered,
    ``temperature_1``, and several losses are named, ``temperature_{data set}``.

    Raises:
        ValueError: If the temperature is below 0.01.

    Example:
        >>> from st_magnitude.kernel.terms import LearnedTemperature, Term
        >>> Term(temperature=LearnedTemperature(0.07))
        Term(dim=None, temperature=LearnedTemperature(0.07), weight=1.0)
        >>> Term(temperature="learned").temperature
        LearnedTemperature(0.05)

    Source: Radford et al. 2021, Learning Transferable Visual Models From Natural Language Supervision, section 2.5.
    """

    MINIMUM = 0.01

    def __new__(cls, initial: float = 0.05) -> LearnedTemperature:
        at_least("A learned temperature", initial, cls.MINIMUM)
        return super().__new__(cls, initial)

    def __repr__(self) -> str:
        return f"LearnedTemperature({float(self)!r})"

    @staticmethod
    def learning_rate_mapping(learning_rate: float = 1e-3) -> dict[str, float]:
        """The learning rate of the temperatures, for ``learning_rate_mapping=`` of the training arguments.

        At the rate of a text encoder they hardly move: a step of Adam changes a temperature by this share of itself.
        """
        return {r"(^|\.)temperatures\.bias$": learning_rate}


@dataclass(frozen=True)
class Term:
    """One summand of a contrastive loss.

    Args:
        dim: Number of leading coordinates to compare; None for all of them.
        temperature: Divisor of the scores: a positive number, or a :class:`LearnedTemperature`, which a ranking loss
            learns. ``"learned"`` is one that starts at 0.05. The function ``infonce`` takes numbers and 0-d tensors,
            which receive gradients.
        weight: Factor of the term in the sum.

    Raises:
        ValueError: If dim is below 1, or if the temperature is a number that is not positive or another word.
    """

    dim: int | None = None
    temperature: float | Tensor = 0.05
    weight: float = 1.0

    if TYPE_CHECKING:  # the word becomes a number below

        def __init__(
            self,
            dim: int | None = None,
            temperature: float | Tensor | Literal["learned"] = 0.05,
            weight: float = 1.0,
        ) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.temperature, str):
            positive("Term.temperature", self.temperature, ["learned"])
            object.__setattr__(self, "temperature", LearnedTemperature())
        if self.dim is not None and self.dim < 1:
            raise ValueError(f"Term.dim must be at least 1, or None for all dimensions; got {self.dim}.")
        if not isinstance(self.temperature, Tensor) and not self.temperature > 0:
            raise ValueError(f"Term.temperature must be positive, got {self.temperature}.")


@dataclass(frozen=True)
class Plan:
    """What the panels of a softmax share. Nothing of it depends on the value of a tensor."""

    dims: tuple[int, ...]  # ascending prefixes
    members: tuple[tuple[int, ...], ...]  # per prefix, the terms that use it, by falling temperature
    powers: tuple[int, ...]  # per term, the power of the exponential before it that is its own exponential, or 0
    weights: tuple[float, ...]  # per term, of one row
    tile_rows: int | None  # None: rows_of_a_tile
    bounded: bool  # whether no logit is too large or too small for the exponential of a float32
    product_dtype: torch.dtype | None = None  # of the factors of matrix products; None: that of the vectors

    @classmethod
    def of(
        cls,
        terms: Sequence[Term],
        width: int,
        num_rows: float,
        tile_rows: int | None,
        similarity: Similarity,
        product_dtype: torch.dtype | None = None,
    ) -> Plan:
        """The plan of terms for embeddings with ``width`` dimensions.

        Where the ratio of two temperatures is 2 or 3, an exponential is a power of another, which is cheaper. The
        values of temperatures that are tensors stay on the device, so these terms have an exponential each.
        """
        dims = tuple(sorted({term.dim or width for term in terms}))
        members, powers = [], [0] * len(terms)
        bounded = similarity == COSINE and all(
            not isinstance(term.temperature, Tensor) and LOG2_E / term.temperature < MAX_EXPONENT for term in terms
        )
        for dim in dims:
            of_prefix = [i for i, term in enumerate(terms) if (term.dim or width) == dim]
            numbers = {i: float(tau) for i in of_prefix if not isinstance(tau := terms[i].temperature, Tensor)}
            chain = sorted(numbers, key=lambda i: -numbers[i])
            for before, after in pairwise(chain):
                ratio = numbers[before] / numbers[after]
                if round(ratio) in (2, 3) and abs(ratio - round(ratio)) < 2e-7:
                    powers[after] = round(ratio)
            members.append((*chain, *(i for i in of_prefix if i not in numbers)))
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
