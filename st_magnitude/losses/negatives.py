"""Negatives: which documents of a batch do not count as such."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from st_magnitude._checks import one_of
from st_magnitude._upstream import batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Above, Batch, Ids
from st_magnitude.kernel.infonce import PLAIN_SCORES
from st_magnitude.kernel.plain import Comparison
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.keys import (
    Features,
    Texts,
    bare_keys,
    device_of,
    is_plain_text,
    text_keys,
    tokens_of,
    unlike_all,
)
from st_magnitude.losses.prompts import split_prompt
from st_magnitude.losses.ranks import Gathered
from st_magnitude.similarity import DOT, Similarity, at_least_float32, without_autocast
from st_magnitude.surgery.raw import prompt_of, unwrapped

logger = logging.getLogger(__name__)

SameText = Literal["exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]

MOST = 0.75  # the share of negatives that may be left out without a warning


class FalseNegatives:
    """Which documents are left out of the negatives by ``same_text``, ``margin`` and ``guide``, and
    how many."""

    def __init__(
        self,
        model: SentenceTransformer,
        same_text: SameText,
        margin: float | None,
        margin_strategy: MarginStrategy,
        guide: SentenceTransformer | None,
        keep_explicit_negatives: bool,
    ) -> None:
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
        self.keep_explicit_negatives = keep_explicit_negatives
        self.guide = None if guide is None else Guide(guide, model)
        self._has_warned = False
        self._first: Tensor | None = None  # (2, n), of rows of the first batch, as `count` has them
        self._unchecked = 10  # batches in which classes may repeat
        self._number: Tensor | int = 0  # of negatives left out since the last line of the log
        self._total = 0  # of all documents but the positives, since then

    def texts(
        self, model: nn.Module, columns: Sequence[Features], mini_batch_size: int | None
    ) -> Texts:
        """The keys of the texts of a batch that the model reads, and the guide's embeddings."""
        keys: list[Tensor] = []
        bare: list[Tensor] = []
        guide: list[Tensor] = []
        if self.same_text == "exclude":
            keys = [text_keys(features, i) for i, features in enumerate(columns)]
            bare = bare_keys(columns, keys, model)
        if self.guide is not None:
            guide = self.guide.embed_columns(columns, model, mini_batch_size)
        are_plain = all(map(is_plain_text, columns))
        return Texts(keys=keys, bare=bare, guide=guide, are_plain=are_plain)

    def exclude(
        self, texts: Texts, batch: Gathered, documents: Sequence[Tensor]
    ) -> list[Tensor | Ids | Above]:
        """``exclude`` of infonce, for documents (B, D) of each column."""
        exclude: list[Tensor | Ids | Above] = []
        if texts.keys:
            exclude += self._ids(texts, batch)
        if self.margin is None or (self.guide is not None and not texts.guide):
            return exclude
        guide = None
        if texts.guide:
            queries, *others = texts.guide
            guide = batch.join_queries(queries), torch.cat([batch.join(x) for x in others])
        spares = self._explicit(batch, documents) if self.keep_explicit_negatives else None
        return [*exclude, Above(self._threshold, guide, spares)]

    def _explicit(self, batch: Gathered, documents: Sequence[Tensor]) -> Ids:
        """Ids that a query shares with the explicit negatives of its row, and with nothing else."""
        positives, *negatives = documents
        of_rows = batch.join(unlike_all(positives, 0))
        of_positives = batch.join(unlike_all(positives, 1))
        return Ids(of_rows, torch.cat([of_positives, *(of_rows for _ in negatives)]))

    def _ids(self, texts: Texts, batch: Gathered) -> list[Tensor | Ids]:
        """The keys of the documents' texts and of their queries, (M,) each, and of queries and
        documents without their prompts.

        Documents that share one of the first two are not negatives of each other. In the second an
        explicit negative is like no other document. A document is not a negative of a query that is
        the same text.
        """
        queries, *documents = texts.keys
        start = len(texts.keys)  # after the columns that text_keys has numbered
        others = [unlike_all(x, start + i) for i, x in enumerate(documents[1:])]
        of_texts = torch.cat([batch.join(x) for x in documents])
        of_queries = torch.cat([batch.join(x) for x in (queries, *others)])
        if not texts.bare:
            return [of_texts, of_queries]
        bare_queries, *bare = map(batch.join, texts.bare)
        return [of_texts, of_queries, Ids(bare_queries, torch.cat(bare))]

    def _threshold(self, positive: Tensor) -> Tensor:
        """The score above which a document is too close, as in GISTEmbedLoss."""
        assert self.margin is not None
        unit = positive.abs() if self.margin_strategy == "relative" else 1.0
        return positive - self.margin * unit

    def get_log(self) -> dict[str, float]:
        if not self._total:
            return {}
        share = float(self._number) / self._total
        self._number = 0
        self._total = 0
        return {"excluded_negatives": share}

    def count(self, mask: Tensor, are_plain: bool) -> None:
        """Adds a batch to the log: whether queries leave out documents, (n, M).

        Of other inputs than plain texts, only a margin leaves documents out. It warns if queries of
        the first batch leave out all or most of them; on a GPU at the second batch, which does not
        have to wait for the first.
        """
        numbers = mask.sum(dim=1)  # (n,)
        most = mask.shape[1] - 1
        if are_plain or self.margin is not None:
            self._number = self._number + numbers.sum()
            self._total += len(numbers) * most
        if self._has_warned:
            return
        if self._first is None:
            is_empty = (numbers >= most).float()
            self._first = torch.stack([is_empty, numbers / max(most, 1)])  # (2, n)
            if self._first.is_cuda:
                return
        self._has_warned = True
        empty, share = self._first.mean(dim=1).tolist()
        if empty or share > MOST:
            logger.warning(
                "%d of %d queries of the first batch have no negative and a loss of 0, and %.0f %%"
                " of the negatives are left out: documents that have the text of the positive, as"
                " far as the model reads, belong to the same query, are the query itself, or score"
                " above the margin, if there is one (margin=%s). Look at max_seq_length, long"
                " prompts, words that the tokenizer does not know, and the size of the batch.",
                round(empty * self._first.shape[1]),
                self._first.shape[1],
                100 * share,
                self.margin,
            )

    def warn_of_anchors(self, classes: Tensor, queries: Tensor) -> None:
        """Warns if the classes (B,) of one of the first batches are those of equal queries, by
        their keys (B,)."""
        if not self._unchecked:
            return
        self._unchecked -= 1
        both = classes * 0x1E3779B97F4A7C15 + queries  # equal where both are
        number = len(classes.unique())
        if number == len(both):
            return
        self._unchecked = 0
        if number == len(both.unique()):
            logger.warning(
                "labels='classes' adds nothing here: all rows of a class have the same query, whose"
                " answers train alike without labels, and same_text leaves them out of each other's"
                " negatives only then. Leave out labels=."
            )

    def share_without_negatives(self, columns: Sequence[Features]) -> float:
        """The share of queries of a batch to which ``same_text`` leaves no negative."""
        if self.same_text == "keep":
            return 0.0
        keys = [text_keys(f, column) for column, f in enumerate(columns)]
        queries, *documents = [torch.zeros(len(x), 1, device=x.device) for x in keys]
        exclude = self._ids(Texts(keys), Gathered(queries))
        mask = left_out(Batch(queries, torch.cat(documents), exclude=exclude), DOT, [Term()])
        return (mask.sum(dim=1) >= mask.shape[1] - 1).float().mean().item()

    def get_config_dict(self) -> dict[str, object]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "guide": None if self.guide is None else self.guide.name,
            "keep_explicit_negatives": self.keep_explicit_negatives,
        }


