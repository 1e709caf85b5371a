"""False negatives, which a loss leaves out of the negatives, and copies of a text in a batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from st_magnitude._checks import InputError, one_of
from st_magnitude._upstream import batch_size_of
from st_magnitude.kernel.batch import Above, Batch, Ids
from st_magnitude.kernel.infonce import PLAIN_SCORES
from st_magnitude.kernel.plain import Comparison
from st_magnitude.losses.keys import (
    Features,
    Texts,
    bare_keys,
    is_plain_text,
    text_keys,
    unlike_all,
    vocabulary_of,
)
from st_magnitude.losses.ranks import Gathered
from st_magnitude.similarity import DOT, Similarity

logger = logging.getLogger(__name__)

SameText = Literal["once", "exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]

MOST = 0.75  # the share of negatives that may be left out without a warning


@dataclass(frozen=True)
class Copies:
    """The keys (n,) of texts, and how many texts of all ranks have each, (n,)."""

    keys: Tensor
    numbers: Tensor


class FalseNegatives:
    """Which documents ``same_text`` and ``margin`` leave out of the negatives, and how many."""

    def __init__(
        self,
        same_text: SameText,
        margin: float | None,
        margin_strategy: MarginStrategy,
        keep_explicit_negatives: bool,
    ) -> None:
        one_of("same_text", same_text, get_args(SameText))
        one_of("margin_strategy", margin_strategy, get_args(MarginStrategy))
        if margin is not None and margin >= 0:
            logger.warning(
                f"margin={margin} leaves out every negative that the model ranks above the"
                " positive, from which it should learn. Use a negative margin, such as -0.1."
            )
        if margin is None and keep_explicit_negatives:
            raise InputError(
                "keep_explicit_negatives exempts negatives from the margin, and margin is None."
                " Give a margin, such as -0.1, or leave it out."
            )
        self.same_text = same_text
        self.margin = margin
        self.margin_strategy = margin_strategy
        self.keep_explicit_negatives = keep_explicit_negatives
        self.start()

    def start(self) -> None:
        """Starts a new run, whose first batch may warn."""
        self._has_warned = False
        self._first: Tensor | None = None  # (2, n), of rows of the first batch, as `count` has them
        self._number: Tensor | int = 0  # of negatives left out since the last line of the log
        self._total = 0  # of all documents but the positives, since then
        self._vocabularies: dict[str | None, int] = {}  # of the columns of a task

    def texts(self, model: nn.Module, columns: Sequence[Features]) -> Texts:
        are_plain = all(map(is_plain_text, columns))
        if self.same_text == "keep":
            return Texts(are_plain=are_plain)
        vocabularies = [self._vocabulary(features, model) for features in columns]
        keys = [
            text_keys(features, i, vocabulary=vocabularies[i]) for i, features in enumerate(columns)
        ]
        return Texts(keys, bare_keys(columns, keys, model, vocabularies), are_plain=are_plain)

    def _vocabulary(self, features: Features, model: nn.Module) -> int:
        task = features.get("task")
        if task not in self._vocabularies:
            self._vocabularies[task] = vocabulary_of(features, model)
        return self._vocabularies[task]

    def exclude(
        self, texts: Texts, ranks: Gathered, documents: Sequence[Tensor]
    ) -> list[Tensor | Ids | Above]:
        """``exclude`` of a Batch, for documents (B, D) of each column."""
        exclude: list[Tensor | Ids | Above] = [*self._ids(texts, ranks)] if texts.keys else []
        if self.margin is not None:
            spares = self._explicit(ranks, documents) if self.keep_explicit_negatives else None
            exclude.append(Above(self._threshold, spares=spares))
        return exclude

    def _explicit(self, ranks: Gathered, documents: Sequence[Tensor]) -> Ids:
        """Ids that a query shares with the explicit negatives of its row, and with nothing else."""
        positives, *negatives = documents
        of_rows = ranks.join(unlike_all(positives, 0))
        of_positives = ranks.join(unlike_all(positives, 1))
        return Ids(of_rows, torch.cat([of_positives, *(of_rows for _ in negatives)]))

    def copies(self, texts: Texts, ranks: Gathered) -> dict[str, Copies]:
        """The copies of documents, and of queries in a softmax, if they share a weight, by the
        names that a Batch has for the logarithms of their numbers."""
        if self.same_text != "once" or not texts.keys:
            return {}
        queries, *documents = texts.keys
        keys = {"log_q": ranks.join_columns(documents)}
        if ranks.has_queries:
            keys["log_q_queries"] = ranks.join_queries(queries)
        if not any(_may_repeat(Ids(x, x)) for x in keys.values()):
            return {}
        return {name: Copies(x, ranks.numbers(x)) for name, x in keys.items()}

    def _ids(self, texts: Texts, ranks: Gathered) -> list[Ids]:
        """The keys of queries and documents without their prompts, and with ``"exclude"`` those of
        the documents' texts and of their queries, (M,) each, in which an explicit negative is like
        no other document. With ``"once"`` the others hold for two queries or two documents."""
        queries, *documents = texts.bare
        rules = [Ids(ranks.join(queries), ranks.join_columns(documents))]
        if self.same_text == "exclude" or ranks.compares_a_kind:
            queries, *documents = texts.keys
            start = len(texts.keys)  # after the columns that text_keys has numbered
            others = [unlike_all(x, start + i) for i, x in enumerate(documents[1:])]
            of_pairs = [ranks.join_columns(x) for x in (documents, [queries, *others])]
            rules += [Ids(x, ~x if self.same_text == "once" else x) for x in of_pairs]
        return [x for x in rules if _may_repeat(x, within=ranks.compares_a_kind)]

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

    def count(self, numbers: Tensor, most: int, are_plain: bool) -> None:
        """Counts the documents that are no negatives of queries, (n,) of at ``most``, for the log.
        It warns if all or most documents of the first batch are none; on a GPU at the second batch,
        which does not have to wait for the first."""
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
                f"{round(empty * self._first.shape[1])} of {self._first.shape[1]} queries of the"
                f" first batch have no negative and learn nothing; {100 * share:.0f} % of the"
                " documents are no negatives: they have the text of the positive, as far as the"
                " model reads, are the query itself, score above the margin"
                f" (margin={self.margin}), or belong to the same query (same_text='exclude'). Look"
                " at max_seq_length, long prompts, words that the tokenizer does not know, and the"
                " size of the batch."
            )

    def share_without_negatives(self, model: nn.Module, columns: Sequence[Features]) -> float:
        """The share of queries of a batch to which ``same_text`` leaves no negative."""
        if self.same_text == "keep":
            return 0.0
        texts = self.texts(model, columns)
        queries, *documents = [torch.zeros(len(x), 1, device=x.device) for x in texts.keys]
        ranks = Gathered(queries)
        copies = self.copies(texts, ranks).get("log_q")
        batch = Batch(queries, torch.cat(documents), exclude=self._ids(texts, ranks))
        most = len(batch.documents) - 1
        return (left_out(batch, copies, DOT) >= most).float().mean().item()

    def get_config_dict(self) -> dict[str, object]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "keep_explicit_negatives": self.keep_explicit_negatives,
        }


def _may_repeat(ids: Ids, within: bool = False) -> bool:
    """Whether a query may share the id of another pair's document, or texts of one kind one id; on
    a GPU the answer would keep the host waiting, and torch.compile cannot know it."""
    if ids.documents.device.type != "cpu" or torch.compiler.is_compiling():
        return True
    documents = ids.documents.tolist()
    different = set(documents)  # for small batches in a third of unique's time
    if ids.queries is ids.documents:
        return len(different) < len(documents)
    queries = ids.queries.tolist()
    if within:
        return len(different.union(queries)) < len(documents) + len(queries)
    return not different.isdisjoint(queries)


def left_out(
    batch: Batch, copies: Copies | None, similarity: Similarity, longest: int | None = None
) -> Tensor:
    """How many documents queries leave out of their negatives, copies of the positive too, (n,):
    for all queries of a small batch, and the first ones of a large batch."""
    queries = batch.queries[: max(1, PLAIN_SCORES // len(batch.documents))]
    has_one_positive = batch.positives is None and batch.targets is None
    rules = list(batch.excluded)
    if copies is None and not rules:
        return queries.new_zeros(len(queries))
    if copies is not None:
        if not rules and has_one_positive:
            return copies.numbers[batch.offset : batch.offset + len(queries)] - 1
        rules.append(copies.keys)
    batch = replace(batch, queries=queries, exclude=rules)
    with torch.no_grad():
        mask = Comparison(batch, similarity, longest=longest).left_out
    assert mask is not None
    return mask.sum(dim=1)


def sizes_without_lists(name: str, columns: Sequence[Features], takes_lists: bool) -> list[int]:
    """The number of texts in each column, except in columns of lists, which hold any number, and
    which :func:`~st_magnitude.attach` marks and lays end to end."""
    noted = [features.get("num_texts") for features in columns]
    sizes = [batch_size_of(features) for features in columns]
    are_cut = any(number not in (None, x) for number, x in zip(noted, sizes, strict=True))
    has_lists = any(number is not None for number in noted)
    if noted[0] or noted[1] or are_cut or (has_lists and not takes_lists):
        raise InputError(
            f"{name} takes lists of texts as negatives, in columns after the positives; not of a"
            " stream, not with labels='teacher', 'doc_to_doc' or keep_explicit_negatives, which ask"
            " whose negatives they are. Give each text a column of its own: negative_1, negative_2,"
            " and so on."
        )
    return [size for number, size in zip(noted, sizes, strict=True) if number is None]
