"""sentence-transformers' distillation losses with a Similarity: they train the norm."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")

SIMILARITIES = [stm.COSINE, stm.QNORM, stm.DOT, stm.Similarity(1.0, 0.5)]


def by_hand(kind, student, labels):
    if kind == "margin":
        margins = (student[:, :1] - student[:, 1:]) - (labels[:, :1] - labels[:, 1:])
        return margins.pow(2).mean()
    teacher = (labels / 5.0).softmax(1)
    return (teacher * (teacher.log() - (student / 5.0).log_softmax(1))).sum(1).mean() * 5.0**2


@pytest.mark.parametrize("kind", ["margin", "kl"])
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=lambda similarity: similarity.name)
def test_value_and_gradient_of_the_norm(model, kind, similarity):
    """The derivative along an embedding is that of its norm: 0 where the similarity divides the
    norm away."""

    def scaled(queries, documents):
        return 1.7 * similarity.pairwise(queries, documents)

    builds = {"margin": MarginMSELoss, "kl": partial(DistillKLDivLoss, temperature=5.0)}
    queries, *documents = (
        torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(4)
    )
    labels = 4 * torch.randn(6, 3, dtype=torch.float64)
    loss = builds[kind](model, similarity_fct=scaled).compute_loss_from_embeddings(
        [queries, *documents], labels
    )
    student = torch.stack([scaled(queries, column) for column in documents], dim=1)  # (6, 3)
    torch.testing.assert_close(loss, by_hand(kind, student, labels))
    sides = (queries, documents[0])
    for x, gradient, exponent in zip(
        sides, torch.autograd.grad(loss, sides), similarity.exponents, strict=True
    ):
        radial = (gradient * x).sum(1).abs().max()
        assert radial < 1e-12 if exponent == 1 else radial > 1e-3
