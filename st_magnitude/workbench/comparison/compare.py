"""compare tells which loss to train with: candidates are ranked on dev, with one look at test."""

from __future__ import annotations

import gc
import math
import os
import shutil
import time
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.base.losses import has_static_embedding_input
from transformers import TrainerCallback, TrainerControl, TrainerState

from st_magnitude._checks import InputError
from st_magnitude._files import locked_folder, moved_in, refuse_used_folder
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import NotFiniteError
from st_magnitude.judge import Difference
from st_magnitude.losses.keys import tokens_of
from st_magnitude.saving.card import add_section, model_name
from st_magnitude.saving.export import load
from st_magnitude.saving.find import refuse_missing
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare, score_by_cosine, scoring_of
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.surgery.vocabulary import remembered_tokens
from st_magnitude.workbench._config import seconds_of
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.comparison.config import Candidate, CompareConfig, grid_of
from st_magnitude.workbench.comparison.exam import exam_of
from st_magnitude.workbench.comparison.result import CompareResult, Entry
from st_magnitude.workbench.files.pairs import Data, load_splits
from st_magnitude.workbench.finetune.save import save_run
from st_magnitude.workbench.finetune.settings import TrainConfig
from st_magnitude.workbench.finetune.trainer import (
    is_uneven,
    make_rows,
    reading,
    sampler_of,
    seconds_per_step,
    steps_of,
    train_copy,
    trained_copy,
    with_defaults,
)
from st_magnitude.workbench.judging.choice import HERE, System, Way, short_names
from st_magnitude.workbench.judging.contestants import search, search_in_folds, task_of
from st_magnitude.workbench.judging.exam import Exam
from st_magnitude.workbench.judging.verdict import BEFORE, Verdict, verdict_of

__all__ = ["CompareConfig", "CompareResult", "Comparison", "compare"]

FEWEST_STEPS = 10
TIMED_STEPS = 5


def compare(
    model: SentenceTransformer | str,
    data: Data,
    output: str | Path,
    config: CompareConfig | None = None,
    *,
    also: Collection[str] = (),
    say: Callable[[str], None] = print,
) -> CompareResult:
    """Tells which loss to train with on your data, or that plain cosine is best, within a budget.

    Candidates are trained on the same batches and ranked on dev (see docs/evaluation.md). The
    best one is compared with plain cosine at its own best setting, with the pretrained model and
    with BM25, on the test split, which is read once. Where nobody gave a test split, a static table
    is judged in folds as by `train`. Plain cosine is recommended unless the best one is clearly
    better.

    Args:
        model: A model, or the folder or hub id of one. It is not changed.
        data: A source of `load_splits`, or what it returned. Without ``config.dev_split``,
            candidates are ranked on held-out queries, and without ``config.test_split`` folds or
            held-out queries have the final figures.
        output: New folder for the winning model (``model``), ``compare.json`` and ``compare.md``.
        also: Folders or hub ids of other models, to weigh against the trained one.
        say: Function that receives the progress line by line.

    Raises:
        ValueError: If a query or its text is in two splits, no query of a split has a relevant
            document, or plain cosine diverges at every setting.
        FileExistsError: If output holds other files.
        OSError: If a model cannot be written, or another process writes to output.
    """
    config = config or CompareConfig()
    output = Path(output).absolute()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("compare trains in one process; start it without torchrun or accelerate.")
    refuse_used_folder(output)
    source = model if isinstance(model, str) else None
    base = load(model) if isinstance(model, str) else copy(model)
    with reading(base, config.max_length):
        pass  # it refuses models and lengths that do not fit
    score_by_cosine(base, say)
    refuse_missing(*also)
    folders = [*filter(None, [source]), *also]
    exam = exam_of(load_splits(data), base, folders, config)
    for note in exam.notes:
        say(f"Note: {note}")
    with locked_folder(output), remembered_tokens(base), moved_in(output, "compare.json") as new:
        run = Comparison(base, source, exam, config, new, say, time.perf_counter())
        run.measure_models(also)
        return run.finish()


