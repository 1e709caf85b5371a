"""Term: a prefix of the embedding, a temperature and a weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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
