"""Negatives: which documents of a batch do not count as such, and whether the batches of all ranks fit together."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device, get_rank
from torch import Tensor

from st_magnitude._checks import one_of
from st_magnitude._upstream import batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Above
from st_magnitude.kernel.ring import agree
from st_magnitude.similarity import Similarity
from st_magnitude.training.state import Logging

__all__ = ["FalseNegatives", "Guide", "MarginStrategy", "SameText", "Texts", "check_on_all_ranks", "text_keys"]

logger = logging.getLogger(__name__)

SameText = Literal["exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]
Features = Mapping[str, Any]


@dataclass(frozen=True)
class Texts:
    """The texts of a batch, column by column, as far as the loss depends on them."""

    keys: Sequence[Tensor] = ()  # (B,) each, equal for equal texts; empty if nothing depends on them
    guide: Sequence[Tensor] = ()  # (B, Dg) each, the guide's embeddings; empty without a guide
    log_q: Sequence[Tensor] = ()  # (B,) each, of the columns of documents; empty without a prior


class FalseNegatives(Logging):
    """The documents of a batch that do not count as negatives; MagnitudeRankingLoss explains the arguments."""

    def __init__(
        self,
        same_text: SameText,
        margin: float | None,
        margin_strategy: MarginStrategy,
        guide: SentenceTransformer | None,
    ) -> None:
        super().__init__()
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
        self._guide_for = None if guide is None else partial(Guide, guide)
        self.guide: Guide | None = None

    def start(self, model: SentenceTransformer) -> None:
        """Takes the model whose tokens the guide reads."""
        self._left_out = LeftOut()
        self.guide = None if self._guide_for is None else self._guide_for(model)

    def texts(self, columns: Sequence[Features], mini_batch_size: int | None) -> Texts:
        """The keys of the texts of a batch, and the guide's embeddings."""
        keys = [text_keys(f, column) for column, f in enumerate(columns)] if self.same_text == "exclude" else ()
        return Texts(keys, () if self.guide is None else [self.guide.embed(f, mini_batch_size) for f in columns])

    def exclude(
        self,
        texts: Texts,
        gather: Callable[[Tensor], Tensor],
        gather_queries: Callable[[Tensor], Tensor],
        offset: int | None,
    ) -> list[Any]:
        """``exclude`` of :func:`~st_magnitude.infonce`; the functions join what all ranks have.

        ``offset`` is the place of the first positive of this rank, or None if more documents follow.
        """
        exclude: list[Any] = [torch.cat([gather(x) for x in columns]) for columns in _ids(texts)]  # (M,) each
        if exclude and offset is not None and torch.is_grad_enabled():
            own = slice(offset, offset + len(texts.keys[0]))
            documents, queries = exclude
            self._left_out.add(number_left_out(documents, queries, own), len(documents))
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

    def get_log(self) -> dict[str, float]:
        return self._left_out.get_log()

    def share_without_negatives(self, columns: Sequence[Features]) -> float:
        """The share of queries of a batch to which ``same_text`` leaves no negative."""
        if self.same_text == "keep":
            return 0.0
        keys = [text_keys(f, column) for column, f in enumerate(columns)]
        documents, queries = (torch.cat(x) for x in _ids(Texts(keys)))
        left_out = number_left_out(documents, queries, slice(len(keys[0])))
        return (left_out >= len(documents) - 1).float().mean().item()

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "guide": None if self.guide is None else self.guide.name,
        }


class LeftOut:
    """The share of negatives that ``same_text`` leaves out, and a warning if none remain.

    Nothing waits for a GPU: the log reads the share, and the second batch what is known about the
    first one.
    """

    def __init__(self) -> None:
        self._number: Tensor | None = None  # of negatives left out since the last line of the log
        self._total = 0  # of all documents but the positives, since then
        self._empty: Tensor | None = None  # number of queries of the first batch without negatives
        self._is_over = False  # whether the first batch was looked at

    def add(self, left_out: Tensor, num_documents: int) -> None:
        """Adds a batch: how many of ``num_documents`` each query leaves out, (B,)."""
        number = left_out.sum()
        self._number = number if self._number is None else self._number + number
        self._total += len(left_out) * (num_documents - 1)
        if self._is_over:
            return
        if self._empty is None:
            empty = (left_out >= num_documents - 1).sum()
            self._empty = torch.zeros((), dtype=empty.dtype, pin_memory=empty.is_cuda)
            self._empty.copy_(empty, non_blocking=True)
            self._rows = len(left_out)
            if empty.is_cuda:
                return
        self._is_over = True
        if number_empty := int(self._empty):
            logger.warning(
                "%d of %d queries of the first batch have no negative, and their loss is 0: all "
                "other documents have the text of the positive, as far as the model reads, or "
                "belong to the same query. Look at max_seq_length, long prompts, words that the "
                "tokenizer does not know, and the size of the batch.",
                number_empty,
                self._rows,
            )

    def get_log(self) -> dict[str, float]:
        if self._number is None or not self._total:
            return {}
        share = self._number.item() / self._total
        self._number, self._total = None, 0
        return {"excluded_negatives": share}


