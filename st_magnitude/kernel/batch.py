"""Batch: what the rows and columns of a contrastive loss are to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from st_magnitude._checks import at_least, one_of
from st_magnitude.kernel.tiles import Judge, Panel, Side
from st_magnitude.similarity import at_least_float32

# What excludes columns: integer ids, or a function of rows and their scores that returns booleans; or several of them.
Exclude = Tensor | Judge | Sequence[Tensor | Judge]

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
PartitionMode = Literal["joint", "per_direction"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]


@dataclass(frozen=True)
class SameId:
    """A judge: the columns with the id of the row, or all others.

    It compares floats into floats, which takes a quarter of the time of comparing integers into booleans.
    """

    rows: Tensor  # (B,), whole numbers
    columns: Tensor  # (M,)
    others: bool = False

    @classmethod
    def of(cls, rows: Tensor, columns: Tensor, dtype: torch.dtype) -> SameId:
        """Of any integers (B,) and (M,), which become small ones without a wait for the device."""
        ordered, order = torch.cat([rows, columns]).sort()
        steps = (ordered != ordered.roll(1)).to(dtype).cumsum(dim=0)
        numbers = torch.empty_like(steps).scatter_(0, order, steps)
        return cls(numbers[: len(rows)], numbers[len(rows) :])

    def __call__(self, rows: slice, scores: Tensor) -> Tensor:
        compare = torch.ne if self.others else torch.eq
        return compare(self.columns, self.rows[rows, None], out=torch.empty_like(scores))


@dataclass(frozen=True)
class Pairs:
    """A judge: the pairs that a matrix names."""

    matrix: Tensor  # (B, M)

    def __call__(self, rows: slice, scores: Tensor) -> Tensor:
        return self.matrix[rows]

    def own(self, first: int) -> Tensor:
        """Whether a row's own column is named, (B,); it is the positive of a row that names none."""
        return self.matrix.diagonal(first) | ~self.matrix.any(dim=1)


@dataclass(frozen=True)
class Batch:
    """The arguments of :func:`~st_magnitude.infonce` that say what rows and columns are to each other."""

    queries: Tensor  # (B, D)
    documents: Tensor  # (M, D)
    offset: int = 0
    all_queries: Tensor | None = None  # (Q, D)
    num_queries: int | None = None
    hardness_mode: HardnessMode | None = None
    hardness_strength: float = 0.0
    exclude: Exclude | None = None
    exclude_queries: Judge | Sequence[Judge] | None = None
    positives: Tensor | None = None
    log_q: Tensor | None = None  # (M,)
    log_q_queries: Tensor | None = None  # (Q,) or (B,)

    @property
    def own(self) -> slice:
        """The rows of the documents that are the positives of the queries."""
        return slice(self.offset, self.offset + len(self.queries))

    @property
    def dtype(self) -> torch.dtype:
        return at_least_float32(self.queries[:0]).dtype

    def check(self, directions: Sequence[Direction]) -> None:
        """Checks the shapes and types of ids and of log q, and the values of hardness."""
        one_of("hardness_mode", self.hardness_mode, (None, *get_args(HardnessMode)))
        at_least("hardness_strength", self.hardness_strength, 0)
        same_kind = {"query_to_query", "doc_to_doc"} & set(directions)
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
        if positives is not None and positives.dtype == torch.bool and same_kind:
            raise ValueError(f"positives for {sorted(same_kind)} must be integer ids (M,) of the documents.")
        size_needed = "doc_to_doc" in directions or self.hardness_mode in ("in_batch_negatives", "hard_negatives")
        if size_needed and self.own.stop > (self.num_queries or len(columns)):
            raise ValueError(
                "num_queries, the number of positives among the documents of all devices, is needed for doc_to_doc and "
                f"for hardness_mode={self.hardness_mode!r} with offset {self.offset}; got {self.num_queries}."
            )
        for name, numbers, length in (("log_q", self.log_q, size), ("log_q_queries", self.log_q_queries, len(columns))):
            if numbers is not None and (numbers.shape != (length,) or not numbers.is_floating_point()):
                raise ValueError(
                    f"{name} takes the logarithms of {length} probabilities, one of each column; got {numbers.dtype} "
                    f"of shape {tuple(numbers.shape)}."
                )

    def panel(self, direction: Direction, rows: Side, columns: Side, attracts: bool) -> Panel:
        """The panel of a direction, whose rows (B, D) are queries or their positives.

        Args:
            direction: Such as ``"query_to_doc"``.
            rows: Queries or positives.
            columns: All documents or all queries.
            attracts: Whether the positives of the softmax are among the columns.
        """
        to_documents = direction.endswith("_doc")
        log_q = self.log_q if to_documents else self.log_q_queries
        crosses = direction in ("query_to_doc", "doc_to_query")
        kept, own = (self._kept(to_documents), self._first(to_documents)) if crosses else (None, None)
        return Panel(
            rows,
            columns,
            own=own,
            attracts=attracts,
            judges=self._judges(direction),
            kept=kept,
            own_attracts=kept.own(own or 0).to(self.dtype) if isinstance(kept, Pairs) else None,
            hardness=self.hardness_strength if direction == "query_to_doc" and self.hardness_mode else 0.0,
            bare=self.bare() if direction == "query_to_doc" else None,
            bias=None if log_q is None else -log_q.detach().to(self.dtype),
        )

    def _first(self, to_documents: bool) -> int:
        """The column of the first row's own document, or of the first query."""
        return self.offset if to_documents or self.all_queries is not None else 0

    def _judges(self, direction: Direction) -> tuple[Judge, ...]:
        to_documents = direction.endswith("_doc")
        judges: list[Judge | None] = [self._same(x, to_documents) for x in _sequence(self.exclude) if _is_ids(x)]
        if direction == "query_to_doc":
            judges += [judge for judge in _sequence(self.exclude) if not _is_ids(judge)]
        elif direction == "doc_to_query":
            judges += _sequence(self.exclude_queries)
        else:  # no text is a negative of itself, and no document of another of its query
            judges.append(self._same_query(to_documents))
            if self.positives is not None:
                judges.append(self._same(self.positives, to_documents))
        return tuple(judge for judge in judges if judge is not None)

    def _same_query(self, to_documents: bool, others: bool = False) -> SameId:
        """The query itself, or the documents of the row's query."""
        first, columns = self._first(to_documents), self.queries if self.all_queries is None else self.all_queries
        numbers = torch.arange(len(self.documents if to_documents else columns), device=self.queries.device)
        owners = numbers % (self.num_queries or len(columns))
        rows = torch.arange(first, first + len(self.queries), device=self.queries.device)
        return SameId(rows.to(self.dtype), owners.to(self.dtype), others)

    def bare(self) -> SameId | None:
        """The documents without a weight of hard negatives, next to the positives."""
        if self.hardness_mode in (None, "all_negatives"):
            return None
        return self._same_query(True, others=self.hardness_mode == "hard_negatives")

    def _kept(self, to_documents: bool) -> Judge | None:
        if self.positives is None:
            return None
        if self.positives.dtype != torch.bool:
            return self._same(self.positives, to_documents)
        return Pairs(self.positives if to_documents else self.positives[:, self.own].T)

    def _same(self, ids: Tensor, to_documents: bool) -> SameId | None:
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
