"""Batch: what the rows and columns of a contrastive loss are to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from st_magnitude._checks import at_least, one_of
from st_magnitude.kernel.tiles import Judge, Panel, Side
from st_magnitude.similarity import at_least_float32

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
PartitionMode = Literal["joint", "per_direction"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"]


@dataclass(frozen=True)
class Above:
    """A rule: columns that score above a threshold, which depends on the score of the row's positive."""

    threshold: Callable[[Tensor], Tensor]  # (n,) -> (n,)
    guide: tuple[Tensor, Tensor] | None = None  # of queries (Q, Dg) and documents (M, Dg), whose products are scores

    def judge(self, rows: Side, columns: Side, own: int | None, positives: Tensor | None) -> Judge:
        """The rule for a panel; ``positives`` (B,) are the scores of the positives if no ``own`` column is in it."""
        x, y = rows.about.get("guide"), columns.about.get("guide")

        def too_close(tile: slice, scores: Tensor) -> Tensor:
            if x is not None and y is not None:
                scores = x[tile] @ y.T
            of_own = positives[tile] if positives is not None else scores.diagonal((own or 0) + tile.start)
            return scores > self.threshold(of_own)[:, None]

        return too_close


# What excludes columns: integer ids, or a function of rows and their scores that returns booleans; or several of them.
Exclude = Tensor | Judge | Above | Sequence[Tensor | Judge | Above]


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
    is_block: bool = False  # whether other ranks have more columns

    @property
    def own(self) -> slice:
        """The rows of the documents that are the positives of the queries."""
        return slice(self.offset, self.offset + len(self.queries))

    @property
    def columns(self) -> Tensor:
        """The queries that are columns."""
        return self.queries if self.all_queries is None else self.all_queries

    @property
    def dtype(self) -> torch.dtype:
        return at_least_float32(self.queries[:0]).dtype

    def check(self, directions: Sequence[Direction]) -> None:
        """Checks the shapes and types of ids and of log q, and the values of hardness."""
        one_of("hardness_mode", self.hardness_mode, (None, *get_args(HardnessMode)))
        at_least("hardness_strength", self.hardness_strength, 0)
        size, num_queries = len(self.documents), len(self.columns)
        same_kind = {"query_to_query", "doc_to_doc"} & set(directions)
        ids, positives = [("exclude", x) for x in _sequence(self.exclude) if isinstance(x, Tensor)], self.positives
        if positives is not None and positives.dtype != torch.bool:
            ids.append(("positives", positives))
        elif positives is not None and (
            same_kind or not positives.shape == (num_queries, size) == (len(self.queries), size)
        ):
            raise ValueError(
                "positives that are booleans (B, M) take neither all_queries nor 'query_to_query' or 'doc_to_doc'; "
                "give integer ids (M,) of the documents."
            )
        for name, x in ids:
            if x.dtype == torch.bool or x.is_floating_point() or x.shape != (size,):
                raise ValueError(
                    f"{name} takes integer ids ({size},) of the documents; got {x.dtype} of shape {tuple(x.shape)}."
                )
        size_needed = "doc_to_doc" in directions or self.hardness_mode in ("in_batch_negatives", "hard_negatives")
        if size_needed and self.own.stop > (self.num_queries or num_queries):
            raise ValueError(
                "num_queries, the number of positives among the documents of all devices, is needed for doc_to_doc and "
                f"for hardness_mode={self.hardness_mode!r} with offset {self.offset}; got {self.num_queries}."
            )
        for name, numbers, length in (("log_q", self.log_q, size), ("log_q_queries", self.log_q_queries, num_queries)):
            if numbers is not None and (numbers.shape != (length,) or not numbers.is_floating_point()):
                raise ValueError(
                    f"{name} takes the logarithms of {length} probabilities, one of each column; got {numbers.dtype} "
                    f"of shape {tuple(numbers.shape)}."
                )

    @cached_property
    def above(self) -> Above | None:
        return next((x for x in _sequence(self.exclude) if isinstance(x, Above)), None)

    @cached_property
    def _ids(self) -> dict[str, Tensor]:
        """The ids that exclude (M, E), and that several positives share (M,)."""
        excluded = [x for x in _sequence(self.exclude) if isinstance(x, Tensor) and self._repeats(x)]
        found = {"ids": torch.stack(excluded, dim=1)} if excluded else {}
        if self.positives is not None and self.positives.dtype != torch.bool and self._repeats(self.positives):
            found["labels"] = self.positives
        return found

    def _repeats(self, ids: Tensor) -> bool:
        """Whether columns may share an id; on a GPU the answer would keep the host waiting."""
        return self.is_block or ids.device.type != "cpu" or len(ids.unique()) < len(ids)

    def about(self, name: str) -> dict[str, Tensor]:
        """What belongs to ``queries``, ``all_queries``, ``documents`` or ``own_documents`` besides their vectors.

        A query has the ids of its positive.
        """
        is_query = name.endswith("queries")
        rows = {"documents": slice(len(self.documents)), "all_queries": slice(len(self.columns))}.get(name, self.own)
        found = {key: ids[rows] for key, ids in self._ids.items()}
        log_q = self.log_q_queries if is_query else self.log_q
        if log_q is not None and (name != "queries" or self.all_queries is None):
            found["bias"] = -log_q.detach().to(self.dtype)
            found["bias"] = found["bias"][rows] if name == "own_documents" else found["bias"]
        if self.above is not None and self.above.guide is not None:
            vectors = self.above.guide[0 if is_query else 1]
            found["guide"] = vectors if is_query and len(vectors) == len(self.queries) else vectors[rows]
        numbers = torch.arange(max(len(self.documents), len(self.columns)), device=self.queries.device)
        found["owner"] = (numbers % (self.num_queries or len(self.columns)))[rows].to(self.dtype)
        return found

    def first(self, direction: Direction) -> int:
        """The column of the first row's own document, or of the first query."""
        return self.offset if direction.endswith("_doc") or self.all_queries is not None else 0

    def panel(
        self,
        direction: Direction,
        rows: Side,
        columns: Side,
        attracts: bool,
        is_here: bool = True,
        positives: Tensor | None = None,
    ) -> Panel:
        """The panel of a direction, whose rows (B, D) are queries or their positives.

        Args:
            direction: Such as ``"query_to_doc"``.
            rows: Queries or positives, with what is known `about` them.
            columns: All documents or all queries, or those of another rank.
            attracts: Whether the positives of the softmax are among the columns.
            is_here: Whether the columns are those of this rank.
            positives: Scores (B,) of the positives, where the columns lack them.
        """
        to_documents, crosses = direction.endswith("_doc"), direction in ("query_to_doc", "doc_to_query")
        own = self.first(direction) if crosses and is_here else None
        kept: SameId | Pairs | None = None
        if crosses and "labels" in rows.about:
            kept = SameId.of(rows.about["labels"], columns.about["labels"], self.dtype)
        elif crosses and self.positives is not None and self.positives.dtype == torch.bool:
            kept = Pairs(self.positives if to_documents else self.positives[:, self.own].T)
        same_owner = SameId(rows.about["owner"], columns.about["owner"], others=self.hardness_mode == "hard_negatives")
        is_weighted = direction == "query_to_doc" and self.hardness_mode is not None
        if not is_here and self.hardness_mode == "hard_negatives":
            is_weighted = False  # of which other ranks have none
        return Panel(
            rows,
            columns,
            own=own,
            attracts=attracts,
            judges=self._judges(direction, rows, columns, own, positives),
            kept=kept,
            own_attracts=kept.own(own or 0).to(self.dtype) if isinstance(kept, Pairs) else None,
            hardness=self.hardness_strength if is_weighted else 0.0,
            bare=same_owner if is_weighted and is_here and self.hardness_mode != "all_negatives" else None,
            bias=columns.about.get("bias"),
        )

    def _judges(
        self, direction: Direction, rows: Side, columns: Side, own: int | None, positives: Tensor | None
    ) -> tuple[Judge, ...]:
        names = ["ids"] if direction in ("query_to_doc", "doc_to_query") else ["ids", "labels"]
        pairs = [(rows.about[name], columns.about[name]) for name in names if name in rows.about]
        ids = [(x.view(len(x), -1).T, y.view(len(y), -1).T) for x, y in pairs]
        judges: list[Judge] = [SameId.of(*pair, self.dtype) for x, y in ids for pair in zip(x, y, strict=True)]
        if direction == "query_to_doc":
            judges += [x for x in _sequence(self.exclude) if not isinstance(x, Tensor | Above)]
        elif direction == "doc_to_query":
            judges += _sequence(self.exclude_queries)
        else:  # no text is a negative of itself, and no document of another of its query
            judges.append(SameId(rows.about["owner"], columns.about["owner"]))
        if self.above is not None and direction in ("query_to_doc", "doc_to_query"):
            judges.append(self.above.judge(rows, columns, own, positives))
        return tuple(judges)


def _sequence(exclude: Any) -> Sequence[Any]:
    if exclude is None:
        return ()
    return exclude if isinstance(exclude, (list, tuple)) else (exclude,)
