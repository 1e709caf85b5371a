"""Batches across ranks: gathered, and checked to match."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor

from st_magnitude._checks import InputError
from st_magnitude._distributed import agree, num_ranks
from st_magnitude.kernel.batch import Direction


class Gathered:
    """The rows of all W ranks, or those of this rank alone if a loss does not gather.

    Of the columns (B, D), the queries first, these are gathered if a softmax of the directions runs
    over them. Without the size of the columns of each rank, the ranks tell each other.
    """

    def __init__(
        self,
        columns: Sequence[Tensor],
        gathers: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        sizes: Sequence[int] = (),
    ) -> None:
        self.columns = columns  # of this rank
        queries = columns[0]
        self._gathers = gathers and num_ranks() > 1
        self.num_queries = len(queries)  # whom documents belong to
        self.offset = 0  # of our first query
        self.share = 1.0  # of the loss of this rank in the mean over the ranks
        self.all_queries: Tensor | None = None  # of all ranks, if a softmax runs over them
        if self._gathers:
            told = sizes or [x for (x,) in agree(queries.device, lambda: [len(queries)], 1)]
            self._sizes = list(told)
            self.num_queries = sum(self._sizes)
            self.offset = sum(self._sizes[: get_rank()])
            self.share = len(self._sizes) * len(queries) / self.num_queries
            if tuple(directions) != ("query_to_doc",):
                self.all_queries = self.join(queries)

    @property
    def num_columns(self) -> int:
        """The number of columns of a softmax over queries."""
        return len(self.columns[0]) if self.all_queries is None else self.num_queries

    @property
    def first_column(self) -> int:
        """The column of our first query there."""
        return 0 if self.all_queries is None else self.offset

    def join(self, x: Tensor) -> Tensor:
        """The rows of a column of all ranks, with their gradients: (B, ...) -> (sum of B, ...)."""
        if not self._gathers:
            return x
        gather = all_gather_with_grad if x.requires_grad else all_gather
        most = max(self._sizes)
        if min(self._sizes) == most:
            return gather(x)
        padded = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
        parts = zip(gather(padded).split(most), self._sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def join_columns(self, columns: Sequence[Tensor]) -> Tensor:
        """The rows of the documents of all ranks, column by column, (M, ...)."""
        if self._gathers:
            columns = [self.join(x) for x in columns]
        return torch.cat(list(columns)) if len(columns) > 1 else columns[0]

    def join_queries(self, x: Tensor) -> Tensor:
        """Likewise for rows of queries, if a softmax runs over queries."""
        return x if self.all_queries is None else self.join(x)


def check_on_all_ranks(check: Callable[[], tuple[int, int]], device: torch.device) -> list[int]:
    """Checks that the batches of all ranks match. ``check`` returns the number of columns of this
    rank and their size, and the result has the size of each rank. Where one rank raises, all do."""
    (num_columns, _), *others = shapes = agree(device, check, 2)
    for rank, (columns, _) in enumerate(others, start=1):
        if columns != num_columns:
            raise InputError(
                "Negatives from all ranks need the same text columns on each of them, but the"
                f" batch of rank 0 has {num_columns} columns and the batch of rank {rank} has"
                f" {columns}."
            )
    return [size for _, size in shapes]
