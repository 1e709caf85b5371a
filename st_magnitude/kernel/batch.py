"""Batch: the embeddings that :func:`~st_magnitude.infonce` compares, with rules and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from st_magnitude._checks import at_least
from st_magnitude.similarity import at_least_float32

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
PartitionMode = Literal["joint", "per_direction"]

# Numbers or booleans (B, M), or a function of a slice of the rows that returns theirs, (n, M)
Targets = Tensor | Callable[[slice], Tensor]


@dataclass(frozen=True)
class Ids:
    """A rule of ``exclude``: texts of one id are not negatives of each other.

    Args:
        queries: Integer ids (Q,); that of query i is in row ``offset + i``.
        documents: Integer ids (M,).
    """

    queries: Tensor
    documents: Tensor


@dataclass(frozen=True)
class Above:
    """A rule of ``exclude``: columns above a threshold do not count as negatives.

    Args:
        threshold: The threshold as a function of the scores of the positives at the longest prefix:
            (n,) -> (n,).
        spares: Exceptions: a query and a document of one id stay negatives, whatever they score.
    """

    threshold: Callable[[Tensor], Tensor]
    spares: Ids | None = None


# Integer ids (M,) of documents, which queries have from their positives; Ids; an Above; or several
Exclude = Tensor | Ids | Above | Sequence[Tensor | Ids | Above]


@dataclass(frozen=True)
class Batch:
    """The arguments of :func:`~st_magnitude.infonce` for B queries and M documents. Query i and
    document ``offset + i`` are a *pair*, with the number ``offset + i``."""

    queries: Tensor  # (B, D), in float32 at least, as all embeddings here
    documents: Tensor  # (M, D)
    offset: int = 0
    all_queries: Tensor | None = None  # (Q, D)
    exclude: Exclude | None = None
    positives: Tensor | None = None  # (M,) integers
    targets: Targets | None = None
    targets_queries: Targets | None = None
    weights: Tensor | None = None  # (B,)
    log_q: Tensor | None = None  # (M,)
    log_q_queries: Tensor | None = None  # (Q,) or (B,)
    hardness_strength: float = 0.0

    def __post_init__(self) -> None:
        for name in ("queries", "documents", "all_queries"):
            if (embeddings := getattr(self, name)) is not None:
                object.__setattr__(self, name, at_least_float32(embeddings))

    @property
    def pairs(self) -> slice:
        """The numbers of the pairs: the rows of the documents that hold the positives."""
        return slice(self.offset, self.offset + len(self.queries))

    @property
    def column_queries(self) -> Tensor:
        """The queries that the softmax of a document runs over, (Q, D) or (B, D)."""
        return self.queries if self.all_queries is None else self.all_queries

    @property
    def num_pairs(self) -> int:
        """Document j belongs to pair j modulo this number."""
        return len(self.column_queries)

    @property
    def excluded(self) -> Sequence[Tensor | Ids | Above]:
        if self.exclude is None:
            return ()
        return (self.exclude,) if isinstance(self.exclude, Tensor | Ids | Above) else self.exclude

    @property
    def excluded_ids(self) -> list[Ids]:
        ids = []
        for rule in self.excluded:
            if not isinstance(rule, Above):
                ids.append(rule if isinstance(rule, Ids) else Ids(rule, rule))
        return ids

    @property
    def above(self) -> Above | None:
        for rule in self.excluded:
            if isinstance(rule, Above):
                return rule
        return None

    @property
    def positive_ids(self) -> list[Ids]:
        return [] if self.positives is None else [Ids(self.positives, self.positives)]

    @property
    def spares(self) -> list[Ids]:
        above = self.above
        return [] if above is None or above.spares is None else [above.spares]

    def check(self, directions: Sequence[Direction]) -> None:
        self._check_embeddings()
        at_least("hardness_strength", self.hardness_strength, 0)
        has_several = self.positives is not None or self.targets is not None
        if self.hardness_strength and (tuple(directions) != ("query_to_doc",) or has_several):
            raise ValueError(
                "hardness_strength weights the negatives of a query with one positive: leave out"
                " other directions than 'query_to_doc', positives and targets."
            )
        if "doc_to_doc" in directions and self.pairs.stop > self.num_pairs:
            raise ValueError(
                "doc_to_doc needs the query of every positive: give all_queries with offset"
                f" {self.offset}."
            )
        rows = len(self.queries)
        columns = len(self.documents)
        _check_ids("positives", self.positives, columns)
        _check_shape("targets", self.targets, rows, columns)
        _check_shape("targets_queries", self.targets_queries, rows, self.num_pairs)
        _check_shape("weights", self.weights, rows)
        _check_shape("log_q", self.log_q, columns)
        _check_shape("log_q_queries", self.log_q_queries, self.num_pairs)
        for ids in [*self.excluded_ids, *self.spares]:
            _check_ids("exclude", ids.documents, columns)
            number = max(self.pairs.stop, self.num_pairs)
            _check_ids("exclude, for queries,", ids.queries[:number], number)
        if len(self.excluded) - len(self.excluded_ids) > 1:
            raise ValueError("exclude takes ids and one Above; got several.")
        self._check_targets(directions)

    def _check_embeddings(self) -> None:
        queries, documents, all_queries = self.queries, self.documents, self.all_queries
        if queries.ndim != 2 or documents.ndim != 2 or queries.shape[1] != documents.shape[1]:
            raise ValueError(
                "infonce takes queries (B, D) and documents (M, D); got "
                f"{tuple(queries.shape)} and {tuple(documents.shape)}."
            )
        if len(queries) == 0 or self.offset < 0 or self.pairs.stop > len(documents):
            raise ValueError(
                f"{len(queries)} queries with offset {self.offset} need their positives in"
                f" documents[{self.offset}:{self.pairs.stop}], but there are {len(documents)}"
                " documents."
            )
        width = queries.shape[1]
        if all_queries is not None and (
            all_queries.shape[1:] != (width,)
            or not self.pairs.stop <= len(all_queries) <= len(documents)
        ):
            raise ValueError(
                f"all_queries holds these {len(queries)} queries from row {self.offset} on, and no"
                f" more than there are documents: (Q, {width}) with Q from {self.pairs.stop} to"
                f" {len(documents)}; got {tuple(all_queries.shape)}."
            )
        for other in (documents, self.column_queries):
            if other.dtype != queries.dtype:
                raise ValueError(
                    f"infonce takes embeddings of one precision; got queries in {queries.dtype} and"
                    f" others in {other.dtype}. Convert them with .float()."
                )

    def _check_targets(self, directions: Sequence[Direction]) -> None:
        if self.targets is None:
            return
        if self.positives is not None:
            raise ValueError("positives are one kind of targets: give one of the two.")
        if {"query_to_query", "doc_to_doc"} & set(directions):
            raise ValueError(
                "targets take neither 'query_to_query' nor 'doc_to_doc'; give integer ids (M,) of"
                " the documents as positives."
            )
        names_queries = isinstance(self.targets, Tensor) and self.num_pairs == len(self.queries)
        if "doc_to_query" in directions and self.targets_queries is None and not names_queries:
            raise ValueError(
                "The softmax of a document needs targets_queries (B, Q), because targets do not"
                " name all queries. For positives give integer ids (M,) of the documents instead."
            )


def _check_shape(name: str, given: Targets | None, *shape: int) -> None:
    if isinstance(given, Tensor) and given.shape != shape:
        raise ValueError(f"{name} takes the shape {shape}; got {tuple(given.shape)}.")


def _check_ids(name: str, ids: Tensor | None, number: int) -> None:
    _check_shape(name, ids, number)
    if ids is not None and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"{name} takes whole numbers as ids; got {ids.dtype}.")
