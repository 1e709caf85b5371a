"""A run: the models that are weighed, what is decided, trained and saved."""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_magnitude.data.task import EncodedTask
from st_magnitude.judge import norm_warning, warn_if_few
from st_magnitude.modules import ExponentNorm
from st_magnitude.saving.export import load
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output, output_width
from st_magnitude.surgery.vocabulary import trimmed_vocabulary
from st_magnitude.training import run_folder
from st_magnitude.training.stopping import refuse_diverged, train_or_stop
from st_magnitude.workbench._config import seconds_of
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.finetune.budget import MARGIN, OverBudget, Plan, plan_of, time_limit
from st_magnitude.workbench.finetune.entrants import Entrant
from st_magnitude.workbench.finetune.save import card_figures, note_figures, save_run
from st_magnitude.workbench.finetune.settings import BUDGET, TrainConfig
from st_magnitude.workbench.finetune.trainer import (
    TIMED_STEPS,
    make_trainer,
    reading,
    seconds_per_step,
    steps_of,
    train_copy,
    trained_copy,
)
from st_magnitude.workbench.judging.choice import HERE, System, Way, short_names
from st_magnitude.workbench.judging.contestants import Encoded, search_in_folds
from st_magnitude.workbench.judging.costs import Cost
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.verdict import (
    Confirmation,
    Verdict,
    confirm,
    scoring_name,
    verdict_of,
)

__all__ = ["FOLDS_OF_ENCODER", "Run", "TrainedModel", "choose_scoring"]

logger = logging.getLogger(__name__)

FOLDS_OF_ENCODER = 2


@dataclass(frozen=True)
class TrainedModel:
    """The result of `train`. Of several processes, only the first has measurements."""

    trainer: SentenceTransformerTrainer | None  # of the model that is saved, if it was trained
    # norms and isotropy of a sample of the texts, "before" and "after"
    geometry: dict[str, dict[str, float]]
    verdict: Verdict | None  # on all models; None without held-out queries
    # None: nothing is recommended, and the trained model, which is clearly worse, was not saved
    output: Path | None
    confirmed: Confirmation | None = None  # what is deployed, on test data
    model: SentenceTransformer | None = None  # that was saved

    @property
    def is_stock(self) -> bool:
        """Whether SentenceTransformer loads the model that was saved."""
        return self.model is not None and not isinstance(self.model[-1], ExponentNorm)

    @property
    def norm_warning(self) -> str:
        """The `judge.norm_warning` of the sample; empty if there is none."""
        after = self.geometry.get("after", {})
        d = after.get("cohens_d", math.nan)
        error = after.get("cohens_d_error", math.nan)
        before = self.geometry.get("before", {}).get("cohens_d", math.nan)
        return norm_warning(d, error, before)


@dataclass(frozen=True)
class _Weighed:
    """A model that was weighed, as it comes or trained."""

    entrant: Entrant
    system: System | None  # None where no query judges or confirms
    figures: dict[str, float]  # of the card
    trainer: SentenceTransformerTrainer | None = None  # of the training on all pairs
    shown: Sequence[System] = ()

    @property
    def is_to_train(self) -> bool:
        """Whether it was judged in folds, and there is no model of all pairs yet."""
        return self.system is not None and bool(self.system.base) and self.trainer is None