@dataclass
class Comparison:
    """Trains and compares the candidates, and keeps their models in a folder until the end."""

    base: SentenceTransformer
    source: str | None  # the folder or hub id of the model, if it is known
    exam: Exam
    config: CompareConfig
    output: Path
    say: Callable[[str], None]
    began: float  # by time.perf_counter
    models: list[System] = field(default_factory=list)  # the pretrained one, and others to weigh
    places: dict[str, Way] = field(default_factory=dict)  # of the models
    pretrained: float = 0.0  # nDCG@10 on dev
    on_dev: float = 0.0  # seconds in which the pretrained model was measured there, and on test
    on_test: float = 0.0
    entries: list[Entry] = field(default_factory=list)  # candidates that are done

    @property
    def dev(self) -> RetrievalData:
        """The queries that rank the candidates."""
        return cast(RetrievalData, self.exam.choose)

    @cached_property
    def rows(self) -> Dataset:
        return make_rows(self.exam.train, self.config.negatives, self.config.seed, warns=True)

    @cached_property
    def grid(self) -> list[Candidate]:
        """All candidates. A prior needs uneven documents, and tokens to know them by."""
        has_tokens = tokens_of(self.base.preprocess(["a"])) is not None
        has_prior = has_tokens and is_uneven(self.rows["positive"])
        return grid_of(self.config, has_static_embedding_input(self.base), has_prior)

    @cached_property
    def wanted_steps(self) -> int:
        """The steps of a candidate by the settings, by default those of `train`, which a budget may
        cut."""
        given = TrainConfig(epochs=self.config.epochs, batch_size=self.config.batch_size)
        sampler_of(with_defaults(given, self.base, len(self.rows)), self.rows)  # it warns
        steps = steps_of(given, self.base, len(self.rows))
        return min(self.config.max_steps or steps, steps)

    def measure_models(self, also: Collection[str]) -> None:
        began = time.perf_counter()
        self.pretrained = task_of(self.base, self.dev).search(10).mean
        self.on_dev = time.perf_counter() - began
        began = time.perf_counter()
        self.models.append(search(BEFORE, self.base, self.exam))
        self.on_test = time.perf_counter() - began
        if self.source is not None:
            self.places[BEFORE] = Way.of(self.base, self.source)
        for name, path in short_names(also).items():
            other = load(path)
            self.models.append(search(name, other, self.exam))
            self.places[name] = Way.of(other, path)

    @cached_property
    def steps(self) -> int:
        """The steps of a candidate: those of the settings, if the budget holds so many for one of
        each loss and the test."""
        settings = self.grid[0].settings(self.config, TIMED_STEPS)
        folder = self.folder(self.grid[0]).parent
        pace = seconds_per_step(self.base, self.exam.train, self.rows, settings, folder)
        left = seconds_of(self.config.budget) - (time.perf_counter() - self.began)
        trainings = self._fewest + 2 * len(self.exam.folds)  # at most two candidates are tested
        of_one = (left - 2 * self.on_test) / trainings - 2 * self.on_dev
        wanted = self.wanted_steps
        if of_one >= wanted * pace:
            return wanted
        steps = min(wanted, max(FEWEST_STEPS, int(of_one / pace)))
        self.say(
            f"A step takes {pace:.1f} s, so a candidate has {steps:,} steps instead of {wanted:,}:"
            f" {self.config.budget} are for a candidate of each loss at least. For more steps, give"
            " a longer --budget."
        )
        return steps

    def finish(self) -> CompareResult:
        """Trains and measures the candidates, writes the files, and returns the result."""
        self.say(f"Up to {len(self.grid)} candidates of up to {self.steps:,} steps")
        for candidate in self.grid:
            if self.entries and self._is_time_up():
                break
            entry = self.train(candidate)
            self.entries.append(entry)
            gc.collect()  # the Trainer is part of cycles
            minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
            done = f"[{minutes}:{seconds:02d}] {len(self.entries)}. {entry.name}"
            self.say(f"{done}: {entry.shown_score} after {entry.steps:,} steps")
        result = self._conclude()
        self._write(result)
        return result

    @property
    def _fewest(self) -> int:
        """The number of losses, each of which is to be tried once; of one loss, two candidates."""
        return min(len(self.grid), max(2, len({candidate.loss for candidate in self.grid})))

    def _is_time_up(self) -> bool:
        """Whether the budget leaves no time for one more candidate and the test of what is first,
        in folds if there are any."""
        tested = len(self._tested())
        trainings = 1 + tested * len(self.exam.folds)
        seconds = sum(entry.seconds for entry in self.entries) / len(self.entries)
        needed = trainings * seconds + tested * self.on_test
        return time.perf_counter() - self.began + needed >= seconds_of(self.config.budget)

    def train(self, candidate: Candidate) -> Entry:
        """Trains a copy of the pretrained model, which ends after a third of the steps if another
        candidate of its loss was better there, and saves it if it may be tested."""
        began = time.perf_counter()
        settings = candidate.settings(self.config, self.steps)
        early = _Early(self, candidate)
        data, folder = self.exam.train, self.folder(candidate)
        trainer = train_copy(self.base, data, self.rows, settings, folder.parent, early)
        if trainer.state.global_step == self.steps:
            early.measure(trainer.model, self.steps)
            if self._may_be_tested(candidate, early.curve[self.steps]):
                self._save(trainer, folder, early)
        seconds = time.perf_counter() - began
        return Entry(candidate, sorted(early.curve.items()), early.exponent, seconds)

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

    def ahead(self, steps: int, ndcg: float) -> list[Candidate]:
        """The candidates that were better after so many steps."""
        rivals = [entry for entry in self.entries if math.isfinite(entry.score)]
        return [entry.candidate for entry in rivals if dict(entry.curve).get(steps, -1) > ndcg]

    def _may_be_tested(self, candidate: Candidate, ndcg: float) -> bool:
        """Whether a candidate that is done is the first so far, or plain cosine."""
        is_first = candidate.loss == "cosine" or not self.ahead(self.steps, ndcg)
        return is_first and not math.isnan(ndcg)

    def _save(self, trainer: SentenceTransformerTrainer, folder: Path, measured: _Early) -> None:
        model = trainer.model
        if measured.exponent != scoring_of(model).exponents[1]:
            prepare(model, Similarity(gamma_query=1.0, gamma_document=measured.exponent))
        ndcg = measured.curve[self.steps]
        figures = {"dev": {"queries": len(self.dev.query_ids), "ndcg": ndcg}}
        bases = [self.source] if self.source else []
        save_run(model, trainer, folder, figures, {}, bases=bases)

    def folder(self, candidate: Candidate) -> Path:
        """The folder in which a model is kept until the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def _ranked(self) -> list[Entry]:
        """The candidates by their steps and nDCG@10; of equal ones, cosine."""
        return sorted(
            self.entries,
            key=lambda entry: (-entry.steps, -entry.score, entry.candidate.loss != "cosine"),
        )

    def _finished(self) -> list[Entry]:
        """Of these, the candidates that were trained to the last step and did not diverge."""
        return [x for x in self._ranked() if x.steps == self.steps and math.isfinite(x.score)]

    def _tested(self) -> list[Entry]:
        """The first candidate, and plain cosine at its best setting on dev, if it is another."""
        finished = self._finished()
        plain = [entry for entry in finished if entry.candidate.loss == "cosine"]
        return finished[:1] + plain[: finished[:1] != plain[:1]]

    def _conclude(self) -> CompareResult:
        entries = self._ranked()
        compared = {entry.candidate.loss for entry in self._finished()}
        missing = [c.loss for c in self.grid if c.loss not in compared]
        is_short = self.steps < self.wanted_steps or len(entries) < self._fewest
        verdict, over_cosine = self._verdict(decides=not is_short)
        result = CompareResult(
            self.source or model_name(self.base),
            entries,
            verdict,
            over_cosine,
            self.pretrained,
            dev_queries=len(self.dev.query_ids),
            left_out=len(self.grid) - len(entries),
            not_compared=tuple(dict.fromkeys(missing)),
            notes=self.exam.notes,
            is_short=is_short,
        )
        options = result.winner.candidate.options(self.config, self.wanted_steps, self.source)
        return replace(result, train_options=options)

    def _verdict(self, decides: bool) -> tuple[Verdict, Difference | None]:
        """The verdict on the winner, and what the first candidate gains over plain cosine, if it is
        another one."""
        tested = self._tested()
        if not any(entry.candidate.loss == "cosine" for entry in tested):
            raise InputError("Plain cosine diverged everywhere; give lower --learning-rates.")
        self.say("Measuring the best candidates.")
        found = [self.judge(entry) for entry in tested]
        over_cosine = None
        if len(found) > 1:
            over_cosine = found[0].ranking.minus(found[1].ranking, seed=self.config.seed)
            if not over_cosine.is_better:
                found.reverse()
        after, *shown = found
        models = [self.models[0], after, *self.models[1:]]
        seed = self.config.seed
        verdict = verdict_of(self.exam, models, shown=shown, seed=seed, decides=decides)
        return verdict.placed(self.places | {after.name: Way(HERE, "")}), over_cosine

    def judge(self, entry: Entry) -> System:
        """How a candidate searches for the test queries: by its model, or by those that are trained
        in folds."""
        folder = self.folder(entry.candidate)
        if not self.exam.folds:
            return replace(search(entry.name, load(str(folder)), self.exam), base=BEFORE)
        settings = entry.candidate.settings(self.config, self.steps)
        trains = partial(trained_copy, model=self.base, config=settings, output=folder.parent)
        return search_in_folds(entry.name, trains, self.exam, BEFORE, exponent=entry.exponent)

    def _write(self, result: CompareResult) -> None:
        """Writes the files; compare.json, which marks the comparison as finished, comes last."""
        text = "\n\n".join([result.to_markdown(), *result.notes])
        model = self.output / "model"
        self.folder(result.winner.candidate).rename(model)
        shutil.rmtree(self.output / "models")
        add_section(model / "README.md", f"### Retrieval\n\n{result.test.to_markdown()}")
        if result.test.decision is not None:
            result.test.decision.save(model)
        (self.output / "compare.md").write_text(f"{text}\n", encoding="utf-8")
        result.save(self.output / "compare.json")


class _Early(TrainerCallback):
    """Measures a candidate after a third of the steps, which is after the warm-up, and ends its
    training if another candidate of the same loss was better there."""

    def __init__(self, run: Comparison, candidate: Candidate) -> None:
        self.run = run
        self.candidate = candidate
        self.curve: dict[int, float] = {}
        self.exponent = 1.0

    def measure(self, model: SentenceTransformer, steps: int) -> None:
        self.curve[steps], self.exponent = self.run.measure(model)

    def on_step_end(
        self, args: object, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        steps = state.global_step
        if steps != max(1, self.run.steps // 3) or steps == self.run.steps:
            return
        self.measure(given["model"], steps)
        ndcg = self.curve[steps]
        losses = {other.loss for other in self.run.ahead(steps, ndcg)}
        control.should_training_stop = math.isnan(ndcg) or self.candidate.loss in losses
