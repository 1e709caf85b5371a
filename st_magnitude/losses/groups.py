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
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from st_magnitude._distributed import largest_of_ranks, shares_passes
from st_magnitude._upstream import batch_size_of
from st_magnitude.losses.passes import (
    OF_TOKENS,
    Numbers,
    Sorted,
    cuts,
    upstream_tokens,
)
from st_magnitude.losses.probe import reads_padding, traits_of

Features = dict[str, Any]


def embed_in_groups(
    model: Callable[[Features], Features], columns: Sequence[Features], encoder: nn.Module
) -> tuple[list[Tensor], list[Numbers]]:
    """The embeddings (B, D) of each column, and the rows (B,) of its texts among those of all
    passes. The model calls the encoder, which is in the wrappers of DDP and torch.compile.

    Columns that are not padded texts, such as images and flattened inputs, are embedded by
    sentence-transformers' ``embed_columns``, and so are all columns of a model with a BatchNorm,
    and of one that reads padding.
    """
    rows: dict[int, Numbers] = {}
    passes: list[_Pass] = []
    start = 0
    for kind in _kinds(columns, encoder):
        for place, found in kind.rows().items():
            rows[place] = start + found
        start += len(kind.texts.order)
        passes += kind.passes(traits_of(encoder).overhead(kind.is_on_cpu))
    others = [place for place in range(len(columns)) if place not in rows]
    parts = _embed(model, passes, encoder)
    for place, part in zip(others, _as_upstream(model, columns, others), strict=True):
        rows[place] = start + np.arange(len(part))
        start += len(part)
        parts.append(part)
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
    texts: dict[int, Sorted] = {}
    for kind in _kinds(columns, encoder):
        for column in kind.columns:
            texts[column.place] = Sorted([column.tokens], shares_passes(encoder))
    found, order = [], []
    start = 0
    for place, features in enumerate(columns):
        rows = np.arange(batch_size_of(features))
        if place in texts and texts[place].saves_tokens(mini_batch_size):
            picked = torch.from_numpy(texts[place].order).to(features["input_ids"].device)
            features = {name: x[picked] if name in OF_TOKENS else x for name, x in features.items()}
            rows = texts[place].rows
        found.append(features)
        order.append(start + rows)
        start += batch_size_of(features)
    return found, order


# --- reading a batch ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A column of padded texts."""

    place: int  # in the batch
    like: Features  # tensors of the types and on the device of its tokens
    notes: Features  # what is not of its tokens, such as the length of its prompt
    tokens: Numbers  # (names of `like`, B, L), of which the second is the attention mask

    def pads(self, left: bool) -> bool:
        """Whether all padding is on one side."""
        mask = self.tokens[1] != 0
        before, after = mask[:, :-1], mask[:, 1:]
        return bool((before <= after).all() if left else (after <= before).all())


def _kinds(columns: Sequence[Features], encoder: nn.Module) -> list[_Kind]:
    """The columns of texts, together where they have the same features, task and prompt. None for a
    model that embeds a text in another way in other passes."""
    traits = traits_of(encoder)
    if traits.depends_on_passes or traits.reads_padding:
        return []
    alike: dict[str, list[_Column]] = {}
    for column in _on_cpu(columns):
        dtypes = [(name, x.dtype) for name, x in column.like.items()]
        alike.setdefault(repr((dtypes, column.notes)), []).append(column)
    kinds = []
    for same in alike.values():
        for left in (False, True):
            if all(column.pads(left) for column in same):
                kinds.append(_Kind(same, left, len(columns)))
                break
    return [] if reads_padding(encoder, map(_Kind.shortest_text, kinds)) else kinds


def _on_cpu(columns: Sequence[Features]) -> list[_Column]:
    """The columns of padded texts.

    This is the one place that waits for a GPU, once a step. It reads the tokens, not the lengths
    alone, because equal texts are found on the CPU, which then sends each pass its tokens.
    """
    found, tensors = [], []
    for place, features in enumerate(columns):
        if _is_padded_text(features):
            like, notes = {}, dict(features)
            for name in OF_TOKENS:
                if name in features:
                    like[name] = notes.pop(name)
                    tensors.append(like[name].flatten().long())
            if torch.is_tensor(length := notes.get("prompt_length")):
                tensors.append(length.flatten().long()[:1])
            found.append((place, like, notes))
    if not found:
        return []
    flat = torch.cat(tensors).cpu().numpy()
    read = []
    for place, like, notes in found:
        shape = (len(like), *like["input_ids"].shape)
        size = math.prod(shape)
        tokens, flat = flat[:size].reshape(shape), flat[size:]
        if torch.is_tensor(notes.get("prompt_length")):
            notes["prompt_length"], flat = int(flat[0]), flat[1:]
        read.append(_Column(place, like, notes, tokens))
    return read


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
        elif isinstance(x, Tensor):
            if name != "prompt_length":
                return False
        elif not (x is None or isinstance(x, str | int | float)):
            return False
    return features.get("modality", "text") in ("text", "message")


