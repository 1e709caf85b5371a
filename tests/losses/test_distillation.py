"""sentence-transformers' distillation losses with a Similarity: they train the norm, at the scale of the teacher."""

from __future__ import annotations

import pytest
import torch
from _tiny import COLUMNS, ROWS
from datasets import Dataset
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss, MarginMSELoss

import st_magnitude as stm

pytestmark = pytest.mark.usefixtures("one_thread")

TEACHER = [[9.0 + 0.1 * i, -4.0 - 0.3 * i, -7.0 + 0.2 * i] for i in range(len(ROWS))]  # logits of a cross-encoder
DATA = Dataset.from_dict({name: [row[i] for row in ROWS] for i, name in enumerate(COLUMNS)} | {"label": TEACHER})
SIMILARITIES = [stm.COSINE, stm.QNORM, stm.DOT, stm.Similarity(1.0, 0.5)]


def scores(similarity, embeddings):
    """(B, D) each -> (B, 3)."""
    return torch.stack([similarity.pairwise(embeddings[0], documents) for documents in embeddings[1:]], dim=1)


def matched(model, similarity):
    """The scale of docs/faq.md: standard deviation of the teacher's scores over that of the student's."""
    embeddings = [model.encode(DATA[name], convert_to_tensor=True) for name in COLUMNS]
    return float(torch.tensor(TEACHER).std() / scores(similarity, embeddings).std())


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
    gradients = torch.autograd.grad(loss, embeddings)
    for role, exponent in ((0, similarity.exponents[0]), (1, similarity.exponents[1])):
        radial = (gradients[role] * embeddings[role]).sum(1).abs().max()
        assert radial < 1e-12 if exponent == 1 else radial > 1e-3


@pytest.mark.parametrize("kind", ["margin", "kl"])
@pytest.mark.parametrize("similarity", [stm.QNORM, stm.DOT], ids=lambda similarity: similarity.name)
def test_the_trainer_distils(model, kind, similarity, tmp_path):
    before = {name: torch.as_tensor(model.encode(DATA[name])).norm(dim=1).mean() for name in COLUMNS}
    loss = distillation(kind, model, similarity, matched(model, similarity))
    arguments = SentenceTransformerTrainingArguments(
        str(tmp_path),
        num_train_epochs=12,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=DATA, loss=loss)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] < 500  # the variance of a margin is 2 * 7^2: the scales match
    assert losses[-1] < 0.4 * losses[0]
    after = {name: torch.as_tensor(model.encode(DATA[name])).norm(dim=1).mean() for name in COLUMNS}
    if similarity == stm.QNORM:  # what the teacher scores low gets shorter beside what it scores high
        assert after["negative_2"] / after["positive"] < before["negative_2"] / before["positive"]
