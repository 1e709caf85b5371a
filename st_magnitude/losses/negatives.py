"""Negatives: which documents of a batch do not count as such, and whether the batches of all ranks fit together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device, get_rank
from torch import Tensor

from st_magnitude._checks import one_of
from st_magnitude._upstream import batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Above
from st_magnitude.kernel.ring import agree
from st_magnitude.losses.texts import Features, split_prompt, tokens_of
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import prompt_of, unwrapped

__all__ = ["FalseNegatives", "Guide", "MarginStrategy", "SameText", "Texts", "check_on_all_ranks", "text_keys"]

logger = logging.getLogger(__name__)

SameText = Literal["exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]


@dataclass(frozen=True)
class Texts:
    """The texts of a batch, column by column, as far as the loss depends on them."""

    keys: Sequence[Tensor] = ()  # (B,) each, equal for equal texts; empty if nothing depends on them
    guide: Sequence[Tensor] = ()  # (B, Dg) each, the guide's embeddings; empty without a guide
    log_q: Sequence[Tensor] = ()  # (B,) each, of the columns of documents; empty without a prior


class FalseNegatives:
    """The documents of a batch that do not count as negatives; MagnitudeRankingLoss explains the arguments."""

    def __init__(
        self,
        model: SentenceTransformer,
        same_text: SameText,
        margin: float | None,
        margin_strategy: MarginStrategy,
        guide: SentenceTransformer | None,
    ) -> None:
        one_of("same_text", same_text, get_args(SameText))
        one_of("margin_strategy", margin_strategy, get_args(MarginStrategy))
        if margin is not None and margin >= 0 and guide is None:
            logger.warning(
                "margin=%s without a guide leaves out every negative that the model ranks above the positive, from "
                "which it should learn. Use a negative margin, such as -0.1, or pass guide=...",
                margin,
            )
        self.same_text = same_text
        self.margin = 0.0 if margin is None and guide is not None else margin
        self.margin_strategy = margin_strategy
        self.guide = None if guide is None else Guide(guide, model)

    def texts(self, model: Any, columns: Sequence[Features], mini_batch_size: int | None) -> Texts:
        """The keys of the texts of a batch that the model reads, and the guide's embeddings."""
        keys = [text_keys(f, column) for column, f in enumerate(columns)] if self.same_text == "exclude" else ()
        if self.guide is None:
            return Texts(keys)
        roles = ("query", *("document" for _ in columns[1:]))
        embed = partial(self.guide.embed, model=model, mini_batch_size=mini_batch_size)
        return Texts(keys, [embed(features, role) for features, role in zip(columns, roles, strict=True)])

    def exclude(
        self, texts: Texts, gather: Callable[[Tensor], Tensor], gather_queries: Callable[[Tensor], Tensor]
    ) -> list[Any]:
        """``exclude`` of :func:`~st_magnitude.infonce`; the functions join documents and queries of all ranks."""
        exclude: list[Any] = [torch.cat([gather(x) for x in columns]) for columns in _ids(texts)]  # (M,) each
        if self.margin is not None and texts.guide:
            queries, *documents = texts.guide
            guide = gather_queries(queries), torch.cat([gather(x) for x in documents])
            exclude.append(Above(self._threshold, guide))
        elif self.margin is not None and self.guide is None:
            exclude.append(Above(self._threshold))
        return exclude

    def _threshold(self, positive: Tensor) -> Tensor:
        """The score above which a document is too close, as in GISTEmbedLoss; a relative margin has no sign."""
        assert self.margin is not None
        return positive - self.margin * (positive.abs() if self.margin_strategy == "relative" else 1.0)

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "guide": None if self.guide is None else self.guide.name,
        }


