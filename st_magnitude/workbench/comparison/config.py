"""Settings and candidates of a comparison. The module imports no torch: ``--help`` is quick."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Annotated

from st_magnitude._checks import InputError, did_you_mean, positive
from st_magnitude.losses.named import LOSSES
from st_magnitude.workbench._config import (
    Bf16,
    Floats,
    MaxLength,
    MiniBatchSize,
    Names,
    Negatives,
    Option,
    Prompts,
    as_options,
    check_ranges,
    numbers,
    seconds_of,
    words,
)
from st_magnitude.workbench.finetune.settings import TrainConfig

__all__ = ["Candidate", "CompareConfig", "grid_of"]

COSINE_PRIOR = "cosine-prior"  # cosine with `st_magnitude.DocumentPrior`

# Temperatures and learning rates in the order in which they are tried; the first ones are the
# defaults of `TrainConfig`.
USUAL_GRID = (0.05, 0.02, 0.01, 0.1), (5e-5, 2e-5)
STATIC_GRID = (0.1, 0.05, 0.02, 0.2), (3e-2, 1e-2)


def compared_losses() -> list[str]:
    """All losses that a comparison can try, in the order in which it tries them."""
    return [*(name for name, loss in LOSSES.items() if loss.is_compared), COSINE_PRIOR]


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison. Every field is an option of ``st-magnitude compare``.

    Raises:
        ValueError: If a loss is unknown, the budget unreadable, or a number out of range.
    """

    budget: Annotated[str, Option(help="Time for all trainings, as 2h.")] = "30m"
    losses: Annotated[
        Names,
        words(
            f"Of {', '.join(compared_losses())}; default: all. Cosine is always tried.",
            "NAME,NAME,...",
        ),
    ] = None
    temperatures: Annotated[
        Floats,
        numbers("Temperatures; default: 0.05,0.02,0.01,0.1 (a static table: 0.1,0.05,0.02,0.2)."),
    ] = None
    learning_rates: Annotated[
        Floats, numbers("Learning rates; default: 5e-5,2e-5 (a static table: 3e-2,1e-2).")
    ] = None
    epochs: Annotated[
        float | None, Option(min=0, help="Passes over the pairs; default: as train.")
    ] = None
    max_steps: Annotated[
        int | None, Option(min=1, help="Largest number of steps of a candidate; default: no limit.")
    ] = None
    batch_size: Annotated[
        int | None,
        Option(min=2, help="Pairs in a batch, each a negative of the others; default: as train."),
    ] = None
    mini_batch_size: MiniBatchSize = None
    negatives: Negatives = None
    max_length: MaxLength = None
    prompts: Prompts = True
    bf16: Bf16 = None
    split: Annotated[str, Option(help="Split to train on.")] = "train"
    dev_split: Annotated[str, Option(help="Split to choose on; if missing, part of train.")] = "dev"
    test_split: Annotated[str, Option(help="Split to test on; if missing, part of train.")] = "test"
    dev_queries: Annotated[int, Option(min=1, help="Largest number of dev queries.")] = 500
    documents: Annotated[int, Option(min=2, help="Documents to search; judged ones always.")] = 5000
    seed: Annotated[int, Option(min=0, help="Random seed.")] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        seconds_of(self.budget)
        known = compared_losses()
        for name in self.losses or ():
            if name not in known:
                hint = did_you_mean(name, known)
                raise InputError(f"losses has {name!r}.{hint} Choose from {', '.join(known)}.")
        for field in ("temperatures", "learning_rates"):
            for value in getattr(self, field) or ():
                positive(field, value)

    @property
    def tried(self) -> list[str]:
        """The losses to try, in their order."""
        asked = {"cosine", *(self.losses or compared_losses())}
        return [name for name in compared_losses() if name in asked]


@dataclass(frozen=True)
class Candidate:
    """A loss with its temperature and learning rate."""

    loss: str
    temperature: float
    learning_rate: float

    @property
    def name(self) -> str:
        return f"{self.loss} tau={self.temperature:g} lr={self.learning_rate:g}"

    def settings(self, config: CompareConfig, steps: int) -> TrainConfig:
        """The settings of `st_magnitude.workbench.finetune.train.train`."""
        has_prior = self.loss == COSINE_PRIOR
        return TrainConfig(
            loss="cosine" if has_prior else self.loss,
            prior=has_prior,
            temperature=self.temperature,
            learning_rate=self.learning_rate,
            max_steps=steps,
            batch_size=config.batch_size,
            mini_batch_size=config.mini_batch_size,
            negatives=config.negatives,
            max_length=config.max_length,
            prompts=config.prompts,
            bf16=config.bf16,
            seed=config.seed,
        )

    def options(self, config: CompareConfig, steps: int, model: str | None) -> str:
        """The settings as options of ``st-magnitude train``, without its defaults."""
        given = {"model": model} | vars(self.settings(config, steps))
        return as_options(given, {"model": None} | vars(TrainConfig()))


def grid_of(config: CompareConfig, is_static: bool, has_prior: bool = False) -> list[Candidate]:
    """All candidates: every loss at the first setting, cosine before the others, then every loss at
    the second one. The first setting is that of `TrainConfig`; rates matter more than
    temperatures."""
    names = [name for name in config.tried if name != COSINE_PRIOR or has_prior]
    temperatures, rates = STATIC_GRID if is_static else USUAL_GRID
    settings = product(config.temperatures or temperatures, config.learning_rates or rates)
    return [Candidate(name, tau, rate) for tau, rate in settings for name in names]
