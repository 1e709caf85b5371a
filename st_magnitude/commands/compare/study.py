"""What is measured so far, in an Optuna study on the disk: a run that dies continues after its last measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from st_magnitude._checks import needs
from st_magnitude._config import list_differences
from st_magnitude._json import from_plain
from st_magnitude.commands.compare.candidates import Candidate
from st_magnitude.commands.compare.config import LOSSES
from st_magnitude.result import to_plain

__all__ = ["Measurement", "Record", "import_optuna"]


@dataclass(frozen=True)
class Measurement:
    """One training run of a candidate, and what it scores on dev."""

    steps: int
    ndcg: float  # mean nDCG@10 at the exponent; nan if training diverged
    exponent: float  # of documents, calibrated on dev; 1 is cosine
    seconds: float  # of everything
    step_seconds: float  # of one step, without the first, which is slower

    @property
    def is_finite(self) -> bool:
        """Whether training did not diverge."""
        return not math.isnan(self.ndcg)

    @property
    def score(self) -> float:
        """nDCG@10, or less than any if training diverged."""
        return self.ndcg if self.is_finite else -math.inf

    @property
    def other_seconds(self) -> float:
        """Everything but the steps."""
        return max(0.0, self.seconds - self.steps * self.step_seconds)


def import_optuna() -> Any:
    with needs("compare", "compare"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Record:
    """An Optuna study with a trial for every measurement, and the state of the comparison as its attributes.

    optuna-dashboard and optuna's plots read ``study.log`` too, while the run goes on. Optuna's SuccessiveHalvingPruner
    is not used: it decides about a trial when that reports, so that the first trials always get the whole budget.

    Args:
        path: File of the journal, which is created or continued.
        settings: What a run that continues must share with the one before.

    Raises:
        FileExistsError: If the journal belongs to a run with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.optuna = import_optuna()
        storage = self.optuna.storages.JournalStorage(self.optuna.storages.journal.JournalFileBackend(str(path)))
        self.study = self.optuna.create_study(
            study_name="compare", storage=storage, direction="maximize", load_if_exists=True
        )
        has_begun = self.get("rung") is not None  # else the budget was too small
        if has_begun and (differences := list_differences(self.get("settings"), settings)):
            raise FileExistsError(
                f"The comparison in {path.parent} was started with other settings: {differences}. Give the same "
                "settings to continue it, or choose another output folder."
            )
        self.set("settings", dict(settings))
        self.measured: dict[Candidate, list[Measurement]] = {}
        for trial in self.study.get_trials():
            measurement = from_plain(Measurement, trial.user_attrs["measurement"])
            params = {name: value for name, value in trial.params.items() if name != "steps"}
            self.measured.setdefault(Candidate(**params), []).append(measurement)

    def get(self, name: str, default: Any = None) -> Any:
        return self.study.user_attrs.get(name, default)

    def set(self, name: str, value: Any) -> None:
        self.study.set_user_attr(name, value)

    def add(self, candidate: Candidate, found: Measurement) -> None:
        self.measured.setdefault(candidate, []).append(found)
        kinds, states = self.optuna.distributions, self.optuna.trial.TrialState
        params = {**vars(candidate), "steps": found.steps}
        self.study.add_trial(
            self.optuna.trial.create_trial(
                state=states.COMPLETE if found.is_finite else states.FAIL,
                value=found.ndcg if found.is_finite else None,
                params=params,
                distributions=dict.fromkeys(params, kinds.FloatDistribution(0.0, 1e9))
                | {"loss": kinds.CategoricalDistribution(LOSSES), "steps": kinds.IntDistribution(1, 10**9)},
                user_attrs={"measurement": to_plain(found)},
            )
        )
