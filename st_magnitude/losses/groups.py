"""A batch is embedded in groups of texts of like length, and copies in a column once.

The texts of all columns are sorted by length and cut into passes of least cost, which have no more
tokens than those of sentence-transformers. Equal texts of different columns have a dropout mask
each, on which SimCSE relies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from st_magnitude._distributed import largest_of_ranks, shares_passes
from st_magnitude._upstream import batch_size_of
from st_magnitude.losses.probe import reads_padding, traits_of

Features = dict[str, Any]
Numbers = NDArray[np.int64]

OF_TOKENS = ("input_ids", "attention_mask", "token_type_ids")  # (B, L) each


def embed_in_groups(
    model: Callable[[Features], Features], columns: Sequence[Features], encoder: nn.Module
) -> tuple[list[Tensor], list[Numbers]]:
    """The embeddings (B, D) of each column, and the rows (B,) of its texts among those of all
    passes, or none if these are the columns. The model calls the encoder, which is in the wrappers
    of DDP and torch.compile.

    Columns that are not padded texts, such as images and flattened inputs, have a pass each.
    sentence-transformers' ``embed_columns`` embeds all columns if none is of padded texts, if the
    model has a BatchNorm, and if it reads padding.
    """
    kinds = _kinds(columns, encoder)
    if not kinds:
        return embed_columns(model, list(columns)), []  # type: ignore[arg-type]
    rows: dict[int, Numbers] = {}
    passes = []
    start = 0
    for kind in kinds:
        passes += kind.passes(traits_of(encoder).overhead(kind.is_on_cpu))
        for place, found in kind.rows.items():
            rows[place] = start + found
        start += len(kind.lengths)
    parts = _embed(model, passes, encoder)
    for place, features in enumerate(columns):
        if place not in rows:
            parts.append(model(features)["sentence_embedding"])
            rows[place] = start + np.arange(len(parts[-1]))
            start += len(parts[-1])
    order = [rows[place] for place in range(len(columns))]
    embeddings = torch.cat(parts)
    joined = torch.from_numpy(np.concatenate(order)).to(embeddings.device)
    return list(embeddings[joined].split(list(map(len, order)))), order


def sorted_by_length(
    columns: Sequence[Features], encoder: nn.Module, mini_batch_size: int
) -> tuple[list[Features], list[Numbers]]:
    """The columns with their longest texts first and copies once, for mini-batches of like length,
    and the rows (B,) of the texts of each among those of all sorted columns.

    Columns stay as they are if they are not padded texts, or if they had more tokens. Copies stay
    where ranks share forward passes, of which all ranks then have equally many.
    """
    texts = {place: x for kind in _kinds(columns, encoder) for place, x in kind.columns.items()}
    found, order = [], []
    start = 0
    for place, features in enumerate(columns):
        rows = np.arange(batch_size_of(features))
        if place in texts:
            of_copies = rows if shares_passes(encoder) else np.zeros_like(rows)
            picked, lengths, places = distinct_texts(texts[place], of_copies)
            before = lengths_of(texts[place])
            sizes = [tokens_of_minibatches(x, mini_batch_size) for x in (lengths, before)]
            if sizes[0] < sizes[1]:
                chosen = torch.from_numpy(picked).to(features["input_ids"].device)
                features = {k: x[chosen] if k in OF_TOKENS else x for k, x in features.items()}
                rows = places
        found.append(features)
        order.append(start + rows)
        start += batch_size_of(features)
    return found, order


# --- reading a batch ------------------------------------------------------------------------------


def _kinds(columns: Sequence[Features], encoder: nn.Module) -> list[_Kind]:
    """The columns of padded texts, together where they have the same features, task and prompt.
    None for a model that embeds a text in another way in other passes."""
    traits = traits_of(encoder)
    if traits.depends_on_passes or traits.reads_padding:
        return []
    alike: dict[str, tuple[Features, Features, dict[int, Numbers]]] = {}
    for place, features in enumerate(columns):
        if _is_padded_text(features):
            like = {name: features[name] for name in OF_TOKENS if name in features}
            notes = {name: x for name, x in features.items() if name not in like}
            key = repr(([(name, x.dtype) for name, x in like.items()], notes))
            *_, same = alike.setdefault(key, (like, notes, {}))
            same[place] = _on_cpu(like)
    kinds = []
    for like, notes, same in alike.values():
        steps = np.concatenate([np.diff((x[1] != 0).astype(int)).ravel() for x in same.values()])
        if (steps <= 0).all() or (steps >= 0).all():
            kinds.append(_Kind(like, notes, same, bool((steps > 0).any()), len(columns)))
    return [] if reads_padding(encoder, map(_Kind.shortest_text, kinds)) else kinds


def _on_cpu(like: Features) -> Numbers:
    """The tokens of a column, (names, B, L).

    This is the one place that waits for a GPU. It reads the tokens, not the lengths alone, because
    equal texts are found on the CPU, which then sends each pass its tokens.
    """
    return torch.stack([x.long() for x in like.values()]).cpu().numpy()


def _is_padded_text(features: Features) -> bool:
    """Whether features are whole numbers for each token of texts (B, L), with a mask, and notes on
    all of them."""
    tokens = features.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or "attention_mask" not in features:
        return False
    for name, x in features.items():
        if name in OF_TOKENS:
            if not isinstance(x, Tensor) or x.is_floating_point() or x.shape != tokens.shape:
                return False
        elif not (x is None or isinstance(x, str | int | float)):
            return False
    return features.get("modality", "text") in ("text", "message")


def lengths_of(tokens: Numbers) -> Numbers:
    """The lengths (N,) of texts (names, N, L), of which the second are the attention masks. An
    empty text counts as one token."""
    lengths: Numbers = np.count_nonzero(tokens[1], axis=1).clip(min=1)
    return lengths


def distinct_texts(tokens: Numbers, columns: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The rows (U,) of the distinct texts among texts (names, N, L), the longest first, their
    lengths (U,), and the place (N,) of each text in this order. Only texts of one of the columns
    (N,) are copies of each other."""
    firsts: dict[tuple[int, bytes], int] = {}
    copies = []  # the row of the first copy of each text
    for row, (column, text) in enumerate(zip(columns, tokens.transpose(1, 0, 2), strict=True)):
        copies.append(firsts.setdefault((column, text.tobytes()), row))
    distinct, numbers = np.unique(copies, return_inverse=True)
    lengths = lengths_of(tokens[:, distinct])
    order = np.argsort(-lengths, kind="stable")
    return distinct[order], lengths[order], np.argsort(order)[numbers]


