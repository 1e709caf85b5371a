"""Training and measuring one candidate after another, on the same splits, rows and model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import TrainerCallback, TrainerControl, TrainerState

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import NotFiniteError
from st_magnitude.judge import warn_if_few
from st_magnitude.losses.keys import tokens_of
from st_magnitude.saving.export import load
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare, scoring_of
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.comparison.config import COSINE_PRIOR, Candidate, CompareConfig, grid_of
from st_magnitude.workbench.comparison.result import Entry
from st_magnitude.workbench.files.pairs import Splits
from st_magnitude.workbench.finetune.save import save_trained
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import (
    is_uneven,
    make_rows,
    reading,
    sampler_of,
    seconds_per_step,
    train_copy,
    trained_copy,
    warn_of_left_out,
    with_defaults,
)
from st_magnitude.workbench.judging.choice import System
from st_magnitude.workbench.judging.contestants import Contestant, search, task_of
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.verdict import BEFORE

__all__ = ["Trials", "exam_of"]

TIMED_STEPS = 5

IsKept = Callable[[int, float], bool]  # by the steps and nDCG@10 on dev at a rung


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


@dataclass
class Trials:
    """The pretrained model, the exam and the settings of all candidates."""

    base: SentenceTransformer
    exam: Exam
    config: CompareConfig
    folder: str | None = None  # of the pretrained model, if it is known
    steps: int | None = None  # of a candidate, if the budget leaves fewer than the settings

    @property
    def dev(self) -> RetrievalData:
        """The queries that rank the candidates."""
        return cast(RetrievalData, self.exam.choose)

    @property
    def test(self) -> RetrievalData:
        """The queries that judge the result."""
        return cast(RetrievalData, self.exam.judged)

    @cached_property
    def rows(self) -> Dataset:
        rows = make_rows(self.exam.train, self.config.negatives, self.config.seed)
        warn_of_left_out(self.exam.train, rows)
        return rows

    @cached_property
    def grid(self) -> list[Candidate]:
        """All candidates. A prior needs uneven documents, and tokens to know them by."""
        is_static = any(isinstance(module, StaticEmbedding) for module in self.base)
        has_tokens = tokens_of(self.base.preprocess(["a"])) is not None
        has_prior = has_tokens and is_uneven(self.rows["positive"])
        return grid_of(self.config, is_static, has_prior)

    @property
    def rungs(self) -> list[int]:
        """The steps after which a candidate is measured: a third, after the warm-up, and all."""
        steps = min(self.wanted_steps, self.steps or self.wanted_steps)
        return sorted({max(1, steps // 3), steps})

    @cached_property
    def wanted_steps(self) -> int:
        """The steps of a candidate by the settings, by default those of `train`, which a budget may
        cut."""
        given = TrainConfig(epochs=self.config.epochs, batch_size=self.config.batch_size)
        usual = with_defaults(given, self.base, len(self.rows))
        sampler_of(usual, self.rows)  # it warns
        of_epoch = max(1, len(self.rows) // cast(int, usual.batch_size))
        steps = max(1, math.ceil(cast(float, usual.epochs) * of_epoch))
        return min(self.config.max_steps or steps, steps)

    def seconds_per_step(self, folder: Path) -> float:
        """How long a step of training takes, by a few steps of the first candidate."""
        settings = self.grid[0].settings(self.config, TIMED_STEPS)
        return seconds_per_step(self.base, self.exam.train, self.rows, settings, folder)

    def measure(self, model: SentenceTransformer) -> tuple[float, float]:
        """nDCG@10 on dev, nan if training diverged, and `ExponentCurve.best`."""
        try:
            # the model is saved with the limit that it had
            usual = None if self.config.max_length is None else self.base
            with reading(model, usual):
                task = task_of(model, self.dev)
        except NotFiniteError:
            return math.nan, float(scoring_of(model).exponents[1])
        if normalizes_output(model):
            return task.search(10).mean, 1.0
        curve = exponent_curve(task, seed=self.config.seed)
        return curve.at(curve.best).mean, curve.best

    def judge(self, entry: Entry, folder: Path) -> System:
        """How a candidate searches for the test queries: by the model in a folder, or by five that
        are trained in folds."""
        if not self.exam.folds:
            return search(Contestant(entry.name, load(str(folder)), base=BEFORE), self.exam)
        settings = entry.candidate.settings(self.config, self.rungs[-1])
        trains = partial(trained_copy, model=self.base, config=settings, output=folder.parent)
        contestant = Contestant(entry.name, train=trains, base=BEFORE)
        return search(contestant, self.exam, entry.exponent)

    def train(
        self,
        candidate: Candidate,
        rungs: list[int],
        is_kept: IsKept,
        folder: Path,
    ) -> Entry:
        """Trains a copy of the pretrained model from rung to rung, and returns what was measured.
        At the last rung ``is_kept`` says whether to save it in the folder."""
        began = time.perf_counter()
        settings = candidate.settings(self.config, rungs[-1])
        at_rungs = _AtRungs(self, rungs, is_kept)
        train = self.exam.train
        trainer = train_copy(self.base, train, self.rows, settings, folder.parent, at_rungs)
        if trainer.state.global_step == rungs[-1] and at_rungs.measure(trainer.model, rungs[-1]):
            self._save(trainer, at_rungs, folder)
        seconds = time.perf_counter() - began
        curve = sorted(at_rungs.curve.items())
        return Entry(candidate, curve, at_rungs.exponent, seconds)

    def _save(self, trainer: SentenceTransformerTrainer, measured: _AtRungs, folder: Path) -> None:
        model = trainer.model
        if measured.exponent != scoring_of(model).exponents[1]:
            prepare(model, Similarity(gamma_query=1.0, gamma_document=measured.exponent))
        ndcg = max(measured.curve.items())[1]
        figures = {"dev": {"queries": len(self.dev.query_ids), "ndcg": ndcg}}
        save_trained(trainer, folder, figures, {}, None, *filter(None, [self.folder]))


class _AtRungs(TrainerCallback):
    """Measures a model at the rungs, and ends its training before the last one if it is behind."""

    def __init__(self, trials: Trials, rungs: list[int], is_kept: IsKept) -> None:
        self.trials = trials
        self.rungs = rungs
        self.is_kept = is_kept
        self.curve: dict[int, float] = {}
        self.exponent = 1.0

    def measure(self, model: SentenceTransformer, steps: int) -> bool:
        self.curve[steps], self.exponent = self.trials.measure(model)
        return self.is_kept(steps, self.curve[steps])

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if state.global_step in self.rungs[:-1]:
            control.should_training_stop = not self.measure(given["model"], state.global_step)
