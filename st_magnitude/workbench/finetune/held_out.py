"""Held-out queries, what a trained model has to beat on them, and what was deployed on others."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.sentence_transformer.evaluation import SentenceEvaluator
from tqdm import tqdm

from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.data.task import encode as encode_data
from st_magnitude.evaluation.lexical import LARGE, TOKENS, LexicalIndex, bm25_run, words
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.judge import warn_if_few
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output
from st_magnitude.surgery.scoring import scoring_of
from st_magnitude.training.stopping import refuse_diverged
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.choice import System
from st_magnitude.workbench.exam import Exam
from st_magnitude.workbench.finetune.classifier import (
    classifier_control,
    classifier_rankings,
)
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import make_rows, train_copy
from st_magnitude.workbench.folds import split_of
from st_magnitude.workbench.verdict import (
    AFTER,
    BEFORE,
    CLASSIFIER,
    Confirmation,
    Verdict,
    row_of,
    scored_of,
    scoring_name,
    verdict_of,
)

__all__ = ["Baseline", "RetrievalEvaluator", "bm25_control", "cross_validate"]

logger = logging.getLogger(__name__)

NUM_DOCUMENTS = 500  # of the sample whose norms are measured
NUM_QUERIES = 100
DEPTH = 100  # documents of BM25's run for each query
MOST_CHARACTERS = 2 * 10**7  # of a corpus whose 4-grams are counted, each in 120 bytes


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


def encode(
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
    task = encode_data(model, data, before_normalize=before, show_progress_bar=shows, known=known)
    return replace(task, similarity=Similarity(1.0, task.similarity.exponents[1]))


def system_of(name: str, task: EncodedTask) -> System:
    """A model that searches for the queries of a task."""
    return System(name, task.search(DEPTH), float(task.similarity.exponents[1]))


def controls(exam: Exam, tasks: Mapping[str, EncodedTask], seed: int) -> Callable[..., Verdict]:
    """Searches by BM25, by a classifier and by models, of which the pretrained one comes first, and
    returns `verdict_of`, which judges a trained model next to them."""
    data = cast(RetrievalData, exam.judged)
    before, *also = [system_of(name, task) for name, task in tasks.items()]
    lexical, no_control = bm25_control(data)
    return partial(
        verdict_of,
        before,
        also=also,
        lexical=lexical,
        no_control=no_control,
        classifier=classifier_control(exam, DEPTH),
        split=split_of(data),
        seed=seed,
    )


def card_figures(
    model: SentenceTransformer,
    data: RetrievalData,
    answers: Collection[str],
    seed: int,
    task: EncodedTask | None = None,
) -> dict[str, float]:
    """Norms and directions of a sample of queries and documents, for the model card. Without the
    embeddings of all data, only the sample is encoded."""
    rng = np.random.default_rng(seed)
    asked = rng.permutation(len(data.query_ids))[:NUM_QUERIES]
    drawn = np.sort(rng.permutation(len(data.document_ids))[:NUM_DOCUMENTS])
    documents = [data.document_ids[column] for column in drawn]
    if task is None:
        texts = {query: data.queries[query] for query in (data.query_ids[row] for row in asked)}
        sample = RetrievalData(texts, {i: data.corpus[i] for i in documents}, {})
        task = encode_data(model, sample, "cosine", before_normalize=True, only=texts)
        sides = {"document": task.documents, "query": task.queries}
    else:
        sides = {"document": task.documents[drawn], "query": task.queries[asked]}
    return geometry_figures(sides, np.array([document in answers for document in documents]))


class RetrievalEvaluator(SentenceEvaluator):
    """Writes given figures into the model card, with the first of them in bold."""

    def note(
        self, model: SentenceTransformer, name: str, figures: dict[str, float], steps: int
    ) -> None:
        self.name = name
        metrics = self.prefix_name_to_metrics(figures, name)
        self.primary_metric = next(iter(metrics))
        self.store_metrics_in_model_card_data(model, metrics, -1, steps)


def cross_validate(
    model: SentenceTransformer,
    exam: Exam,
    config: TrainConfig,
    output: Path,
    exponent: float | None = None,
) -> Ranking:
    """The ranking of copies of a model, each of which trains on the paper of one fold and searches
    for its queries, by a document exponent or as it was trained."""
    found = []
    shown = f"Training and measuring in {len(exam.folds)} folds"
    for train, asked in tqdm(exam.papers(), desc=shown, total=len(exam.folds)):
        rows = make_rows(train, config.negatives, config.seed)
        trainer = train_copy(model, train, rows, config, output)
        refuse_diverged(trainer)
        task = encode(trainer.model, asked)
        if exponent is not None:
            task = replace(task, similarity=Similarity(1.0, exponent))
        found.append(task.search(DEPTH))
    return Ranking.joined(cast(RetrievalData, exam.judged), found)


class Baseline:
    """The queries that judge, with BM25, a model as it was before training and other models;
    without any queries, only the norms of a sample of the training data.

    The attribute ``tasks`` has the last encoding of each model, from which another measurement of
    the same corpus takes the documents.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        exam: Exam,
        config: TrainConfig,
        also: Mapping[str, SentenceTransformer] | None = None,
    ) -> None:
        self.model = model
        self.exam = exam
        self.config = config
        self.others = dict(also or {})
        self.tasks: dict[str, EncodedTask] = {}
        self.data = exam.judged or exam.train
        if len(self.data.corpus) < 2:
            raise DataError("The corpus has one document: there is nothing to tell apart.")
        if exam.judged is not None:
            warn_if_few(self.data.query_ids, "a model")
            began = time.perf_counter()
            models = {BEFORE: model, **self.others}
            self.tasks = {name: encode(encoder, self.data) for name, encoder in models.items()}
            self.seconds = time.perf_counter() - began
            self.verdict_on = controls(exam, self.tasks, config.seed)
        self.geometry = self._geometry(self.tasks.get(BEFORE))
        self.confirming = self._searches(BEFORE)
        self.tasks.clear()  # which take memory while the model trains

    def _searches(self, name: str) -> dict[str, System]:
        """The searches by the model, under a name, and before training also by the other ones, for
        the queries that confirm."""
        if (data := self.exam.confirm) is None:
            return {}
        models = {name: self.model} | (self.others if name == BEFORE else {})
        return {
            of: system_of(of, encode(model, data, self.tasks.get(of)))
            for of, model in models.items()
        }

    def confirm(self, verdict: Verdict | None) -> Confirmation | None:
        """What the verdict deploys, or the trained model, measured on the queries that confirm,
        which choose nothing, next to the systems that the decision names, the pretrained model and
        the classifier."""
        if self.exam.confirm is None:
            return None
        data = self.exam.confirm.only(self.exam.confirm.query_ids)
        systems = models = self.confirming | self._searches(AFTER)
        names = [AFTER, BEFORE]
        if verdict is not None and verdict.decision is not None:
            decision = verdict.decision
            systems = {system.name: system for system in verdict.systems}
            names = [decision.name, decision.over, decision.rival, BEFORE]
        lexical: dict[str, Ranking] = {}
        found = []
        for name in filter(None, dict.fromkeys(names)):
            system = systems[name]
            if (tokens := system.tokens) and tokens not in lexical:
                lexical[tokens] = LexicalIndex(data, TOKENS[tokens]).search(data, DEPTH)
            dense = models[system.model].ranking if system.model else None
            found.append(replace(system, ranking=system.again(dense, lexical.get(tokens))))
        if verdict is not None and verdict.penalty is not None:
            read = classifier_rankings(self.exam.train, data, DEPTH, [verdict.penalty])
            found += [System(CLASSIFIER, ranking) for ranking in read.values()]
        rows = tuple(row_of(system, found[0], self.config.seed) for system in found)
        return Confirmation(split_of(data), len(data.query_ids), rows)

    def compare(self, of_folds: Ranking | None = None) -> tuple[Verdict | None, dict[str, float]]:
        """The verdict on the trained model, or on the ranking of `cross_validate`, and the figures
        of its norms."""
        verdict = None
        task = None
        if of_folds is not None:
            exponent = scoring_of(self.model, before_normalize=True).exponents[1]
            system = System(AFTER, of_folds, float(exponent))
            verdict = replace(self.verdict_on(system), folds=len(self.exam.folds))
        elif self.exam.judged is not None:
            task = self.tasks[AFTER] = encode(self.model, self.data)
            verdict = self._choose_scoring(task)
        return verdict, self._geometry(task)

    def _geometry(self, task: EncodedTask | None) -> dict[str, float]:
        return card_figures(self.model, self.data, self.exam.answers, self.config.seed, task)

    def _choose_scoring(self, task: EncodedTask) -> Verdict:
        """The verdict on the model as it was trained, or at `ExponentCurve.best`, of which each
        fold of the queries is ranked by the choice of the others."""
        trained = system_of(AFTER, task)
        if normalizes_output(self.model):
            return self.verdict_on(trained)
        curve = exponent_curve(task, seed=self.config.seed)
        best = trained
        if curve.best != curve.present:
            options = task.sweep({curve.best, *curve.by_query}, DEPTH)
            best = System(AFTER, curve.of(options), curve.best)
        saved, other = (trained, best) if self.config.keep_scoring else (best, trained)
        name = f"{AFTER}, {scoring_name(other.exponent)} (not saved)"
        shown = [] if other is saved else [replace(other, name=name)]
        verdict = self.verdict_on(saved, shown=shown)
        before = next(system for system in verdict.systems if system.name == BEFORE)
        return replace(
            verdict,
            as_trained=scored_of(trained, before, self.config.seed),
            best=scored_of(best, before, self.config.seed),
            curve=curve.to_dict()["ndcg@10"],
        )
