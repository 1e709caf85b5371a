"""Negatives: which documents of a batch do not count as such."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from st_magnitude._checks import one_of
from st_magnitude._upstream import batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Above
from st_magnitude.losses.ranks import Gathered
from st_magnitude.losses.texts import (
    Features,
    Texts,
    device_of,
    split_prompt,
    text_keys,
    tokens_of,
    unlike_all,
)
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import prompt_of, unwrapped
from st_magnitude.training.attach import Logging

logger = logging.getLogger(__name__)

SameText = Literal["exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]


class FalseNegatives(Logging):
    """The documents of a batch that do not count as negatives, as MagnitudeRankingLoss says."""

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
                "margin=%s without a guide leaves out every negative that the model ranks above the"
                " positive, from which it should learn. Use a negative margin, such as -0.1, or"
                " pass guide=...",
                margin,
            )
        self.same_text = same_text
        self.margin = 0.0 if margin is None and guide is not None else margin
        self.margin_strategy = margin_strategy
        self._given = (guide,)  # in a tuple it is not a submodule
        self.guide: Guide | None = None

    def start(self, model: SentenceTransformer) -> None:
        """Takes the model whose tokens the guide reads."""
        self._has_warned = False
        self._is_empty: Tensor | None = None  # rows of the first batch without negatives, (B,)
        self._number: Tensor | int = 0  # of negatives left out since the last line of the log
        self._total = 0  # of all documents but the positives, since then
        (given,) = self._given
        self.guide = None if given is None else Guide(given, model)

    def texts(
        self, model: nn.Module, columns: Sequence[Features], mini_batch_size: int | None
    ) -> Texts:
        """The keys of the texts of a batch that the model reads, and the guide's embeddings."""
        keys: list[Tensor] = []
        guide: list[Tensor] = []
        if self.same_text == "exclude":
            keys = [text_keys(features, i) for i, features in enumerate(columns)]
        if self.guide is not None:
            guide = self.guide.embed_columns(columns, model, mini_batch_size)
        return Texts(keys=keys, guide=guide)

    def exclude(self, texts: Texts, batch: Gathered) -> list[Tensor | Above]:
        """``exclude`` of infonce."""
        exclude: list[Tensor | Above] = []
        if texts.keys:
            of_texts, of_queries = self._ids(texts, batch)
            exclude += [of_texts, of_queries]
            if torch.is_grad_enabled() and not batch.is_ring:  # in a ring more documents follow
                own = slice(batch.offset, batch.offset + len(texts.keys[0]))
                self._count(number_left_out(of_texts, of_queries, own), len(of_texts))
        if self.margin is not None and texts.guide:
            queries, *documents = texts.guide
            guide = batch.join_queries(queries), torch.cat([batch.join(x) for x in documents])
            exclude.append(Above(self._threshold, guide))
        elif self.margin is not None and self.guide is None:
            exclude.append(Above(self._threshold))
        return exclude

    def _ids(self, texts: Texts, batch: Gathered) -> tuple[Tensor, Tensor]:
        """The keys of the documents' texts and of their queries, (M,) each.

        Documents that share one of them are not negatives of each other. In the second an explicit
        negative is like no other document.
        """
        queries, *documents = texts.keys
        others = [
            unlike_all(queries, len(texts.keys) + column) for column in range(len(documents) - 1)
        ]
        of_texts = torch.cat([batch.join(x) for x in documents])
        return of_texts, torch.cat([batch.join(x) for x in (queries, *others)])

    def _threshold(self, positive: Tensor) -> Tensor:
        """The score above which a document is too close, as in GISTEmbedLoss."""
        assert self.margin is not None
        unit = positive.abs() if self.margin_strategy == "relative" else 1.0
        return positive - self.margin * unit

    def get_log(self) -> dict[str, float]:
        if not self._total:
            return {}
        share = float(self._number) / self._total
        self._number = self._total = 0
        return {"excluded_negatives": share}

    def _count(self, left_out: Tensor, num_documents: int) -> None:
        """Adds a batch to the log: how many of the documents each query leaves out, (B,).

        It warns if the first batch has rows without negatives; on a GPU at the second batch, which
        does not have to wait for them.
        """
        self._number = self._number + left_out.sum()
        self._total += len(left_out) * (num_documents - 1)
        if self._has_warned:
            return
        if self._is_empty is None:
            self._is_empty = left_out >= num_documents - 1
            if self._is_empty.is_cuda:
                return
        self._has_warned = True
        if number := int(self._is_empty.sum()):
            logger.warning(
                "%d of %d queries of the first batch have no negative, and their loss is 0: all"
                " other documents have the text of the positive, as far as the model reads, or"
                " belong to the same query. Look at max_seq_length, long prompts, words that the"
                " tokenizer does not know, and the size of the batch.",
                number,
                len(self._is_empty),
            )

    def share_without_negatives(self, columns: Sequence[Features]) -> float:
        """The share of queries of a batch to which ``same_text`` leaves no negative."""
        if self.same_text == "keep":
            return 0.0
        keys = [text_keys(f, column) for column, f in enumerate(columns)]
        of_texts, of_queries = self._ids(Texts(keys), Gathered(keys[0]))
        left_out = number_left_out(of_texts, of_queries, slice(len(keys[0])))
        return (left_out >= len(of_texts) - 1).float().mean().item()

    def get_config_dict(self) -> dict[str, object]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "guide": None if self.guide is None else self.guide.name,
        }