@torch.no_grad()
def left_out(batch: Batch, similarity: Similarity, terms: Sequence[Term]) -> Tensor:
    """Which documents queries leave out of their negatives, booleans (n, M): for all queries of a
    small batch, and the first ones of a large batch."""
    number = max(1, PLAIN_SCORES // len(batch.documents))
    queries = at_least_float32(batch.queries[:number])
    exclude = list(batch.excluded)
    if batch.above is not None and batch.above.guide is not None:
        guides, documents = batch.above.guide
        first = batch.offset if len(guides) > len(batch.queries) else 0
        guide = guides[first : first + number], documents
        exclude = [*batch.excluded_ids, replace(batch.above, guide=guide)]
    documents = at_least_float32(batch.documents)
    rows = replace(batch, queries=queries, documents=documents, exclude=exclude)
    longest = max(term.dim or queries.shape[1] for term in terms)
    with without_autocast(queries):
        return Comparison(rows, similarity, {longest}, "query_to_doc").left_out


def sizes_without_lists(name: str, columns: Sequence[Features], takes_lists: bool) -> list[int]:
    """The number of texts in each column, except in columns of lists, which hold any number.

    :func:`~st_magnitude.attach` marks such columns, and lays their lists end to end.
    """
    noted = [features.get("num_texts") for features in columns]
    sizes = [batch_size_of(features) for features in columns]
    are_cut = any(number not in (None, x) for number, x in zip(noted, sizes, strict=True))
    has_lists = any(number is not None for number in noted)
    if noted[0] or noted[1] or are_cut or (has_lists and not takes_lists):
        raise ValueError(
            f"{name} takes lists of texts as negatives, in columns after the positives; not of a"
            " stream, not with labels='teacher', 'doc_to_doc' or keep_explicit_negatives, which ask"
            " whose negatives they are, and on several processes with gather_across_devices='ring'"
            " or False. Give each text a column of its own: negative_1, negative_2, and so on."
        )
    return [size for number, size in zip(noted, sizes, strict=True) if number is None]


def chat_template_of(model: SentenceTransformer) -> object:
    return getattr(model.tokenizer, "chat_template", None)


class Guide:
    """A frozen model that scores documents in place of the model that is trained.

    It is not a Module, which keeps its weights out of optimizers, ``train()`` and ``state_dict``.
    """

    def __init__(self, guide: SentenceTransformer, model: SentenceTransformer) -> None:
        if guide is model:
            raise ValueError(
                "guide is the model that is trained, but a guide is frozen. Pass a copy,"
                " copy.deepcopy(model), or margin=... without a guide to let the model's own"
                " scores decide."
            )
        if guide.similarity_fn_name not in ("cosine", "dot"):
            raise ValueError(
                "A guide scores by cosine or dot, and this one has the distance"
                f" {guide.similarity_fn_name!r}. Set its similarity_fn_name to one of the two."
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
            or chat_template_of(guide) != chat_template_of(model)
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
