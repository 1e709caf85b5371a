"""Settings and candidates of a comparison. Nothing at the top of this module imports torch, so ``--help`` is quick."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from st_magnitude._checks import at_least, positive
from st_magnitude._config import (
    BatchSize,
    Bf16,
    MiniBatchSize,
    Negatives,
    Prompts,
    SkipEmpty,
    TrainLength,
    check_ranges,
    did_you_mean,
    numbers,
    words,
)
from st_magnitude.finetune.settings import TrainConfig

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["FACTOR", "LOSSES", "Candidate", "CompareConfig", "grid_of", "rungs_of", "seconds_of"]

LOSSES = ("cosine", "qnorm", "dot", "learnable", "tempaggmrl", "cosine-prior")
TEMPERATURES = (0.02, 0.05, 0.01, 0.1)
RATES, STATIC_RATES = (5e-5, 2e-5), (3e-2, 1e-2)
SIGREG = (0.0, 0.05)
SPREAD = (0.6, 1.2, 2.0)  # TempAggMRL's temperatures in units of one: 0.03, 0.06 and 0.1, the paper's, at 0.05
FACTOR = 3  # from rung to rung a candidate has so many times as many steps, and about one of so many is left


def seconds_of(budget: str) -> float:
    """The seconds of a time such as "90s", "30m" or "2h".

    Example:
        >>> seconds_of("2h")
        7200.0
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)\s*", str(budget))
    if found is None or not float(found[1]):
        raise ValueError(f"budget must be a time such as '90s', '30m' or '2h'; got {budget!r}.")
    return float(found[1]) * {"s": 1, "h": 3600}.get(found[2], 60)


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison. Every field is an option of ``st-magnitude compare``, which prints their help texts.

    Raises:
        ValueError: If a loss is unknown, the budget cannot be read, or a number is outside of its range.

    Example:
        >>> CompareConfig(losses=["qnorm"], budget="2h").max_steps
        300
    """

    budget: Annotated[str, typer.Option(help="Time after which no other candidate begins, as 30m or 2h.")] = "30m"
    losses: Annotated[
        Sequence[str] | None,
        words(f"Losses besides plain cosine, of {', '.join(LOSSES)}; default: all.", "NAME,NAME,..."),
    ] = None
    temperatures: Annotated[Sequence[float] | None, numbers("Temperatures; default: 0.02,0.05,0.01,0.1.")] = None
    learning_rates: Annotated[
        Sequence[float] | None, numbers("Learning rates; default: 5e-5,2e-5 (a static table: 3e-2,1e-2).")
    ] = None
    sigreg: Annotated[Sequence[float] | None, numbers("Weights of SIGReg, 0 for none; default: 0,0.05.")] = None
    epochs: Annotated[float, typer.Option(min=0, help="Largest number of passes over the training pairs.")] = 3.0
    max_steps: Annotated[int, typer.Option(min=1, help="Largest number of training steps of a candidate.")] = 300
    batch_size: BatchSize = 32
    mini_batch_size: MiniBatchSize = None
    negatives: Negatives = None
    max_length: TrainLength = None
    prompts: Prompts = True
    bf16: Bf16 = None
    split: Annotated[str, typer.Option(help="Split of the qrels to train on.")] = "train"
    dev_split: Annotated[str, typer.Option(help="Split to rank candidates on; else queries are held out.")] = "dev"
    test_split: Annotated[str, typer.Option(help="Split that is read once; else queries are held out.")] = "test"
    dev_queries: Annotated[int, typer.Option(min=1, help="Largest number of dev queries; more are sampled.")] = 500
    documents: Annotated[int, typer.Option(min=2, help="Documents of a search: the judged and a sample.")] = 5000
    skip_empty: SkipEmpty = False
    seed: Annotated[int, typer.Option(help="Seed for the splits, the order of the pairs, dropout and bootstrap.")] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        seconds_of(self.budget)
        for name in self.losses or ():
            if name not in LOSSES:
                raise ValueError(f"losses has {name!r}.{did_you_mean(name, LOSSES)} Choose from {', '.join(LOSSES)}.")
        for field in ("temperatures", "learning_rates"):
            for value in getattr(self, field) or ():
                positive(field, value)
        for weight in self.sigreg or ():
            at_least("sigreg", weight, 0)


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    ``tempaggmrl`` is cosine over a quarter, a half and all of the dimensions, each at `SPREAD` times the temperature.
    ``cosine-prior`` is cosine with `st_magnitude.DocumentPrior`.

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
        """The settings of `st_magnitude.finetune.run.train`, all but SIGReg."""
        from st_magnitude.losses.temperature import quarters

        shared = ("batch_size", "mini_batch_size", "negatives", "max_length", "prompts", "bf16", "seed")
        options: dict[str, Any] = {name: getattr(config, name) for name in shared}
        options |= {"learning_rate": self.learning_rate, "max_steps": steps}
        if self.loss == "tempaggmrl":
            options |= {"loss": "cosine", "dims": list(quarters(model))}
            options["temperatures"] = [round(factor * self.temperature, 6) for factor in SPREAD]
        else:
            loss, _, prior = self.loss.partition("-")
            options |= {"loss": loss, "prior": bool(prior), "temperature": self.temperature}
        return TrainConfig(**options)


def grid_of(config: CompareConfig, is_static: bool, has_prior: bool = False) -> list[Candidate]:
    """All candidates: every loss at the same temperatures, learning rates and weights of SIGReg.

    Plain cosine comes first at every setting, so a comparison that runs out of time has treated no loss better. The
    settings that matter least come last: the second learning rate, and SIGReg before it.

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
