"""How models search for the queries of an exam, as they come and trained in folds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from tqdm import tqdm

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode
from st_magnitude.evaluation.lexical import LARGE
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output
from st_magnitude.workbench.judging.choice import System
from st_magnitude.workbench.judging.exam import DEPTH, Exam

__all__ = ["Encoded", "search", "search_in_folds", "task_of"]


def search(name: str, model: SentenceTransformer, exam: Exam) -> System:
    """How a model searches for the queries of an exam."""
    return Encoded.of(name, model, exam).system()


def search_in_folds(
    name: str,
    train: Callable[[RetrievalData], SentenceTransformer],
    exam: Exam,
    base: str,
    folds: int | None = None,
    exponent: float | None = None,
) -> System:
    """How a model that is trained searches for the queries of an exam: it is trained once for each
    fold, and searches for its queries alone.

    Args:
        train: Returns a copy of the model that was trained on the data of a fold.
        base: The name of the model that is trained.
        folds: Their number; by default those of the exam.
        exponent: Of documents; by default as the model was trained.
    """
    rankings = []
    number = len(exam.in_folds(folds))
    shown = f"{base[0].upper()}{base[1:]}, {number} folds"
    for data, asked in tqdm(exam.papers(folds), shown, number, unit="fold"):
        task = task_of(train(data), asked)
        if exponent is not None:
            task = replace(task, similarity=Similarity(1.0, exponent))
        rankings.append(task.search(DEPTH))
    ranking = Ranking.joined(cast(RetrievalData, exam.judged), rankings)
    used = float(task.similarity.exponents[1])
    return System(name, ranking, used, base=base, folds=number)


@dataclass(frozen=True)
class Encoded:
    """A model with its embeddings of the queries that judge and of those that confirm."""

    name: str
    judges: EncodedTask | None
    confirms: EncodedTask | None

    @classmethod
    def of(cls, name: str, model: SentenceTransformer, exam: Exam) -> Encoded:
        judges = None if exam.judged is None else task_of(model, exam.judged)
        confirms = None if exam.confirm is None else task_of(model, exam.confirm, judges)
        return cls(name, judges, confirms)

    @property
    def is_asked(self) -> bool:
        """Whether any query judges or confirms."""
        return self.judges is not None or self.confirms is not None

    def system(self, exponent: float | None = None) -> System:
        """Its searches, by a document exponent or as it is scored. Where nobody judges, those for
        the queries that confirm."""
        tasks = [task for task in (self.judges, self.confirms) if task is not None]
        if exponent is None:
            exponent = float(tasks[0].similarity.exponents[1])
        similarity = Similarity(1.0, exponent)
        found = [replace(task, similarity=similarity).search(DEPTH) for task in tasks]
        confirm = None if self.confirms is None else found[-1]
        return System(self.name, found[0], exponent, confirm=confirm)


def task_of(
    model: SentenceTransformer, data: RetrievalData, other: EncodedTask | None = None
) -> EncodedTask:
    """The raw embeddings of queries and corpus; scores divide by the norm of the query.

    The corpus is not encoded again if it is that of another task of the same model.
    """
    is_fast = has_static_embedding_input(model) and len(data.corpus) < LARGE
    shows = sys.stderr.isatty() and not is_fast
    # parts of unit vectors are ranked as they are served
    before = not (normalizes_output(model) and is_cut(model))
    known = None if other is None or other.data.corpus != data.corpus else other.documents
    task = encode(model, data, before_normalize=before, show_progress_bar=shows, known=known)
    return replace(task, similarity=Similarity(1.0, task.similarity.exponents[1]))
