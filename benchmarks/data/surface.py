"""The surface of a text, which needs no model: the control of figures that the norm reaches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

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
