"""The surface of a text, which needs no model: the control of figures that the norm reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import st_magnitude as stm
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask

WEIGHTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
MARKS = ".,:;()[]`'\"=_/-"


def surface_features(texts: Sequence[str]) -> NDArray[np.float64]:
    """Length, punctuation, digits and capitals of texts: n texts -> (n, 18).

    Example:
        >>> surface_features(["Sorts a list.", "key : default=None"])[:, 0].round(2)
        array([1.39, 1.39])
    """
    rows = []
    for text in texts:
        words = text.split()
        characters = max(len(text), 1)
        marks = [text.count(mark) / characters for mark in MARKS]
        shares = [sum(map(kind, text)) / characters for kind in (str.isdigit, str.isupper)]
        word_length = sum(map(len, words)) / max(len(words), 1)
        ends = [float(text[:1].isupper()), float(text.endswith("."))]
        rows.append([np.log1p(len(words)), *shares, word_length, *marks, *ends])
    return np.array(rows)


def auroc(positive: NDArray[np.float64], negative: NDArray[np.float64]) -> float:
    """Probability that a value of the first sample exceeds one of the second, ties counting half.

    Example:
        >>> auroc([3.0, 2.0], [1.0, 2.0])
        0.875
    """
    is_positive = np.repeat([True, False], [len(positive), len(negative)])
    return float(roc_auc_score(is_positive, np.concatenate([positive, negative])))


class SurfacePrior:
    """log P(a document answers a query), by a logistic regression on the surface of its text.

    It is fitted on the corpus of the data, whose judgments say which documents are answers.
    """

    def __init__(self, data: RetrievalData) -> None:
        answers = set().union(*data.relevant.values())
        self.classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        features = surface_features(list(data.corpus.values()))
        self.classifier.fit(features, [document in answers for document in data.corpus])

    def added(self, encoded: EncodedTask, data: RetrievalData, weight: float) -> EncodedTask:
        """Cosine + weight · prior as an inner product: vectors with the prior as one more
        dimension."""
        features = surface_features([data.corpus[key] for key in data.document_ids])
        prior = torch.from_numpy(self.classifier.predict_log_proba(features)[:, 1:])  # (m, 1)
        queries = stm.COSINE.query(encoded.queries)
        documents = stm.COSINE.document(encoded.documents)
        queries = torch.nn.functional.pad(queries, (0, 1), value=1.0)
        documents = torch.cat([documents, weight * prior.to(documents)], dim=1)
        return replace(encoded, queries=queries, documents=documents, similarity=stm.DOT)

    def chosen(self, dev: tuple[EncodedTask, RetrievalData]) -> float:
        """The weight with the highest nDCG@10 on dev queries."""

        def score(weight: float) -> float:
            return self.added(*dev, weight).search(10).mean

        return max(WEIGHTS, key=score)
