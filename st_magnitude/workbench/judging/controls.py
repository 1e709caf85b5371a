"""Searches without a model, which a model has to beat: BM25 and a linear classifier of words."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
from datasets import Dataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS, bm25_run, grams, words
from st_magnitude.result import shortened
from st_magnitude.workbench.judging.choice import System
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.options import Options

__all__ = ["CLASSIFIER", "Controls", "bm25_control", "classifier_control"]

logger = logging.getLogger(__name__)

CLASSIFIER = "a linear classifier of words"
PENALTIES = (1.0, 0.3, 3.0)  # C of the classifier
FEWEST = 5  # training queries of each document that it knows
MOST_WORK = 2 * 10**6  # training queries times documents, of which a million takes seconds
MOST_CHARACTERS = 2 * 10**7  # of a corpus whose 4-grams are counted, each in 120 bytes


@dataclass(frozen=True)
class Controls:
    """The rankings of BM25 by its tokens, and of a linear classifier by its C.

    Without any of BM25, ``no_control`` says why in a sentence. There is no classifier where
    documents are not names of classes.
    """

    lexical: Mapping[str, Ranking]
    no_control: str = ""
    classifier: Options[float] | None = None

    @classmethod
    def of(cls, exam: Exam, seed: int = 0) -> Controls:
        """The controls of an exam, on the queries that judge."""
        lexical, no_control = bm25_control(cast(RetrievalData, exam.judged))
        found = classifier_control(exam)
        classifier = Options.choose(found, seed=seed) if found else None
        return cls(lexical, no_control, classifier)

    @property
    def systems(self) -> list[System]:
        """The classifier, which is not weighed."""
        return [System(CLASSIFIER, self.classifier.held_out)] if self.classifier else []

    def confirm(self, exam: Exam) -> list[System]:
        """The classifier with its C, on the queries that confirm."""
        if self.classifier is None:
            return []
        asked = cast(RetrievalData, exam.confirm)
        found = classifier_rankings(exam.train, asked, [self.classifier.value])
        return [System(CLASSIFIER, ranking) for ranking in found.values()]


def bm25_control(data: RetrievalData) -> tuple[dict[str, Ranking], str]:
    """BM25's rankings by `TOKENS`, or none and a sentence that says why it is no control.

    It is a control where at least half of the queries share a word with a document that answers
    them, or find `DEPTH` documents or more. Without bm25s the sentence is empty. A corpus of more
    than `MOST_CHARACTERS` characters is searched by words only.
    """
    data = data.only(data.query_ids)
    try:
        by_words = bm25_run(data, DEPTH)
    except ImportError as error:
        logger.warning(f"Not measured: {error}")
        return {}, ""
    is_full = by_words.columns[:, -1] >= 0
    shared = int((is_full | (by_words.gains > 0).any(axis=1)).sum())
    if 2 * shared < len(by_words):
        return {}, (
            f"BM25 finds a word in common with an answer for {shared:,} of {len(by_words):,}"
            " queries only, so it is no control."
        )
    found = {"words": by_words}
    characters = sum(map(len, data.corpus.values()))
    if characters > MOST_CHARACTERS:
        logger.warning(
            f"BM25 is measured by words only: the 4-grams of a corpus of {characters:,} characters"
            " would take too much memory."
        )
        return found, ""
    others = {name: split for name, split in TOKENS.items() if split is not words}
    found |= {name: bm25_run(data, DEPTH, tokenizer=split) for name, split in others.items()}
    return found, ""


def classifier_control(exam: Exam) -> dict[float, Ranking]:
    """The rankings of linear support vector machines of TF-IDF, by C, or none where documents are
    not names of classes.

    The machines read the queries that the model is trained on, in each fold those of its paper.
    """
    judged = cast(RetrievalData, exam.judged)
    of_folds: list[dict[float, Ranking]] = []
    for train, asked in exam.papers():
        found = classifier_rankings(train, asked)
        if not found:
            return {}
        of_folds.append(found)
    return {C: Ranking.joined(judged, [found[C] for found in of_folds]) for C in PENALTIES}


def classifier_rankings(
    train: RetrievalData, asked: RetrievalData, penalties: Collection[float] = PENALTIES
) -> dict[float, Ranking]:
    """The rankings of machines that read the queries of train, by C, or none where each query has
    not one answer, or a document has fewer than `FEWEST` training queries."""
    rows = train.triplets(0)
    if not _names_classes(rows, train):
        return {}
    reader = TfidfVectorizer(analyzer=_tokens, sublinear_tf=True)
    read = reader.fit_transform(rows["anchor"])
    machines = [LinearSVC(C=C, random_state=0).fit(read, rows["positive"]) for C in penalties]
    found = [_search(reader, machine, asked) for machine in machines]
    return dict(zip(penalties, found, strict=True))


def _names_classes(rows: Dataset, train: RetrievalData) -> bool:
    """Whether documents are names of classes. Where most have as many queries as such names, the
    log says what is against it."""
    documents = {*train.corpus.values()}
    counts = Counter(rows["positive"])
    few = sorted(document for document in documents if counts[document] < FEWEST)
    if len(documents) < 2 or 2 * len(few) > len(documents):
        return False
    why = ""
    if few:
        why = f"{len(few):,} of {len(documents):,} documents have fewer than {FEWEST} training"
        why += f" queries, such as {shortened(few[0], 40)!r}"
    elif len({*rows["anchor"]}) < len(rows):
        why = "some queries have several answers"
    elif len(documents) * len(rows) > MOST_WORK:
        why = f"{len(documents):,} classes of {len(rows):,} queries would take it long"
    if why:
        logger.warning(f"A linear classifier of words is not measured, as {why}.")
    return not why and any(map(words, rows["anchor"]))


def _tokens(text: str) -> list[str]:
    return [*words(text), *grams(text)]


def _search(reader: TfidfVectorizer, machine: LinearSVC, asked: RetrievalData) -> Ranking:
    scores = machine.decision_function(reader.transform(asked.asked.values()))
    if scores.ndim == 1:  # of two classes
        scores = np.stack([-scores, scores], axis=1)
    place = {name: column for column, name in enumerate(machine.classes_)}
    known = [document for document in asked.document_ids if asked.corpus[document] in place]
    scores = scores[:, [place[asked.corpus[document]] for document in known]]
    places = np.array([asked.position[document] for document in known])
    return Ranking.of(asked, [*asked.asked], ((places, row) for row in scores), DEPTH)
