"""An encoder within a time budget: trained, as it comes, or left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Plan", "plan_of"]

MARGIN = 1.2  # over the time that was estimated


@dataclass(frozen=True)
class Plan:
    """The part of an encoder in a run.

    Attributes:
        epochs: The epochs of each training. 0: it is weighed as it comes; None: it is left out.
        note: A sentence for the user, before the time is spent.
    """

    epochs: float | None
    note: str
    is_cut: bool = False  # whether there are fewer epochs than by default


def plan_of(
    budget: float,
    texts: int,
    rate: float,
    searches: int,
    steps: int,
    epochs: float,
    step: Callable[[], float],
) -> Plan:
    """The plan for a budget in seconds, and estimates.

    Args:
        texts: The texts that a model encodes for a search.
        rate: Texts encoded in a second.
        searches: Models that are trained and encode all texts.
        steps: The steps of all trainings.
        epochs: The epochs of each training by default.
        step: Measures the seconds of a step, if there is time for the encoding.
    """
    once = texts / rate
    if once > budget:
        said = f"The encoder is left out: it encodes {texts:,} texts in about {_time(once)}"
        return Plan(None, f"{said}. {_remedy(budget, once)}")
    training = steps * step()
    whole = (1 + searches) * once + training
    if whole <= budget:
        return Plan(epochs, f"The encoder takes about {_time(whole)}.")
    if (cut := epochs * (budget - whole + training) / training) >= 1:
        said = f"The encoder is trained for {cut:.1f} epochs instead of {epochs:.1f}"
        return Plan(cut, f"{said}. {_remedy(budget, whole)}", is_cut=True)
    said = "The encoder is weighed as it comes, as its training takes too long"
    return Plan(0.0, f"{said}. {_remedy(budget, whole)}")


def _remedy(budget: float, needed: float) -> str:
    minutes = math.ceil(MARGIN * needed / 60)
    return f"The budget is {_time(budget)}; --budget {minutes}m is enough."


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
