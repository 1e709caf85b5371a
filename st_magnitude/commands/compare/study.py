"""What is measured so far, in an Optuna study on the disk: a run that dies continues after its last measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from st_magnitude._checks import needs
from st_magnitude._config import list_differences
from st_magnitude.commands.compare.candidates import Candidate
from st_magnitude.commands.compare.plan import FACTOR

if TYPE_CHECKING:
    from optuna import Study as OptunaStudy
    from optuna.trial import Trial

__all__ = ["Measurement", "Record", "import_optuna"]

NAME = "compare"


@dataclass(frozen=True)
class Measurement:
    """One training run of a candidate, and what it scores on dev."""

    steps: int
    ndcg: float  # mean nDCG@10 at the exponent; nan if training diverged
    exponent: float  # of documents, calibrated on dev; 1 is cosine
    seconds: float  # of everything
    training_seconds: float  # of the steps alone


def import_optuna() -> Any:
    with needs("compare", "compare"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Record:
    """The candidates as trials of an Optuna study, one intermediate value for each rung.

    optuna-dashboard and optuna's plots read ``study.log`` too, while the run goes on.

    Args:
        path: File of the journal, which is created or continued.
        settings: What a run that continues must share with the one before.

    Raises:
        FileExistsError: If the journal belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        optuna = import_optuna()
        self.storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        self.study: OptunaStudy = optuna.create_study(
            study_name=NAME, storage=self.storage, direction="maximize", pruner=_halving(optuna), load_if_exists=True
        )
        has_begun = self.get("candidates") is not None  # else the budget was too small
        if has_begun and (differences := list_differences(self.get("settings"), settings)):
            raise FileExistsError(
                f"The comparison in {path.parent} was started with other settings: {differences}. Give the same "
                "settings to continue it, or choose another output folder."
            )
        self.study.set_user_attr("settings", dict(settings))
        self._trials: dict[Candidate, Trial] = {}

    @property
    def candidates(self) -> list[Candidate]:
        return list(self._trials)

    def get(self, name: str, default: Any = None) -> Any:
        return self.study.user_attrs.get(name, default)

    def set(self, name: str, value: Any) -> None:
        self.study.set_user_attr(name, value)

    def enter(self, candidates: Sequence[Candidate]) -> None:
        """Makes a trial of every candidate, or finds those of the run that is continued."""
        optuna = import_optuna()
        for candidate in candidates[len(self.study.get_trials(deepcopy=False)) :]:
            self.study.enqueue_trial({"candidate": candidate.name})
        kind = {"candidate": optuna.distributions.CategoricalDistribution([c.name for c in candidates])}
        for _ in self.study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.WAITING]):
            self.study.ask(kind)
        study_id = self.storage.get_study_id_from_name(NAME)
        for number, candidate in enumerate(candidates):
            trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
            self._trials[candidate] = optuna.trial.Trial(self.study, trial_id)

    def measurements(self, candidate: Candidate) -> list[Measurement]:
        found = self._trials[candidate].user_attrs.get("measurements", [])
        return [Measurement(**{**m, "ndcg": math.nan if m["ndcg"] is None else m["ndcg"]}) for m in found]

    def add(self, candidate: Candidate, measured: Measurement) -> None:
        trial = self._trials[candidate]
        plain = vars(measured) | {"ndcg": None if math.isnan(measured.ndcg) else measured.ndcg}
        trial.report(measured.ndcg, measured.steps)
        trial.set_user_attr("measurements", [*trial.user_attrs.get("measurements", []), plain])

    def survives(self, candidate: Candidate) -> bool:
        """Whether a candidate is in the best third of the rung, all of which has been measured."""
        return not self._trials[candidate].should_prune()

    def finish(self, finalists: Sequence[Candidate]) -> None:
        """Tells Optuna which trials ran to the end and which were stopped."""
        states = import_optuna().trial.TrialState
        for candidate, trial in self._trials.items():
            value = self.measurements(candidate)[-1].ndcg if candidate in finalists else None
            is_complete = value is not None and not math.isnan(value)
            state = states.COMPLETE if is_complete else states.PRUNED
            self.study.tell(trial, value if is_complete else None, state=state, skip_if_finished=True)


def _halving(optuna: Any) -> Any:
    class Halving(optuna.pruners.BasePruner):
        """Keeps the best third of all trials that have reported at a step.

        Optuna's SuccessiveHalvingPruner decides about a trial when it reports, so that the first trials always get the
        whole budget. Here all candidates of a rung report before the first is judged, and all are judged alike.
        """

        def prune(self, study: OptunaStudy, trial: Any) -> bool:
            step = trial.last_step
            values = [t.intermediate_values.get(step, math.nan) for t in study.get_trials(deepcopy=False)]
            ranked = sorted((value for value in values if not math.isnan(value)), reverse=True)
            own = trial.intermediate_values[step]
            return math.isnan(own) or own < ranked[math.ceil(len(ranked) / FACTOR) - 1]

    return Halving()
