"""The candidates of a comparison, in the order in which they are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude.comparison.config import LOSSES, CompareConfig
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.losses.regularizers import SIGReg
from st_magnitude.losses.temperature import quarters

__all__ = ["FACTOR", "Candidate", "grid_of", "rungs_of"]

TEMPERATURES = (0.02, 0.05, 0.01, 0.1)
RATES, STATIC_RATES = (5e-5, 2e-5), (3e-2, 1e-2)
SIGREG = (0.0, 0.05)
SPREAD = (0.6, 1.2, 2.0)  # TempAggMRL's temperatures in units of one: 0.03, 0.06 and 0.1, the paper's, at 0.05
FACTOR = 3  # from rung to rung a candidate has so many times as many steps, and about one of so many is left


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    ``tempaggmrl`` is cosine over a quarter, a half and all of the dimensions at 0.6, 1.2 and 2 times the temperature,
    which at 0.05 are the temperatures of its paper. ``cosine-prior`` is cosine with `st_magnitude.DocumentPrior`.

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
        shared = ("batch_size", "mini_batch_size", "negatives", "max_length", "bf16", "seed")
        options: dict[str, Any] = {name: getattr(config, name) for name in shared}
        options |= {"learning_rate": self.learning_rate, "max_steps": steps}
        if self.loss == "tempaggmrl":
            options |= {"loss": "cosine", "dims": list(quarters(model))}
            options["temperatures"] = [round(factor * self.temperature, 6) for factor in SPREAD]
        else:
            loss, _, prior = self.loss.partition("-")
            options |= {"loss": loss, "prior": bool(prior), "temperature": self.temperature}
        return TrainConfig(**options)

    def loss_options(self) -> dict[str, Any]:
        return {"regularizers": [(SIGReg(), self.sigreg)]} if self.sigreg else {}


def grid_of(config: CompareConfig, is_static: bool, has_prior: bool = False) -> list[Candidate]:
    """All candidates: every loss at the same temperatures, learning rates and weights of SIGReg.

    All losses are tried at one setting after the other, plain cosine first, so a comparison that runs out of time has
    treated no loss better than cosine. The settings that matter least come last: other learning rates, then SIGReg.
    Without a prior, there is no ``cosine-prior``.

    Example:
        >>> len(grid_of(CompareConfig(), is_static=False)), len(grid_of(CompareConfig(), False, has_prior=True))
        (80, 96)
        >>> grid = grid_of(CompareConfig(losses=["dot"], temperatures=[0.05], sigreg=[0.1]), is_static=True)
        >>> [candidate.name for candidate in grid[:2]]
        ['cosine tau=0.05 lr=0.03', 'dot tau=0.05 lr=0.03 sigreg=0.1']
    """
    names = [name for name in LOSSES if name in (config.losses or LOSSES) and (has_prior or name != "cosine-prior")]
    rates = config.learning_rates or (STATIC_RATES if is_static else RATES)
    found: list[Candidate] = []
    for rate, weight, tau in product(rates, config.sigreg or SIGREG, config.temperatures or TEMPERATURES):
        found += [Candidate("cosine", tau, rate), *(Candidate(name, tau, rate, weight) for name in names)]
    return list(dict.fromkeys(found))


def rungs_of(candidates: int, steps: int) -> list[int]:
    """The steps after which a candidate is measured, each three times as many as the ones before.

    Example:
        >>> rungs_of(8, 300), rungs_of(9, 300), rungs_of(80, 1000)
        ([300], [100, 300], [111, 333, 999])
    """
    halvings = max(0, math.floor(math.log(candidates / 3, FACTOR) + 1e-9))  # as many as leave three candidates
    first = max(1, steps // FACTOR**halvings)
    return [first * FACTOR**rung for rung in range(halvings + 1)]
