"""sentence-transformers' distillation losses with a Similarity: they train the norm."""

from __future__ import annotations

import pytest
import torch
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")

SIMILARITIES = [stm.COSINE, stm.QNORM, stm.DOT, stm.Similarity(1.0, 0.5)]


def scores(similarity, embeddings):
    """(B, D) each -> (B, 3)."""
    return torch.stack([similarity.pairwise(embeddings[0], documents) for documents in embeddings[1:]], dim=1)


def by_hand(kind, similarity, scale, embeddings, labels):
    student = scale * scores(similarity, embeddings)
    if kind == "margin":
        margins = (student[:, :1] - student[:, 1:]) - (labels[:, :1] - labels[:, 1:])
        return margins.pow(2).mean()
    teacher = (labels / 5.0).softmax(1)
    return (teacher * (teacher.log() - (student / 5.0).log_softmax(1))).sum(1).mean() * 5.0**2


def distillation(kind, model, similarity, scale):
    def scaled(queries, documents):
        return scale * similarity.pairwise(queries, documents)

    if kind == "margin":
        return MarginMSELoss(model, similarity_fct=scaled)
    return DistillKLDivLoss(model, similarity_fct=scaled, temperature=5.0)


@pytest.mark.parametrize("kind", ["margin", "kl"])
@pytest.mark.parametrize("similarity", SIMILARITIES, ids=lambda similarity: similarity.name)
def test_value_and_gradient_of_the_norm(model, kind, similarity):
    """The derivative along an embedding is that of its norm: 0 where the similarity divides the norm away."""
    embeddings = [torch.randn(6, 5, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    labels = 4 * torch.randn(6, 3, dtype=torch.float64)
    loss = distillation(kind, model, similarity, 1.7).compute_loss_from_embeddings(embeddings, labels)
    torch.testing.assert_close(loss, by_hand(kind, similarity, 1.7, embeddings, labels))
    gradients = torch.autograd.grad(loss, embeddings[:2])
    for gradient, x, exponent in zip(gradients, embeddings[:2], similarity.exponents, strict=True):
        radial = (gradient * x).sum(1).abs().max()
        assert radial < 1e-12 if exponent == 1 else radial > 1e-3