def number_left_out(documents: Tensor, queries: Tensor, own: slice) -> Tensor:
    """How many other documents have the text or the query of each of the positives ``own``, (B,).

    ``documents`` are keys of the documents' texts, (M,), and ``queries`` of their queries.
    """
    both = documents * 0x1E3779B97F4A7C15 + queries  # equal where both are
    numbers = []
    for keys in (documents, queries, both):
        ordered = keys.sort().values  # neither sorting nor searching waits for a GPU
        wanted = keys[own].contiguous()
        end = torch.searchsorted(ordered, wanted, right=True)
        numbers.append(end - torch.searchsorted(ordered, wanted))
    return numbers[0] + numbers[1] - numbers[2] - 1


class Guide:
    """A frozen model that scores documents in place of the model that is trained.

    It is not a Module, which keeps its weights out of optimizers, ``train()`` and ``state_dict``.
    """

    def __init__(
        self, guide: SentenceTransformer, model: SentenceTransformer, what: str = "guide"
    ) -> None:
        if guide is model:
            raise ValueError(
                f"{what} is the model that is trained, but a {what} is frozen. Pass a copy,"
                " copy.deepcopy(model), or margin=... without a guide to let the model's own"
                " scores decide."
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

    def embed_columns(
        self, columns: Sequence[Features], model: nn.Module, mini_batch_size: int | None
    ) -> list[Tensor]:
        """Embeddings of queries and of columns of documents, (B, Dg) each."""
        roles = ["query"] + ["document"] * (len(columns) - 1)
        pairs = zip(columns, roles, strict=True)
        return [self.embed(f, role, model, mini_batch_size) for f, role in pairs]

    @torch.no_grad()
    def embed(
        self, features: Features, role: str, model: nn.Module, mini_batch_size: int | None
    ) -> Tensor:
        """Embeddings of a column whose inner products are the guide's scores, (B, Dg).

        They are those of ``encode_query`` or ``encode_document``, of texts without a prompt of the
        model that reads the features.
        """
        device = device_of(features)
        self.model.to(device)
        number = batch_size_of(features)
        size = mini_batch_size or number
        prompt = prompt_of(self.model, role)
        may_differ = bool(prompt or prompt_of(model, role) or "prompt_length" in features)
        texts: list[str] | None = None
        if self.retokenizes or (may_differ and tokens_of(features) is not None):
            reader = unwrapped(model)
            assert isinstance(reader, BaseModel)
            _, texts = split_prompt(features, reader)
        embeddings = []
        for start in range(0, number, size):
            if texts is not None:
                part = self.model.preprocess(texts[start : start + size], prompt=prompt, task=role)
                part = batch_to_device(part, device)
            elif size == number:
                part = dict(features)
            else:
                part = minibatch_of(dict(features), start, start + size)
            embeddings.append(self.model(part | {"task": role})["sentence_embedding"])
        return self.similarity.document(torch.cat(embeddings))
