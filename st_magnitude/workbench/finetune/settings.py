"""TrainConfig: the settings of a training run, for ``st-magnitude train`` and for `train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from st_magnitude._checks import InputError, did_you_mean, positive
from st_magnitude.losses.named import LOSSES
from st_magnitude.workbench._config import (
    Bf16,
    Floats,
    Ints,
    MaxLength,
    MiniBatchSize,
    Negatives,
    Option,
    Prompts,
    check_ranges,
    numbers,
    seconds_of,
    whole_numbers,
)

__all__ = ["TrainConfig"]

BUDGET = "10m"


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Every field is an option of ``st-magnitude train``, which prints
    their help texts.

    Raises:
        ValueError: If the loss is unknown or a number is outside of its range.
    """

    split: Annotated[str, Option(help="Split to train on.")] = "train"
    dev_split: Annotated[str, Option(help="Split to measure on, if the data have it.")] = "dev"
    confirm: Annotated[
        str | None, Option(help="Split to measure the saved model on at the end, as test.")
    ] = None
    loss: Annotated[str, Option(help=f"Ranking loss: {', '.join(LOSSES)}.")] = "cosine"
    dims: Annotated[Ints, whole_numbers("Dimensions to train, as 96,192,384; default: all.")] = None
    temperatures: Annotated[
        Floats,
        numbers("Temperatures whose losses are summed; default: 0.05, or those of the loss."),
    ] = None
    temperature: Annotated[
        float | None, Option(help="Temperature; default: 0.05; cosine on a static table: 0.1.")
    ] = None
    epochs: Annotated[
        float | None,
        Option(
            min=0,
            help="Passes over the pairs; default: 1, or up to 8 until there are 40 steps; static"
            " table: 3.",
        ),
    ] = None
    max_steps: Annotated[int, Option(min=-1, help="Steps, instead of --epochs if positive.")] = -1
    batch_size: Annotated[
        int | None,
        Option(
            min=2,
            help="Pairs in a batch, each a negative of the others; default: 32, or 512 for a static"
            " table on more than 50,000 pairs.",
        ),
    ] = None
    mini_batch_size: MiniBatchSize = None
    learning_rate: Annotated[
        float | None,
        Option(min=0, help="Learning rate; default: 5e-5; LoRA: 2e-4; static table: 0.03."),
    ] = None
    lora: Annotated[
        int | None, Option(min=1, help="Rank of a LoRA to train in place of all weights.")
    ] = None
    negatives: Negatives = None
    prior: Annotated[bool, Option(help="Correct for documents that are often positive (logQ).")] = (
        False
    )
    max_length: MaxLength = None
    prompts: Prompts = True
    bf16: Bf16 = None
    save_steps: Annotated[int, Option(min=1, help="Steps between checkpoints.")] = 200
    folds: Annotated[
        int | None,
        Option(
            min=0,
            help="Folds to measure in, without a dev split; default: 2, static table: 5; with many"
            " queries a dev split.",
        ),
    ] = None
    seed: Annotated[int, Option(min=0, help="Seed for the order, the negatives and dropout.")] = 0
    worth: Annotated[
        float, Option(min=0, help="Points that a less simple search has to gain to be deployed.")
    ] = 0.5
    budget: Annotated[
        str | None,
        Option(help="Time for the encoder of a training without --model, as 2h; default: 10m."),
    ] = None
    keep_scoring: Annotated[
        bool, Option(help="Score as trained, even if another exponent is clearly better.")
    ] = False
    keep_anyway: Annotated[bool, Option(help="Save a clearly worse model, too.")] = False
    keep_checkpoints: Annotated[bool, Option(help="Keep checkpoints of a finished run.")] = False
    resume: Annotated[bool, Option(help="Continue from the last checkpoint.")] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        seconds_of(self.budget or BUDGET)
        positive("temperature", self.temperature, [None])
        if self.loss not in LOSSES:
            raise InputError(
                f"There is no loss {self.loss!r}.{did_you_mean(self.loss, LOSSES)} "
                f"Choose one of {', '.join(LOSSES)}."
            )
        has_temperatures = self.temperatures is not None or LOSSES[self.loss].has_temperatures
        if self.temperature is not None and (has_temperatures or self.dims is not None):
            raise InputError(
                "temperature is for a loss of one term. With dims, or a loss of several"
                f" temperatures, pass {self.temperature} as temperatures instead."
            )
