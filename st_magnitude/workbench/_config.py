"""Settings of a command and a function: a dataclass, whose fields are the command's options.

A field carries an `Option` in its annotation. `commands.core.command` shows it on the command line,
and `check_ranges` applies its range to values from Python.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Annotated, get_args, get_type_hints

from st_magnitude._checks import InputError, in_range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Option:
    """The purpose of a field, and the values it takes. The parser reads a text."""

    help: str
    min: float | None = None
    max: float | None = None
    parser: Callable[[str], object] | None = None
    metavar: str | None = None


Ints = Sequence[int] | None
Floats = Sequence[float] | None
Names = Sequence[str] | None

# Options of several configurations
MaxLength = Annotated[int | None, Option(min=1, help="Tokens of a text; default: as the model.")]
MiniBatchSize = Annotated[int | None, Option(min=1, help="Texts at a time, to save memory.")]
Negatives = Annotated[
    int | None,
    Option(min=0, help="Hard negatives for a pair; default: 1 if there are judged ones."),
]
Prompts = Annotated[bool, Option(help="Put the model's prompts before the texts.")]
Bf16 = Annotated[bool | None, Option(help="Compute in bfloat16; default: where it is fast.")]
SkipEmpty = Annotated[bool, Option(help="Leave out judgments of empty and absent texts.")]


def check_ranges(config: DataclassInstance) -> None:
    """Checks every field of a dataclass against the smallest and largest value of its option."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        value = getattr(config, field.name)
        in_range(field.name, value)
        for option in get_args(hints[field.name]):
            if value is None or not isinstance(option, Option):
                continue
            if option.min is not None and not value >= option.min:
                raise InputError(f"{field.name} must be at least {option.min:g}, got {value}.")
            if option.max is not None and not value <= option.max:
                raise InputError(f"{field.name} must be at most {option.max:g}, got {value}.")


def as_options(given: Mapping[str, object], usual: Mapping[str, object]) -> str:
    """Values by the names of options, as a shell reads them, without those that are usual."""
    words: list[str] = []
    for name, value in given.items():
        option = name.replace("_", "-")
        if value == usual.get(name):
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{option}", shlex.quote(str(one))]
    return " ".join(words)


def seconds_of(budget: str) -> float:
    """The seconds of a time such as "90s", "30m" or "2h"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)\s*", str(budget))
    if found is None or not float(found[1]):
        raise InputError(f"budget must be a time such as '90s', '30m' or '2h'; got {budget!r}.")
    return float(found[1]) * {"s": 1, "h": 3600}.get(found[2], 60)


def _separated(kind: Callable[[str], object], help: str, metavar: str) -> Option:
    """An option that takes values separated by commas."""

    def parse(given: str) -> list[object]:
        try:
            return [kind(x) for x in given.split(",")]
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise InputError(f"takes {what} separated by commas, got {given!r}.") from None

    return Option(help, parser=parse, metavar=metavar)


whole_numbers = partial(_separated, int, metavar="N,N,...")
numbers = partial(_separated, float, metavar="X,X,...")
words = partial(_separated, str)