# --- passes ---------------------------------------------------------------------------------------


class _Kind:
    """Columns whose texts may share a forward pass, by length.

    Args:
        columns: Of one kind, which are padded on one side.
        pads_left: Whether this side is the left one.
        num_columns: Of the batch.
    """

    def __init__(self, columns: Sequence[_Column], pads_left: bool, num_columns: int) -> None:
        self.columns = columns
        self.pads_left = pads_left
        self.like, self.notes = columns[0].like, columns[0].notes
        self.is_on_cpu = self.like["input_ids"].is_cpu
        shapes = {column.place: column.tokens.shape[1:] for column in columns}
        self.upstream_tokens = upstream_tokens(shapes, num_columns)
        self.width = max(width for _, width in shapes.values())
        padded = self._padded()
        self.texts = Sorted(padded)
        # (names, U, L), the longest texts first
        self.tokens = np.concatenate(padded, axis=1)[:, self.texts.order]

    def _padded(self) -> list[Numbers]:
        """The tokens of each column up to the width, padded as its reader pads."""
        fill = np.zeros((len(self.like), 1), dtype=np.int64)
        for column in self.columns:
            is_padding = column.tokens[1] == 0  # (B, L)
            if is_padding.any():
                fill = column.tokens[:, is_padding][:, :1]
        padded = []
        for column in self.columns:
            number, width = column.tokens.shape[1:]
            gap = np.broadcast_to(fill[:, :, None], (len(fill), number, self.width - width))
            both = [gap, column.tokens] if self.pads_left else [column.tokens, gap]
            padded.append(np.concatenate(both, axis=2))
        return padded

    def rows(self) -> dict[int, Numbers]:
        """The rows (B,) of the texts of each column among those of all passes."""
        found = {}
        start = 0
        for column in self.columns:
            end = start + column.tokens.shape[1]
            found[column.place] = self.texts.rows[start:end]
            start = end
        return found

    def passes(self, overhead: float) -> list[_Pass]:
        ends = cuts(self.texts.lengths, overhead, self.upstream_tokens)
        return [_Pass(self, begin, end) for begin, end in pairwise([0, *ends])]

    def features(self, begin: int, end: int, length: int) -> Features:
        """Those of the texts from begin to end, cut to a length."""
        kept = slice(self.width - length, None) if self.pads_left else slice(length)
        found = dict(self.notes)
        for (name, like), tokens in zip(self.like.items(), self.tokens, strict=True):
            found[name] = torch.from_numpy(tokens[begin:end, kept]).to(like.device, like.dtype)
        return found

    def shortest_text(self) -> tuple[Features, Features]:
        """Without padding and with that of the batch. An odd length is preferred, because some
        models take only multiples."""
        last = len(self.texts.order) - 1
        length = int(self.texts.lengths[last])
        if length | 1 < self.width:
            length |= 1
        return self.features(last, last + 1, length), self.features(last, last + 1, self.width)


@dataclass(frozen=True)
class _Pass:
    """A forward pass of the texts of a kind from begin to end."""

    kind: _Kind
    begin: int
    end: int

    @property
    def length(self) -> int:
        return int(self.kind.texts.lengths[self.begin])

    def embed(self, model: Callable[[Features], Features]) -> Tensor:
        features = self.kind.features(self.begin, self.end, self.length)
        embeddings: Tensor = model(features)["sentence_embedding"]
        return embeddings


def _embed(
    model: Callable[[Features], Features], passes: list[_Pass], encoder: nn.Module
) -> list[Tensor]:
    """The embeddings of each pass. Ranks that share passes make equally many."""
    if not passes:
        return []
    number = largest_of_ranks(encoder, len(passes))
    while len(passes) < number and max(x.end - x.begin for x in passes) > 1:
        passes = _halved(passes)
    parts = [x.embed(model) for x in passes]
    for _ in range(number - len(passes)):  # each text has its own pass, and other ranks wait
        shortest = min(passes, key=lambda x: x.length)
        parts[0] = parts[0] + 0 * shortest.embed(model).sum()
    return parts


def _halved(passes: list[_Pass]) -> list[_Pass]:
    """The passes, of which the largest one is two."""
    sizes = [x.end - x.begin for x in passes]
    place = sizes.index(max(sizes))
    largest = passes[place]
    middle = (largest.begin + largest.end) // 2
    halves = [replace(largest, end=middle), replace(largest, begin=middle)]
    return [*passes[:place], *halves, *passes[place + 1 :]]


def _as_upstream(
    model: Callable[[Features], Features], columns: Sequence[Features], places: list[int]
) -> list[Tensor]:
    """The embeddings of the columns that are not grouped. They share a pass only if all columns
    after the first do."""
    some = [columns[place] for place in places]
    if {0, *places} == set(range(len(columns))):
        return embed_columns(model, some, separate_first=0 in places)  # type: ignore[arg-type]
    return [model(features)["sentence_embedding"] for features in some]
