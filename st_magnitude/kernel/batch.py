"""Batch: what the rows and columns of a contrastive loss are to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from st_magnitude.kernel.tiles import Judge, Panel, Side
from st_magnitude.similarity import at_least_float32

# What excludes columns: integer ids, or a function of rows and their scores that returns booleans; or several of them.
Exclude = Tensor | Judge | Sequence[Tensor | Judge]


@dataclass(frozen=True)
class SameId:
    """A judge: the columns with the id of the row.

    It compares floats into floats, which takes a quarter of the time of comparing integers into booleans.
    """

    rows: Tensor  # (B,), whole numbers
    columns: Tensor  # (M,)

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> SameId:
        """Of any integers (B,) and (M,), which become small ones without a wait for the device."""
        ordered, order = torch.cat([rows, columns]).sort()
        steps = (ordered != ordered.roll(1)).to(dtype).cumsum(dim=0)
        numbers = torch.empty_like(steps).scatter_(0, order, steps)
        return cls(numbers[: len(rows)], numbers[len(rows) :])

    def __call__(self, rows: slice, scores: Tensor) -> Tensor:
        return torch.eq(self.columns, self.rows[rows, None], out=torch.empty_like(scores))


@dataclass(frozen=True)
class Pairs:
    """A judge: the pairs that a matrix names."""

    matrix: Tensor  # (B, M)

    def __call__(self, rows: slice, scores: Tensor) -> Tensor:
        return self.matrix[rows]


@dataclass(frozen=True)
class Batch:
    """The arguments of :func:`~st_magnitude.infonce` that say what rows and columns are to each other."""

    queries: Tensor  # (B, D)
    documents: Tensor  # (M, D)
    offset: int
    all_queries: Tensor | None  # (Q, D)
    hardness: tuple[float, float]
    exclude: Exclude | None
    exclude_queries: Judge | Sequence[Judge] | None
    positives: Tensor | None
    log_q: Tensor | None  # (M,)
    log_q_queries: Tensor | None  # (Q,) or (B,)

    @property
    def own(self) -> slice:
        """The rows of the documents that are the positives of the queries."""
        return slice(self.offset, self.offset + len(self.queries))

    @property
    def dtype(self) -> torch.dtype:
        return at_least_float32(self.queries[:0]).dtype

    def check(self) -> None:
        """Checks the shapes and types of ids and of log q."""
        size, columns = len(self.documents), self.queries if self.all_queries is None else self.all_queries
        for name, values in (("exclude", self.exclude), ("positives", self.positives)):
            for ids in _sequence(values):
                is_matrix = name == "positives" and ids.dtype == torch.bool
                if not isinstance(ids, Tensor) or (is_matrix and ids.shape == (len(self.queries), size)):
                    continue
                if ids.dtype == torch.bool or ids.is_floating_point() or ids.shape != (size,):
                    raise ValueError(
                        f"{name} takes integer ids ({size},) of the documents; got {ids.dtype} of shape "
                        f"{tuple(ids.shape)}."
                    )
        positives = self.positives
        if positives is not None and positives.dtype == torch.bool and len(columns) != len(self.queries):
            raise ValueError("positives are booleans of these queries, not of all_queries; give integer ids (M,).")
        for name, numbers, length in (("log_q", self.log_q, size), ("log_q_queries", self.log_q_queries, len(columns))):
            if numbers is not None and (numbers.shape != (length,) or not numbers.is_floating_point()):
                raise ValueError(
                    f"{name} takes the logarithms of {length} probabilities, one of each column; got {numbers.dtype} "
                    f"of shape {tuple(numbers.shape)}."
                )

    def panel(self, direction: str, rows: Side, columns: Side, attracts: bool) -> Panel:
        """The panel of a direction, whose rows (B, D) are queries or their positives.

        Args:
            direction: Such as ``"query_to_doc"``.
            rows: Queries or positives.
            columns: All documents or all queries.
            attracts: Whether the positives of the softmax are among the columns.
        """
        to_documents = direction.endswith("_doc")
        log_q = self.log_q if to_documents else self.log_q_queries
        return Panel(
            rows,
            columns,
            own=self.offset if to_documents or self.all_queries is not None else 0,
            attracts=attracts,
            judges=self._judges(direction),
            kept=self._kept(to_documents),
            hardness=self.hardness[not to_documents],
            bias=None if log_q is None else -log_q.detach().to(self.dtype),
        )

    def _judges(self, direction: str) -> tuple[Judge, ...]:
        to_documents = direction.endswith("_doc")
        judges = [self._same("exclude", ids, to_documents) for ids in _sequence(self.exclude) if _is_ids(ids)]
        functions = {"query_to_doc": self.exclude, "doc_to_query": self.exclude_queries}[direction]
        judges += [judge for judge in _sequence(functions) if not _is_ids(judge)]
        return tuple(judge for judge in judges if judge is not None)

    def _kept(self, to_documents: bool) -> Judge | None:
        if self.positives is None:
            return None
        if self.positives.dtype != torch.bool:
            return self._same("positives", self.positives, to_documents)
        return Pairs(self.positives if to_documents else self.positives[:, self.own].T)

    def _same(self, name: str, ids: Tensor, to_documents: bool) -> SameId | None:
        """The columns with the id of a row's positive; a query has the id of its positive. None: no other column."""
        if ids.device.type == "cpu" and len(ids.unique()) == len(ids):
            return None  # on other devices the answer would keep the host waiting
        columns = ids if to_documents else ids[self.own] if self.all_queries is None else ids[: len(self.all_queries)]
        return SameId.of(ids[self.own], columns, self.dtype)


def _is_ids(judge: Any) -> bool:
    return isinstance(judge, Tensor)


def _sequence(exclude: Any) -> Sequence[Any]:
    if exclude is None:
        return ()
    return exclude if isinstance(exclude, (list, tuple)) else (exclude,)
