"""A formula of one's own in place of infonce: what it gets is what the other losses get."""

import itertools

import pytest
import torch
import torch.distributed as dist
from _losses import TWICE, assert_same_gradients, batch_of, gradients
from _ranks import needs_fork, on_ranks
from _tiny import ROWS, load_transformer, raw_embeddings
from torch.nn.parallel import DistributedDataParallel

import st_magnitude as stm
from st_magnitude.kernel.plain import Comparison

ROWS_OF_TWO = [*TWICE, (ROWS[7][0], ROWS[0][1], "see below")]  # which have texts in common
LABELS = {
    None: None,
    "weights": torch.tensor([1.0, 0.5, 2.0, 0.0, 1.5, 1.0, 0.2, 3.0], dtype=torch.float64),
    "classes": torch.tensor([0, 1, 2, -1, 1, 2, 0, -1]),
}


class Decoupled(stm.QNormRankingLoss):
    """w_i (log sum of exp(logits) of the negatives - the mean logit of the positives)."""

    def loss_of(self, batch, similarity):
        compared = Comparison(batch, similarity)
        logits = compared.logits(self.scaled_terms[0])
        shares = compared.is_pair.double() if compared.targets is None else compared.targets
        negatives = logits.masked_fill(shares > 0, -torch.inf).logsumexp(dim=1)
        rows = negatives - (shares * logits).sum(dim=1)
        return (rows if batch.weights is None else batch.weights * rows).mean()


def expected(model, kind):
    """The same from loops over rows of the joined batch, whose texts are compared as strings."""
    queries, *documents = raw_embeddings(model, batch_of(model, ROWS_OF_TWO))
    logits = 3 * queries / queries.norm(dim=1, keepdim=True) @ torch.cat(documents).T
    number, total = len(ROWS_OF_TWO), 0.0
    texts = [row[1] for row in ROWS_OF_TWO] + [row[2] for row in ROWS_OF_TWO]
    labels = LABELS[kind]
    for i, (query, positive, _) in enumerate(ROWS_OF_TWO):
        same = {i}
        if kind == "classes" and labels[i] >= 0:
            same = {j for j in range(number) if labels[j] == labels[i]}
        others = {j for j, text in enumerate(texts) if text not in (query, positive)} - same
        others -= {j for j in range(number) if ROWS_OF_TWO[j][0] == query}
        row = logits[i, sorted(others)].logsumexp(dim=0) - logits[i, sorted(same)].mean()
        total = total + (labels[i] if kind == "weights" else 1.0) * row / number
    return total


CASES = list(itertools.product(LABELS, [None, 3]))


def one_rank(folder, kind, mini_batch_size):
    """The value of half of the rows, and the gradient accumulated over two steps."""
    part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    model = load_transformer(folder).double()
    options = {"mini_batch_size": mini_batch_size, "gather_across_devices": True}
    loss = Decoupled(model, scale=3.0, same_text="exclude", labels=kind, **options)
    loss.model = DistributedDataParallel(model)
    labels = None if kind is None else LABELS[kind][part]
    with loss.model.no_sync():
        loss(batch_of(model, ROWS_OF_TWO[part]), labels).backward()
    value = loss(batch_of(model, ROWS_OF_TWO[part]), labels)
    value.backward()
    return value.item(), gradients(model)


@needs_fork
def test_a_formula_of_ones_own_has_the_batch_of_all_ranks(folder):
    """Plain and cached."""
    ranks = on_ranks(2, lambda: [one_rank(folder, *case) for case in CASES])
    for (kind, _), *found in zip(CASES, *ranks, strict=True):
        model = load_transformer(folder).double()
        value = expected(model, kind)
        value.backward()
        assert sum(x for x, _ in found) / 2 == pytest.approx(value.item(), rel=1e-9)
        for _, twice in found:
            assert_same_gradients(twice, gradients(model), 2, rtol=1e-7, atol=1e-10)
