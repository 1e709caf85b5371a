"""Which texts share a forward pass: a plan of least cost, in tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")  # (B, L) each


class Sorted:
    """The texts of columns, which are of one width, by length."""

    def __init__(self, columns: Sequence[Numbers], keeps_copies: bool = False) -> None:
        """From the tokens of each, (names, B, L), of which the second are the attention masks."""
        texts: dict[tuple[int, bytes], int] = {}  # the number of each distinct text
        numbers: list[int] = []
        for place, tokens in enumerate(columns):
            for row in np.hstack(list(tokens)):  # (B, names · L)
                key = (len(numbers) if keeps_copies else place, row.tobytes())
                numbers.append(texts.setdefault(key, len(texts)))
        first = np.unique(numbers, return_index=True)[1]
        masks = np.concatenate(columns, axis=1)[1]
        self._lengths = np.count_nonzero(masks, axis=1).clip(min=1)  # (N,) as they come
        lengths = self._lengths[first]
        order = np.argsort(-lengths, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self.order = first[order]  # (U,) rows of the distinct texts of a column, the longest first
        self.rows = places[numbers]  # (N,) the place of each text in this order
        self.lengths = lengths[order]  # (U,) in tokens, at least 1

    def saves_tokens(self, mini_batch_size: int) -> bool:
        """Whether mini-batches of the sorted texts have fewer tokens than those of all texts."""
        sizes = [tokens_of_minibatches(x, mini_batch_size) for x in (self.lengths, self._lengths)]
        return sizes[0] < sizes[1]


def cuts(lengths: Numbers, overhead: float, most: float = math.inf) -> list[int]:
    """The ends of the passes of texts whose lengths (n,) descend: those of the least

        sum over passes of (number of texts · length of the longest + overhead)

    with at most ``most`` tokens. Texts of one length stay together.

    Each pass more saves less than the one before it, which ends the search. No other passes are
    better: in as many of them, whatever their texts, are as many tokens or more.

    Example:
        >>> cuts(np.array([60, 58, 9, 8, 8]), overhead=50)
        [2, 5]
        >>> cuts(np.array([60, 58, 9, 8, 8]), overhead=1000, most=299)
        [2, 5]
    """
    negated, begins = np.unique(-lengths, return_index=True)
    ends = np.append(begins[1:], len(lengths))
    sizes = ends[:, None] - begins  # (last, first) of a pass by its last and its first length
    tokens = np.where(sizes > 0, -negated * sizes, math.inf)
    best = tokens[:, 0]  # the least tokens of the texts up to each length
    starts: list[Numbers] = []  # the first length of the last pass, for each number of passes
    while True:
        totals = tokens + np.append(math.inf, best[:-1])
        start = totals.argmin(axis=1)
        fewer = totals[np.arange(len(ends)), start]
        if best[-1] <= most and best[-1] - fewer[-1] <= overhead:
            break
        starts.append(start)
        best = fewer
    found = [len(lengths)]
    last = len(ends) - 1
    for start in reversed(starts):
        last = start[last] - 1
        found.append(int(ends[last]))
    return found[::-1]


def upstream_tokens(shapes: Mapping[int, tuple[int, int]], num_columns: int) -> int:
    """The tokens of columns of one kind, by their places in a batch and shapes (B, L), in the
    passes of sentence-transformers' ``embed_columns``: the first column has its own, and all others
    share one if they are of one kind and size."""
    total = number = widest = 0
    sizes = set()
    for place, (size, width) in shapes.items():
        length = max(width, 1)  # a width of 0 is that of empty texts, which count as one token
        total += size * length
        if place > 0:
            number += size
            sizes.add(size)
            widest = max(widest, length)
    shares_pass = len(shapes) - (0 in shapes) == num_columns - 1 and len(sizes) == 1
    if shares_pass:
        size, width = shapes.get(0, (0, 0))
        total = size * max(width, 1) + number * widest
    return total


def tokens_of_minibatches(lengths: Numbers, size: int) -> int:
    """The tokens of texts of these lengths (n,) in mini-batches of a size, in this order."""
    begins = np.arange(0, len(lengths), size)
    sizes = np.diff(np.append(begins, len(lengths)))
    return int(sizes @ np.maximum.reduceat(lengths, begins))
