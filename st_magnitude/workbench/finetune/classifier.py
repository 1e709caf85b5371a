"""A linear classifier of words: the control where documents are names of classes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import cast

import numpy as np
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import grams, words
from st_magnitude.workbench.exam import Exam

__all__ = ["classifier_control"]

logger = logging.getLogger(__name__)

FEWEST = 5  # training queries of each document
PENALTIES = (1.0, 0.3, 3.0)  # C of `LinearSVC`
MOST_WORK = 2 * 10**6  # training queries times documents, of which a million takes seconds


def classifier_control(exam: Exam, depth: int) -> dict[float, Ranking]:
    """The rankings of linear support vector machines of TF-IDF, by C, or none where documents are
    not names of classes.

    They are where each query has one answer, and each document at least `FEWEST` training queries.
    The machines read the queries that the model is trained on, in each fold those of its paper.
    """
    judged = cast(RetrievalData, exam.judged)
    found: dict[float, list[Ranking]] = {penalty: [] for penalty in PENALTIES}
    for train, asked in [*exam.papers()] or [(exam.train, judged)]:
        rows = train.triplets(0)
        if not _names_classes(rows, train):
            return {}
        reader = TfidfVectorizer(analyzer=_tokens, sublinear_tf=True)
        read = reader.fit_transform(rows["anchor"])
        for penalty, of_folds in found.items():
            machine = LinearSVC(C=penalty, random_state=0).fit(read, rows["positive"])
            of_folds.append(_search(reader, machine, asked, depth))
    return {penalty: Ranking.joined(judged, of_folds) for penalty, of_folds in found.items()}


def _names_classes(rows: Dataset, train: RetrievalData) -> bool:
    counts = Counter(rows["positive"])
    if {*train.corpus.values()} != counts.keys() or min(counts.values()) < FEWEST:
        return False
    if len(counts) < 2 or len({*rows["anchor"]}) < len(rows):
        return False
    if len(counts) * len(rows) > MOST_WORK:
        logger.warning(
            f"A linear classifier of words is not measured, as {len(counts):,} classes of"
            f" {len(rows):,} queries would take it long."
        )
        return False
    return any(map(words, rows["anchor"]))


def _tokens(text: str) -> list[str]:
    return [*words(text), *grams(text)]


def _search(
    reader: TfidfVectorizer, machine: LinearSVC, asked: RetrievalData, depth: int
) -> Ranking:
    scores = machine.decision_function(reader.transform(asked.asked.values()))
    if scores.ndim == 1:  # of two classes
        scores = np.stack([-scores, scores], axis=1)
    place = {name: column for column, name in enumerate(machine.classes_)}
    known = [document for document in asked.document_ids if asked.corpus[document] in place]
    scores = scores[:, [place[asked.corpus[document]] for document in known]]
    places = np.array([asked.position[document] for document in known])
    return Ranking.of(asked, [*asked.asked], ((places, row) for row in scores), depth)