# --- passes ---------------------------------------------------------------------------------------


class _Kind:
    """Columns whose texts may share a forward pass, by length.

    Args:
        like: Tensors of the types and on the device of the tokens.
        notes: The other features, such as the length of the prompt.
        columns: The tokens (names of ``like``, B, L) of each column by its place in the batch.
        pads_left: Whether padding is on the left.
        num_columns: Of the batch.
    """

    def __init__(
        self,
        like: Features,
        notes: Features,
        columns: dict[int, Numbers],
        pads_left: bool,
        num_columns: int,
    ) -> None:
        self.like = like
        self.notes = notes
        self.columns = columns
        self.pads_left = pads_left
        self.is_on_cpu = like["input_ids"].is_cpu
        places = np.array(list(columns))
        sizes, widths = np.array([x.shape[1:] for x in columns.values()]).T
        self.upstream_tokens = upstream_tokens(places, sizes, widths, num_columns)
        self.width = widths.max()
        # (names, N, L), padded as the reader of the texts pads
        whole = np.zeros((len(like), sizes.sum(), self.width), int)
        for tokens in columns.values():
            padding = tokens[:, tokens[1] == 0]  # (names, n)
            if padding.size:
                whole[:] = padding[:, :1, None]
        ends = sizes.cumsum()
        for tokens, end in zip(columns.values(), ends, strict=True):
            _, size, width = tokens.shape
            whole[:, end - size : end, self._kept(width)] = tokens
        picked, self.lengths, rows = distinct_texts(whole, places.repeat(sizes))
        self.tokens = whole[:, picked]  # (names, U, L), the longest texts first
        # (B,) of the texts of each column among these
        self.rows = dict(zip(columns, np.split(rows, ends[:-1]), strict=True))

    def _kept(self, length: int) -> slice:
        """The places of the longest texts of a length."""
        return slice(self.width - length, None) if self.pads_left else slice(length)

    def passes(self, overhead: float) -> list[_Pass]:
        ends = cuts(self.lengths, overhead, self.upstream_tokens)
        return [_Pass(self, begin, end) for begin, end in pairwise([0, *ends])]

    def features(self, begin: int, end: int, length: int) -> Features:
        """Those of the texts from begin to end, cut to a length."""
        found = dict(self.notes)
        for (name, like), tokens in zip(self.like.items(), self.tokens, strict=True):
            part = tokens[begin:end, self._kept(length)]
            found[name] = torch.from_numpy(part).to(like.device, like.dtype)
        return found

    def shortest_text(self) -> tuple[Features, Features]:
        """Without padding and with that of the batch. An odd length is preferred, because some
        models take only multiples."""
        last = len(self.lengths) - 1
        length = int(self.lengths[last])
        if length | 1 < self.width:
            length |= 1
        return self.features(last, last + 1, length), self.features(last, last + 1, self.width)


