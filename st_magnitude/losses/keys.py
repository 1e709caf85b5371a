"""The texts of a batch as a ranking loss reads them, and the rules on them.

A text has a key, a hash of its tokens, by which a loss recognises equal texts.
"""

from __future__ import annotations

import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Router
from sentence_transformers.util import get_rank
from torch import Tensor, nn

from st_magnitude._upstream import batch_size_of, tokenizer_of
from st_magnitude.losses.ranks import Gathered
from st_magnitude.surgery.raw import prompt_of, unwrapped

logger = logging.getLogger(__name__)

Features = Mapping[str, Any]


@dataclass(frozen=True)
class Texts:
    """The texts and labels of a batch as a ranking loss sees them, column by column."""

    keys: Sequence[Tensor] = ()  # (B,) each, equal for equal texts; empty if nothing needs them
    bare: Sequence[Tensor] = ()  # (B,) each, keys of the texts without prompts; empty with "keep"
    labels: Tensor | None = None  # as the data have them
    sizes: Sequence[int] = ()  # of the batch of each rank, if the loss gathers
    learned: Sequence[Tensor] = ()  # exponents of a cached step, 0-d; else the model has them
    order: Sequence[NDArray[np.int64]] = ()  # (B,) each, of `sorted_by_length` in a cached step
    losses: dict[str, Tensor] = field(default_factory=dict)  # by name, which a cached step fills


class BatchRule(ABC):
    """Reads of a batch, beyond its embeddings, which texts are no negatives, labels, or a prior."""

    def start(self) -> None:  # noqa: B027
        """Starts a new run, whose first batch may warn."""

    @abstractmethod
    def fields(self, texts: Texts, ranks: Gathered) -> dict[str, Any]:
        """Fields of the `Batch` of these texts, whose embeddings are ``ranks.columns``."""

    def get_log(self) -> dict[str, float]:
        """Figures for a line of the log."""
        return {}

    @abstractmethod
    def get_config_dict(self) -> dict[str, object]: ...


def read_texts(
    columns: Sequence[Features], model: nn.Module, vocabularies: dict[str | None, int]
) -> Texts:
    """The keys of all texts; ``vocabularies`` notes those of tasks for the next batch."""
    keys, has_prompts = [], False
    for column, features in enumerate(columns):
        task = features.get("task")
        if task not in vocabularies:
            vocabularies[task] = vocabulary_of(features, model)
        keys.append(text_keys(features, column, vocabulary=vocabularies[task]))
        has_prompts |= "prompt_length" in features
    bare = keys
    if has_prompts:
        bare = [
            text_keys(x, column, begin_of_text(x, model), vocabularies[x.get("task")])
            for column, x in enumerate(columns)
        ]
    return Texts(keys, bare)


def is_plain_text(features: Features) -> bool:
    """Whether a column holds token ids of texts alone, in a chat template or not.

    Images and sound come as numbers with a fraction, next to the tokens that stand for them.
    """
    if "input_ids" not in features or features.get("modality", "text") not in ("text", "message"):
        return False
    for name, x in features.items():
        is_media = torch.is_tensor(x) and x.is_floating_point()
        if is_media and "embedding" not in name:  # which a model has added
            return False
    return True


def tokens_of(features: Features) -> tuple[Tensor, Tensor, Tensor] | None:
    """The id of each token, the number of its text, and its place or -1 for padding: (N,) each.

    None for inputs that are not plain text, and for models without token ids.
    """
    if not is_plain_text(features):
        return None
    ids = features["input_ids"]
    # a StaticEmbedding, or a batch for FlashAttention
    if "offsets" in features or "cu_seq_lens_q" in features:
        starts = features["offsets"] if "offsets" in features else features["cu_seq_lens_q"][:-1]
        tokens = torch.arange(ids.numel(), device=ids.device)
        texts = torch.searchsorted(starts.long(), tokens, right=True) - 1
        return ids.flatten(), texts, tokens - starts[texts]
    if "attention_mask" not in features:
        return None
    mask = features["attention_mask"].long()  # (B, L)
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return ids.flatten(), texts.flatten(), (mask.cumsum(dim=1) * mask - 1).flatten()