class Guide:
    """A frozen model that scores documents in place of the model that is trained.

    It is not a submodule of the loss, which keeps its weights out of optimizers, ``train()`` and ``state_dict``.
    """

    def __init__(self, guide: SentenceTransformer, model: SentenceTransformer) -> None:
        if guide is model:
            raise ValueError(
                "guide is the model that is trained, but a guide is frozen. Pass margin=... without a guide to "
                "let the model's own scores decide, or a copy, copy.deepcopy(model)."
            )
        self.model = guide.eval()
        self.similarity = Similarity.named(guide.similarity_fn_name)
        card = guide.model_card_data
        self.name = card.model_id or card.base_model or type(guide[0]).__name__
        # As in GISTEmbedLoss, and where the features of one kind of module mean nothing to another.
        self.retokenizes = (
            type(guide[0]) is not type(model[0])
            or isinstance(guide[0], Router)
            or guide.tokenizer.get_vocab() != model.tokenizer.get_vocab()
            or (guide.max_seq_length or math.inf) < (model.max_seq_length or math.inf)
        )

    @torch.no_grad()
    def embed(self, features: Features, role: str, model: Any, mini_batch_size: int | None) -> Tensor:
        """Embeddings of a column whose inner products are the guide's scores, (B, Dg).

        They are those of ``encode_query`` or ``encode_document``, of texts without a prompt of the model that reads
        the features.
        """
        device = _device_of(features)
        self.model.to(device)
        number = batch_size_of(features)
        size = mini_batch_size or number
        parts: Iterable[dict[str, Any]]
        own = dict(features) | {"task": role}
        prompt = prompt_of(self.model, role)
        may_differ = bool(prompt or prompt_of(model, role) or "prompt_length" in features)
        if self.retokenizes or (may_differ and tokens_of(features) is not None):
            _, texts = split_prompt(features, unwrapped(model))
            read = partial(self.model.preprocess, prompt=prompt, task=role)
            parts = (
                batch_to_device(read(texts[i : i + size]) | {"task": role}, device) for i in range(0, number, size)
            )
        elif size == number:
            parts = [own]
        else:
            parts = (minibatch_of(own, i, i + size) for i in range(0, number, size))
        return self.similarity.document(torch.cat([self.model(part)["sentence_embedding"] for part in parts]))


def _device_of(features: Features) -> torch.device:
    return next(value.device for value in features.values() if isinstance(value, Tensor))


def text_keys(features: Features, column: int = 0) -> Tensor:
    """A 64-bit hash of the tokens of each text of a column, (B,): padding does not change it.

    Inputs without token ids get keys that no other input of the batch has, on this rank and all others.
    """
    tokens = tokens_of(features)
    if tokens is None:
        return _unlike(torch.arange(batch_size_of(features), device=_device_of(features)), column)
    ids, texts, places = tokens
    # A sum over tokens of a mix of id and place: multiplications by odd numbers modulo 2^64, and shifts.
    mixed = (ids.long() + 1) * 0x1E3779B97F4A7C15 + places * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 32)) * 0x14D049BB133111EB
    mixed = (mixed ^ (mixed >> 29)).masked_fill(places < 0, 0)
    return mixed.new_zeros(batch_size_of(features)).index_add_(0, texts, mixed)


def _ids(texts: Texts) -> list[list[Tensor]]:
    """Two sets of numbers of the documents, column by column, (B,) each: equal if they are not negatives of each other.

    The first are the keys of the documents' texts. The second are the keys of their queries; an explicit negative is
    like no other document.
    """
    if not texts.keys:
        return []
    queries, *documents = texts.keys
    rows = torch.arange(len(queries), device=queries.device)
    unlike = [_unlike(rows, column) for column in range(len(texts.keys), 2 * len(texts.keys) - 2)]
    return [documents, [queries, *unlike]]


def _unlike(rows: Tensor, column: int) -> Tensor:
    """Numbers that nothing else has in the batches of all ranks."""
    return rows + ((get_rank() << 10 | column) << 32)


def check_on_all_ranks(check: Callable[[], tuple[int, int]], device: torch.device | None, needs_one_size: bool) -> None:
    """Checks the batch of this rank and, where negatives come from all ranks, that their batches fit together.

    ``check`` returns the number of columns and rows of this rank. The ranks exchange them on the device; None if they
    do not share negatives. All ranks raise, because a rank that raised alone would leave the others waiting.
    """
    if device is None:
        check()
        return
    (num_columns, num_rows), *others = agree(device, check, 2)
    for rank, (columns, rows) in enumerate(others, start=1):
        if columns != num_columns:
            raise ValueError(
                "Negatives from all ranks need the same text columns on each of them, but the batch of rank 0 has "
                f"{num_columns} columns and the batch of rank {rank} has {columns}."
            )
        if rows != num_rows and needs_one_size:
            raise ValueError(
                "gather_across_devices=True needs batches of one size, but the batch of rank 0 has "
                f"{num_rows} rows and the batch of rank {rank} has {rows}. Set dataloader_drop_last=True, or pass "
                "gather_across_devices='ring', which takes batches of any size."
            )
