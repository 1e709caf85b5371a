"""The study of the document prior: counts and scoring."""

import pytest
import torch
from benchmarks.data.dependencies import Task
from benchmarks.studies.prior import prior

from st_magnitude.data.retrieval import RetrievalData

CORPUS = {"a": "", "b": "", "c": ""}
PART = RetrievalData({"q": "?", "r": "!"}, CORPUS, {"q": {"b"}, "r": {"c"}})


def test_log_p_counts_the_pairs():
    task = Task(["x", "y", "z"], ["b", "b", "c"], CORPUS, PART, PART)
    torch.testing.assert_close(task.log_p("abc").exp(), torch.tensor([1.0, 3.0, 2.0]) / 6)


def test_ranking_with_the_prior():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    plain, weighted = prior.ranked(logits, torch.tensor([0.0, 3.0, 0.0]), (0.0, 1.0), PART, "abc")
    second = 1 / torch.log2(torch.tensor(3.0)).item()
    assert plain == pytest.approx([second, 1])
    assert weighted == pytest.approx([1, second])