def text_keys(
    features: Features, column: int = 0, start: int | Tensor = 0, vocabulary: int = 0
) -> Tensor:
    """A 64-bit hash (B,) of the tokens of each text of a column from place ``start`` on, whatever
    the padding, as another vocabulary spells no text.

    Inputs without token ids get keys that are unique across columns and ranks.
    """
    tokens = tokens_of(features)
    if tokens is None:
        device = next(value.device for value in features.values() if isinstance(value, Tensor))
        return unlike_all(torch.empty(batch_size_of(features), device=device), column)
    ids, texts, places = tokens
    places = places - start
    # A sum over tokens of a mix of id and place: products with odd numbers modulo 2^64, and shifts
    mixed = (ids.long() + 1 + vocabulary) * 0x1E3779B97F4A7C15 + places * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 32)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 29)).masked_fill(places < 0, 0)
    return mixed.new_zeros(batch_size_of(features)).index_add_(0, texts, mixed)


def vocabulary_of(features: Features, model: nn.Module) -> int:
    """A number of the vocabulary from which the ids of a column are: 0 without a Router, whose
    routes may have several. Other processes have the same number."""
    model = unwrapped(model)
    if not isinstance(next(model.children(), None), Router) or tokens_of(features) is None:
        return 0
    words = tokenizer_of(cast(BaseModel, model), features.get("task")).get_vocab()
    return zlib.crc32(repr(sorted(words.items())).encode()) << 31  # above the ids


def begin_of_text(features: Features, model: nn.Module) -> int | Tensor:
    """The place at which texts begin behind their prompt, whose length a Transformer notes, or
    behind the special tokens with which every text begins; a table has none."""
    if "prompt_length" in features:
        length = features["prompt_length"]
        return length.flatten()[0] if isinstance(length, Tensor) else length
    if not is_plain_text(features) or "offsets" in features:
        return 0
    tokenizer = tokenizer_of(cast(BaseModel, unwrapped(model)), features.get("task"))
    mask = tokenizer("a", return_special_tokens_mask=True)["special_tokens_mask"]
    return [*mask, 0].index(0)


def unlike_all(rows: Tensor, column: int) -> Tensor:
    """Ids (B,) that are unique across columns and ranks."""
    return torch.arange(len(rows), device=rows.device) + ((get_rank() << 10 | column) << 32)


# --- prompts --------------------------------------------------------------------------------------


def spelled(features: Features, model: BaseModel) -> list[str]:
    """The B texts of a column of tokens as the model spells them; waits for the device."""
    rows: list[list[int]] = [[] for _ in range(batch_size_of(features))]
    tokens = tokens_of(features)
    assert tokens is not None
    for token, text, place in zip(*(x.tolist() for x in tokens), strict=True):
        if place >= 0:
            rows[text].append(token)
    tokenizer = tokenizer_of(model, features.get("task"))  # of transformers, or of tokenizers
    decode = getattr(tokenizer, "batch_decode", None) or tokenizer.decode_batch
    found: list[str] = decode(rows, skip_special_tokens=True)
    return found


def begins_with_prompt(features: Features, model: BaseModel) -> bool:
    """Whether all texts of a column of tokens begin with the same prompt of the model."""
    texts = spelled(features, model)
    for prompt in filter(None, model.prompts.values()):
        two = model.preprocess(["", "x"], prompt=prompt, task=features.get("task"))
        empty, other = spelled(two, model)
        differ = (i for i, (x, y) in enumerate(zip(empty, other, strict=False)) if x != y)
        place = next(differ, len(empty))  # where a text stands in a chat template
        # empty if all its tokens are special or unknown, which texts do not show either
        begin = empty[:place].strip()
        if all(text.startswith(begin) for text in texts):
            return True
    return False


def warn_without_prompts(columns: Sequence[Features], model: nn.Module, who: str) -> None:
    """Warns if a model puts prompts before texts, and columns, the queries first, have none."""
    model = unwrapped(model)
    if not isinstance(model, BaseModel):
        return
    for number, features in enumerate(columns, start=1):
        role = "query" if number == 1 else "document"
        prompt = prompt_of(model, role)
        # A Transformer notes the length of a prompt; a prompt may also stand in the data.
        if not prompt or "prompt_length" in features or tokens_of(features) is None:
            continue
        if not begins_with_prompt(features, model):
            logger.warning(
                f"encode_{role} puts the prompt {prompt!r} before a text, but text column {number}"
                f" of a batch of {who} begins with no prompt of the model: it trains on other texts"
                " than it will be used with. Give SentenceTransformerTrainingArguments"
                " prompts={column: prompt} for each column of each data set."
            )
