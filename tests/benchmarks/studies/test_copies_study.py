"""The study of copies trains over distinct documents, with the gradients of the package's loss."""

import pytest
import torch
from benchmarks.studies.copies.copies import ARMS, TAU, Distinct, Task, joined

import st_magnitude as stm

QUERIES = ["boils water", "a drink", "where rivers end", "it rains", "a hot drink", "weather"]
ANSWERS = ["tea", "tea", "the sea", "rain", "tea", "rain"]


@pytest.fixture
def task(monkeypatch, static_path):
    monkeypatch.setattr(
        "benchmarks.studies.copies.copies.static_model", lambda: stm.load(static_path, device="cpu")
    )
    return Task(QUERIES, ANSWERS, {})


def gradient(model, loss):
    loss.backward()
    return model[0].embedding.weight.grad


@pytest.mark.parametrize("arm", ARMS)
def test_distinct_documents_have_the_gradient_of_the_loss(task, static_path, arm):
    studied, ours = (stm.load(static_path, device="cpu") for _ in range(2))
    answers = [torch.tensor([i]) for i in task.answers]
    found = gradient(studied, Distinct(studied, arm, task)([joined(task.queries), joined(answers)]))
    same_text, has_prior = ARMS[arm]
    prior = stm.DocumentPrior.from_texts(ours, ANSWERS) if has_prior else None
    loss = stm.CosineRankingLoss(ours, temperature=TAU, same_text=same_text, prior=prior)
    expected = gradient(ours, loss([ours.preprocess(QUERIES), ours.preprocess(ANSWERS)]))
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
