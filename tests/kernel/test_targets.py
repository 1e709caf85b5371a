"""Targets and weights of rows: the formula, and sentence-transformers' distillation."""

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
from torch import nn

from st_magnitude import COSINE, DOT, Similarity, Term, infonce
from st_magnitude.kernel.batch import Ids

BOTH = ("query_to_doc", "doc_to_query")
BACKENDS = ["plain", "tiled"]
TERMS = (Term(3, 0.5, 0.7), Term(None, 0.3), Term(None, 0.6, 2.0))


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def pairs(matrix, offset=0):
    """Rules that exclude the pairs of a matrix (B, M), one for each row."""
    queries = torch.eye(offset + len(matrix), dtype=torch.int64)
    return [Ids(x, 2 - row.long()) for x, row in zip(queries[offset:], matrix, strict=True)]


def formula(queries, documents, terms, similarity, targets, weights, log_q, excluded):
    """-sum_j T_ij log softmax_j of every term; a document has the targets transposed."""

    def of_rows(scores, share, bias, left_out):
        logits = scores + bias
        logits = logits.masked_fill(left_out & (share == 0), -torch.inf)
        share = share / share.sum(dim=1, keepdim=True)
        return -(share * logits.log_softmax(dim=1).masked_fill(share == 0, 0)).sum(dim=1)

    own, total = slice(2, 2 + len(queries)), 0.0
    for term in terms:
        scores = similarity(queries[:, : term.dim], documents[:, : term.dim]) / term.temperature
        forward = of_rows(scores, targets, -log_q, excluded)
        backward = of_rows(scores[:, own].T, targets[:, own].T, torch.zeros(()), excluded[:, own].T)
        total += term.weight * (weights * (forward + backward) / 2).mean()
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["matrix", "function"])
@pytest.mark.parametrize("gammas", [(1, 1), (0.3, 0.8), (1, 0)])
def test_targets_are_the_formula(backend, kind, gammas):
    """With prefixes, learned temperatures, a prior, exclusions and weights of rows."""
    queries, documents = draw(4, 8), draw(9, 8, seed=1)
    targets = draw(4, 9, seed=2).detach().softmax(dim=1) * (draw(4, 9, seed=3) > -0.5)
    targets[0] *= 3.0  # rows are divided by their sums
    weights, log_q = (
        torch.tensor([0.5, 2.0, 0.0, 1.5], dtype=torch.float64),
        draw(9, seed=4).detach(),
    )
    excluded = draw(4, 9, seed=5) > 0.4
    stays = torch.zeros_like(excluded)
    stays.diagonal(2).fill_(True)
    leaves = [
        queries,
        documents,
        *(torch.tensor(t.temperature, dtype=torch.float64, requires_grad=True) for t in TERMS),
    ]
    terms = [Term(term.dim, tau, term.weight) for term, tau in zip(TERMS, leaves[2:], strict=True)]
    before = targets.clone()
    given = {"targets": targets}
    if kind == "function":
        given = {"targets": targets.__getitem__, "targets_queries": targets[:, 2:6].T}
    loss = infonce(
        queries,
        documents,
        terms,
        Similarity(*gammas),
        BOTH,
        2,
        partition_mode="per_direction",
        exclude=pairs(excluded, 2),
        weights=weights,
        log_q=log_q,
        backend=backend,
        **given,
    )
    left_out = excluded & ~stays
    expected = formula(
        queries, documents, terms, Similarity(*gammas), targets, weights, log_q, left_out
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves)
    )
    assert torch.equal(targets, before)  # a matrix of the caller is never written to


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("similarity", [COSINE, DOT], ids=lambda s: s.name)
def test_equals_sentence_transformers_distillation(backend, similarity):
    """DistillKLDivLoss compares a row with its own documents, and adds the teacher's entropy."""
    queries, *documents = columns = [draw(5, 8, seed=seed) for seed in range(4)]
    teacher = draw(5, 3, seed=9).detach()
    theirs = DistillKLDivLoss(nn.Identity(), similarity.pairwise, temperature=0.5)
    expected = theirs.compute_loss_from_embeddings(columns, teacher)
    targets = torch.zeros(5, 15, dtype=torch.float64)
    probabilities = (teacher / 0.5).softmax(dim=1)
    for column in range(3):
        targets[:, 5 * column : 5 * column + 5].diagonal().copy_(probabilities[:, column])
    others = torch.arange(15) % 5 != torch.arange(5)[:, None]
    ours = infonce(
        queries,
        torch.cat(documents),
        [Term(temperature=0.5)],
        similarity,
        targets=targets,
        exclude=pairs(others),
        backend=backend,
    )
    entropy = -(probabilities * probabilities.log()).sum(dim=1).mean()
    scale = 0.5**2  # theirs is multiplied by the squared temperature
    torch.testing.assert_close((ours - entropy) * scale, expected)
    found, wanted = (torch.autograd.grad(loss, columns) for loss in (ours * scale, expected))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_multiply_the_losses_of_rows(backend):
    queries, documents = draw(4, 8), draw(9, 8, seed=1)
    weights = torch.tensor([1.0, 0.0, 3.0, 0.25])
    parts = [infonce(queries[i : i + 1], documents, offset=i, backend=backend) for i in range(4)]
    loss = infonce(queries, documents, weights=weights, backend=backend)
    torch.testing.assert_close(loss, (torch.stack(parts) * weights).mean())


@pytest.mark.parametrize("backend", BACKENDS)
def test_constants_change_neither_type_nor_gradient(backend):
    queries, documents = (draw(n, 8).detach().float() for n in (4, 9))
    given = {"weights": draw(4), "log_q": draw(9), "targets": draw(4, 9)}
    given = {name: (x * x).detach().requires_grad_() for name, x in given.items()}
    loss = infonce(queries.requires_grad_(), documents, backend=backend, **given)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(x.grad is None for x in given.values())
