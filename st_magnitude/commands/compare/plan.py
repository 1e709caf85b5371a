"""Successive halving within a budget: pure functions of measured costs.

Every rung trains its candidates from the same pretrained model, with the same batches in the same order, for the same
number of steps and with a whole learning rate schedule. The best third goes on to the next rung, of three times as many
steps, and with it plain cosine at its best temperature and at 0.05, the controls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FACTOR", "Costs", "Rung", "least_budget", "make_plan", "next_steps", "price"]

FACTOR = 3  # by which candidates become fewer, and steps more, from rung to rung
CONTROLS = 2
FINALISTS = 3  # of the last rung, beside the controls
FIRST_STEPS, LAST_STEPS = 20, 100  # the fewest steps of a first and of a last rung that tell candidates apart


@dataclass(frozen=True)
class Costs:
    """What the parts of a comparison cost, in seconds, or in steps for a budget in steps."""

    step: float = 1.0  # of training
    run: float = 0.0  # of everything else about one training run: setting up and the search on dev
    end: float = 0.0  # of everything after the last rung: the test split and the files


@dataclass(frozen=True)
class Rung:
    steps: int
    candidates: int


def price(sizes: Sequence[int], last_steps: float, costs: Costs) -> float:
    """The cost of rungs with these numbers of candidates, the last of them with so many steps."""
    steps = sum(size * last_steps / FACTOR**i for i, size in enumerate(reversed(sizes)))
    return costs.step * steps + costs.run * sum(sizes) + costs.end


def next_steps(sizes: Sequence[int], amount: float, costs: Costs, most: int) -> int:
    """Steps of the first of these rungs such that all of them fit; ``most`` is the limit for the last.

    Example:
        >>> next_steps([9, 5], 800, Costs(), most=1000)  # 9 x 33 + 5 x 100
        33
    """
    return max(1, math.floor(_last_steps(sizes, amount, costs, most) / FACTOR ** (len(sizes) - 1)))


def make_plan(candidates: int, amount: float, costs: Costs, most: int) -> list[Rung] | None:
    """The rungs for a number of candidates, or None if the budget is too small for them.

    Args:
        candidates: Number of candidates of the first rung.
        amount: Budget, in the unit of the costs.
        costs: Measured costs.
        most: Largest number of steps of a candidate.

    Example:
        >>> make_plan(20, 2000, Costs(), most=1000)
        [Rung(steps=21, candidates=20), Rung(steps=65, candidates=9), Rung(steps=195, candidates=5)]
        >>> make_plan(80, 1500, Costs(), most=1000) is None
        True
    """
    sizes = _sizes(candidates, most)
    if amount < _least(sizes, costs, most):
        return None
    last = _last_steps(sizes, amount, costs, most)
    return [
        Rung(max(1, math.floor(last / FACTOR**i)), size)
        for i, size in zip(reversed(range(len(sizes))), sizes, strict=True)
    ]


def least_budget(candidates: int, costs: Costs, most: int) -> float:
    """The smallest budget for which `make_plan` finds a plan."""
    return _least(_sizes(candidates, most), costs, most)


def _sizes(candidates: int, most: int) -> list[int]:
    """Numbers of candidates of the rungs, as many rungs as leave enough steps for the first."""
    sizes = [candidates]
    while sizes[-1] > FINALISTS + CONTROLS + 1 and most / FACTOR ** len(sizes) >= FIRST_STEPS:
        sizes.append(math.ceil(sizes[-1] / FACTOR) + CONTROLS)
    return sizes


def _least(sizes: list[int], costs: Costs, most: int) -> float:
    last = min(most, max(LAST_STEPS, FIRST_STEPS * FACTOR ** (len(sizes) - 1)))
    return price(sizes, last, costs)


def _last_steps(sizes: Sequence[int], amount: float, costs: Costs, most: int) -> float:
    fixed = price(sizes, 0, costs)
    return min(most, (amount - fixed) / (price(sizes, 1, costs) - fixed))
