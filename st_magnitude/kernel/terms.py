"""Term: a prefix of the embedding, a temperature and a weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from st_magnitude._checks import at_least

__all__ = ["LearnedTemperature", "Term"]


class LearnedTemperature(float):
    """A temperature that a ranking loss learns, which starts at this number.

    Every such term has its own temperature. The loss learns its logarithm and keeps it at 0.01 or
    more, as CLIP keeps its logit scale, 1 / temperature, at 100 or less.

    With :func:`~st_magnitude.attach` the log of a Trainer has ``temperature``. Several terms are
    numbered, ``temperature_1``, and several losses are named, ``temperature_{data set}``.

    Raises:
        ValueError: If the temperature is below 0.01.

    Example:
        >>> from st_magnitude.kernel.terms import LearnedTemperature, Term
        >>> Term(temperature=LearnedTemperature(0.07))
        Term(dim=None, temperature=LearnedTemperature(0.07), weight=1.0)

    Source: Radford et al. 2021, Learning Transferable Visual Models From Natural Language
        Supervision, section 2.5.
    """

    MINIMUM = 0.01

    def __new__(cls, initial: float = 0.05) -> LearnedTemperature:
        at_least("A learned temperature", initial, cls.MINIMUM)
        return super().__new__(cls, initial)

    def __repr__(self) -> str:
        return f"LearnedTemperature({float(self)!r})"

    @staticmethod
    def learning_rate_mapping(learning_rate: float = 1e-3) -> dict[str, float]:
        """The ``learning_rate_mapping=`` of the training arguments for temperatures.

        At the rate of a text encoder they hardly move: a step of Adam changes a temperature by this
        share of itself.
        """
        return {r"(^|\.)temperatures\.bias$": learning_rate}


@dataclass(frozen=True)
class Term:
    """One summand of a contrastive loss.

    Args:
        dim: Number of leading coordinates to compare; None for all of them.
        temperature: Divisor of the scores: a positive number, or a :class:`LearnedTemperature`,
            which a ranking loss learns. The function ``infonce`` takes numbers and 0-d tensors,
            which receive gradients.
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