@dataclass
class Run:
    """Weighs the models, trains what wins, and saves it."""

    entrants: Sequence[Entrant]
    exam: Exam
    rows: Dataset
    config: TrainConfig
    output: Path
    settings: dict[str, object]
    checkpoint: Path | None
    also: Collection[str]
    say: Callable[[str], None]
    weighed: dict[str, _Weighed] = field(default_factory=dict)
    left_out: str = ""  # what the budget did not hold, in sentences

    def finish(self) -> TrainedModel:
        """Judges, decides, trains what is deployed on all pairs, confirms and saves."""
        verdict = None
        judged = self.exam.judged
        if judged is not None:
            warn_if_few(judged.query_ids, "a model")
        for entrant in self.entrants:
            self._weigh(entrant)
        if judged is not None or self.exam.confirm is not None:
            for name, path in short_names(self.also).items():
                other = Entrant(load(path), path, name)
                self._measure(other, self._cost(other))
        if judged is not None:
            shown = [system for one in self.weighed.values() for system in one.shown]
            verdict = verdict_of(
                self.exam,
                self.systems,
                shown=shown,
                seed=self.config.seed,
                worth=self.config.worth,
            )
        saved = self._to_save(verdict)
        if saved in self.weighed and self.weighed[saved].is_to_train:
            self._train_winner(self.weighed[saved].entrant)
        confirmed = confirm(self.exam, self.systems, verdict, self.config.seed)
        if verdict is not None:
            stock = {
                one.name: self.weighed[one.name].entrant for one in self.systems if not one.base
            }
            places = {
                name: Way.of(entrant.model, entrant.source)
                for name, entrant in stock.items()
                if entrant.source is not None
            }
            placed = verdict.placed(places | {saved: Way(HERE, "")})
            verdict = replace(placed, left_out=self.left_out)
        return self._save(saved, verdict, confirmed)

    @property
    def systems(self) -> list[System]:
        return [one.system for one in self.weighed.values() if one.system is not None]

    def _to_save(self, verdict: Verdict | None) -> str:
        """The name of the model to save: of what is deployed; with BM25 alone, the best one that
        wants no more training; and where nothing is recommended, the best trained one."""
        if verdict is None:
            return self.entrants[0].after
        if verdict.decision is None:
            return verdict.name
        models = {system.name: system.model for system in verdict.systems}
        ready = [one for one in self.systems if not self.weighed[one.name].is_to_train]
        best = max(ready, key=lambda system: system.ranking.mean)
        return models[verdict.decision.name] or best.name

    def _weigh(self, entrant: Entrant) -> None:
        """Measures a model as it comes and trained, as far as there is time."""
        cost = self._cost(entrant)
        plan = self._plan(entrant, cost)
        if plan is None:
            self._measure(entrant, cost)
            self._train(entrant, cost)
            return
        self.say(plan.note)
        if not plan.trains:
            self.left_out = plan.note
        if not plan.weighs:
            return
        budget = self.config.budget or BUDGET
        try:
            with time_limit(MARGIN * seconds_of(budget) - plan.last):
                self._measure(entrant, cost)
                if plan.trains:
                    self._train(entrant, cost)
        except OverBudget:
            name = entrant.after if entrant.before in self.weighed else entrant.before
            said = f"{name[0].upper()}{name[1:]} is left out: it takes longer than was estimated"
            self.left_out = f"{said}, and --budget {budget} is over. Give a longer one."
            self.say(self.left_out)

    def _cost(self, entrant: Entrant) -> Cost:
        return Cost.of(entrant.model, self.exam.judged or self.exam.train, self.config.seed)

    def _measure(self, entrant: Entrant, cost: Cost) -> None:
        if self.exam.judged is not None:
            self.say(f"Measuring {entrant.before}: {len(self.exam.judged.corpus):,} documents.")
        encoded = Encoded.of(entrant.before, entrant.model, self.exam)
        figures = card_figures(entrant.model, self.exam, self.config.seed, encoded.judges)
        system = replace(encoded.system(), cost=cost) if encoded.is_asked else None
        self.weighed[entrant.before] = _Weighed(entrant, system, figures)

    def _train(self, entrant: Entrant, cost: Cost) -> None:
        """A model that is trained: in each fold, or on all pairs where a split judges."""
        exam, config = self.exam, self.config
        if exam.folds:
            trains = partial(trained_copy, model=entrant.model, config=config, output=self.output)
            folds = self._folds(entrant)
            system = search_in_folds(entrant.after, trains, exam, entrant.before, folds)
            self.weighed[entrant.after] = _Weighed(entrant, replace(system, cost=cost), {})
            return
        if len(self.entrants) == 1:
            trainer = self.train_fully(entrant)
        else:  # the others come from memory, without a checkpoint
            trainer = train_copy(entrant.model, exam.train, self.rows, config, self.output)
            refuse_diverged(trainer)
        encoded = Encoded.of(entrant.after, trainer.model, exam)
        figures = card_figures(trainer.model, exam, config.seed, encoded.judges)
        found: System | None = None
        shown: list[System] = []
        if encoded.judges is not None and not normalizes_output(trainer.model):
            found, shown = choose_scoring(encoded, config)
            if shown and not config.keep_scoring:
                prepare(trainer.model, Similarity(1.0, found.exponent))
        elif encoded.is_asked:
            found = encoded.system()
        if found is not None:
            found = replace(found, base=entrant.before, cost=cost)
        self.weighed[entrant.after] = _Weighed(entrant, found, figures, trainer, shown)

    def _train_winner(self, entrant: Entrant) -> None:
        """Trains on all pairs what was judged in folds."""
        trainer = self.train_fully(entrant)
        system = cast(System, self.weighed[entrant.after].system)
        encoded = Encoded.of(entrant.after, trainer.model, replace(self.exam, judged=None))
        if encoded.confirms is not None:
            system = replace(system, confirm=encoded.system().confirm)
        figures = card_figures(trainer.model, self.exam, self.config.seed)
        self.weighed[entrant.after] = _Weighed(entrant, system, figures, trainer)

    def train_fully(self, entrant: Entrant) -> SentenceTransformerTrainer:
        """Trains a model in place on all pairs, with checkpoints."""
        settings = self.settings
        if len(self.entrants) > 1:
            settings = settings | {"trains": entrant.after}
        if self.checkpoint is not None:
            run_folder.check_same_run(self.output, settings)
        config = self.config
        trainer = make_trainer(entrant.model, self.exam.train, self.rows, config, self.output)
        if trainer.is_world_process_zero() and self.checkpoint is None:
            run_folder.record_run(self.output, settings)
        with reading(entrant.model, config.max_length), trimmed_vocabulary(trainer):
            train_or_stop(trainer, self.checkpoint)
        return trainer

    def _folds(self, entrant: Entrant) -> int | None:
        """The number of folds of an encoder where a static table has more."""
        return None if entrant.is_table or self.config.folds else FOLDS_OF_ENCODER

    def _plan(self, entrant: Entrant, cost: Cost) -> Plan | None:
        """The plan for an encoder within the budget; None for a model that is trained anyway."""
        exam, config = self.exam, self.config
        if entrant.is_table or exam.judged is None or len(self.entrants) == 1:
            return None
        papers = [len(train.triplets(0)) for train, _ in exam.papers(self._folds(entrant))]
        last = steps_of(config, entrant.model, len(self.rows)) if exam.folds else 0
        texts = len(exam.judged.corpus) + len(exam.judged.query_ids)
        texts += 0 if exam.confirm is None else len(exam.confirm.query_ids)
        timed = replace(config, epochs=1, max_steps=TIMED_STEPS)
        model, output = entrant.model, self.output
        return plan_of(
            seconds_of(config.budget or BUDGET),
            texts,
            cost.documents,
            searches=len(papers) + int(bool(exam.folds) and exam.confirm is not None),
            steps=sum(steps_of(config, model, size) for size in papers) + last,
            last=last,
            step=lambda: seconds_per_step(model, exam.train, self.rows, timed, output),
        )

    def _save(
        self, name: str, verdict: Verdict | None, confirmed: Confirmation | None
    ) -> TrainedModel:
        """Saves a model, unless it is a clearly worse one that nothing recommends."""
        of = self.weighed[name]
        entrant, trainer = of.entrant, of.trainer
        geometry = {"before": self.weighed[entrant.before].figures}
        if trainer is not None:
            geometry["after"] = of.figures
        trained = TrainedModel(trainer, geometry, verdict, None, confirmed)
        if self._is_worse(of, verdict) and not self.config.keep_anyway:
            logger.warning(
                f"Nothing was saved to {self.output}. The last checkpoint remains: --resume"
                " --keep-anyway (in Python resume=True, keep_anyway=True) saves its model."
            )
            return trained
        model = entrant.stock() if trainer is None else trainer.model
        width = output_width(model) or 0
        size = f"An embedding takes {4 * width:,} bytes, and {width:,} as int8."
        if trainer is not None:
            note_figures(trainer, geometry, verdict)
            if entrant.source is not None:
                size = f"Trained from `{Path(entrant.source).name}`. {size}"
        held_out = (self.exam.judged or self.exam.train).name
        sections = {
            f"Retrieval ({held_out})": verdict.to_markdown() if verdict else None,
            "Retrieval (test)": confirmed.to_markdown() if confirmed else None,
            "Size": size,
            "Norms": trained.norm_warning if trainer else None,
        }
        record = {"geometry": geometry, "dev": verdict, "test": confirmed, "model": name}
        decision = None if verdict is None else verdict.decision
        bases = [entrant.source] if entrant.source else []
        save_run(model, trainer, self.output, record, sections, decision, bases)
        if not self.config.keep_checkpoints:
            shutil.rmtree(self.output / run_folder.WORK, ignore_errors=True)
        return replace(trained, output=self.output, model=model)

    def _is_worse(self, of: _Weighed, verdict: Verdict | None) -> bool:
        """Whether nothing is recommended, and a trained model is clearly worse by any scoring."""
        if verdict is None or verdict.decision is not None:
            return False
        before = cast(System, self.weighed[of.entrant.before].system)
        found = [cast(System, of.system), *of.shown]
        gains = [one.ranking.minus(before.ranking, seed=self.config.seed) for one in found]
        return all(gain.is_worse for gain in gains)


def choose_scoring(encoded: Encoded, config: TrainConfig) -> tuple[System, list[System]]:
    """The model to save, as it was trained or at `ExponentCurve.best`, of which each fold of the
    queries is ranked by the choice of the others; and the other one to show."""
    task = cast(EncodedTask, encoded.judges)
    curve = exponent_curve(task, seed=config.seed)
    trained = encoded.system()
    if curve.best == curve.present:
        return trained, []
    options = task.sweep({curve.best, *curve.by_query}, DEPTH)
    best = replace(encoded.system(curve.best), ranking=curve.of(options))
    saved, other = (trained, best) if config.keep_scoring else (best, trained)
    name = f"{encoded.name}, {scoring_name(other.exponent)} (not saved)"
    return saved, [replace(other, name=name)]
