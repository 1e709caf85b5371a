"""compare tells which loss to train with: an Optuna study with successive halving on dev, and one look at test.

Every process that is started with the same output works on the same study. A file lock has one of them plan the
comparison, gives each candidate to one process, and has one process write the result when no candidate is left. The
system frees the locks of a process that dies, so another one trains its candidate again.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
import yaml
from filelock import FileLock, Timeout
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import needs
from st_magnitude._config import list_differences
from st_magnitude._plot import draw, pyplot
from st_magnitude.comparison.candidates import FACTOR, Candidate, Costs, cost, grids, least_steps, plan, rungs_of
from st_magnitude.comparison.config import LOSSES, CompareConfig, parse_budget
from st_magnitude.comparison.data import make_splits
from st_magnitude.comparison.result import CompareResult, Entry, OnTest
from st_magnitude.comparison.trial import Setup
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.metrics import model_name
from st_magnitude.finetune.comparison import own_ndcg
from st_magnitude.finetune.run import digest_of
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.surgery.card import add_section
from st_magnitude.surgery.export import load

__all__ = ["CompareConfig", "CompareResult", "compare"]

MODELS_ON_TEST, FILE_SECONDS = 3, 5.0  # the pretrained model, plain cosine and the best candidate; the last files
FREE = {"budget"}  # settings that may change when a comparison continues


def compare(
    model: SentenceTransformer | str | Callable[[], SentenceTransformer],
    data: RetrievalData | str | Path,
    output: str | Path,
    config: CompareConfig | None = None,
    *,
    dev: RetrievalData | None = None,
    test: RetrievalData | None = None,
    say: Callable[[str], None] = print,
) -> CompareResult:
    """Tells which loss to train with on your data, or that plain cosine is best, within a budget of time or steps.

    The candidates are Cosine, QNorm, Dot, Learnable and TempAggMRL at the same temperatures and learning rates, with
    and without SIGReg. All of them see the same batches in the same order, and each is measured at the document
    exponent that is best on dev. Optuna's successive halving stops those that are behind. The best one on dev is
    compared with plain cosine at its own best temperature, and both with the pretrained model, on the test split, which
    is read once. Without a clear difference plain cosine is recommended.

    Processes that make the same call with the same output, on one or on several machines, share the work.

    Args:
        model: A model, the folder or hub id of one, or a function that returns a new one. It is not changed.
        data: A folder in BEIR's layout, whose splits the config names, or the data to train on.
        output: New folder for the winning model (``model``), ``compare.json``, ``compare.md`` with its picture
            ``compare-curves.png``, ``train.yaml`` for ``st-magnitude train --config``, and Optuna's ``study.log``. An
            unfinished comparison is continued; candidates that were measured are not trained again.
        config: Settings.
        dev: Data to rank the candidates on; None: the split of the folder, else held-out training queries.
        test: Data for the final figures; None: as for dev.
        say: Function that receives the progress line by line.

    Raises:
        ImportError: If optuna or matplotlib is not installed.
        ValueError: If the data cannot be used (`make_splits`), or the budget is too small; the message names the least.
        FileExistsError: If output holds other files, a finished comparison, or one with other settings.
        KeyboardInterrupt: At Ctrl-C. The same call continues.

    Example:
        ::

            result = stm.compare("all-MiniLM-L6-v2", "my-data", "runs/compare", CompareConfig(budget="30m"))
            print(result.recommendation)
    """
    began, config, output = time.perf_counter(), config or CompareConfig(), Path(output).absolute()
    with needs("compare", "compare"):
        import optuna  # noqa: F401
    pyplot()  # raises before anything is trained
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare trains in one process; start it without torchrun or accelerate launch.")
    if (output / "compare.json").exists():
        raise FileExistsError(f"{output} holds a finished comparison. Choose another output folder.")
    splits = make_splits(data, config, dev, test)
    for note in splits.notes:
        say(f"Note: {note}")
    settings = {key: value for key, value in vars(config).items() if key not in FREE}
    settings["model"] = model if isinstance(model, str) else None
    settings["data"] = [digest_of(part) for part in (splits.train, splits.dev, splits.test)]
    with _no_progress_bars():
        setup = Setup.of(model, splits, config)
        try:
            run = _Run(setup, output, say, began, json.loads(json.dumps(settings)))
            return run.finish(model if isinstance(model, str) else model_name(setup.base))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Stopped. Give the same command again to continue with {output}.") from None


class _Run:
    """One of the processes that work on a comparison. Its settings are what all of them share, as JSON has it."""

    def __init__(
        self, setup: Setup, output: Path, say: Callable[[str], None], began: float, settings: dict[str, Any]
    ) -> None:
        import optuna
        from optuna.storages import journal

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.setup, self.output, self.say, self.began = setup, output, say, began
        self.budget, self.in_steps = parse_budget(setup.config.budget)
        self.states = optuna.trial.TrialState
        self.sets = grids(setup.config, setup.is_static)
        output.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(output / ".lock")  # of the one process that plans, takes a candidate or writes the result
        with self.lock:
            log = output / "study.log"
            if not log.exists() and any(file.name != ".lock" for file in output.iterdir()):
                raise FileExistsError(f"{output} is not empty; choose another folder.")
            (output / "models").mkdir(exist_ok=True)
            self.study = optuna.create_study(
                study_name="compare",
                storage=optuna.storages.JournalStorage(journal.JournalFileBackend(str(log))),
                direction="maximize",
                load_if_exists=True,
            )
            known = self.study.user_attrs
            if "plan" not in known:  # else this process continues or joins a comparison
                self.study.set_user_attr("settings", settings)
                self.study.set_user_attr("plan", self._plan())
            elif differences := list_differences(known["settings"], settings):
                raise FileExistsError(
                    f"The comparison in {output} was started with other settings: {differences}. Give the same "
                    "settings to continue it, or choose another output folder."
                )
        self.plan: dict[str, Any] = self.study.user_attrs["plan"]
        self.rungs: list[int] = self.plan["rungs"]
        self.grid = next(grid for grid in self.sets if len(grid) == self.plan["candidates"])
        self.study.pruner = optuna.pruners.SuccessiveHalvingPruner(self.rungs[0], reduction_factor=FACTOR)
        if done := len(self.entries()):
            say(f"Continuing after {done} training runs.")

    def _plan(self) -> dict[str, Any]:
        """The largest set of candidates that the budget can train for long enough to tell them apart."""
        costs, spent, reserve, most = Costs(), 0.0, 0.0, self.setup.most_steps
        if not self.in_steps:
            costs, on_test = self.setup.time(self.sets[0][-1], self.output / "models")
            reserve = MODELS_ON_TEST * on_test + FILE_SECONDS
            spent = time.perf_counter() - self.began + costs.search + reserve  # a search with the pretrained model
        for grid in self.sets:
            steps = plan(len(grid), self.budget - spent, costs, most)
            if steps >= (least := least_steps(len(grid), most)):
                break
        else:
            least = math.ceil((cost(len(grid), least, costs) + spent) / (1 if self.in_steps else 60))
            raise ValueError(
                f"A budget of {self.setup.config.budget} is too small: {len(grid)} candidates need --budget "
                f"'{least}{' steps' if self.in_steps else 'm'}' at least. Give that, or fewer --losses, "
                "--temperatures or --documents."
            )
        rungs = rungs_of(len(grid), steps)
        stops = [f", about a third of them beyond {rung:,}" for rung in rungs[:-1]]
        self.say(f"{len(grid)} candidates of up to {rungs[-1]:,} steps{''.join(stops)}")
        if grid is not self.sets[0]:
            self.say(f"Note: A larger budget tries up to {len(self.sets[0])} candidates.")
        pretrained = float(own_ndcg(self.setup.base, self.setup.splits.dev).mean())
        return {"candidates": len(grid), "rungs": rungs, "reserve": reserve, "pretrained": pretrained}

    def entries(self) -> list[Entry]:
        """The candidates that are measured, the best first, and of equals plain cosine, with which the grid begins."""
        found = []
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.PRUNED)):
            curve, duration = sorted(trial.intermediate_values.items()), trial.duration
            seconds = duration.total_seconds() if duration else 0.0
            found.append(Entry(Candidate(**trial.params), curve, trial.user_attrs["exponent"], seconds))
        return sorted(found, key=lambda entry: (-entry.steps, -entry.score, self.grid.index(entry.candidate)))

    def finish(self, name: str) -> CompareResult:
        """Trains candidates until none is left or the time is up. The last process reads the test split and writes."""
        is_waiting = False
        while True:
            with self.lock:
                claim, others = self._claim()
                if claim is None and not others:
                    if "test" not in self.study.user_attrs:
                        self.study.set_user_attr("test", self._test())
                    result = self._result(name)
                    if not (self.output / "compare.json").exists():
                        self._write(result)
                    return result
            if claim is not None:
                candidate, trial, lock = claim
                with lock:
                    self._train(candidate, trial)
            elif is_waiting:
                time.sleep(0.5)
            else:
                is_waiting = True
                self.say(f"Waiting for {others} candidates of other processes.")

    def _claim(self) -> tuple[tuple[Candidate, Any, FileLock] | None, int]:
        """A candidate to train, with its trial and its lock, and the number of those that other processes train."""
        if "test" in self.study.user_attrs:
            return None, 0
        entries, others = self.entries(), 0
        spent = sum(entry.steps for entry in entries) if self.in_steps else time.perf_counter() - self.began
        is_over = bool(entries) and spent >= self.budget - self.plan["reserve"]
        measured = {entry.candidate for entry in entries}
        for candidate in (candidate for candidate in self.grid if candidate not in measured):
            lock = FileLock(f"{self.folder(candidate)}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                others += 1
                continue
            if is_over:
                lock.release()
                continue
            for trial in self.study.get_trials(deepcopy=False, states=(self.states.RUNNING,)):
                if trial.params == vars(candidate):  # its process has died, for its lock is free
                    self.study.tell(trial.number, state=self.states.FAIL)
            self.study.enqueue_trial(vars(candidate))
            claimed = self.study.ask()
            claimed.suggest_categorical("loss", LOSSES)
            for name in ("temperature", "learning_rate", "sigreg"):
                claimed.suggest_float(name, 0.0, 1e9)
            return (candidate, claimed, lock), others
        return None, others

    def _train(self, candidate: Candidate, trial: Any) -> None:
        curve: dict[int, float] = {}

        def goes_on(steps: int, ndcg: float, exponent: float) -> bool:
            trial.set_user_attr("exponent", exponent)
            trial.report(ndcg, steps)
            curve[steps] = ndcg
            if math.isnan(ndcg):
                return False
            if steps < self.rungs[-1]:
                return not trial.should_prune() or self._is_best_cosine(candidate, steps, ndcg)
            whole = [entry.score for entry in self.entries() if entry.steps == steps]
            return ndcg >= max(whole, default=ndcg) or self._is_best_cosine(candidate, steps, ndcg)

        try:
            self.setup.train(candidate, self.rungs, goes_on, self.folder(candidate))
            steps, ndcg = max(curve.items())
            is_whole = steps == self.rungs[-1] and not math.isnan(ndcg)
            self.study.tell(trial, ndcg if is_whole else None, None if is_whole else self.states.PRUNED)
        except BaseException:
            self.study.tell(trial, state=self.states.FAIL)
            raise
        gc.collect()  # the Trainer is part of cycles
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        number = f"{len(self.entries())}/{len(self.grid)}"
        score = "diverged" if math.isnan(ndcg) else f"{ndcg:.4f} after {steps:,} steps"
        self.say(f"[{minutes}:{seconds:02d}] {number} {candidate.name}: {score}")

    def _is_best_cosine(self, candidate: Candidate, steps: int, ndcg: float) -> bool:
        """Whether a candidate is plain cosine at its best temperature so far: the control, which always goes on."""
        trials = self.study.get_trials(deepcopy=False)
        controls = (t for t in trials if t.params.get("loss") == "cosine" and t.params.get("sigreg") == 0)
        ahead = any(trial.intermediate_values.get(steps, ndcg) > ndcg for trial in controls)
        return candidate.is_plain_cosine and not ahead

    def folder(self, candidate: Candidate) -> Path:
        """Where a model waits for the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def _test(self) -> dict[str, list[float]]:
        """nDCG@10 of every test query with the pretrained model, plain cosine and the first candidate on dev."""
        entries = self.entries()
        whole = (entry for entry in entries if entry.steps == self.rungs[-1] and math.isfinite(entry.score))
        cosine = next((entry for entry in whole if entry.candidate.is_plain_cosine), None)
        if cosine is None:
            raise ValueError("Training with plain cosine diverged at every setting; give lower --learning-rates.")
        models = {entry.name: load(str(self.folder(entry.candidate))) for entry in (cosine, entries[0])}
        models = {"pretrained": self.setup.base, **models}
        return {name: own_ndcg(model, self.setup.splits.test).tolist() for name, model in models.items()}

    def _result(self, name: str) -> CompareResult:
        scores: dict[str, list[float]] = self.study.user_attrs["test"]
        entries, test, seed = self.entries(), self.setup.splits.test, self.setup.config.seed
        (_, before), (_, control), *others = scores.items()
        return CompareResult(
            model=name,
            candidates=entries,
            test=OnTest(
                len(test.query_ids),
                len(test.corpus),
                {name: sum(score) / len(score) for name, score in scores.items()},
                {n: paired_bootstrap(score, before, seed=seed) for n, score in scores.items() if score is not before},
                paired_bootstrap(others[0][1], control, seed=seed) if others else None,
            ),
            pretrained=self.plan["pretrained"],
            dev_queries=len(self.setup.splits.dev.query_ids),
            left_out=len(self.grid) - len(entries),
            budget=self.setup.config.budget,
            notes=list(self.setup.splits.notes),
        )

    def _write(self, result: CompareResult) -> None:
        """Writes the files; compare.json, which marks the comparison as finished, comes last."""
        output, candidate = self.output, result.winner.candidate
        shutil.copytree(self.folder(candidate), output / "model", dirs_exist_ok=True)
        test: Any = next(iter(result.tables()))
        add_section(output / "model" / "README.md", f"### Retrieval\n\n{test.to_markdown()}")
        settings = candidate.settings(self.setup.config, self.setup.base, self.rungs[-1])
        changed = {name: value for name, value in vars(settings).items() if value != getattr(TrainConfig(), name)}
        note = "st-magnitude train --config train.yaml --data ... --model ... --output ..."
        if candidate.sigreg:
            note = f"train(..., loss_options={{'regularizers': [(stm.SIGReg(), {candidate.sigreg})]}}) in Python"
        (output / "train.yaml").write_text(f"# {note}\n{yaml.safe_dump(changed)}", encoding="utf-8")
        (output / "compare-curves.png").write_bytes(draw(result.paint, (6.0, 4.0)).png)
        parts = [result.to_markdown(), *result.notes, "![nDCG@10 on dev by steps](compare-curves.png)\n"]
        (output / "compare.md").write_text("\n\n".join(parts), encoding="utf-8")
        shutil.rmtree(output / "models")
        result.save(output / "compare.json")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.utils.logging.enable_progress_bar()
