"""TrainConfig: the settings of a training run, for ``st-magnitude train`` and for `train`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from st_magnitude._checks import positive
from st_magnitude._config import (
    BatchSize,
    Bf16,
    MiniBatchSize,
    Negatives,
    Prompts,
    TrainLength,
    check_ranges,
    did_you_mean,
    numbers,
    whole_numbers,
)

__all__ = ["LOSS_NAMES", "TrainConfig"]

LOSS_NAMES = ("cosine", "dot", "qnorm", "dnorm", "learnable", "tempagg")


def _temperature(given: Any) -> float | str:
    try:
        return given if given == "learned" else float(given)
    except ValueError:
        raise typer.BadParameter(f"takes a number or 'learned'; got {given!r}.") from None


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Every field is an option of ``st-magnitude train``, which prints
    their help texts.

    Raises:
        ValueError: If the loss is unknown or a number is outside of its range.

    Example:
        >>> TrainConfig(loss="qnorm", batch_size=64).max_steps
        -1
    """

    loss: Annotated[str, typer.Option(help=f"Ranking loss: {', '.join(LOSS_NAMES)}.")] = "cosine"
    dims: Annotated[
        Sequence[int] | None, whole_numbers("Prefixes to train, such as 96,192,384; default: all.")
    ] = None
    temperatures: Annotated[
        Sequence[float] | None,
        numbers(
            "Temperatures to sum over at every prefix, such as 0.03,0.1; default: 0.05, or as"
            " TempAggLoss."
        ),
    ] = None
    temperature: Annotated[  # a number, "learned" or None: typer does not know unions
        Any,
        typer.Option(
            parser=_temperature,
            metavar="X|learned",
            help=(
                "Temperature; 'learned' learns all temperatures, starting at 0.05 or at"
                " --temperatures."
            ),
        ),
    ] = None
    epochs: Annotated[
        float, typer.Option(min=0, help="Passes over the pairs of a query and a document.")
    ] = 1.0
    max_steps: Annotated[
        int, typer.Option(help="Number of steps; overrides --epochs if positive.")
    ] = -1
    batch_size: BatchSize = 32
    mini_batch_size: MiniBatchSize = None
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            help=(
                "Peak learning rate of AdamW; default: 2e-5, 2e-4 for LoRA, 0.03 for a static"
                " table."
            ),
        ),
    ] = None
    warmup_ratio: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the steps with a rising rate.")
    ] = 0.1
    negatives: Negatives = None
    margin: Annotated[
        float | None,
        typer.Option(
            help=(
                "Leave out negatives that score above the positive minus this, such as -0.1;"
                " default: 0 with --guide."
            )
        ),
    ] = None
    guide: Annotated[
        str | None, typer.Option(help="Folder or hub id of a model that scores for the margin.")
    ] = None
    prior: Annotated[
        bool,
        typer.Option(
            "--prior",
            help="Correct in-batch negatives by how often a document is a positive (logQ).",
        ),
    ] = False
    merge: Annotated[
        bool,
        typer.Option(
            "--merge", help="Merge the model with the pretrained one, by a weight chosen on dev."
        ),
    ] = False
    max_loss: Annotated[
        float,
        typer.Option(
            min=0, help="Largest loss of nDCG@10 of the merged model on each --keep-data."
        ),
    ] = 0.01
    max_length: TrainLength = None
    serve_length: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens that the saved model reads; default: as the pretrained model."
        ),
    ] = None
    prompts: Prompts = True
    bf16: Bf16 = None
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 200
    seed: Annotated[int, typer.Option(help="Seed for the order, the negatives and dropout.")] = 0
    keep_scoring: Annotated[
        bool,
        typer.Option(
            "--keep-scoring",
            help="Score the saved model as trained, even if another way is better.",
        ),
    ] = False
    keep_anyway: Annotated[
        bool,
        typer.Option(
            "--keep-anyway",
            help="Save the model even if it is clearly worse than the pretrained one.",
        ),
    ] = False
    keep_checkpoints: Annotated[
        bool,
        typer.Option("--keep-checkpoints", help="Keep the checkpoints after the run has finished."),
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in the output.")
    ] = False

    def __post_init__(self) -> None:
        check_ranges(self)
        positive("temperature", self.temperature, ["learned", None])
        has_terms = self.loss == "tempagg" or self.dims is not None or self.temperatures is not None
        if self.temperature not in (None, "learned") and has_terms:
            raise ValueError(
                f"temperature={self.temperature} is for a loss of one term. With dims, or with"
                f" several temperatures as tempagg has them, pass temperatures={self.temperature}"
                " instead."
            )
        if self.loss not in LOSS_NAMES:
            raise ValueError(
                f"There is no loss {self.loss!r}.{did_you_mean(self.loss, LOSS_NAMES)} "
                f"Choose one of {', '.join(LOSS_NAMES)}."
            )
