"""The candidates of a comparison, and how many of them a budget can train for how many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude.comparison.config import LOSSES, CompareConfig
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.losses.sigreg import SIGReg
from st_magnitude.losses.temperature import quarters

__all__ = ["FACTOR", "Candidate", "Costs", "cost", "grids", "least_steps", "plan", "rungs_of"]

TEMPERATURES = ((0.01, 0.02, 0.05, 0.1), (0.02, 0.05))
RATES, STATIC_RATES = (5e-5, 2e-5), (3e-2, 1e-2)
SIGREG = (0.0, 0.05)
SPREAD = (0.6, 1.2, 2.0)  # TempAggMRL's temperatures in units of one: 0.03, 0.06 and 0.1, the paper's, at 0.05
FACTOR = 3  # from rung to rung a candidate has so many times as many steps, and about one of so many is left
FIRST_STEPS, LAST_STEPS = 20, 100  # the fewest steps of a first and of a last rung that tell candidates apart


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    ``tempaggmrl`` is cosine over a quarter, a half and all of the dimensions at 0.6, 1.2 and 2 times the temperature,
    which at 0.05 are the temperatures of its paper.

    Example:
        >>> Candidate("qnorm", 0.02, 5e-5, 0.05).name
        'qnorm tau=0.02 lr=5e-05 sigreg=0.05'
    """

    loss: str
    temperature: float
    learning_rate: float
    sigreg: float = 0.0  # weight; 0: without

    @property
    def name(self) -> str:
        name = f"{self.loss} tau={self.temperature:g} lr={self.learning_rate:g}"
        return f"{name} sigreg={self.sigreg:g}" if self.sigreg else name

    @property
    def is_plain_cosine(self) -> bool:
        return self.loss == "cosine" and not self.sigreg

    def settings(self, config: CompareConfig, model: SentenceTransformer, steps: int) -> TrainConfig:
        """The settings of `st_magnitude.finetune.run.train`."""
        if self.loss == "tempaggmrl":
            taus = [round(factor * self.temperature, 6) for factor in SPREAD]
            terms: dict[str, Any] = {"loss": "cosine", "dims": list(quarters(model)), "temperatures": taus}
        else:
            terms = {"loss": self.loss, "temperature": self.temperature}
        shared = ("batch_size", "mini_batch_size", "negatives", "max_length", "bf16", "seed")
        terms |= {name: getattr(config, name) for name in shared}
        return TrainConfig(**terms, learning_rate=self.learning_rate, max_steps=steps)

    def loss_options(self) -> dict[str, Any]:
        return {"regularizers": [(SIGReg(), self.sigreg)]} if self.sigreg else {}


def grids(config: CompareConfig, is_static: bool) -> list[list[Candidate]]:
    """Sets of candidates, from the largest to the smallest, of which a comparison takes the first that fits its budget.

    Smaller sets leave out a learning rate, then SIGReg, then temperatures, and never what the user has asked for. Every
    loss has the same temperatures and rates. Plain cosine comes first at all of them, and then all losses at one
    setting after the other, so a comparison that runs out of time has treated no loss better than cosine.

    Example:
        >>> [len(grid) for grid in grids(CompareConfig(), is_static=False)]
        [80, 40, 20, 10]
        >>> [c.name for c in grids(CompareConfig(losses=["dot"], temperatures=[0.05]), is_static=True)[-1]]
        ['cosine tau=0.05 lr=0.03', 'dot tau=0.05 lr=0.03']
    """
    rates = STATIC_RATES if is_static else RATES
    sizes: list[tuple[Sequence[float], ...]] = [(TEMPERATURES[0], rates, SIGREG), (TEMPERATURES[0], rates[:1], SIGREG)]
    sizes += [(temperatures, rates[:1], SIGREG[:1]) for temperatures in TEMPERATURES]
    names = [name for name in LOSSES if name in (config.losses or LOSSES)]
    found: list[list[Candidate]] = []
    for size in sizes:
        asked = (config.temperatures, config.learning_rates, config.sigreg)
        temperatures, chosen, weights = (own or default for own, default in zip(asked, size, strict=True))
        controls = [Candidate("cosine", t, lr) for lr, t in product(chosen, temperatures)]
        others = [Candidate(loss, t, lr, w) for w, lr, t, loss in product(weights, chosen, temperatures, names)]
        grid = list(dict.fromkeys([*controls, *others]))
        if grid not in found:
            found.append(grid)
    return found


@dataclass(frozen=True)
class Costs:
    """The parts of a training run, in seconds, or in steps for a budget in steps."""

    step: float = 1.0
    search: float = 0.0  # on dev


def cost(candidates: int, steps: float, costs: Costs) -> float:
    """About what a comparison takes whose candidates have at most so many steps.

    A third of the candidates of a rung goes on, and one more, because the first ones cannot know what follows.

    Example:
        >>> cost(4, 100, Costs()), cost(10, 300, Costs(step=0.5, search=2.0))
        (400.0, 1030.0)
    """
    halvings, total, before = _halvings(candidates), 0.0, 0.0
    for rung in range(halvings + 1):
        number = min(candidates, math.ceil(candidates / FACTOR**rung) + min(rung, 1))
        end = steps / FACTOR ** (halvings - rung)
        total += number * ((end - before) * costs.step + costs.search)
        before = end
    return total


def least_steps(candidates: int, most: int) -> int:
    """The fewest steps of a whole run that tell so many candidates apart, and at most ``most``."""
    return min(most, max(LAST_STEPS, FIRST_STEPS * FACTOR ** _halvings(candidates)))


def plan(candidates: int, amount: float, costs: Costs, most: int) -> int:
    """The steps of a whole run for which an amount is enough, at most ``most``.

    Example:
        >>> plan(4, 400, Costs(), most=1000), plan(4, 400, Costs(), most=50), plan(10, 2000, Costs(), most=1000)
        (100, 50, 300)
    """
    fixed = cost(candidates, 0, costs)
    return min(most, math.floor((amount - fixed) / (cost(candidates, 1, costs) - fixed) + 1e-9))


def rungs_of(candidates: int, steps: int) -> list[int]:
    """The steps after which a candidate is searched with, each three times as many as the ones before.

    Example:
        >>> rungs_of(8, 300), rungs_of(9, 300), rungs_of(80, 1000)
        ([300], [100, 300], [111, 333, 999])
    """
    halvings = _halvings(candidates)
    first = max(1, steps // FACTOR**halvings)
    return [first * FACTOR**rung for rung in range(halvings + 1)]


def _halvings(candidates: int) -> int:
    """As many as leave three candidates."""
    return max(0, math.floor(math.log(candidates / 3, FACTOR) + 1e-9))
