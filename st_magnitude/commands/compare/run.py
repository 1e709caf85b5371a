"""compare tells which loss to train with: successive halving on dev, and one look at the test split."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from sentence_transformers import SentenceTransformer

from st_magnitude._files import refuse_used_folder
from st_magnitude._plot import pyplot
from st_magnitude.commands.compare.bench import Bench
from st_magnitude.commands.compare.candidates import CUSTOMARY
from st_magnitude.commands.compare.config import Budget, CompareConfig
from st_magnitude.commands.compare.data import Splits, make_splits, read_splits
from st_magnitude.commands.compare.files import write_files
from st_magnitude.commands.compare.plan import (
    FACTOR,
    FINALISTS,
    Costs,
    Rung,
    least_budget,
    plan,
    plan_after,
    price,
)
from st_magnitude.commands.compare.result import CompareResult, Entry, OnTest
from st_magnitude.commands.compare.study import Measurement, Record, import_optuna
from st_magnitude.commands.compare.workers import Job, Workers, workers_at
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.metrics import model_name
from st_magnitude.finetune.comparison import own_ndcg
from st_magnitude.finetune.run import digest_of
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.surgery.export import load

__all__ = ["CompareConfig", "CompareResult", "compare"]

Data = RetrievalData | RetrievalData
FEWEST = 2  # candidates of the last rung, whatever is left: plain cosine and the best of the others
MOST_ON_TEST, REPORT_SECONDS = 3, 5.0  # models that are measured at the end, and the time for the files
PROBE_STEPS, PROBE_SECONDS = 30, 3.0
TOLERANCE = 0.05  # the share of the budget by which the last training run may exceed it
FREE = {"budget", "ray"}  # settings that may change when a comparison continues


def compare(
    model: SentenceTransformer | str | Callable[[], SentenceTransformer],
    data: Data | str | Path,
    output: str | Path,
    config: CompareConfig | None = None,
    *,
    dev: Data | None = None,
    test: Data | None = None,
    say: Callable[[str], None] = print,
) -> CompareResult:
    """Tells which loss to train with on your data, or that plain cosine is best, within a budget of time or steps.

    The candidates are Cosine, QNorm, Dot, Learnable and TempAggMRL at the same temperatures and learning rates, with
    and without SIGReg. All of a rung see the same batches in the same order for the same number of steps, and the
    document exponent of each that keeps norms is calibrated on dev. Successive halving on dev nDCG@10 leaves a few, of
    which the first is compared with plain cosine at its own best temperature on the test split. Without a clear
    difference plain cosine is recommended.

    Args:
        model: A model, the folder or hub id of one, or a function that returns a new one. It is not changed.
        data: A folder in BEIR's layout, whose splits the config names, or the data to train on.
        output: New folder for the winning model (``model``), ``compare.json``, ``compare.md``, ``report.html`` with the
            curves as ``compare-curves.png``, ``train_winner.py``, and Optuna's ``study.log``. If it holds an unfinished
            comparison, that is continued; what was measured is not trained again.
        config: Settings.
        dev: Data that chooses, if data is not a folder; None: held-out training queries.
        test: Data for the final figures; None: held-out training queries.
        say: Function that receives the progress line by line.

    Raises:
        ImportError: If optuna, matplotlib or jinja2 is not installed.
        ValueError: If the data cannot be used (`make_splits`), or the budget is too small; the message names the least.
        FileExistsError: If output holds other files, a finished comparison, or one with other settings.
        KeyboardInterrupt: At Ctrl-C. The same call continues.

    Example:
        ::

            result = stm.compare("all-MiniLM-L6-v2", "my-data", "runs/compare", CompareConfig(budget="30m"))
            print(result.recommendation)
    """
    began = time.perf_counter()
    config, output = config or CompareConfig(), Path(output)
    import_optuna()
    pyplot()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare runs in one process; start it without torchrun or accelerate launch.")
    if (output / "compare.json").exists():
        raise FileExistsError(f"{output} holds a finished comparison. Choose another output folder.")
    if not (output / "study.log").exists():
        refuse_used_folder(output)
    with workers_at(config.ray) as workers, _quiet():
        splits = _splits(data, dev, test, config)
        bench = Bench.of(model, splits, output.absolute(), config)
        for note in bench.notes:
            say(f"Note: {note}")
        output.mkdir(parents=True, exist_ok=True)
        record = Record(output / "study.log", _settings(model, splits, config))
        budget = Budget.parse(config.budget)
        name = model if isinstance(model, str) else model_name(bench.base)
        try:
            run = _Run(bench, workers, record, budget, say, began)
            result = run.conclude(run.halve(), name)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"Stopped. Give the same command again to continue with {output}.") from None
    write_files(result, bench, model if isinstance(model, str) else None, data)
    return result


def _splits(data: Data | str | Path, dev: Data | None, test: Data | None, config: CompareConfig) -> Splits:
    sizes = {"dev_queries": config.dev_queries, "documents": config.documents, "seed": config.seed}
    if isinstance(data, str | Path):
        if dev is not None or test is not None:
            raise ValueError(
                "dev and test are for data in memory; a folder has them as splits (dev_split, test_split)."
            )
        return read_splits(data, config.split, config.dev_split, config.test_split, **sizes)
    return make_splits(data, dev, test, **sizes)


def _settings(model: Any, splits: Splits, config: CompareConfig) -> dict[str, Any]:
    """What a comparison that continues shares with the one before, as JSON has it."""
    settings = {key: value for key, value in vars(config).items() if key not in FREE}
    settings |= {"model": model if isinstance(model, str) else None}
    settings |= {"data": [digest_of(part) for part in (splits.train, splits.dev, splits.test)]}
    return json.loads(json.dumps(settings))


@dataclass
class _Run:
    """The state of a comparison: what is measured, what is left, and what it will cost.

    A rung is a dict in the record: its ``number``, the ``names`` of its candidates, the most important first, and the
    ``rungs`` that it begins, pairs of steps and number of candidates.
    """

    bench: Bench
    workers: Workers
    record: Record
    budget: Budget
    say: Callable[[str], None]
    began: float  # on the clock of time.perf_counter

    def __post_init__(self) -> None:
        self.before = self.record.get("seconds", 0.0)
        self.costs = Costs(**self.record.get("costs", {}))
        measuring = time.perf_counter()
        _ = self.bench.pretrained
        sizes = (len(task.corpus) + len(task.query_ids) for task in (self.bench.test, self.bench.dev))
        per_model = (time.perf_counter() - measuring) * next(sizes) / next(sizes)
        self.end = 0.0 if self.budget.in_steps else MOST_ON_TEST * per_model + REPORT_SECONDS

    @property
    def seconds(self) -> float:
        """Seconds spent, those before a kill included."""
        return self.before + time.perf_counter() - self.began

    @property
    def left(self) -> float:
        """What the rungs may still spend."""
        in_steps = self.budget.in_steps
        spent = sum(m.steps for e in self.entries() for m in e.rungs) if in_steps else self.seconds
        return self.budget.amount - self.end - spent

    def entries(self) -> list[Entry]:
        """All that is measured, the best first, and of equals plain cosine, with which every grid begins."""
        order = {candidate: i for i, candidate in enumerate(self.bench.candidates[0])}
        found = [Entry(candidate, rungs) for candidate, rungs in self.record.measured.items()]
        return sorted(found, key=lambda e: (-e.last.steps, -e.last.score, order[e.candidate]))

    def halve(self) -> list[Entry]:
        """Measures all rungs; the candidates of the last one, the best first."""
        rung: dict[str, Any] | None = self._begin()
        while rung:
            self.record.set("rung", rung)
            self._measure(**rung)
            rung = self._next(**rung)
        entries = self.entries()
        return [entry for entry in entries if entry.last.steps == entries[0].last.steps]

    def _begin(self) -> dict[str, Any]:
        """The first rung of the largest set of candidates that fits the budget, or that of the run that continues."""
        sets = self.bench.candidates
        if rung := self.record.get("rung"):
            done = sum(len(entry.rungs) for entry in self.entries())
            self.say(f"Continuing after {done} training runs in {Budget(self.before)}.")
            return dict(rung)
        is_timed = not self.budget.in_steps
        if is_timed:  # the cheapest candidate and the dearest; the first run also pays for what is loaded once
            jobs = (Job(sets[0][i], PROBE_STEPS, False, PROBE_SECONDS) for i in (0, -1))
            probes = [found for _, found in self.workers.measure(self.bench, jobs)]
            self.costs = self._mean_costs(probes)
        left, most = self.left, self.bench.most_steps
        for grid in sets:
            if left >= (least := least_budget(len(grid), self.costs, most, is_timed)):
                break
        else:
            enough = Budget(self.budget.amount - left + least, self.budget.in_steps).rounded_up
            raise ValueError(
                f"A budget of {self.budget} is too small: {len(grid)} candidates need --budget {enough!r} at least. "
                "Give that, or fewer --losses, --temperatures or --documents."
            )
        rungs = plan(len(grid), left, self.costs, most, is_timed)
        self.say(f"{len(grid)} candidates: " + ", then ".join(f"{r.candidates} of {r.steps:,} steps" for r in rungs))
        if len(grid) < len(sets[0]):
            self.say(f"Note: A larger budget tries up to {len(sets[0])} candidates.")
        self.record.set("costs", vars(self.costs))
        return {"number": 1, "names": [candidate.name for candidate in grid], "rungs": rungs}

    def _measure(self, number: int, names: Sequence[str], rungs: Sequence[tuple[int, int]]) -> None:
        """Measures the candidates of the first of these rungs."""
        (steps, size), later = rungs[0], rungs[1:]
        jobs = self._jobs(names, steps, size, is_last=not later)
        with closing(self.workers.measure(self.bench, jobs)) as measured:  # an interrupt ends what others still train
            for candidate, found in measured:
                if found.steps < steps:
                    self.say(f"Note: The time is up, so that {candidate.name} was stopped.")
                    continue
                self.record.add(candidate, found)
                self.record.set("seconds", self.seconds)
                done = sum(entry.last.steps == steps for entry in self.entries())
                left = price([(steps, max(0, size - done)), *later], self.costs) + self.end
                minutes, seconds = divmod(int(self.seconds), 60)
                score = f"{found.ndcg:.4f}" if found.is_finite else "diverged"
                self.say(
                    f"[{minutes}:{seconds:02d}, {Budget(left, self.budget.in_steps)} left] "
                    f"{number}/{number + len(later)} {done}/{max(size, done)} {candidate.name} {score}"
                )

    def _jobs(self, names: Sequence[str], steps: int, size: int, is_last: bool) -> Iterator[Job]:
        """What is still to be measured.

        The names of the last rung are all of the one before, so that the number of candidates corrects what its plan
        could not know, such as a machine that becomes faster or slower.
        """
        by_name = {candidate.name: candidate for candidate in self.bench.candidates[0]}
        for number, name in enumerate(names):
            done = [e for e in self.entries() if e.last.steps == steps]
            if name in (entry.name for entry in done):
                continue
            limit = math.inf
            if is_last and done and number >= FEWEST and not self.budget.in_steps:
                if 0.5 * float(np.mean([e.last.seconds for e in done])) > self.left:
                    if number < size:
                        self.say(f"Note: The time is up before {size - number} of {size} candidates of the last rung.")
                    return
                limit = self.left + TOLERANCE * self.budget.amount
            yield Job(by_name[name], steps, is_last, limit)

    def _next(self, number: int, names: Sequence[str], rungs: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
        """The rung after one that is measured: of plain cosine, the best third and, for the last rung, a reserve."""
        steps, is_last = rungs[0][0], len(rungs) == 1
        ranked = [entry for entry in self.entries() if entry.last.steps == steps]
        best = [e.name for e in ranked if e.last.is_finite][: max(FINALISTS, math.ceil(len(ranked) / FACTOR))]
        cosine, *customary = (entry.name for entry in _controls(ranked))
        alive = list(dict.fromkeys([cosine, *best[:2], *customary, *best[2:]]))
        if not self.budget.in_steps:
            self.costs = self._mean_costs([entry.last for entry in ranked if entry.name in alive])
            self.record.set("costs", vars(self.costs))
        most = self.bench.most_steps
        following = plan_after(steps, len(alive), self.left, self.costs, most)
        if is_last and (not following or len(alive) < FEWEST):
            return None
        following = following or [Rung(steps + 1, FEWEST)]
        chosen = alive[: following[0].candidates]
        if len(following) == 1 and following[0].steps < most and not self.budget.in_steps:
            chosen = list(dict.fromkeys([*chosen, *alive, *(entry.name for entry in ranked)]))
        return {"number": number + 1, "names": chosen, "rungs": following}

    def _mean_costs(self, found: Sequence[Measurement]) -> Costs:
        step, other = np.mean([[m.step_seconds, m.other_seconds] for m in found], axis=0).tolist()
        return Costs(step, other, self.workers.number)

    def conclude(self, finalists: Sequence[Entry], name: str) -> CompareResult:
        """Reads the test split."""
        first, controls = finalists[0], _controls(finalists)
        if not controls[0].last.is_finite:
            raise ValueError("Training with plain cosine diverged at every setting; give lower --learning-rates.")
        per_query: dict[str, list[float]] = self.record.get("test", {})
        for entry in [first, *controls]:
            if entry.name not in per_query:
                model = load(str(self.bench.folder(entry.candidate)))
                per_query[entry.name] = own_ndcg(model, self.bench.test).tolist()
        self.record.set("test", per_query)
        gains = {
            e.name: paired_bootstrap(per_query[first.name], per_query[e.name], seed=self.bench.config.seed)
            for e in controls
            if e != first
        }
        ndcg = {name: float(np.mean(scores)) for name, scores in per_query.items()}
        return CompareResult(
            model=name,
            candidates=self.entries(),
            test=OnTest(len(self.bench.test.query_ids), len(self.bench.test.corpus), ndcg, gains),
            pretrained=float(self.bench.pretrained.mean()),
            dev_queries=len(self.bench.pretrained),
            dim=self.bench.base.get_embedding_dimension() or 0,
            budget=str(self.budget),
            seconds=self.seconds,
            notes=self.bench.notes,
        )


def _controls(ranked: Sequence[Entry]) -> list[Entry]:
    """Plain cosine at its best temperature, and at 0.05 if that is another one."""
    plain = [entry for entry in ranked if entry.candidate.is_plain_cosine]
    customary = [e for e in plain if e.candidate.temperature == CUSTOMARY != plain[0].candidate.temperature]
    return [*plain[:1], *customary[:1]]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides progress bars of every training run, and the warning about few queries, which is among the notes."""
    noisy = logging.getLogger("st_magnitude.evaluation.calibration")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        noisy.setLevel(level)
        transformers.utils.logging.enable_progress_bar()
