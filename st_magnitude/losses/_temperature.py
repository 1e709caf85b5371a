"""Temperatures that a ranking loss learns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from st_magnitude.kernel.terms import LearnedTemperature, Term
from st_magnitude.losses._optimizer import average_over_ranks
from st_magnitude.similarity import Similarity
from st_magnitude.training.state import Remembering, ResumeGuard

__all__ = ["Temperatures", "with_temperature"]


def with_temperature(terms: Iterable[Term], temperature: float | Literal["learned"] | None) -> tuple[Term, ...]:
    """The terms of a loss with its argument ``temperature``.

    Args:
        terms: Terms.
        temperature: Temperature of the only term; ``"learned"``: all temperatures are learned, starting where they are;
            None: the terms as they are.

    Raises:
        ValueError: If there is one temperature for several terms, or it is out of range.
    """
    terms = tuple(terms)
    if temperature is None:
        return terms
    if temperature == "learned":
        return tuple(replace(term, temperature=LearnedTemperature(float(term.temperature))) for term in terms)
    if len(terms) > 1:
        raise ValueError(
            f"temperature={temperature} is for a loss of one term, and this one has {len(terms)}. Give each term its "
            "own, or temperature='learned' to learn all of them."
        )
    return tuple(replace(term, temperature=temperature) for term in terms)


class Temperatures(Remembering):
    """The learned temperatures of a loss: exp(bias), one for each term with a LearnedTemperature.

    The parameter is called a bias so that trainers exempt it from weight decay. It is part of the loss and not of the
    model, so that nothing of it is saved with the model. What a Trainer does for parameters of the model only is done
    here: its value is in the checkpoints (:func:`~st_magnitude.attach`), a run that resumes without it is refused, and
    all ranks take the same steps (`average_over_ranks`).
    """

    def __init__(self, terms: Sequence[Term], model: nn.Module) -> None:
        super().__init__()
        self._members = [i for i, term in enumerate(terms) if isinstance(term.temperature, LearnedTemperature)]
        initial = [float(terms[i].temperature) for i in self._members]
        self.bias = nn.Parameter(torch.tensor(initial, device=getattr(model, "device", None)).log())  # (L,)
        self._guard = ResumeGuard(model)
        self._effective: list[Tensor] = []
        average_over_ranks(self)

    def forward(self) -> Tensor:
        self.bias.data.clamp_(min=math.log(LearnedTemperature.MINIMUM))  # after a step of the optimizer, as CLIP does
        return self.bias.exp()  # (L,)

    def fill(self, terms: Sequence[Term], learned: Iterable[Tensor]) -> list[Term]:
        """The terms with their present temperatures."""
        filled = list(terms)
        for i, temperature in zip(self._members, learned, strict=True):
            filled[i] = replace(terms[i], temperature=temperature)
        return filled

    def begin(self) -> None:
        """Refuses the first batch of a run that resumes without the temperatures."""
        self._guard.refuse(
            "A learned temperature starts anew on the first batch of a run",
            "the temperature in the checkpoints. A run without it continues as a new run from the checkpoint's model",
        )
        self._guard.release()

    @torch.no_grad()
    def observe(self, queries: Tensor, terms: Sequence[Term], similarity: Similarity) -> None:
        """Keeps the effective temperatures of a batch for the log; ``terms`` as the kernel gets them."""
        gamma = similarity.gamma_query
        if isinstance(gamma, Tensor) or gamma < 1:
            norms = [torch.linalg.vector_norm(queries[:, : terms[i].dim].float(), dim=1).mean() for i in self._members]
            self._effective = [
                terms[i].temperature / norm ** (1 - gamma) for i, norm in zip(self._members, norms, strict=True)
            ]

    def get_log(self) -> dict[str, float]:
        named = {"temperature": self().tolist(), "effective_temperature": [float(x) for x in self._effective]}
        return {
            f"{key}_{number}" if len(self._members) > 1 else key: value
            for key, values in named.items()
            for number, value in enumerate(values, start=1)
        }

    def get_extra_state(self) -> dict[str, Any]:
        return {"temperatures_bias": self.bias.tolist()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.bias.data.copy_(torch.tensor(state["temperatures_bias"]))
        self._guard.release()

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        average_over_ranks(self)
