"""A batch is embedded in groups of texts of like length, and copies in a column once.

The texts of all columns are sorted by length and cut into passes of least cost, which have no more
tokens than those of sentence-transformers. Equal texts of different columns have a dropout mask
each, on which SimCSE relies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    kinds = _kinds(columns, encoder)
    grouped = {place for kind in kinds for place in kind.places}
    others = [place for place in range(len(columns)) if place not in grouped]
    parts = _as_upstream(model, columns, others)
    rows: dict[int, Numbers] = {}
    start = 0
    for place, part in zip(others, parts, strict=True):
        rows[place] = start + np.arange(len(part))
        start += len(part)
    passes: list[_Pass] = []
    for kind in kinds:
        for place, found in zip(kind.places, kind.rows, strict=True):
            rows[place] = start + found
        start += len(kind.texts.order)
        passes += kind.passes(traits_of(encoder).overhead(kind.device.type == "cpu"))
    missing = 0
    if passes:
        number = largest_of_ranks(encoder, len(passes))
        passes = _split(passes, number)
        missing = number - len(passes)
    parts += [model(x.features())["sentence_embedding"] for x in passes]
    if missing:  # each text has its own pass, and other ranks wait for more
        shortest = min(passes, key=lambda x: x.length)
        again = [model(shortest.features())["sentence_embedding"] for _ in range(missing)]
        parts[0] = parts[0] + 0 * torch.cat(again).sum()
    embeddings = torch.cat(parts)
    order = [rows[place] for place in range(len(columns))]
    joined = torch.from_numpy(np.concatenate(order)).to(embeddings.device)
    return list(embeddings[joined].split([len(x) for x in order])), order


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
        for place, numbers in zip(kind.places, kind.numbers, strict=True):
            texts[place] = Sorted([numbers], shares_passes(encoder))
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


class _Kind:
    """Columns whose texts may share a forward pass, by length.

    Args:
        columns: By their places in the batch.
        numbers: The tokens of each, which are padded on one side.
        pads_left: Whether this side is the left one.
        num_columns: Of the batch.
    """

    def __init__(
        self,
        columns: dict[int, Features],
        numbers: Sequence[dict[str, Numbers]],
        pads_left: bool,
        num_columns: int,
    ) -> None:
        self.places = list(columns)
        self.numbers = numbers
        self.pads_left = pads_left
        first = next(iter(columns.values()))
        self.device = first["input_ids"].device
        self.notes = _notes(first, numbers[0])
        self.dtypes = {name: first[name].dtype for name in OF_TOKENS if name in first}
        shapes = [x["input_ids"].shape for x in numbers]
        self.upstream_tokens = upstream_tokens(dict(zip(columns, shapes, strict=True)), num_columns)
        self.width = max(width for _, width in shapes)
        padded = self._padded()
        self.texts = Sorted(padded)
        # (U, L) by name, the longest texts first
        self.tokens = {
            name: np.vstack([x[name] for x in padded])[self.texts.order] for name in self.dtypes
        }
        ends = np.cumsum([size for size, _ in shapes])
        self.rows = np.split(self.texts.rows, ends[:-1])  # (B,) of each column, among its texts

    def _padded(self) -> list[dict[str, Numbers]]:
        """The tokens of each column up to the width, padded as its reader pads."""
        fill = dict.fromkeys(self.dtypes, 0)
        for numbers in self.numbers:
            is_padding = numbers["attention_mask"] == 0
            if is_padding.any():
                fill = {name: int(numbers[name][is_padding][0]) for name in self.dtypes}
        padded = []
        for numbers in self.numbers:
            gap = self.width - numbers["input_ids"].shape[1]
            room = (0, 0), (gap, 0) if self.pads_left else (0, gap)
            padded.append(
                {name: np.pad(numbers[name], room, constant_values=x) for name, x in fill.items()}
            )
        return padded

    def features(self, begin: int, end: int, length: int) -> Features:
        """Those of the texts from begin to end, cut to a length."""
        kept = slice(self.width - length, None) if self.pads_left else slice(length)
        found = dict(self.notes)
        for name, dtype in self.dtypes.items():
            tokens = torch.from_numpy(self.tokens[name][begin:end, kept])
            found[name] = tokens.to(self.device, dtype)
        return found

    def passes(self, overhead: float) -> list[_Pass]:
        ends = cuts(self.texts.lengths, overhead, self.upstream_tokens)
        return [_Pass(self, begin, end) for begin, end in pairwise([0, *ends])]

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

    def features(self) -> Features:
        return self.kind.features(self.begin, self.end, self.length)


def _kinds(columns: Sequence[Features], encoder: nn.Module) -> list[_Kind]:
    """The columns of texts, together where they have the same features, task and prompt. None for a
    model that embeds a text in another way in other passes."""
    traits = traits_of(encoder)
    if traits.depends_on_passes or traits.reads_padding:
        return []
    places = [place for place, features in enumerate(columns) if _is_padded_text(features)]
    numbers = dict(zip(places, _on_cpu([columns[i] for i in places]), strict=True))
    alike: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        dtypes = [
            (name, columns[place][name].dtype) for name in OF_TOKENS if name in columns[place]
        ]
        key = (*dtypes, *_notes(columns[place], numbers[place]).items())
        alike.setdefault(key, []).append(place)
    kinds = []
    for same in alike.values():
        tokens = [numbers[i] for i in same]
        masks = [x["attention_mask"] != 0 for x in tokens]
        pads_right = all((x[:, 1:] <= x[:, :-1]).all() for x in masks)
        if pads_right or all((x[:, 1:] >= x[:, :-1]).all() for x in masks):
            some = {i: columns[i] for i in same}
            kinds.append(_Kind(some, tokens, not pads_right, len(columns)))
    return [] if reads_padding(encoder, map(_Kind.shortest_text, kinds)) else kinds


def _is_padded_text(features: Features) -> bool:
    """Whether features are whole numbers for each token of texts (B, L), with a mask, and notes on
    all of them."""
    if not {"input_ids", "attention_mask"} <= features.keys():
        return False
    notes = {name: x for name, x in features.items() if name not in OF_TOKENS}
    length = notes.pop("prompt_length", None)
    if not (length is None or isinstance(length, int | Tensor)):
        return False
    if not all(x is None or isinstance(x, str | int | float) for x in notes.values()):
        return False
    if notes.get("modality", "text") not in ("text", "message"):
        return False
    tokens = [features[name] for name in OF_TOKENS if name in features]
    return all(
        isinstance(x, Tensor)
        and x.ndim == 2
        and x.shape == tokens[0].shape
        and not (x.is_floating_point() or x.is_complex())
        for x in tokens
    )


def _on_cpu(columns: Sequence[Features]) -> list[dict[str, Numbers]]:
    """The numbers of each tensor of each column.

    This is the one place that waits for a GPU, once a step. It reads the tokens, not the lengths
    alone, because equal texts are found on the CPU, which then sends each pass its tokens.
    """
    tensors = [x for features in columns for x in features.values() if torch.is_tensor(x)]
    if not tensors:
        return []
    flat = torch.cat([x.flatten().long() for x in tensors]).cpu()
    parts = iter(flat.split([x.numel() for x in tensors]))
    return [
        {name: next(parts).view(x.shape).numpy() for name, x in y.items() if torch.is_tensor(x)}
        for y in columns
    ]


def _notes(features: Features, numbers: dict[str, Numbers]) -> Features:
    """The features of a column that are not of its tokens, such as the length of its prompt."""
    notes = {name: x for name, x in features.items() if name not in OF_TOKENS}
    if "prompt_length" in numbers:
        notes["prompt_length"] = int(numbers["prompt_length"].flat[0])
    return notes


# --- passes ---------------------------------------------------------------------------------------


def _as_upstream(
    model: Callable[[Features], Features], columns: Sequence[Features], places: list[int]
) -> list[Tensor]:
    """The embeddings of the columns that are not grouped. They share a pass only if all columns
    after the first do."""
    some = [columns[place] for place in places]
    if {0, *places} == set(range(len(columns))):
        return embed_columns(model, some, separate_first=0 in places)  # type: ignore[arg-type]
    return [model(features)["sentence_embedding"] for features in some]


def _split(passes: list[_Pass], number: int) -> list[_Pass]:
    """Halves the largest passes until there are a ``number`` of them, or one for each text."""
    while len(passes) < number:
        sizes = [x.end - x.begin for x in passes]
        largest = sizes.index(max(sizes))
        kind, begin, end = passes[largest].kind, passes[largest].begin, passes[largest].end
        if end - begin == 1:
            break
        middle = (begin + end) // 2
        halves = [_Pass(kind, begin, middle), _Pass(kind, middle, end)]
        passes = [*passes[:largest], *halves, *passes[largest + 1 :]]
    return passes
