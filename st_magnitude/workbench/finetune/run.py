"""A run: the models that are weighed, what is decided, trained and saved."""

from __future__ import annotations

import logging
import math
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer

from st_magnitude.data.task import EncodedTask
from st_magnitude.judge import norm_warning, warn_if_few
from st_magnitude.modules import ExponentNorm
from st_magnitude.saving.export import load
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.surgery.vocabulary import trimmed_vocabulary
from st_magnitude.training import run_folder
from st_magnitude.training.stopping import refuse_diverged, train_or_stop
from st_magnitude.workbench._config import seconds_of
from st_magnitude.workbench.calibration import exponent_curve
from st_magnitude.workbench.finetune.budget import Plan, plan_of
from st_magnitude.workbench.finetune.card import card_figures
from st_magnitude.workbench.finetune.entrants import Entrant
from st_magnitude.workbench.finetune.save import about_size, note_figures, save_trained, write_run
from st_magnitude.workbench.finetune.settings import BUDGET, TrainConfig
from st_magnitude.workbench.finetune.trainer import (
    TIMED_STEPS,
    epochs_of,
    is_uneven,
    make_trainer,
    reading,
    seconds_per_step,
    steps_of,
    train_copy,
    trained_copy,
)
from st_magnitude.workbench.judging.choice import HERE, System, short_names
from st_magnitude.workbench.judging.confirmation import Confirmation, confirm
from st_magnitude.workbench.judging.contestants import Contestant, Encoded, search
from st_magnitude.workbench.judging.costs import Cost
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.verdict import (
    Scoring,
    Verdict,
    scored_of,
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
    # with ``config.prior``: what it was counted from, or why it was left out
    prior: str | None = None
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
    """A model that was weighed, by its name in the run."""

    system: System | None  # None where no query judges or confirms
    figures: dict[str, float] = field(default_factory=dict)  # of the card
    stock: Callable[[], SentenceTransformer] | None = None  # returns a model as it comes
    trainer: SentenceTransformerTrainer | None = None  # of the training on all pairs
    scoring: Scoring | None = None
    shown: Sequence[System] = ()


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
    configs: dict[str, TrainConfig] = field(default_factory=dict)  # of models with less time

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
                model = load(path)
                cost = Cost.of(model, judged or self.exam.train, self.config.seed)
                found = search(Contestant(name, model, cost=cost), self.exam)
                self.weighed[name] = _Weighed(found, stock=partial(load, path))
        if judged is not None:
            verdict = verdict_of(
                self.exam,
                self.systems,
                shown=[system for one in self.weighed.values() for system in one.shown],
                scorings={name: x.scoring for name, x in self.weighed.items() if x.scoring},
                seed=self.config.seed,
                worth=self.config.worth,
            )
        saved = self._to_save(verdict)
        for entrant in self.entrants:
            if entrant.after == saved and self.weighed[saved].trainer is None:
                self._train_winner(entrant)
        confirmed = confirm(self.exam, self.systems, verdict, self.config.seed)
        if verdict is not None:
            places = {one.before: one.source for one in self.entrants if one.source}
            verdict = verdict.placed(places | short_names(self.also) | {saved: HERE})
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
        ready = [one for one in self.systems if not one.base or self.weighed[one.name].trainer]
        best = max(ready, key=lambda system: system.ranking.mean)
        return models[verdict.decision.name] or best.name

    def _weigh(self, entrant: Entrant) -> None:
        """Measures a model as it comes and trained, as far as there is time."""
        exam = self.exam
        cost = Cost.of(entrant.model, exam.judged or exam.train, self.config.seed)
        plan = self._plan(entrant, cost)
        if plan is not None:
            self.say(plan.note)
            if plan.epochs is None:
                return
        if exam.judged is not None:
            self.say(f"Measuring {entrant.before}: {len(exam.judged.corpus):,} documents.")
        self._measure(entrant, cost)
        if plan is not None and not plan.epochs:
            return
        if plan is not None and plan.is_cut:
            self.configs[entrant.after] = replace(self.config, epochs=plan.epochs, max_steps=-1)
        if not exam.folds:
            self._train_on_split(entrant, cost)
            return
        trains = partial(
            trained_copy, model=entrant.model, config=self._config(entrant), output=self.output
        )
        contestant = Contestant(
            entrant.after, None, trains, entrant.before, cost, self._folds(entrant)
        )
        self.weighed[entrant.after] = _Weighed(search(contestant, exam))

    def _measure(self, entrant: Entrant, cost: Cost) -> None:
        """A model as it comes."""
        encoded = Encoded.of(entrant.before, entrant.model, self.exam)
        figures = card_figures(entrant.model, self.exam, self.config.seed, encoded.judges)
        system = replace(encoded.system(), cost=cost) if encoded.is_asked else None
        is_kept = self.exam.folds or len(self.entrants) > 1  # else it is trained in place
        stock = (lambda: entrant.model) if is_kept else entrant.stock()
        self.weighed[entrant.before] = _Weighed(system, figures, stock)

    def _train_on_split(self, entrant: Entrant, cost: Cost) -> None:
        """Trains a model on all pairs, and measures it on the split that judges, if there is one,
        which chooses its scoring."""
        exam, config = self.exam, self._config(entrant)
        if len(self.entrants) == 1:
            trainer = self.train_fully(entrant)
        else:  # the others come from memory, without a checkpoint
            trainer = train_copy(entrant.model, exam.train, self.rows, config, self.output)
            refuse_diverged(trainer)
        encoded = Encoded.of(entrant.after, trainer.model, exam)
        before = self.weighed[entrant.before].system
        system, scoring = None, None
        shown: list[System] = []
        if encoded.judges is not None and not normalizes_output(trainer.model):
            system, shown, scoring = choose_scoring(encoded, cast(System, before), config)
        elif encoded.is_asked:
            system = encoded.system()
        if system is not None:
            system = replace(system, base=entrant.before, cost=cost)
        figures = card_figures(trainer.model, exam, config.seed, encoded.judges)
        self.weighed[entrant.after] = _Weighed(system, figures, None, trainer, scoring, shown)

    def _train_winner(self, entrant: Entrant) -> None:
        """Trains on all pairs what was judged in folds."""
        trainer = self.train_fully(entrant)
        system = cast(System, self.weighed[entrant.after].system)
        encoded = Encoded.of(entrant.after, trainer.model, replace(self.exam, judged=None))
        if encoded.confirms is not None:
            system = replace(system, confirm=encoded.system().confirm)
        figures = card_figures(trainer.model, self.exam, self.config.seed)
        self.weighed[entrant.after] = _Weighed(system, figures, None, trainer)

    def train_fully(self, entrant: Entrant) -> SentenceTransformerTrainer:
        """Trains a model in place on all pairs, with checkpoints."""
        settings = self.settings
        if len(self.entrants) > 1:
            settings = settings | {"trains": entrant.after}
        if self.checkpoint is not None:
            run_folder.check_same_run(self.output, settings)
        config = self._config(entrant)
        trainer = make_trainer(entrant.model, self.exam.train, self.rows, config, self.output)
        if trainer.is_world_process_zero() and self.checkpoint is None:
            run_folder.record_run(self.output, settings)
        with reading(entrant.model, config.max_length), trimmed_vocabulary(trainer):
            train_or_stop(trainer, self.checkpoint)
        return trainer

    def _config(self, entrant: Entrant) -> TrainConfig:
        """The settings, with the epochs for which there is time."""
        return self.configs.get(entrant.after, self.config)

    def _folds(self, entrant: Entrant) -> int | None:
        """The number of folds of an encoder where a static table has more."""
        return None if entrant.is_table or self.config.folds else FOLDS_OF_ENCODER

    def _plan(self, entrant: Entrant, cost: Cost) -> Plan | None:
        """The plan for an encoder within the budget; None for a model that is trained anyway."""
        exam, config = self.exam, self.config
        if entrant.is_table or exam.judged is None or len(self.entrants) == 1:
            return None
        papers = [len(train.triplets(0)) for train, _ in exam.papers(self._folds(entrant))]
        sizes = [*papers, *([len(self.rows)] if exam.folds else [])]
        texts = len(exam.judged.corpus) + len(exam.judged.query_ids)
        texts += 0 if exam.confirm is None else len(exam.confirm.query_ids)
        timed = replace(config, epochs=1, max_steps=TIMED_STEPS)
        model, output = entrant.model, self.output
        return plan_of(
            seconds_of(config.budget or BUDGET),
            texts,
            cost.documents,
            searches=len(papers) + int(bool(exam.folds) and exam.confirm is not None),
            steps=sum(steps_of(config, size) for size in sizes),
            epochs=epochs_of(config, len(self.rows)),
            step=lambda: seconds_per_step(model, exam.train, self.rows, timed, output),
        )

    def _save(
        self, name: str, verdict: Verdict | None, confirmed: Confirmation | None
    ) -> TrainedModel:
        """Saves a model, unless it is a clearly worse one that nothing recommends."""
        of = self.weighed[name]
        trainer = of.trainer
        is_worse = verdict is not None and verdict.decision is None and verdict.is_worse
        base = next((one for one in self.entrants if name in (one.before, one.after)), None)
        geometry = {} if base is None else {"before": self.weighed[base.before].figures}
        prior = None
        if trainer is not None:
            geometry["after"] = of.figures
            if self.config.prior:
                prior = _about_prior(cast(Dataset, trainer.train_dataset))
        trained = TrainedModel(trainer, geometry, verdict, None, prior, confirmed)
        if is_worse and not self.config.keep_anyway:
            logger.warning(
                f"Nothing was saved to {self.output}. The last checkpoint remains: --resume"
                " --keep-anyway (in Python resume=True, keep_anyway=True) saves its model."
            )
            return trained
        if trainer is not None and of.scoring is not None:
            exponent = cast(System, of.system).exponent
            if exponent != of.scoring.as_trained.exponent:
                prepare(trainer.model, Similarity(1.0, exponent))
        model = trainer.model if trainer is not None else cast(Any, of.stock)()
        held_out = (self.exam.judged or self.exam.train).name
        source = None if base is None else base.source
        sections = {
            f"Retrieval ({held_out})": verdict.to_markdown() if verdict else None,
            "Retrieval (test)": confirmed.to_markdown() if confirmed else None,
            "Size": about_size(model, source if trainer else None),
        }
        record = {"geometry": geometry, "dev": verdict, "test": confirmed, "model": name}
        decision = None if verdict is None else verdict.decision
        sources = [one for one in (source or short_names(self.also).get(name),) if one]
        if trainer is None:
            rows = Dataset.from_dict({})
            write_run(model, self.output, record, sections, rows, decision, *sources)
        else:
            note_figures(trainer, geometry, verdict)
            sections |= {"Document prior": prior, "Norms": trained.norm_warning}
            save_trained(trainer, self.output, record, sections, decision, *sources)
        if not self.config.keep_checkpoints:
            shutil.rmtree(self.output / run_folder.WORK, ignore_errors=True)
        return replace(trained, output=self.output, model=model)


def choose_scoring(
    encoded: Encoded, before: System, config: TrainConfig
) -> tuple[System, list[System], Scoring]:
    """The model to save, as it was trained or at `ExponentCurve.best`, of which each fold of the
    queries is ranked by the choice of the others; the other one to show; and both figures."""
    task = cast(EncodedTask, encoded.judges)
    curve = exponent_curve(task, seed=config.seed)
    trained = best = encoded.system()
    if curve.best != curve.present:
        options = task.sweep({curve.best, *curve.by_query}, DEPTH)
        best = replace(encoded.system(curve.best), ranking=curve.of(options))
    saved, other = (trained, best) if config.keep_scoring else (best, trained)
    name = f"{encoded.name}, {scoring_name(other.exponent)} (not saved)"
    shown = [] if other is saved else [replace(other, name=name)]
    as_trained, at_best = (scored_of(one, before, config.seed) for one in (trained, best))
    return saved, shown, Scoring(as_trained, at_best, curve.to_dict()["ndcg@10"])


def _about_prior(rows: Dataset) -> str:
    counts = Counter(rows["positive"])
    if not is_uneven(rows["positive"]):
        return (
            f"All {len(counts):,} documents are equally often positives. A prior changes nothing"
            " and was left out."
        )
    return (
        f"Trained with the prior of {len(counts):,} documents in {len(rows):,} pairs, of which the"
        f" most frequent one has {max(counts.values()):,} (logQ correction). The model holds the"
        " prior in its embeddings, so nothing has to be added when it is served."
    )
