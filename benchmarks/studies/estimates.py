"""Means with 95 % intervals, and tables of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

NOTHING = ["(No cells are stored yet.)"]


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float

    def show(self, scale: float = 100.0, digits: int = 1) -> str:
        values = (self.mean, self.low, self.high)
        mean, low, high = (f"{scale * value:+.{digits}f}" for value in values)
        return f"{mean} [{low}, {high}]"


Gain = tuple[Estimate, int]  # and the number of seeds


def margin(values: Sequence[float]) -> float:
    """Half a 95 % t interval of the mean; nan for one value."""
    n = len(values)
    if n < 2:
        return float("nan")
    return float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5)


def paired(differences: list[NDArray[np.float64]], num_samples: int = 2000) -> Estimate:
    """Mean over tasks of differences by seed and query, one (S, n) a task.

    The interval is the wider of a bootstrap over queries and t over seeds; with one seed it is
    over queries alone.
    """
    rng = np.random.default_rng(0)
    by_seed = np.mean([x.mean(axis=1) for x in differences], axis=0)  # (S,)
    resampled = np.zeros(num_samples)
    for x in differences:
        by_query = x.mean(axis=0)
        drawn = rng.integers(len(by_query), size=(num_samples, len(by_query)))
        resampled += by_query[drawn].mean(axis=1)
    low, high = np.quantile(resampled / len(differences), [0.025, 0.975])
    mean = float(by_seed.mean())
    if len(by_seed) > 1:
        half = margin(by_seed)
        low, high = min(low, mean - half), max(high, mean + half)
    return Estimate(mean, float(low), float(high))


def gain_of(
    after: Mapping[int, NDArray[np.float64]], before: Mapping[int, NDArray[np.float64]]
) -> Gain | None:
    """Figures of every query by seed less others, over the seeds that both have."""
    seeds = sorted(after.keys() & before.keys())
    if not seeds:
        return None
    return paired([np.array([after[seed] - before[seed] for seed in seeds])]), len(seeds)


def show(found: Gain | Estimate | None) -> str:
    """A gain in points with its interval, or nothing."""
    estimate = found[0] if isinstance(found, tuple) else found
    return "" if estimate is None else estimate.show()


def in_points(values: Any, scale: float = 100.0) -> str:
    return f"{scale * np.mean(values):.1f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Any]], align: str = "l") -> list[str]:
    """The lines of a table.

    Args:
        align: "l" or "r" for the first columns; the others are aligned to the right.

    Example:
        >>> markdown(["loss", "dev"], [["Cosine", 46.4]])
        ['| loss | dev |', '| --- | ---: |', '| Cosine | 46.4 |']
    """
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    if not lines:
        return NOTHING
    ruler = ["---" if kind == "l" else "---:" for kind in align.ljust(len(head), "r")]
    return ["| " + " | ".join(head) + " |", "| " + " | ".join(ruler) + " |", *lines]
