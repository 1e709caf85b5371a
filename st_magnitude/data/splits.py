"""Splits that share queries: a figure on queries that a model was trained on is too high."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from st_magnitude.data.beir import DataError

__all__ = ["check_held_out", "refuse_shared"]


def check_held_out(folder: str | Path, split: str, *others: str | None) -> None:
    """Refuses a split of a BEIR folder that has queries of its other splits; those that do not exist are passed over.

    Raises:
        DataError: If a query has relevant documents in both splits.
    """
    queries = _judged(folder, split)
    for other in others:
        if other not in (None, split):
            refuse_shared(queries, _judged(folder, other), split, other)


def refuse_shared(queries: Collection[str], others: Collection[str], split: str, other: str) -> None:
    """Refuses two splits that share queries.

    Raises:
        DataError: If they do. The message has their number and the first of them.
    """
    if both := sorted({*queries} & {*others}):
        raise DataError(
            f"{len(both):,} queries of the {split} split are also in the {other} split, such as {both[0]!r}: figures "
            "on queries that were trained on, or that chose a setting, are too high. Take them out of one of the two."
        )


def _judged(folder: str | Path, split: str) -> set[str]:
    """Ids of the queries that have a relevant document in a split."""
    path = Path(folder, "qrels", f"{split}.tsv")
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()  # from_beir says what is wrong with them
    rows = (line.split("\t") if "\t" in line else line.split() for line in lines)
    return {row[0] for row in rows if len(row) > 2 and row[-1].isdecimal() and int(row[-1]) > 0}
