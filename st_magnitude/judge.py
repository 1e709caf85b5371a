"""Verdicts on differences of a metric, and warnings about norms and too few queries."""

from __future__ import annotations

import logging
import math
from collections.abc import Sized
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from st_magnitude._checks import InputError

logger = logging.getLogger(__name__)

FEW_QUERIES = 50
MOST_DIGITS = 4  # of a point


@dataclass(frozen=True)
class Difference:
    """The mean difference that a change of model or scoring makes, with the verdict of `judge`.

    Attributes:
        mean, low, high: The mean difference and the ends of its 95 % interval.
        queries, changed: Number of queries, and of those whose metric changed at all.

    Example:
        >>> print(judge([0.1] * 300))
        +10.0 points [+8.7, +11.1]
    """

    mean: float
    low: float
    high: float
    queries: int
    changed: int

    def __str__(self) -> str:
        """In points, which are hundredths, with the interval. An end that is not 0 has as many
        digits as tell it from 0."""
        ends = [100 * end for end in (self.low, self.high)]
        smallest = min((abs(end) for end in ends if end), default=1.0)
        digits = next(
            n for n in range(1, MOST_DIGITS + 1) if n == MOST_DIGITS or round(smallest, n)
        )
        mean, low, high = (f"{value:+.{digits}f}" for value in (100 * self.mean, *ends))
        return f"{mean} points [{low}, {high}]"

    @property
    def is_better(self) -> bool:
        """Whether the interval lies above 0."""
        return self.low > 0

    @property
    def is_worse(self) -> bool:
        """Whether the interval lies below 0."""
        return self.high < 0

    @property
    def verdict(self) -> str:
        """``"better"``, ``"worse"``, or ``"undecided"`` where the interval holds 0."""
        if self.is_worse:
            return "worse"
        return "better" if self.is_better else "undecided"

    @property
    def name(self) -> str:
        """How a sentence on the difference begins."""
        return {"better": "Better", "worse": "Worse"}.get(self.verdict, "No clear difference")


def judge(differences: ArrayLike, num_samples: int = 10_000, seed: int = 0) -> Difference:
    """Judges a mean difference by an interval that also holds for few queries and few changes.

    The interval has one more query, which lost everything for the lower end and won everything for
    the upper end:

        low, high = quantiles at 2.5 and 97.5 % of  w_1 x_1 + ... + w_n x_n -+ w_{n+1},

    where the weights w are uniform on the simplex (Dirichlet(1, ..., 1)). For differences of 0 or
    1, these are the exact limits of Clopper and Pearson; for many changes, about a bootstrap's.

    Args:
        differences: A metric such as nDCG@10 of every query with the change minus the one without,
            each in [-1, 1], (n,).
        num_samples: Number of draws of the weights.
        seed: Seed of the draws.

    Raises:
        ValueError: If there is no query, or a difference is not a number in [-1, 1].

    Example:
        >>> judge([0.05] * 25).verdict, judge([0.05] * 250).verdict
        ('undecided', 'better')

    Source: Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random
    Variable, arXiv 1905.06208. That it covers for every distribution is a conjecture without a
    known exception.
    """
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not (np.abs(x) <= 1 + 1e-9).all():
        raise InputError(
            "differences must be one number in [-1, 1] for each query, such as differences of "
            f"nDCG@10; got an array of shape {x.shape}."
        )
    changed = x[x != 0]
    unchanged = len(x) - len(changed)
    rng = np.random.default_rng(seed)
    extra = rng.standard_exponential(num_samples)
    total = extra + (rng.standard_gamma(unchanged, num_samples) if unchanged else 0.0)
    weighted = np.zeros(num_samples)
    for value in changed:
        weights = rng.standard_exponential(num_samples)
        weighted += weights * value
        total += weights
    low = float(np.quantile((weighted - extra) / total, 0.025))
    high = float(np.quantile((weighted + extra) / total, 0.975))
    return Difference(float(x.mean()), low, high, len(x), len(changed))


def warn_if_few(queries: Sized, choice: str) -> None:
    """Warns if fewer than 50 queries make a choice, which noise then decides."""
    if len(queries) < FEW_QUERIES:
        logger.warning(
            f"{len(queries)} queries are few to choose {choice} by: differences of several "
            f"hundredths of nDCG@10 are noise. Use at least {FEW_QUERIES}, better some hundreds."
        )


def nothing_found(*ndcg: float) -> str:
    """The sentence in place of a recommendation, if no mean nDCG@10 is above 0; else empty."""
    if any(mean > 0 for mean in ndcg):
        return ""
    return (
        "No query has a relevant document among the first ten, so nothing can be recommended: check"
        " the judgments and the texts, or take another model."
    )


def norm_warning(d: float, error: float, before: float = math.nan) -> str:
    """The warning not to drop documents by their norm; empty where d allows it.

    It comes where the 95 % interval of d, d ± 1.96 · error, lies below 0, or where training has
    lowered d by more than 0.2, a small effect, and to below its interval.

    Args:
        d: `geometry.cohens_d` of document norms, relevant minus never-relevant; nan where it is
            undefined.
        error: `geometry.cohens_d_error` of d.
        before: d of the same documents before training.

    Example:
        >>> norm_warning(-0.1, error=0.3), norm_warning(0.5, error=0.1, before=0.6)
        ('', '')
        >>> print(norm_warning(-1.8, error=0.1, before=-0.2).split(". ")[0])
        Never-relevant documents have the larger norms (Cohen's d -1.80, before training -0.20)
    """
    is_negative = d == -math.inf or d + 1.96 * error < 0
    if not (is_negative or before - d > max(0.2, 1.96 * error)):
        return ""
    change = "" if math.isnan(before) else f", before training {before:+.2f}"
    fault = "Never-relevant documents have the larger norms"
    if not is_negative:
        fault = "Training has brought the norms of answers and of never-relevant documents together"
    return (
        f"{fault} (Cohen's d {d:+.2f}{change}). Do not drop documents by their norm. What helps"
        " differs between data: explicit negatives that resemble the queries, scale='auto' if the"
        " scale was fixed, or a fixed scale and a higher temperature if it was 'auto'. Measure d"
        " and nDCG@10 after each change."
    )
