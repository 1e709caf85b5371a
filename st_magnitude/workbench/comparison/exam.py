"""The queries that rank and judge the candidates of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.judge import warn_if_few
from st_magnitude.workbench.comparison.config import COSINE_PRIOR, CompareConfig
from st_magnitude.workbench.files.pairs import Splits
from st_magnitude.workbench.finetune.trainer import is_uneven
from st_magnitude.workbench.judging.exam import Exam

__all__ = ["exam_of"]


def exam_of(
    splits: Splits, model: SentenceTransformer, folders: Sequence[str], config: CompareConfig
) -> Exam:
    """The exam of the model to train and of those in folders, with a sample of the documents."""
    exam = Exam.of(
        splits,
        model,
        *folders,
        train=config.split,
        choose=config.dev_split,
        judge=config.test_split,
        seed=config.seed,
    )
    rng = np.random.default_rng(config.seed)
    chooses = _sample(exam.choose, config.dev_queries, config.documents, rng)
    judged = _sample(exam.judged, None, config.documents, rng)
    warn_if_few(min(chooses.query_ids, judged.query_ids, key=len), "a loss")
    notes = exam.notes
    corpus = exam.train.corpus
    positives = (corpus[document] for ids in exam.train.relevant.values() for document in ids)
    if COSINE_PRIOR in config.tried and not is_uneven(positives):
        notes += ("All documents are equally often positives: a prior would change nothing.",)
    return replace(exam, choose=chooses, judged=judged, notes=notes)


def _sample(
    data: RetrievalData | None, queries: int | None, documents: int, rng: np.random.Generator
) -> RetrievalData:
    """At most so many queries, with their judged documents and a sample of the others."""
    data = cast(RetrievalData, data)  # with a split that chooses, none is missing
    ids = sorted(data.query_ids)
    part = data.only({ids[i] for i in rng.permutation(len(ids))[:queries]})
    kept = set().union(*part.relevant.values(), *part.negatives.values())
    others = sorted(part.corpus.keys() - kept)
    kept |= {others[i] for i in rng.permutation(len(others))[: max(0, documents - len(kept))]}
    return replace(part, corpus={d: text for d, text in part.corpus.items() if d in kept})
