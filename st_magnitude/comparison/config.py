"""CompareConfig: the settings of a comparison, for ``st-magnitude compare`` and for `compare`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from st_magnitude._checks import at_least, positive
from st_magnitude._config import (
    BatchSize,
    Bf16,
    MiniBatchSize,
    Negatives,
    SkipEmpty,
    TrainLength,
    check_ranges,
    did_you_mean,
    numbers,
    words,
)

__all__ = ["LOSSES", "CompareConfig", "seconds_of"]

LOSSES = ("cosine", "qnorm", "dot", "learnable", "tempaggmrl", "cosine-prior")


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
        >>> CompareConfig(losses=["q-norm"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: losses has 'q-norm'. Did you mean 'qnorm'? Choose from cosine, qnorm, dot, ...
    """

    budget: Annotated[str, typer.Option(help="Time after which no further candidate begins, such as 30m or 2h.")] = (
        "30m"
    )
    losses: Annotated[
        Sequence[str] | None,
        words(f"Losses to try besides plain cosine: {', '.join(LOSSES)}; default: all.", "NAME,NAME,..."),
    ] = None
    temperatures: Annotated[
        Sequence[float] | None, numbers("Temperatures of every loss; default: 0.02,0.05,0.01,0.1.")
    ] = None
    learning_rates: Annotated[
        Sequence[float] | None,
        numbers("Learning rates of every loss; default: 5e-5,2e-5 (a static table: 3e-2,1e-2)."),
    ] = None
    sigreg: Annotated[Sequence[float] | None, numbers("Weights of SIGReg, 0 for none; default: 0,0.05.")] = None
    epochs: Annotated[
        float, typer.Option(min=0, help="Largest number of passes over the training pairs of one candidate.")
    ] = 3.0
    max_steps: Annotated[int, typer.Option(min=1, help="Largest number of training steps of one candidate.")] = 300
    batch_size: BatchSize = 32
    mini_batch_size: MiniBatchSize = None
    negatives: Negatives = None
    max_length: TrainLength = None
    bf16: Bf16 = None
    split: Annotated[str, typer.Option(help="Split of the qrels to train on.")] = "train"
    dev_split: Annotated[
        str, typer.Option(help="Split that candidates are ranked on; default: held-out queries of the training split.")
    ] = "dev"
    test_split: Annotated[
        str, typer.Option(help="Split that is read once, at the end; default: as for --dev-split.")
    ] = "test"
    dev_queries: Annotated[int, typer.Option(min=1, help="Largest number of dev queries; more are sampled.")] = 500
    documents: Annotated[
        int,
        typer.Option(
            min=2, help="Largest number of documents of a search: the judged ones and a sample of the others."
        ),
    ] = 5000
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
