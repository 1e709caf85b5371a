"""CompareConfig: the settings of a comparison, for ``st-magnitude compare`` and for `compare`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from st_magnitude._checks import positive
from st_magnitude._config import (
    BatchSize,
    Bf16,
    MiniBatchSize,
    Negatives,
    SkipEmpty,
    check_ranges,
    did_you_mean,
    numbers,
    words,
)

__all__ = ["LOSSES", "CompareConfig", "parse_budget"]

LOSSES = ("cosine", "qnorm", "dot", "learnable", "tempaggmrl")
SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}


def parse_budget(text: str) -> tuple[float, bool]:
    """The seconds that a comparison may take, or the training steps of all its candidates, and whether it is steps.

    Example:
        >>> parse_budget("2h"), parse_budget("500 steps")
        ((7200.0, False), (500.0, True))
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|steps?)\s*", str(text))
    if found is None or not float(found[1]):
        raise ValueError(
            f"budget must be a time or a number of steps, such as '30m', '2h' or '500 steps'; got {text!r}."
        )
    return float(found[1]) * SECONDS.get(found[2], 1), found[2].startswith("step")


@dataclass(frozen=True)
class CompareConfig:
    """Settings of a comparison. Every field is an option of ``st-magnitude compare``, which prints their help texts.

    Raises:
        ValueError: If a loss is unknown, the budget cannot be read, or a number is outside of its range.

    Example:
        >>> CompareConfig(losses=["q-norm"])
        Traceback (most recent call last):
        ...
        ValueError: losses has 'q-norm'. Did you mean 'qnorm'? Choose from cosine, qnorm, dot, learnable, tempaggmrl.
    """

    budget: Annotated[
        str, typer.Option(help="Time for everything, such as 30m or 2h, or training steps, such as '2000 steps'.")
    ] = "30m"
    losses: Annotated[
        Sequence[str] | None,
        words(f"Losses to try besides plain cosine: {', '.join(LOSSES)}; default: all.", "NAME,NAME,..."),
    ] = None
    temperatures: Annotated[
        Sequence[float] | None,
        numbers("Temperatures of every loss; default: 0.01,0.02,0.05,0.1, in a small budget 0.02,0.05."),
    ] = None
    learning_rates: Annotated[
        Sequence[float] | None,
        numbers("Learning rates of every loss; default: 5e-5,2e-5 (a static table: 3e-2,1e-2), or the first of them."),
    ] = None
    sigreg: Annotated[
        Sequence[float] | None, numbers("Weights of SIGReg, 0 for none; default: 0,0.05, in a small budget 0.")
    ] = None
    epochs: Annotated[
        float, typer.Option(min=0, help="Largest number of passes over the training pairs of one candidate.")
    ] = 3.0
    batch_size: BatchSize = 32
    mini_batch_size: MiniBatchSize = None
    negatives: Negatives = None
    max_length: Annotated[
        int | None,
        typer.Option(min=1, help="Number of tokens of a text in training; searches read what the model reads."),
    ] = None
    dim: Annotated[
        int | None,
        typer.Option(min=1, help="Dimensions of an embedding that the index and every search keep; default: all."),
    ] = None
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
        parse_budget(self.budget)
        for name in self.losses or ():
            if name not in LOSSES:
                raise ValueError(f"losses has {name!r}.{did_you_mean(name, LOSSES)} Choose from {', '.join(LOSSES)}.")
        for field in ("temperatures", "learning_rates"):
            for value in getattr(self, field) or ():
                positive(field, value)
        for weight in self.sigreg or ():
            if not 0 <= weight < float("inf"):
                raise ValueError(f"sigreg must be weights of at least 0, such as 0,0.05; got {weight}.")
