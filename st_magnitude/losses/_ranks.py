"""Checks of a batch whose negatives come from all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from st_magnitude._upstream import batch_size_of
from st_magnitude.kernel.ring import agree, num_ranks

if TYPE_CHECKING:
    from st_magnitude.losses.ranking import MagnitudeRankingLoss

__all__ = ["check_ranks"]


def check_ranks(loss: MagnitudeRankingLoss, sentence_features: list[dict[str, Tensor]], labels: Tensor | None) -> None:
    """Checks the inputs of this rank and, where negatives come from all ranks, that their batches fit together.

    Raises:
        ValueError: If the inputs are refused, or if the batches differ in columns or, when they are gathered, in size.
            All ranks raise, because one that raised alone would leave the others waiting for it.
    """

    def own_sizes() -> tuple[int, int]:
        loss.check_inputs(sentence_features, labels)
        return len(sentence_features), batch_size_of(sentence_features[0])

    if not loss.gather_across_devices or num_ranks() == 1:
        loss.check_inputs(sentence_features, labels)
        return
    (num_columns, num_rows), *others = agree(next(loss.model.parameters()).device, own_sizes, 2)
    for rank, (columns, rows) in enumerate(others, start=1):
        if columns != num_columns:
            raise ValueError(
                "Negatives from all ranks need the same text columns on each of them, but the batch of rank 0 has "
                f"{num_columns} columns and that of rank {rank} has {columns}."
            )
        if rows != num_rows and not loss.uses_ring:
            raise ValueError(
                "gather_across_devices=True needs batches of one size, but that of rank 0 has "
                f"{num_rows} rows and that of rank {rank} has {rows}. Set dataloader_drop_last=True, or pass "
                "gather_across_devices='ring', which takes batches of any size."
            )
