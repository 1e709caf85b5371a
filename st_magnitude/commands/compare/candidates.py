"""What a comparison tries: a loss at a temperature and a learning rate, with or without SIGReg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from st_magnitude.commands.compare.config import LOSSES, CompareConfig
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.losses.regularizers import SIGReg

__all__ = ["CUSTOMARY", "Candidate", "grids"]

CUSTOMARY = 0.05  # the temperature of sentence-transformers' default scale of 20
TEMPERATURES = ((0.01, 0.02, 0.05, 0.1), (0.02, 0.05))
RATES, STATIC_RATES = (5e-5, 2e-5), (3e-2, 1e-2)
SIGREG = (0.0, 0.05)
SPREAD = (0.6, 1.2, 2.0)  # TempAggMRL's temperatures in units of one: 0.03, 0.06 and 0.1, the paper's, at 0.05


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

    def settings(self, config: CompareConfig, dims: tuple[int, ...], steps: int) -> TrainConfig:
        """The settings of `st_magnitude.finetune.run.train` for a model with these prefixes."""
        if self.loss == "tempaggmrl":
            taus = [round(factor * self.temperature, 6) for factor in SPREAD]
            terms: dict[str, Any] = {"loss": "cosine", "dims": list(dims), "temperatures": taus}
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
    loss has the same temperatures and rates, and every set contains plain cosine at all of them.

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
        controls = product(["cosine"], temperatures, chosen, [0.0])
        others = product(names, temperatures, chosen, weights)
        grid = [Candidate(*choice) for choice in dict.fromkeys([*controls, *others])]
        if grid not in found:
            found.append(grid)
    return found
