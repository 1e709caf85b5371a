"""Batches across ranks: gathered, and checked to match."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor
from torch.nn.functional import pad

from st_magnitude._checks import InputError
from st_magnitude._distributed import agree, num_ranks
from st_magnitude.kernel.batch import Direction


class Gathered:
    """The rows of all W ranks, or those of this rank alone if a loss does not gather.

    Args:
        queries: Queries of this rank, (B, D).
        gather_across_devices: As for the loss. A ring passes documents around instead.
        directions: As for the loss. Queries are gathered if a softmax runs over them.
    """

    def __init__(
        self,
        queries: Tensor,
        gather_across_devices: bool | str = False,
        directions: Sequence[Direction] = ("query_to_doc",),
    ) -> None:
        self.compares_a_kind = bool({"query_to_query", "doc_to_doc"} & set(directions))
        self.has_queries = any(x.endswith("query") for x in directions)  # among the columns
        self._dtype = torch.promote_types(queries.dtype, torch.float32)
        ranks = num_ranks() if gather_across_devices else 1
        self.is_ring = ranks > 1 and gather_across_devices == "ring"
        self._gathers = ranks > 1 and not self.is_ring
        self.num_queries = len(queries)  # whom documents belong to
        self.offset = 0  # of our first query
        if self._gathers:
            self.num_queries = ranks * len(queries)
            self.offset = get_rank() * len(queries)
        self.all_queries: Tensor | None = None  # (W·B, D), if a softmax runs over them
        self.num_columns = len(queries)  # of a softmax over queries
        self.first_column = 0  # our first query there
        if self._gathers and tuple(directions) != ("query_to_doc",):
            self.all_queries = self.join(queries)
            self.num_columns = self.num_queries
            self.first_column = self.offset

    def join(self, x: Tensor) -> Tensor:
        """The rows of all ranks, with their gradients: (B, ...) -> (W·B, ...)."""
        if not self._gathers:
            return x
        return all_gather_with_grad(x) if x.requires_grad else all_gather(x)

    def join_columns(self, columns: Sequence[Tensor]) -> Tensor:
        """The rows of all ranks, column by column, (M, ...)."""
        joined = [self.join(x) for x in columns]
        return torch.cat(joined) if len(joined) > 1 else joined[0]

    def join_queries(self, x: Tensor) -> Tensor:
        """Likewise for rows of queries, if a softmax runs over queries."""
        return x if self.all_queries is None else self.join(x)

    def numbers(self, keys: Tensor) -> Tensor:
        """How many texts of all ranks have each of the joined keys (M,)."""
        everywhere = keys
        if self.is_ring:
            everywhere = rows_of_all_ranks(keys)
        ordered = everywhere.sort().values
        ends = torch.searchsorted(ordered, keys, right=True)
        return (ends - torch.searchsorted(ordered, keys)).to(self._dtype)


def rows_of_all_ranks(x: Tensor) -> Tensor:
    """The rows of all ranks, whose numbers may differ, without their gradients: (n, ...) ->
    (N, ...)."""
    sizes = [size for (size,) in agree(x.device, lambda: [len(x)], 1)]
    most = max(sizes)
    padding = [0] * (2 * x.ndim - 1) + [most - len(x)]  # of the last dimension first
    parts = all_gather(pad(x.detach(), padding)).split(most)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def check_on_all_ranks(
    check: Callable[[], tuple[int, int]], device: torch.device | None, needs_one_size: bool
) -> None:
    """Checks the batch of this rank, and that it matches those of other ranks.

    ``check`` returns the number of columns and rows of this rank. The ranks exchange them on the
    device; None if they do not share negatives. Where one rank raises, all do.
    """
    if device is None:
        check()
        return
    (num_columns, num_rows), *others = agree(device, check, 2)
    for rank, (columns, rows) in enumerate(others, start=1):
        if columns != num_columns:
            raise InputError(
                "Negatives from all ranks need the same text columns on each of them, but the"
                f" batch of rank 0 has {num_columns} columns and the batch of rank {rank} has"
                f" {columns}."
            )
        if rows != num_rows and needs_one_size:
            raise InputError(
                "gather_across_devices=True needs batches of one size, but the batch of rank 0 has"
                f" {num_rows} rows and the batch of rank {rank} has {rows}. Set"
                " dataloader_drop_last=True, or pass gather_across_devices='ring', which takes"
                " batches of any size."
            )
