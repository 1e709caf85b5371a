"""Checks of arguments, whose ValueError names the argument, what it got and what it takes, and of
optional packages."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import TypeGuard

# There is no release to install from. What follows is "." or an extra, such as ".[plot]".
INSTALL = "from a checkout: pip install"

LARGEST = 2**31  # numbers of options; seeds of numpy end at twice as many


class InputError(ValueError):
    """A value that cannot be used: a message in one line, as of the two classes below."""


class InputTypeError(TypeError):
    """An `InputError` for a value of another type."""


class MissingPackage(ImportError):
    """An optional package that is not installed."""


@contextmanager
def foreign() -> Iterator[None]:
    """Takes over what another package refuses with a sentence of its own."""
    try:
        yield
    except (ValueError, ImportError) as error:
        if type(error) in (ValueError, ImportError):  # those below have no such sentence
            kind = InputError if isinstance(error, ValueError) else MissingPackage
            raise kind(str(error)) from error
        raise


@contextmanager
def needs(purpose: str, extra: str) -> Iterator[None]:
    """Turns a missing package into an ImportError that says which extra to install."""
    try:
        yield
    except ImportError as error:
        raise MissingPackage(
            f'{purpose} needs {error.name}. Install it {INSTALL} ".[{extra}]".'
        ) from error


def shown(value: object, most: int = 99) -> str:
    """A value as a message shows it, cut."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def counted(number: int, noun: str) -> str:
    """A number of things: "1 row", "2,000 queries"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the closest known name, after a space; nothing if no name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def is_number(value: object, kind: type = Real) -> TypeGuard[float]:
    """Whether a value is a number of a kind, and neither True nor False."""
    return isinstance(value, kind) and not isinstance(value, bool)


def one_of(name: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        *first, last = map(repr, choices)
        raise InputError(f"{name} must be one of {', '.join(first)} and {last}; got {value!r}.")


def positive(name: str, value: object, words: Sequence[str | None] = ()) -> None:
    """Checks that a value is a positive, finite number, or one of the words."""
    if value not in words and not (is_number(value) and 0 < value < math.inf):
        options = " or ".join(["a positive number", *map(repr, words)])
        raise InputError(f"{name} must be {options}; got {value!r}.")


def in_range(name: str, value: object) -> None:
    """Checks that no number of a value is NaN, infinite, or larger than libraries count."""
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, float) and not math.isfinite(number):
            raise InputError(f"{name} must be a finite number; got {number}.")
        if isinstance(number, (int, float)) and number >= LARGEST:
            raise InputError(f"{name} must be less than {LARGEST:,}; got {number:,}.")


def at_least(name: str, value: object, minimum: float, advice: str = "", kind: type = Real) -> None:
    """Checks that a value is a number that is not below a minimum; NaN never passes."""
    if not (is_number(value, kind) and value >= minimum):
        raise InputError(f"{name} must be at least {minimum}{advice}; got {value!r}.")


def prefix_dims(dims: Iterable[int]) -> tuple[int, ...]:
    """Prefix dimensions as given, after a check that they are distinct whole numbers from 1 up."""
    given = list(dims)
    are_whole = all(is_number(dim, Integral) and dim >= 1 for dim in given)
    if not given or not are_whole or len(set(given)) < len(given):
        raise InputError(
            f"dims must be distinct whole numbers of at least 1, such as [128, 256]; got {given}."
        )
    return tuple(map(int, given))
