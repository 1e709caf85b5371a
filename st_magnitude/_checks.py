"""Checks of arguments, whose ValueError names the argument, what it got and what it takes, and of optional packages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from typing import Any

__all__ = ["INSTALL", "at_least", "needs", "one_of", "positive", "prefix_dims", "whole_number"]


# There is no release to install from. What follows is "." or an extra, such as ".[plot]".
INSTALL = "from a checkout: pip install"


@contextmanager
def needs(purpose: str, extra: str) -> Iterator[None]:
    """Turns a missing package into an ImportError that says which extra to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{purpose} needs {error.name}. Install it {INSTALL} ".[{extra}]".') from error


def one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Checks that a value is one of a few choices.

    Example:
        >>> one_of("views", "both", ("pooled", "per_view"))
        Traceback (most recent call last):
        ValueError: views must be one of 'pooled' and 'per_view'; got 'both'.
    """
    if value not in choices:
        *first, last = map(repr, choices)
        raise ValueError(f"{name} must be one of {', '.join(first)} and {last}; got {value!r}.")


def positive(name: str, value: Any, words: Sequence[str | None] = ()) -> None:
    """Checks that a value is a positive, finite number, or one of the words.

    Example:
        >>> positive("scale", -1, ["auto"])
        Traceback (most recent call last):
        ValueError: scale must be a positive number or 'auto'; got -1.
    """
    if value in words and not isinstance(value, bool):
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        options = " or ".join(["a positive number", *map(repr, words)])
        raise ValueError(f"{name} must be {options}; got {value!r}.")


def at_least(name: str, value: Any, minimum: float, advice: str = "") -> None:
    """Checks that a number is not below a minimum; NaN never passes.

    Example:
        >>> at_least("every", 0, 1)
        Traceback (most recent call last):
        ValueError: every must be at least 1; got 0.
    """
    if not value >= minimum:
        raise ValueError(f"{name} must be at least {minimum}{advice}; got {value}.")


def prefix_dims(dims: Iterable[int]) -> tuple[int, ...]:
    """Prefix dimensions in the given order, after a check that they are distinct whole numbers from 1 up.

    Example:
        >>> prefix_dims([8, 8])
        Traceback (most recent call last):
        ValueError: dims must be distinct whole numbers of at least 1, such as [128, 256]; got [8, 8].
    """
    given = list(dims)
    try:
        whole = tuple(index(dim) for dim in given)
    except TypeError:
        whole = ()
    if not whole or min(whole) < 1 or len(set(whole)) < len(whole):
        raise ValueError(f"dims must be distinct whole numbers of at least 1, such as [128, 256]; got {given}.")
    return whole


def whole_number(name: str, value: Any) -> int:
    """The value as an int, after a check that it is a whole number from 1 up."""
    try:
        if not isinstance(value, bool) and index(value) >= 1:
            return index(value)
    except TypeError:
        pass
    raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
