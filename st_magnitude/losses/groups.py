"""A batch is embedded in groups of texts of like length, and copies in a column once.

The texts of all columns are sorted by length, and cut into groups with the least cost in tokens,

    sum over groups of (number of texts · length of the longest + OVERHEAD),

where OVERHEAD is the cost of one more forward and backward pass. Equal texts of different columns
have a dropout mask each, on which SimCSE relies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.base.losses.merged_forward import embed_columns
from torch import Tensor, nn

from st_magnitude._distributed import missing_passes, shares_passes
from st_magnitude._upstream import batch_size_of
from st_magnitude.surgery.raw import num_positions

Features = dict[str, Any]
Numbers = NDArray[np.int64]

OVERHEAD = 100  # tokens that cost as much as a pass on a CPU
OVERHEAD_OF_A_DEVICE = 4096  # to which the host sends each operation; a cautious guess
OF_TOKENS = {"input_ids", "attention_mask", "token_type_ids"}
BY_PASS = (nn.BatchNorm1d, nn.SyncBatchNorm)  # their statistics are those of the texts of a pass


def embed_in_groups(
    model: Callable[[Features], Features], columns: Sequence[Features], encoder: nn.Module
) -> tuple[list[Tensor], list[Numbers]]:
    """The embeddings (B, D) of each column, and the rows (B,) of its texts among those of all
    passes. The model calls the encoder, which is in the wrappers of DDP and torch.compile.

    Columns that are not padded texts, such as images and flattened inputs, are embedded by
    sentence-transformers' ``embed_columns``, and so are all columns of a model with a BatchNorm.
    """
    places = _places_of_texts(columns, encoder)
    others = [place for place in range(len(columns)) if place not in places]
    as_they_are = [columns[place] for place in others]
    parts = embed_columns(model, as_they_are, separate_first=0 in others)  # type: ignore[arg-type]
    start = 0
    rows: dict[int, Numbers] = {}
    for place, part in zip(others, parts, strict=True):
        rows[place] = start + np.arange(len(part))
        start += len(part)
    passes: list[Features] = []
    for kind in _kinds(columns, places, encoder):
        rows |= {place: start + found for place, found in zip(kind.places, kind.rows, strict=True)}
        start += kind.size
        passes += kind.passes
    missing = missing_passes(encoder, len(passes)) if passes else 0
    for _ in range(missing):
        passes.append({name: x[-1:] if torch.is_tensor(x) else x for name, x in passes[-1].items()})
    parts += [model(features)["sentence_embedding"] for features in passes]
    for _ in range(missing):
        parts[0] = parts[0] + 0 * parts.pop().sum()
    embeddings = torch.cat(parts)
    order = [rows[place] for place in range(len(columns))]
    joined = torch.from_numpy(np.concatenate(order)).to(embeddings.device)
    return list(embeddings[joined].split([len(x) for x in order])), order


def sorted_by_length(
    columns: Sequence[Features], encoder: nn.Module
) -> tuple[list[Features], list[Numbers]]:
    """The columns with their longest texts first and copies once, for mini-batches of like length,
    and the rows (B,) of the texts of each among those of all sorted columns.

    Columns that are not padded texts stay as they are. Copies stay where ranks share forward
    passes, of which all ranks then have equally many.
    """
    places = _places_of_texts(columns, encoder)
    numbers = dict(zip(places, _on_cpu([columns[i] for i in places]), strict=True))
    found, order = [], []
    start = 0
    for place, features in enumerate(columns):
        rows = np.arange(batch_size_of(features))
        if place in places:
            texts = _Sorted([numbers[place]], shares_passes(encoder))
            picked = torch.from_numpy(texts.order).to(features["input_ids"].device)
            features = {name: x[picked] if name in OF_TOKENS else x for name, x in features.items()}
            rows = texts.rows
        found.append(features)
        order.append(start + rows)
        start += batch_size_of(features)
    return found, order


def cuts(lengths: Numbers, overhead: int) -> list[int]:
    """The ends of the groups of least cost of texts whose lengths (n,) descend.

    Texts of one length stay together. The best groups of the texts before a length follow from
    those of the texts before each longer one.

    Example:
        >>> cuts(np.array([60, 58, 9, 8, 8]), overhead=50)
        [2, 5]
    """
    negated, begins = np.unique(-lengths, return_index=True)
    ends = np.append(begins[1:], len(lengths))
    best = np.zeros(len(ends) + 1)  # costs of the texts before each length
    last = np.zeros(len(ends) + 1, dtype=int)  # the first length of the last group of these
    for i, end in enumerate(ends, start=1):
        costs = best[:i] - negated[:i] * (end - begins[:i]) + overhead
        last[i] = costs.argmin()
        best[i] = costs[last[i]]
    found = []
    i = len(ends)
    while i:
        found.append(int(ends[i - 1]))
        i = last[i]
    return found[::-1]


# --- reading a batch ------------------------------------------------------------------------------


def _is_padded_text(features: Features) -> bool:
    """Whether features are token ids (B, L) with a mask, and nothing else by text or by token."""
    tensors = {name: x for name, x in features.items() if torch.is_tensor(x)}
    tensors.pop("prompt_length", None)
    is_text = features.get("modality", "text") in ("text", "message")
    if not is_text or not {"input_ids", "attention_mask"} <= tensors.keys() <= OF_TOKENS:
        return False
    shape = tensors["input_ids"].shape
    return len(shape) == 2 and all(x.shape == shape for x in tensors.values())


def _places_of_texts(columns: Sequence[Features], encoder: nn.Module) -> list[int]:
    """The places of the columns whose texts may change their places in a pass."""
    if any(isinstance(module, BY_PASS) for module in encoder.modules()):
        return []
    return [place for place, features in enumerate(columns) if _is_padded_text(features)]


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


class _Sorted:
    """The texts of columns, which are of one width, by length."""

    def __init__(self, columns: Sequence[dict[str, Numbers]], keeps_copies: bool = False) -> None:
        texts: dict[tuple[int, bytes], int] = {}  # the number of each distinct text
        numbers: list[int] = []
        for place, column in enumerate(columns):
            tokens = np.hstack([column[name] for name in column if name in OF_TOKENS])
            for row in tokens:
                key = (len(numbers) if keeps_copies else place, row.tobytes())
                numbers.append(texts.setdefault(key, len(texts)))
        first = np.unique(numbers, return_index=True)[1]
        masks = np.vstack([column["attention_mask"] for column in columns])
        lengths = masks[first].sum(axis=1).clip(min=1)
        order = np.argsort(-lengths, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        self.order = first[order]  # (U,) rows of the distinct texts of a column, the longest first
        self.rows = places[numbers]  # (N,) the place of each text in this order
        self.lengths = lengths[order]  # (U,) in tokens, at least 1


# --- planning passes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """Columns whose texts may share a forward pass."""

    places: list[int]  # of the columns
    passes: list[Features]
    size: int  # the number of texts of all passes
    rows: list[Numbers]  # (B,) of each column, the rows of its texts among them


def _kinds(
    columns: Sequence[Features], places: Sequence[int], encoder: nn.Module
) -> Iterator[_Kind]:
    """The columns of texts, together where they have the same features, task and prompt."""
    numbers = dict(zip(places, _on_cpu([columns[i] for i in places]), strict=True))
    alike: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        notes = _notes(columns[place], numbers[place])
        key = (*numbers[place], *map(repr, notes.items()))
        alike.setdefault(key, []).append(place)
    for same in alike.values():
        masks = [numbers[i]["attention_mask"] for i in same]
        if all((x[:, 1:] <= x[:, :-1]).all() for x in masks):
            yield _kind(columns, numbers, same, pads_left=False)
        # a place that is learned depends on the padding before it
        elif all((x[:, 1:] >= x[:, :-1]).all() for x in masks) and num_positions(encoder) == np.inf:
            yield _kind(columns, numbers, same, pads_left=True)
        else:
            for i in same:
                size = len(numbers[i]["input_ids"])
                yield _Kind([i], [dict(columns[i])], size, [np.arange(size)])


def _kind(
    columns: Sequence[Features],
    numbers: dict[int, dict[str, Numbers]],
    places: list[int],
    pads_left: bool,
) -> _Kind:
    like = columns[places[0]]
    notes = _notes(like, numbers[places[0]])
    names = [name for name in numbers[places[0]] if name in OF_TOKENS]
    width = max(numbers[i]["input_ids"].shape[1] for i in places)
    tokens = []  # of each column, with zeros up to the width
    for i in places:
        gap = width - numbers[i]["input_ids"].shape[1]
        room = (0, 0), (gap, 0) if pads_left else (0, gap)
        tokens.append({name: np.pad(numbers[i][name], room) for name in names})
    texts = _Sorted(tokens)
    joined = {name: np.vstack([x[name] for x in tokens])[texts.order] for name in names}
    overhead = OVERHEAD if like["input_ids"].is_cpu else OVERHEAD_OF_A_DEVICE
    passes = []
    for begin, end in pairwise([0, *cuts(texts.lengths, overhead)]):
        longest = texts.lengths[begin]
        kept = slice(width - longest, width) if pads_left else slice(longest)
        group = {
            name: torch.from_numpy(x[begin:end, kept]).to(like[name].device, like[name].dtype)
            for name, x in joined.items()
        }
        passes.append(group | notes)
    ends = np.cumsum([len(x["input_ids"]) for x in tokens])
    return _Kind(places, passes, len(texts.order), np.split(texts.rows, ends[:-1]))


def _notes(features: Features, numbers: dict[str, Numbers]) -> Features:
    """The features of a column that are not of its tokens, such as the length of its prompt."""
    notes = {name: x for name, x in features.items() if name not in OF_TOKENS}
    if "prompt_length" in numbers:
        notes["prompt_length"] = int(numbers["prompt_length"].flat[0])
    return notes
