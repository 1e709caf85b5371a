"""Choices that are judged by queries which did not make them, and the system to deploy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from st_magnitude.data.ranking import Ranking
from st_magnitude.judge import Difference

__all__ = ["Choice", "Decision", "Fusion", "System", "choose", "decide", "fusions"]

WEIGHTS = tuple(round(0.1 * step, 1) for step in range(11))

V = TypeVar("V")


@dataclass(frozen=True)
class Fusion:
    """The weighted sum of the scores of a model and of BM25, on fixed scales.

        score(q, d) = weight * s(q, d) / unit + (1 - weight) * BM25(q, d) / scale

    A document that one of the two did not return has the score 0 there. At 1 and 0 it is the model
    alone and BM25 alone.

    Attributes:
        weight: The weight of the model.
        unit: 1 for cosine; else the mean over queries of the model's best score.
        scale: The mean over queries of BM25's best score.
        tokens: The tokens of BM25, a name in `lexical.TOKENS`.

    Example:
        >>> print(Fusion(weight=0.6, unit=1.0, scale=4.2, tokens="words"))
        0.6 model + 0.4 BM25 of words

    Source: Bruch, Gai and Ingber, An Analysis of Fusion Functions for Hybrid Retrieval, 2023, arXiv
    2210.11934.
    """

    weight: float
    unit: float
    scale: float
    tokens: str

    def __str__(self) -> str:
        return f"{self.weight:g} model + {1 - self.weight:g} BM25 of {self.tokens}"


def fusions(
    dense: Ranking, lexical: Mapping[str, Ranking], is_cosine: bool
) -> dict[Fusion, Ranking]:
    """The rankings of all fusions of a model and BM25, by tokens and weights."""
    unit = 1.0 if is_cosine else _mean_best(dense)
    found: dict[Fusion, Ranking] = {}
    for tokens, ranking in lexical.items():
        scale = _mean_best(ranking)
        columns, (of_model, of_bm25) = _union(dense, ranking)
        for weight in WEIGHTS:
            fusion = Fusion(weight, unit, scale, tokens)
            if weight in (0.0, 1.0):
                found[fusion] = dense if weight else ranking
                continue
            scores = weight * of_model / unit + (1 - weight) * of_bm25 / scale
            found[fusion] = _sorted(dense, columns, scores)
    return found


def _mean_best(ranking: Ranking) -> float:
    """The mean over queries of the best score; 1 if it is not above 0."""
    best = ranking.scores[ranking.columns[:, 0] >= 0, 0]
    mean = float(best.mean()) if len(best) else 0.0
    return mean if mean > 0 else 1.0


def _union(first: Ranking, second: Ranking) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The documents of both by position, -1 where there are fewer, (n, 2k), and their scores in
    each, 0 where it has no score, (2, n, 2k)."""
    width = first.columns.shape[1] + second.columns.shape[1]
    columns = np.full((len(first), width), -1)
    scores = np.zeros((2, len(first), width))
    for row in range(len(first)):
        parts = [ranking.columns[row] for ranking in (first, second)]
        joined = np.unique(np.concatenate(parts))
        joined = joined[joined >= 0]
        columns[row, : len(joined)] = joined
        for i, (part, ranking) in enumerate(zip(parts, (first, second), strict=True)):
            is_found = part >= 0
            places = np.searchsorted(joined, part[is_found])
            scores[i, row, places] = ranking.scores[row, is_found]
    return columns, scores


def _sorted(like: Ranking, columns: NDArray[np.int64], scores: NDArray[np.float64]) -> Ranking:
    """The ranking of positions in rising order and their scores, (n, 2k)."""
    scores = np.where(columns < 0, -np.inf, scores)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : like.columns.shape[1]]
    columns = np.take_along_axis(columns, order, axis=1)
    return Ranking(like.data, like.query_ids, columns, np.take_along_axis(scores, order, axis=1))


@dataclass(frozen=True)
class Choice(Generic[V]):
    """A choice among options, and the ranking that judges it."""

    value: V  # by all queries: what is deployed
    ranking: Ranking  # each query by what the queries of the other folds choose


def choose(options: Mapping[V, Ranking], folds: Sequence[Iterable[str]]) -> Choice[V]:
    """Chooses by mean nDCG@10, the first of equal options: once by all queries, and once for each
    fold of query ids by those of the others."""
    names = list(options)
    values = np.stack([options[name].ndcg for name in names])  # (options, n)
    first = options[names[0]]
    rows = {query: row for row, query in enumerate(first.query_ids)}
    columns = first.columns.copy()
    scores = first.scores.copy()
    for fold in folds:
        held_out = np.zeros(len(rows), dtype=bool)
        held_out[[rows[query] for query in fold]] = True
        if held_out.all():  # one fold: nothing else can choose
            continue
        best = options[names[highest_rows(values[:, ~held_out])[0]]]
        columns[held_out] = best.columns[held_out]
        scores[held_out] = best.scores[held_out]
    ranking = Ranking(first.data, first.query_ids, columns, scores)
    return Choice(names[highest_rows(values)[0]], ranking)


def highest_rows(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rows with the highest mean, up to rounding: (options, n)."""
    means = np.nanmean(values, axis=1)
    return np.flatnonzero(means >= means.max() - 1e-12)


@dataclass(frozen=True)
class System:
    """A way to search that could be deployed."""

    name: str
    ranking: Ranking
    how: Fusion | str = ""  # with BM25: the fusion, or the tokens of BM25 alone


@dataclass(frozen=True)
class Decision:
    """The system to deploy, the simplest that no other one clearly beats.

    Attributes:
        name: Name of the system.
        ndcg: Its mean nDCG@10.
        how: Its fusion with BM25, or the tokens of BM25 alone, or "".
        over: Name of the best simpler system, or "".
        lead: The difference to that one.
    """

    name: str
    ndcg: float
    how: Fusion | str
    over: str
    lead: Difference | None

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        said = f"Deploy {self.name}{how}: nDCG@10 {self.ndcg:.4f}"
        if self.lead is None:
            return f"{said}. Nothing else is clearly better."
        return f"{said}, {self.lead} over {self.over}."


def decide(systems: Sequence[System], seed: int = 0) -> Decision:
    """Decides among systems, the simplest first. Nothing clearly beats the highest mean."""
    falling = sorted(systems, key=lambda system: -system.ranking.mean)

    def is_beaten(system: System) -> bool:
        better = (other for other in falling if other.ranking.mean > system.ranking.mean)
        return any(other.ranking.minus(system.ranking, seed=seed).is_better for other in better)

    place, system = next(pair for pair in enumerate(systems) if not is_beaten(pair[1]))
    simpler = max(systems[:place], key=lambda one: one.ranking.mean, default=None)
    lead = None if simpler is None else system.ranking.minus(simpler.ranking, seed=seed)
    over = "" if simpler is None else simpler.name
    return Decision(system.name, system.ranking.mean, system.how, over, lead)
