"""An encoder within a time budget: trained, as it comes, or left out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.nn.modules.module import register_module_forward_pre_hook

__all__ = ["MARGIN", "OverBudget", "Plan", "plan_of", "time_limit"]

MARGIN = 1.2  # over the time that was estimated


class OverBudget(Exception):
    """A model has computed for longer than its budget holds."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Within the block, models compute for so many seconds at most. OverBudget: they were slower.
    Models of other threads are not stopped."""
    ends = time.perf_counter() + seconds
    thread = threading.get_ident()

    def check(*_: object) -> None:
        if time.perf_counter() > ends and threading.get_ident() == thread:
            raise OverBudget

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


@dataclass(frozen=True)
class Plan:
    """The part of an encoder in a run.

    Attributes:
        note: A sentence for the user, before the time is spent.
        weighs: Whether it is weighed as it comes.
        trains: Whether it is trained.
        last: The seconds of the training on all pairs, after those that judge.
    """

    note: str
    weighs: bool = True
    trains: bool = False
    last: float = 0.0


def plan_of(
    budget: float,
    texts: int,
    rate: float,
    searches: int,
    steps: int,
    last: int,
    step: Callable[[], float],
) -> Plan:
    """The plan for a budget in seconds, and estimates.

    Args:
        texts: The texts that a model encodes for a search.
        rate: Texts encoded in a second.
        searches: Models that are trained and encode all texts.
        steps: The steps of all trainings.
        last: Those of the training on all pairs, if it comes after those that judge.
        step: Measures the seconds of a step, if there is time for the encoding.
    """
    once = texts / rate
    if once > budget:
        said = f"The encoder is left out: it encodes {texts:,} texts in about {_time(once)}"
        return Plan(f"{said}. {_remedy(budget, once)}", weighs=False)
    pace = step()
    whole = (1 + searches) * once + steps * pace
    if whole <= budget:
        return Plan(f"The encoder takes about {_time(whole)}.", trains=True, last=last * pace)
    said = "The encoder is weighed as it comes, as its training takes too long"
    return Plan(f"{said}. {_remedy(budget, whole)}")


def _remedy(budget: float, needed: float) -> str:
    minutes = math.ceil(MARGIN * needed / 60)
    return f"The budget is {_time(budget)}; --budget {minutes}m is enough."


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
