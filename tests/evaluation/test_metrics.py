"""Rankings and nDCG against scikit-learn, sentence-transformers and plain sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sklearn.metrics import ndcg_score

from st_magnitude.data.task import ndcg, rank


@pytest.mark.parametrize("k", [1, 3, 10])
@pytest.mark.parametrize("num_documents", [2, 10, 40])
@pytest.mark.parametrize("grades", [2, 5])
def test_ndcg_is_that_of_sklearn(k, num_documents, grades):
    rng = np.random.default_rng(0)
    relevance = rng.integers(grades, size=(30, num_documents)) * (rng.random((30, num_documents)) < 0.4)
    relevance[:, 0] += ~relevance.any(axis=1)
    scores = rng.permuted(np.tile(np.arange(num_documents), (30, 1)), axis=1)  # no ties
    gains = np.take_along_axis(relevance, (-scores).argsort(axis=1), axis=1)[:, :k]
    expected = [ndcg_score(r[None], s[None], k=k, ignore_ties=True) for r, s in zip(relevance, scores, strict=True)]
    assert ndcg(gains, [row[row > 0].tolist() for row in relevance], k=k) == pytest.approx(expected, abs=1e-12)


def test_ndcg_of_documents_not_found_counts_against_the_ideal():
    assert ndcg([[True, False]], [[1] * 3], k=2) == pytest.approx([1 / (1 + 1 / math.log2(3))])
    assert ndcg([[False] * 10], [[1]]) == [0.0]
    assert ndcg([[True] * 12], [[1] * 12], k=10) == pytest.approx([1.0])


def test_rank_breaks_ties_like_sentence_transformers(task):
    """The evaluator's lower document id is the lower index of sorted ids."""
    task["corpus"] = dict(sorted(task["corpus"].items(), reverse=True))
    scores = torch.randint(3, (8, 20)).float()  # columns in the order of the sorted ids
    evaluator = InformationRetrievalEvaluator(**task, score_functions={"table": lambda q, d: scores.flip(1)})
    evaluator.embed_inputs = lambda model, texts, **kwargs: torch.zeros(len(texts), 2)
    expected = evaluator.compute_all_metrics(model=None)["table"]["ndcg@k"][10]
    ids = sorted(task["corpus"])
    hits = [
        [ids[column] in docs for column in row]
        for row, docs in zip(rank(scores, 10).tolist(), task["relevant_docs"].values(), strict=True)
    ]
    assert ndcg(hits, [[1] * len(docs) for docs in task["relevant_docs"].values()]).mean() == pytest.approx(expected)
