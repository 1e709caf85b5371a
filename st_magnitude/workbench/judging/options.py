"""Rankings of the same queries by an option, of which each fold is judged by what others choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from st_magnitude.data.ranking import Ranking
from st_magnitude.geometry import Array
from st_magnitude.judge import Difference
from st_magnitude.workbench.judging.folds import DEFAULT_FOLDS, folds_of

__all__ = ["Options"]

V = TypeVar("V")
Rule = Callable[[Array], int]  # from nDCG@10, (options, n), to the row of an option


def first_highest(values: Array) -> int:
    """The option with the highest mean, the first of equal ones: (options, n)."""
    return int(highest_rows(values)[0])


def highest_rows(values: Array) -> NDArray[np.int64]:
    """The rows with the highest mean, up to rounding: (options, n)."""
    means = values.mean(axis=1)
    return np.flatnonzero(means >= means.max() - 1e-12)


@dataclass(frozen=True, repr=False)
class Options(Generic[V]):
    """Rankings of the same n queries by an option, such as a weight or an exponent.

    All queries choose the option to deploy. Each fifth of them is judged by the option that the
    other fifths choose, so no query judges what it has chosen.

    Attributes:
        rankings: The ranking of every option.
        value: What all queries choose.
        by_query: For each query, what the other folds choose.
        seed: Seed of the folds and of the draws of `judge`.

    Example:
        >>> from st_magnitude.data.retrieval import RetrievalData
        >>> queries = {f"q{i}": f"question {i}" for i in range(50)}
        >>> answers = {query: {"a"} for query in queries}
        >>> data = RetrievalData(queries, {"a": "answer", "b": "other"}, answers)
        >>> right, wrong = (Ranking.of_run(data, {q: {d: 1} for q in queries}) for d in "ab")
        >>> options = Options.choose({0.0: wrong, 0.5: right})
        >>> options.value, options.held_out.mean
        (0.5, 1.0)
        >>> print(options.held_out - wrong)
        +100.0 points [+85.6, +100.0]
    """

    rankings: Mapping[V, Ranking]
    value: V
    by_query: list[V]
    seed: int = 0

    @classmethod
    def choose(
        cls,
        rankings: Mapping[V, Ranking],
        rule: Rule = first_highest,
        seed: int = 0,
        **fields: Any,
    ) -> Self:
        """Chooses by nDCG@10: by all queries, and for each fold of them by the others.

        The first option judges queries without an answer, and those of a fold without others.

        Args:
            rule: By default the highest mean, the first of equal ones.
            **fields: Further fields of a subclass.
        """
        names = list(rankings)
        first = rankings[names[0]]
        values = np.stack([ranking.ndcg for ranking in rankings.values()])  # (options, n)
        is_answered = first.has_answer
        rows = {query: row for row, query in enumerate(first.query_ids)}
        by_query = [names[0]] * len(rows)
        for fold in folds_of(first.data, DEFAULT_FOLDS, seed):
            held_out = [rows[query] for query in fold]
            others = is_answered.copy()
            others[held_out] = False
            if others.any():
                chosen = names[rule(values[:, others])]
                for row in held_out:
                    by_query[row] = chosen
        value = names[rule(values[:, is_answered])]
        return cls(rankings, value, by_query, seed, **fields)

    @cached_property
    def per_query(self) -> Array:
        """nDCG@10 of every query by every option, (options, n)."""
        return np.stack([ranking.ndcg for ranking in self.rankings.values()])

    @property
    def ndcg(self) -> Array:
        """Mean nDCG@10 by every option, (options,)."""
        return self.per_query.mean(axis=1)

    @cached_property
    def held_out(self) -> Ranking:
        """The ranking that judges the choice: each query by what the other folds choose."""
        return self.of(self.rankings)

    def of(self, rankings: Mapping[V, Ranking]) -> Ranking:
        """`held_out`, from other rankings by the same options, such as longer ones."""
        chosen = list(enumerate(self.by_query))
        columns = np.stack([rankings[value].columns[row] for row, value in chosen])
        scores = np.stack([rankings[value].scores[row] for row, value in chosen])
        first = rankings[self.value]
        return Ranking(first.data, first.query_ids, columns, scores)

    def over(self, value: V) -> Difference:
        """nDCG@10 of `held_out` minus that by one option."""
        return self.held_out.minus(self.rankings[value], seed=self.seed)