@dataclass(frozen=True)
class _Pass:
    """A forward pass of the texts of a kind from begin to end."""

    kind: _Kind
    begin: int
    end: int

    def embed(self, model: Callable[[Features], Features]) -> Tensor:
        features = self.kind.features(self.begin, self.end, self.kind.lengths[self.begin])
        embeddings: Tensor = model(features)["sentence_embedding"]
        return embeddings


def _embed(
    model: Callable[[Features], Features], passes: list[_Pass], encoder: nn.Module
) -> list[Tensor]:
    """The embeddings of each pass. Ranks that share passes make equally many."""
    number = largest_of_ranks(encoder, len(passes))
    while len(passes) < number:
        largest = max(passes, key=lambda x: x.end - x.begin)
        middle = (largest.begin + largest.end) // 2
        if middle == largest.begin:
            break  # each text has its own pass
        place = passes.index(largest)
        passes[place : place + 1] = replace(largest, end=middle), replace(largest, begin=middle)
    parts = [x.embed(model) for x in passes]
    for _ in range(number - len(passes)):  # other ranks wait
        shortest = min(passes, key=lambda x: x.kind.lengths[x.begin])
        parts[0] = parts[0] + 0 * shortest.embed(model).sum()
    return parts


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


def upstream_tokens(places: Numbers, sizes: Numbers, widths: Numbers, num_columns: int) -> int:
    """The tokens of columns of one kind, (B, L) each, by their places in a batch, in the passes of
    sentence-transformers' ``embed_columns``: the first column has its own, and all others share one
    if they are of one kind and size. Empty texts count as one token."""
    widths = widths.clip(min=1)
    others = places > 0
    if others.sum() == num_columns - 1 and len(set(sizes[others])) == 1:
        widths[others] = widths[others].max()
    return int(sizes @ widths)


def tokens_of_minibatches(lengths: Numbers, size: int) -> int:
    """The tokens of texts of these lengths (n,) in mini-batches of a size, in this order."""
    begins = np.arange(0, len(lengths), size)
    sizes = np.diff(np.append(begins, len(lengths)))
    return int(sizes @ np.maximum.reduceat(lengths, begins))
