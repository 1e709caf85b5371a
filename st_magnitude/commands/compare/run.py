"""compare tells which loss to train with: successive halving on dev, and one look at the test split."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude._files import refuse_used_folder
from st_magnitude._plot import pyplot
from st_magnitude.commands.compare.bench import Bench, Pace
from st_magnitude.commands.compare.candidates import CUSTOMARY, Candidate, grids
from st_magnitude.commands.compare.config import Budget, CompareConfig
from st_magnitude.commands.compare.data import Splits, make_splits, read_splits
from st_magnitude.commands.compare.files import write_files
from st_magnitude.commands.compare.plan import FACTOR, Costs, Rung, least_budget, make_plan, next_steps
from st_magnitude.commands.compare.result import CompareResult, Entry, OnTest, Spending
from st_magnitude.commands.compare.study import Record, import_optuna
from st_magnitude.commands.train.comparison import compare as calibrate
from st_magnitude.commands.train.comparison import own_ndcg
from st_magnitude.commands.train.run import digest_of
from st_magnitude.corpus.beir import RetrievalData
from st_magnitude.evaluation.task import JudgedTask, NotFiniteError
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.surgery.export import load

__all__ = ["CompareConfig", "CompareResult", "compare"]

Data = RetrievalData | JudgedTask
REPORT_SECONDS = 5.0
FREE = {"budget"}  # the setting that may change when a comparison continues


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
    splits = _splits(data, dev, test, config)
    bench = Bench.of(model, splits, output, config)
    for note in splits.notes:
        say(f"Note: {note}")
    output.mkdir(parents=True, exist_ok=True)
    record = Record(output / "study.log", _settings(model, splits, config))
    run = _Run(bench, record, Budget.parse(config.budget), say, began)
    with _quiet():
        try:
            result = run.conclude(run.halve(), splits.notes)
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
    """The state of a comparison: what is measured, what is left, and what it will cost."""

    bench: Bench
    record: Record
    budget: Budget
    say: Callable[[str], None]
    began: float  # on the clock of time.perf_counter

    def __post_init__(self) -> None:
        self.before = self.record.get("seconds", 0.0)
        self.costs = Costs(**self.record.get("costs", {}))
        self.pretrained = np.array(self.record.get("pretrained", []))

    @property
    def seconds(self) -> float:
        """Seconds spent, those before a kill included."""
        return self.before + time.perf_counter() - self.began

    @property
    def spent(self) -> float:
        """The part of the budget that is spent."""
        return float(sum(r.steps for e in self.entries() for r in e.rungs)) if self.budget.in_steps else self.seconds

    def halve(self) -> list[Candidate]:
        """Measures all rungs; the candidates of the last one."""
        alive, plan = self._begin()
        begun: list[list[str]] = self.record.get("begun", [])  # names of the candidates of the rungs of a killed run
        for i in range(len(plan)):
            if i < len(begun):
                alive = [candidate for candidate in alive if candidate.name in begun[i]]
            else:
                if i:
                    controls = self._controls(alive)
                    alive = [c for c in alive if c in controls or self.record.survives(c)]
                    plan[i:] = self._plan_again(alive, plan, i)
                self.record.set("plan", [[rung.steps, rung.candidates] for rung in plan])
                begun = [*begun, [candidate.name for candidate in alive]]
                self.record.set("begun", begun)
            self._measure_rung(alive, i, plan)
        self.record.finish(alive)
        return alive

    def _begin(self) -> tuple[list[Candidate], list[Rung]]:
        """The largest set of candidates that fits the budget, or that of the run that is continued."""
        all_grids = grids(self.bench.config, self.bench.is_static)
        if names := self.record.get("candidates"):
            grid = next(grid for grid in all_grids if [c.name for c in grid] == names)
            self.record.enter(grid)
            done = sum(len(entry.rungs) for entry in self.entries())
            self.say(f"Continuing after {done} training runs in {Budget(self.before)}.")
            return grid, [Rung(*rung) for rung in self.record.get("plan")]
        began = time.perf_counter()
        self.pretrained = own_ndcg(self.bench.base, self.bench.dev)
        if not self.budget.in_steps:
            self.costs = self._probe([all_grids[0][0], all_grids[0][-1]], time.perf_counter() - began)
        before = self.spent if not self.budget.in_steps else 0.0
        most = self.bench.most_steps
        for grid in all_grids:
            if plan := make_plan(len(grid), self.budget.amount - before, self.costs, most):
                break
        else:
            least = Budget(before + least_budget(len(grid), self.costs, most), self.budget.in_steps).rounded_up
            raise ValueError(
                f"A budget of {self.budget} is too small: {len(grid)} candidates need --budget {least!r} at least. "
                "Give that, or fewer --losses, --temperatures or --documents."
            )
        self.say(f"{len(grid)} candidates: " + ", then ".join(f"{r.candidates} of {r.steps:,} steps" for r in plan))
        if len(grid) < len(all_grids[0]):
            self.say(f"Note: A larger budget tries up to {len(all_grids[0])} candidates.")
        self.record.set("costs", vars(self.costs))
        self.record.set("pretrained", self.pretrained.tolist())
        self.record.set("plan", [[rung.steps, rung.candidates] for rung in plan])
        self.record.set("candidates", [candidate.name for candidate in grid])
        self.record.enter(grid)
        return grid, plan

    def _probe(self, candidates: Sequence[Candidate], evaluation: float) -> Costs:
        """Trains the cheapest and the dearest candidate for some seconds."""
        paces, rests = [], []
        for candidate in candidates:
            began, pace = time.perf_counter(), Pace(limit=3.0)
            trainer = self.bench.trained(candidate, 1000, pace)
            with suppress(NotFiniteError):
                calibrate(trainer.model, self.bench.dev, self.pretrained)
            paces.append(pace.per_step)
            rests.append(time.perf_counter() - began - pace.seconds)
        dev, test = (len(task.corpus) + len(task.query_ids) for task in (self.bench.dev, self.bench.test))
        end = 3 * evaluation * test / dev + REPORT_SECONDS  # the first on dev and two controls
        # The first run also pays for what is loaded once.
        return Costs(float(np.mean(paces)), rests[-1], end)

    def _plan_again(self, alive: Sequence[Candidate], plan: Sequence[Rung], i: int) -> list[Rung]:
        """The rungs from number i on, by the costs of the rung before instead of those of the probe."""
        if not self.budget.in_steps:
            last = [self.record.measurements(candidate)[-1] for candidate in alive]
            step = float(np.mean([m.training_seconds / m.steps for m in last]))
            run = float(np.mean([m.seconds - m.training_seconds for m in last]))
            self.costs = replace(self.costs, step=step, run=run)
        sizes = [len(alive), *(rung.candidates for rung in plan[i + 1 :])]
        steps = next_steps(sizes, self.budget.amount - self.spent, self.costs, self.bench.most_steps)
        steps = max(steps, plan[i - 1].steps + 1)
        return [Rung(steps * FACTOR**j, size) for j, size in enumerate(sizes)]

    def _measure_rung(self, alive: Sequence[Candidate], i: int, plan: Sequence[Rung]) -> None:
        costs, steps = self.costs, plan[i].steps
        later = sum(r.candidates * (costs.step * r.steps + costs.run) for r in plan[i + 1 :]) + costs.end
        for number, candidate in enumerate(alive, start=1):
            if len(self.record.measurements(candidate)) > i:
                continue
            measured = self.bench.measured(candidate, steps, self.pretrained, keep=i + 1 == len(plan))
            self.record.add(candidate, measured)
            self.record.set("seconds", self.seconds)
            left = Budget(later + (len(alive) - number) * (costs.step * steps + costs.run), self.budget.in_steps)
            minutes, seconds = divmod(int(self.seconds), 60)
            score = f"{measured.ndcg:.4f}" if math.isfinite(measured.ndcg) else "diverged"
            where = f"{i + 1}/{len(plan)} {number}/{len(alive)}"
            self.say(f"[{minutes}:{seconds:02d}, {left} left] {where} {candidate.name} {score}")

    def _controls(self, alive: Sequence[Candidate]) -> list[Candidate]:
        """Plain cosine at its best temperature, and at 0.05, at the best learning rate of each."""
        plain = [c for c in alive if c.is_plain_cosine]
        customary = [c for c in plain if c.temperature == CUSTOMARY]
        return [max(group, key=self._score) for group in (plain, customary) if group]

    def _score(self, candidate: Candidate) -> float:
        ndcg = self.record.measurements(candidate)[-1].ndcg
        return ndcg if math.isfinite(ndcg) else -math.inf

    def entries(self) -> list[Entry]:
        """All that is measured, the best first."""
        found = [Entry(c, rungs) for c in self.record.candidates if (rungs := self.record.measurements(c))]
        return sorted(found, key=lambda e: (-e.last.steps, -self._score(e.candidate)))

    def conclude(self, finalists: Sequence[Candidate], notes: Sequence[str]) -> CompareResult:
        """Reads the test split and chooses."""
        cosine, *others = self._controls(finalists)
        if not math.isfinite(self._score(cosine)):
            raise ValueError("Training with plain cosine diverged at every setting; give lower --learning-rates.")
        first = max([cosine, *finalists], key=self._score)
        customary = next((other for other in others if other.temperature != cosine.temperature), None)
        controls = [control for control in (cosine, customary) if control is not None]
        per_query: dict[str, list[float]] = self.record.get("test", {})
        for candidate in dict.fromkeys([first, *controls]):
            if candidate.name not in per_query:
                model = load(str(self.bench.folder(candidate)))
                per_query[candidate.name] = own_ndcg(model, self.bench.test).tolist()
        self.record.set("test", per_query)
        seed = self.bench.config.seed
        gains = {
            control.name: paired_bootstrap(per_query[first.name], per_query[control.name], seed=seed)
            for control in controls
            if control != first
        }
        winner = first if first == cosine or gains[cosine.name][1] > 0 else cosine
        entries = self.entries()
        rungs = [rung.steps for entry in entries for rung in entry.rungs]
        return CompareResult(
            model=self.bench.name,
            winner=winner.name,
            first=first.name,
            cosine=cosine.name,
            customary=None if customary is None else customary.name,
            candidates=entries,
            test=OnTest(
                queries=len(self.bench.test.query_ids),
                documents=len(self.bench.test.corpus),
                ndcg={name: float(np.mean(scores)) for name, scores in per_query.items()},
                gains=gains,
            ),
            pretrained=float(self.pretrained.mean()),
            dev_queries=len(self.pretrained),
            dim=self.bench.base.get_embedding_dimension() or 0,
            budget=Spending(
                given=str(self.budget),
                spent=self.spent,
                seconds=self.seconds,
                steps=sum(rungs),
                rungs=[[steps, rungs.count(steps)] for steps in sorted(set(rungs))],
            ),
            notes=list(notes),
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """The warning about few queries, which every calibration would repeat, is among the notes already."""
    logger = logging.getLogger("st_magnitude.evaluation.calibration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
