"""False negatives, which a loss leaves out of the negatives, and copies of a text in a batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from st_magnitude._checks import InputError, one_of
from st_magnitude.kernel.batch import Above, Batch, Direction, Ids
from st_magnitude.kernel.infonce import PLAIN_SCORES
from st_magnitude.kernel.plain import Comparison
from st_magnitude.losses.keys import BatchRule, Texts, unlike_all
from st_magnitude.losses.ranks import Gathered
from st_magnitude.similarity import Similarity, at_least_float32

logger = logging.getLogger(__name__)

SameText = Literal["once", "exclude", "keep"]
MarginStrategy = Literal["absolute", "relative"]

MOST = 0.75  # the share of negatives that may be left out without a warning


class FalseNegatives(BatchRule):
    """Which documents ``same_text`` and ``margin`` leave out of the negatives, and how many."""

    def __init__(
        self,
        same_text: SameText,
        margin: float | None,
        margin_strategy: MarginStrategy,
        keep_explicit_negatives: bool,
        directions: Sequence[Direction],
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
        # whether a softmax compares texts of one kind, and whether queries are among its columns
        self.compares_a_kind = bool({"query_to_query", "doc_to_doc"} & set(directions))
        self.has_queries = any(x.endswith("query") for x in directions)

    def start(self) -> None:
        self._has_warned = False
        # of n queries of a batch, who has no negative, and the share that each leaves out: (2, n)
        self._counted: Tensor | None = None

    def fields(self, texts: Texts, ranks: Gathered) -> dict[str, Any]:
        """``exclude``, and with ``"once"`` the logarithms of how many copies texts have."""
        exclude: list[Ids | Above] = self._ids(texts, ranks)
        if self.margin is not None:
            spares = self._explicit(ranks) if self.keep_explicit_negatives else None
            exclude.append(Above(self._threshold, spares=spares))
        found: dict[str, Any] = {"exclude": exclude}
        if self.same_text != "once" or not texts.bare:
            return found
        keys = {"log_q": ranks.join_columns(texts.keys[1:])}
        if self.has_queries:
            keys["log_q_queries"] = ranks.join_queries(texts.keys[0])
        for name, x in keys.items():
            if self._may_repeat(Ids(x, x)):
                found[name] = _numbers(x).to(at_least_float32(ranks.columns[0])).log()
        return found

    def _ids(self, texts: Texts, ranks: Gathered) -> list[Ids | Above]:
        """The keys of queries and documents without their prompts, and with ``"exclude"`` those of
        the documents' texts and of their queries, (M,) each, in which an explicit negative is like
        no other document. With ``"once"`` the others hold for two queries or two documents."""
        if not texts.bare:
            return []
        queries, *documents = texts.bare
        rules = [Ids(ranks.join(queries), ranks.join_columns(documents))]
        if self.same_text == "exclude" or self.compares_a_kind:
            queries, *documents = texts.keys
            start = len(texts.keys)  # after the columns that text_keys has numbered
            others = [unlike_all(x, start + i) for i, x in enumerate(documents[1:])]
            of_pairs = [ranks.join_columns(x) for x in (documents, [queries, *others])]
            rules += [Ids(x, ~x if self.same_text == "once" else x) for x in of_pairs]
        return [rule for rule in rules if self._may_repeat(rule)]

    def _may_repeat(self, ids: Ids) -> bool:
        """Whether a rule may leave something out; on a GPU the answer would keep the host waiting,
        and torch.compile cannot know it."""
        if ids.documents.device.type != "cpu" or torch.compiler.is_compiling():
            return True
        documents = ids.documents.tolist()
        different = set(documents)  # for small batches in a third of unique's time
        if ids.queries is ids.documents:
            return len(different) < len(documents)
        return self.compares_a_kind or not different.isdisjoint(ids.queries.tolist())

    def _explicit(self, ranks: Gathered) -> Ids:
        """Ids that a query shares with the documents of its row, and with nothing else."""
        of_rows = ranks.join(unlike_all(ranks.columns[0], 0))
        return Ids(of_rows, of_rows.repeat(len(ranks.columns) - 1))

    def _threshold(self, positive: Tensor) -> Tensor:
        """The score above which a document is too close, as in GISTEmbedLoss."""
        assert self.margin is not None
        unit = positive.abs() if self.margin_strategy == "relative" else 1.0
        return positive - self.margin * unit

    def count(
        self,
        batch: Batch,
        texts: Texts,
        ranks: Gathered,
        similarity: Similarity,
        longest: int | None,
    ) -> None:
        """Counts the documents that are no negatives, in one batch for each line of the log."""
        is_due = self._counted is None and torch.is_grad_enabled()
        if is_due and (texts.bare or self.margin is not None):
            numbers = self._left_out(batch, texts, ranks, similarity, longest)
            most = len(batch.documents) - 1
            self._counted = torch.stack([(numbers >= most).float(), numbers / max(most, 1)])
            if numbers.is_cuda:
                return  # to warn at the next batch keeps the host from waiting
        self._warn()

    def _warn(self) -> None:
        """Warns if all or most documents of the first batch are no negatives."""
        if self._has_warned or self._counted is None:
            return
        self._has_warned = True
        number = self._counted.shape[1]
        empty, share = self._counted.mean(dim=1).tolist()
        if empty or share > MOST:
            logger.warning(
                f"{round(empty * number)} of {number} queries of the first batch have no negative"
                f" and learn nothing; {100 * share:.0f} % of the documents are no negatives: they"
                " have the text of the positive, as far as the model reads, are the query itself,"
                f" score above the margin (margin={self.margin}), or belong to the same query"
                " (same_text='exclude'). Look at max_seq_length, long prompts, words that the"
                " tokenizer does not know, and the size of the batch."
            )

    def get_log(self) -> dict[str, float]:
        self._warn()
        counted, self._counted = self._counted, None
        if counted is None:
            return {}
        return {"excluded_negatives": float(counted[1].mean())}

    def _left_out(
        self,
        batch: Batch,
        texts: Texts,
        ranks: Gathered,
        similarity: Similarity,
        longest: int | None,
    ) -> Tensor:
        """How many documents queries leave out of their negatives, copies of the positive too,
        (n,): for all queries of a small batch, and the first ones of a large batch."""
        queries = batch.queries[: max(1, PLAIN_SCORES // len(batch.documents))]
        exclude = list(batch.excluded)
        if self.same_text == "once" and texts.bare:
            exclude.append(ranks.join_columns(texts.keys[1:]))
        with torch.no_grad():
            batch = replace(batch, queries=queries, exclude=exclude)
            mask = Comparison(batch, similarity, longest=longest).left_out
        return queries.new_zeros(len(queries)) if mask is None else mask.sum(dim=1)

    def get_config_dict(self) -> dict[str, object]:
        return {
            "same_text": self.same_text,
            "margin": self.margin,
            "margin_strategy": self.margin_strategy,
            "keep_explicit_negatives": self.keep_explicit_negatives,
        }


def _numbers(keys: Tensor) -> Tensor:
    """How many texts have each of the joined keys (M,)."""
    ordered = keys.sort().values
    return torch.searchsorted(ordered, keys, right=True) - torch.searchsorted(ordered, keys)
