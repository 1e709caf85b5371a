"""Term: a prefix of the embedding, a temperature and a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from st_magnitude._checks import positive

__all__ = ["Term"]


@dataclass(frozen=True)
class Term:
    """One summand of a contrastive loss.

    Args:
        dim: Number of leading coordinates to compare; None for all of them.
        temperature: Divisor of the scores: a positive number or, for the function ``infonce``, a
            0-d tensor, which receives a gradient.
        weight: Factor of the term in the sum.

    Raises:
        ValueError: If dim is below 1, or the temperature not positive.
    """

    dim: int | None = None
    temperature: float | Tensor = 0.05
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.dim is not None and self.dim < 1:
            raise ValueError(
                f"Term.dim must be at least 1, or None for all dimensions; got {self.dim}."
            )
        if not isinstance(self.temperature, Tensor) and not self.temperature > 0:
            raise ValueError(f"Term.temperature must be positive, got {self.temperature}.")


def check_terms(terms: Sequence[Term], width: int) -> None:
    if not terms:
        raise ValueError("infonce needs at least one Term.")
    if too_long := [term.dim for term in terms if term.dim is not None and term.dim > width]:
        raise ValueError(f"Term dims {too_long} exceed the {width} dimensions of the embeddings.")


def stack_temperatures(terms: Sequence[Term], like: Tensor) -> Tensor:
    """The temperatures of all terms on the device of a tensor, (T,)."""
    given = [term.temperature for term in terms]
    return torch.stack(  # filled on the device, because a copy from the host would wait for it
        [x.to(like) if isinstance(x, Tensor) else like.new_full((), x) for x in given]
    )


def with_temperature(terms: Iterable[Term], temperature: float | None) -> tuple[Term, ...]:
    """The terms of a loss with its argument ``temperature``."""
    positive("temperature", temperature, [None])
    terms = tuple(terms)
    if not terms:
        raise ValueError(
            "terms is empty; give at least one Term, such as terms=[Term(temperature=0.05)]."
        )
    if temperature is None:
        return terms
    if len(terms) > 1:
        raise ValueError(
            f"temperature={temperature} is for a loss of one term, and this one has {len(terms)}."
            " Give each term its own."
        )
    return (replace(terms[0], temperature=temperature),)
