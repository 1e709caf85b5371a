"""InfoNCE as on a whiteboard, differentiated by autograd: the definition of
:func:`~st_magnitude.infonce`.

    L = sum_t w_t · mean_i [ -sum_j T_ij log softmax_j( logit_t,ij ) ]
    logit_t,ij = s_t(q_i, d_j) / tau_t + alpha · s_t(q_i, d_j) - log q_j

``s_t`` is the similarity of the first ``dim_t`` coordinates. The part with alpha, the strength of
hardness, is that of negatives alone, without a gradient. What is left out of the softmax has the
lowest logit. The targets ``T_ij`` of a row sum to
1: a single positive has all of it, several positives share it equally, a teacher spreads it.
Training takes this path while a batch is small, and the tests compare the tiled engine with it, so
it shares no mask with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from st_magnitude.kernel.batch import Batch, Direction, Ids
from st_magnitude.kernel.terms import Term, longest_prefix
from st_magnitude.similarity import Similarity, without_autocast


def plain_infonce(
    batch: Batch,
    terms: Sequence[Term],
    similarity: Similarity,
    softmaxes: Sequence[tuple[Direction, ...]],
) -> Tensor:
    """The mean loss over softmaxes; the first direction of each has the positives. The targets of
    its rows are numbers of columns, (B,), or distributions over them, (B, all columns)."""
    losses = []
    weights = None if batch.weights is None else batch.weights.detach().to(batch.queries)  # (B,)
    longest = longest_prefix(terms)
    for directions in softmaxes:
        parts = [Comparison(batch, similarity, x, longest) for x in directions]
        first, *others = parts
        targets = first.targets  # the number of the column of each positive: (B,)
        if targets is None:
            targets = first.rows_are
        elif others:
            none = (targets.new_zeros(x.shape) for x in others)
            targets = torch.cat([targets, *none], dim=1)
        for term in terms:
            logits = [part.logits(term) for part in parts]
            joint = torch.cat(logits, dim=1) if others else logits[0]  # (B, all columns)
            if weights is None:
                loss = F.cross_entropy(joint, targets)
            else:
                loss = (weights * F.cross_entropy(joint, targets, reduction="none")).mean()
            losses.append(loss if term.weight == 1 else term.weight * loss)
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    return total if len(softmaxes) == 1 else total / len(softmaxes)


class Comparison:
    """Scores, targets and mask, (B, M) each, of one direction: its B rows are queries or their
    positives. The targets are None if each row has its positive as the only one, and the mask is
    None if no rule leaves anything out. A margin compares scores of the ``longest`` prefix."""

    def __init__(
        self,
        batch: Batch,
        similarity: Similarity,
        direction: Direction = "query_to_doc",
        longest: int | None = None,
    ) -> None:
        self.batch = batch
        self.from_query, self.to_query = direction.startswith("query"), direction.endswith("query")
        self.rows = batch.queries if self.from_query else batch.documents[batch.pairs]  # (B, D)
        self.columns = batch.column_queries if self.to_query else batch.documents  # (M, D)
        self.as_row = similarity.query if self.from_query else similarity.document
        self.as_column = similarity.query if self.to_query else similarity.document
        self.log_q = batch.log_q_queries if self.to_query else batch.log_q  # (M,)

        self.shape = len(self.rows), len(self.columns)
        self.start = batch.offset if self.to_query and batch.all_queries is None else 0
        self.first = batch.offset - self.start  # the column of the pair of row 0
        self.longest = longest
        self._scores: dict[int, Tensor] = {}  # of prefixes
        self.targets: Tensor | None = None  # (B, M), rows sum to 1
        self.left_out: Tensor | None
        if self.from_query == self.to_query:
            self.left_out = self._same_kind()
        else:
            self.targets = self._targets(self.rows.dtype)
            self.left_out = self._false_negatives()
            if self.left_out is not None:
                self.left_out.diagonal(self.first).fill_(False)
                if self.targets is not None:
                    self.left_out &= self.targets == 0

    @property
    def rows_are(self) -> Tensor:
        """The numbers of the columns of the pairs, (B,)."""
        return torch.arange(self.first, self.first + self.shape[0], device=self.rows.device)

    @property
    def columns_are(self) -> Tensor:  # (M,)
        return torch.arange(self.shape[1], device=self.rows.device)

    @property
    def is_pair(self) -> Tensor:  # (B, M)
        return self.rows_are[:, None] == self.columns_are

    def scores(self, dim: int | None = None) -> Tensor:
        """s(row, column) of a prefix, or of all coordinates, (B, M)."""
        dim = dim or self.rows.shape[1]
        if dim not in self._scores:
            rows, columns = self.as_row(self.rows[:, :dim]), self.as_column(self.columns[:, :dim])
            with without_autocast(rows):
                self._scores[dim] = rows @ columns.T
        return self._scores[dim]

    def logits(self, term: Term) -> Tensor:
        """The logits of the softmax, (B, M)."""
        scores = self.scores(term.dim)
        logits = scores / term.temperature
        if self.batch.hardness_strength:
            hardness = self.batch.hardness_strength * scores.detach()
            logits = logits + hardness.masked_fill(self.is_pair, 0)
        if self.log_q is not None:
            logits = logits - self.log_q.detach().to(logits.dtype)
        if self.left_out is None:
            return logits
        lowest = torch.finfo(logits.dtype).min / 2  # whose exponential is 0
        return logits.masked_fill(self.left_out, lowest)

    def _same(self, ids: Ids) -> Tensor:
        """Pairs of texts with the same id, (B, M)."""
        of_rows = ids.queries if self.from_query else ids.documents
        of_columns = ids.queries if self.to_query else ids.documents
        of_columns = of_columns[self.start : self.start + self.shape[1]]
        return of_rows[self.batch.pairs, None] == of_columns

    def _same_kind(self) -> Tensor:
        """Texts of one kind, both queries or both documents, that share a pair or an id, (B, M)."""
        numbers = (self.start + x for x in (self.rows_are, self.columns_are))
        rows, columns = (x % self.batch.num_pairs for x in numbers)
        shared = [self._same(ids) for ids in self.batch.excluded_ids]
        shared += [self._same(ids) for ids in self.batch.positive_ids]
        return torch.stack([rows[:, None] == columns, *shared]).any(dim=0)

    def _false_negatives(self) -> Tensor | None:
        """The pairs that ``exclude`` leaves out, by scores of the longest prefix, (B, M)."""
        batch = self.batch
        said = [self._same(ids) for ids in batch.excluded_ids]
        if batch.above is not None:
            scores = self.scores(self.longest).detach()
            of_pairs = scores.where(self.is_pair, 0).sum(dim=1)  # (B,)
            too_close = scores > batch.above.threshold(of_pairs)[:, None]
            for spares in batch.spares:
                too_close &= ~self._same(spares)
            said.append(too_close)
        return reduce(torch.logical_or, said) if said else None

    def _targets(self, dtype: torch.dtype) -> Tensor | None:
        """The target distribution of each row over the columns, (B, M); rows sum to 1."""
        batch = self.batch
        given = batch.targets_queries if self.to_query else batch.targets
        if given is None and isinstance(batch.targets, Tensor):
            given = batch.targets[:, batch.pairs].T
        if given is not None:
            found = given if isinstance(given, Tensor) else given(slice(0, self.shape[0]))
        elif batch.positives is None:
            return None
        else:
            (ids,) = batch.positive_ids
            found = self._same(ids)
        found = found.detach().to(dtype)
        names_nothing = found.sum(dim=1, keepdim=True) == 0  # (B, 1); they keep their positive
        found = found + self.is_pair * names_nothing
        return found / found.sum(dim=1, keepdim=True)