def number_left_out(documents: Tensor, queries: Tensor, own: slice) -> Tensor:
    """How many other documents have the text or the query of each of the positives ``own``, (B,).

    Args:
        documents: Keys of the documents' texts, (M,).
        queries: Keys of the queries that they belong to, (M,).
        own: The positives at hand.
    """
    both = documents * 0x1E3779B97F4A7C15 + queries  # equal where both are
    counts = []
    for keys in (documents, queries, both):
        ordered = keys.sort().values  # neither sorting nor searching waits for a GPU
        wanted = keys[own].contiguous()
        end = torch.searchsorted(ordered, wanted, right=True)
        counts.append(end - torch.searchsorted(ordered, wanted))
    return counts[0] + counts[1] - counts[2] - 1


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
        self.tokenizer = model.tokenizer
        # As in GISTEmbedLoss, and where the features of one kind of module mean nothing to another.
        self.retokenizes = (
            type(guide[0]) is not type(model[0])
            or guide.tokenizer.get_vocab() != model.tokenizer.get_vocab()
            or (guide.max_seq_length or math.inf) < (model.max_seq_length or math.inf)
        )

    @torch.no_grad()
    def embed(self, features: Features, mini_batch_size: int | None) -> Tensor:
        """Embeddings of a column whose inner products are the guide's scores, (B, Dg)."""
        device = _device_of(features)
        self.model.to(device)
        number = batch_size_of(features)
        size = mini_batch_size or number
        parts: Iterable[dict[str, Any]]
        if self.retokenizes:
            texts = self._spelled(features)
            parts = (
                batch_to_device(self.model.preprocess(texts[i : i + size]), device) for i in range(0, number, size)
            )
        elif size == number:
            parts = [dict(features)]
        else:
            parts = (minibatch_of(dict(features), i, i + size) for i in range(0, number, size))
        return self.similarity.document(torch.cat([self.model(part)["sentence_embedding"] for part in parts]))

    def _spelled(self, features: Features) -> list[str]:
        """The texts as the tokens of the model spell them."""
        tokens = tokens_of(features)
        if tokens is None:
            raise ValueError(
                "A guide with another tokenizer reads texts, but a column of the batch holds other inputs."
            )
        rows: list[list[int]] = [[] for _ in range(batch_size_of(features))]
        for token, text, place in zip(*(x.tolist() for x in tokens), strict=True):
            if place >= 0:
                rows[text].append(token)
        decode = getattr(self.tokenizer, "batch_decode", None) or self.tokenizer.decode_batch  # of transformers, or not
        return decode(rows, skip_special_tokens=True)


def _device_of(features: Features) -> torch.device:
    return next(value.device for value in features.values() if isinstance(value, Tensor))


def tokens_of(features: Features) -> tuple[Tensor, Tensor, Tensor] | None:
    """For each token of a column its id, the number of its text, and its place in it or -1 for padding: (N,) each.

    None for inputs that are not plain text, and for models without token ids.
    """
    if "input_ids" not in features or "pixel_values" in features or features.get("modality", "text") != "text":
        return None
    ids = features["input_ids"]
    if "offsets" in features or "cu_seq_lens_q" in features:  # a StaticEmbedding, or a batch for FlashAttention
        starts = features["offsets"] if "offsets" in features else features["cu_seq_lens_q"][:-1]
        tokens = torch.arange(ids.numel(), device=ids.device)
        texts = torch.searchsorted(starts.long(), tokens, right=True) - 1
        return ids.flatten(), texts, tokens - starts[texts]
    if "attention_mask" not in features:
        return None
    mask = features["attention_mask"].long()  # (B, L)
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return ids.flatten(), texts.flatten(), (mask.cumsum(dim=1) * mask - 1).flatten()


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
