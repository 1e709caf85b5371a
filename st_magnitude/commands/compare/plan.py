"""Successive halving within a budget: pure functions of measured costs.

Every rung trains its candidates from the same pretrained model, with the same batches in the same order, for the same
number of steps and with a whole learning rate schedule. The best third goes on to the next rung, of three times as many
steps, and with it plain cosine at its best temperature and at 0.05, the controls. After every rung the rest is planned
anew, by what the training runs have cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["FACTOR", "FINALISTS", "Costs", "Rung", "least_budget", "plan", "plan_after", "price"]

FACTOR = 3  # by which candidates become fewer, and steps more, from rung to rung
CONTROLS = 2
FINALISTS = 3  # which go on at least, beside the controls
FIRST_STEPS, LAST_STEPS = 20, 100  # the fewest steps of a first and of a last rung that tell candidates apart
GROWTH = 1.5  # a rung of fewer times the steps of the one before is not worth its costs


@dataclass(frozen=True)
class Costs:
    """What the parts of a comparison cost, in seconds, or in steps for a budget in steps."""

    step: float = 1.0  # of training
    run: float = 0.0  # of everything else about one training run: setting up and the search on dev
    workers: int = 1  # training runs at a time


class Rung(NamedTuple):
    steps: int
    candidates: int


def price(rungs: Sequence[tuple[float, int]], costs: Costs) -> float:
    """The cost of pairs of steps and number of candidates.

    Example:
        >>> price([Rung(10, 9), Rung(30, 5)], Costs(step=0.5, run=2.0))
        148.0
        >>> price([Rung(10, 9), Rung(30, 5)], Costs(step=0.5, run=2.0, workers=4))
        55.0
    """
    return sum(math.ceil(number / costs.workers) * (costs.step * steps + costs.run) for steps, number in rungs)


def plan(candidates: int, amount: float, costs: Costs, most: int, pilot: bool = False) -> list[Rung]:
    """The rungs that spend an amount, in the unit of the costs, without more than ``most`` steps of a candidate.

    Args:
        candidates: Number of candidates of the first rung.
        amount: Budget without what comes after the last rung.
        costs: Measured costs.
        most: Largest number of steps of a candidate.
        pilot: Whether few candidates have a first rung too, which measures the costs better than a probe.

    Example:
        >>> plan(20, 2000, Costs(), most=1000)
        [Rung(steps=21, candidates=20), Rung(steps=65, candidates=9), Rung(steps=195, candidates=5)]
        >>> plan(4, 2000, Costs(), most=1000), plan(4, 2000, Costs(), most=1000, pilot=True)
        ([Rung(steps=500, candidates=4)], [Rung(steps=125, candidates=4), Rung(steps=375, candidates=4)])
    """
    return _fill(_sizes(candidates, most, pilot), amount, costs, most)


def plan_after(steps: int, candidates: int, amount: float, costs: Costs, most: int) -> list[Rung]:
    """The rungs that follow one of so many steps: fewer, smaller or none if what is left of the budget is little.

    Example:
        >>> plan_after(21, 9, 1580, Costs(), most=1000)
        [Rung(steps=65, candidates=9), Rung(steps=197, candidates=5)]
        >>> plan_after(21, 9, 200, Costs(), most=1000), plan_after(195, 4, 200, Costs(), most=1000)
        ([Rung(steps=40, candidates=5)], [])
    """
    sizes = _sizes(candidates, most)
    fewer = [sizes[i:] for i in range(len(sizes))] + [[number] for number in range(sizes[-1] - 1, 1, -1)]
    plans = (_fill(some, amount, costs, most) for some in fewer)
    return next((rungs for rungs in plans if rungs[0].steps >= GROWTH * steps), [])


def least_budget(candidates: int, costs: Costs, most: int, pilot: bool = False) -> float:
    """The smallest amount for which a plan has enough steps to tell candidates apart."""
    sizes = _sizes(candidates, most, pilot)
    return price(_rungs(sizes, min(most, max(LAST_STEPS, FIRST_STEPS * FACTOR ** (len(sizes) - 1)))), costs)


def _sizes(candidates: int, most: int, pilot: bool = False) -> list[int]:
    """Numbers of candidates of the rungs, as many rungs as leave enough steps for the first."""
    sizes = [candidates]
    while most / FACTOR ** len(sizes) >= FIRST_STEPS and (
        sizes[-1] > FINALISTS + CONTROLS + 1 or (pilot and len(sizes) == 1)
    ):
        sizes.append(min(sizes[-1], max(FINALISTS, math.ceil(sizes[-1] / FACTOR)) + CONTROLS))
    return sizes


def _rungs(sizes: Sequence[int], last: float) -> list[tuple[float, int]]:
    return [(last / FACTOR**i, size) for i, size in zip(reversed(range(len(sizes))), sizes, strict=True)]


def _fill(sizes: Sequence[int], amount: float, costs: Costs, most: int) -> list[Rung]:
    fixed = price(_rungs(sizes, 0.0), costs)
    last = min(most, (amount - fixed) / (price(_rungs(sizes, 1.0), costs) - fixed))
    return [Rung(max(1, math.floor(steps)), size) for steps, size in _rungs(sizes, last)]
