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
from functools import partial
from pathlib import Path

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude._files import locked_folder, moved_in, refuse_used_folder
from st_magnitude.judge import Difference
from st_magnitude.saving.card import add_section, model_name
from st_magnitude.saving.export import load
from st_magnitude.saving.find import refuse_missing
from st_magnitude.surgery.normalize import score_by_cosine
from st_magnitude.surgery.vocabulary import remembered_tokens
from st_magnitude.workbench._config import seconds_of
from st_magnitude.workbench.comparison.config import Candidate, CompareConfig
from st_magnitude.workbench.comparison.result import CompareResult, Entry
from st_magnitude.workbench.comparison.trials import Trials, exam_of
from st_magnitude.workbench.files.pairs import Data, load_splits
from st_magnitude.workbench.finetune.trainer import reading
from st_magnitude.workbench.judging.choice import HERE, System, short_names
from st_magnitude.workbench.judging.contestants import Contestant, search, task_of
from st_magnitude.workbench.judging.verdict import BEFORE, Verdict, verdict_of

__all__ = ["CompareConfig", "CompareResult", "compare"]

FEWEST_STEPS = 10
MARGIN = 1.2  # of a budget, over the time that trainings took


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
    name = model if isinstance(model, str) else None
    base = load(model) if isinstance(model, str) else copy(model)
    with reading(base, config.max_length):
        pass  # it refuses models and lengths that do not fit
    score_by_cosine(base, say)
    refuse_missing(*also)
    exam = exam_of(load_splits(data), base, [*filter(None, [name]), *also], config)
    for note in exam.notes:
        say(f"Note: {note}")
    trials = Trials(base, exam, config, name)
    with locked_folder(output), remembered_tokens(base), moved_in(output, "compare.json") as new:
        began = time.perf_counter()
        pretrained = task_of(base, trials.dev).search(10).mean
        measured = time.perf_counter() - began
        start = time.perf_counter()
        before = search(Contestant(BEFORE, base), exam)
        seconds = time.perf_counter() - start
        others = [Contestant(of, load(path)) for of, path in short_names(also).items()]
        models = [before, *(search(other, exam) for other in others)]
        places = short_names(also) | ({} if name is None else {BEFORE: name})
        run = _Run(trials, new, pretrained, models, seconds, began, say, places)
        trials.steps = run.plan(measured)
        return run.finish(name or model_name(base))


@dataclass(frozen=True)
class _Run:
    """Trains and compares the candidates, and keeps the models in a folder until the end."""

    trials: Trials
    output: Path
    pretrained: float  # nDCG@10 on dev
    models: list[System]  # the pretrained one, and others to weigh
    seconds: float  # in which the pretrained model was measured on test
    began: float  # by time.perf_counter
    say: Callable[[str], None]
    places: dict[str, str] = field(default_factory=dict)  # folders or hub ids of the models
    entries: list[Entry] = field(default_factory=list)  # candidates that are done

    def plan(self, measuring: float) -> int | None:
        """The steps of a candidate with which the budget holds one of each loss and the test; None
        if those of the settings fit.

        Args:
            measuring: The seconds of a measurement on dev.
        """
        wanted = self.trials.rungs[-1]
        pace = self.trials.seconds_per_step(self.output / "models")
        left = seconds_of(self.trials.config.budget) - (time.perf_counter() - self.began)
        of_one = (left - 2 * self.seconds) / (self._fewest + self._later) - 2 * measuring
        if of_one >= wanted * pace:
            return None
        steps = min(wanted, max(FEWEST_STEPS, int(of_one / pace)))
        self.say(
            f"A step takes {pace:.1f} s, so a candidate has {steps:,} steps instead of {wanted:,}:"
            f" {self.trials.config.budget} are for a candidate of each loss at least. For more"
            " steps, give a longer --budget."
        )
        return steps

    def finish(self, name: str) -> CompareResult:
        """Trains and measures the candidates, writes the files, and returns the result."""
        grid = self.trials.grid
        self.say(f"Up to {len(grid)} candidates of up to {self.trials.rungs[-1]:,} steps")
        for candidate in grid:
            if self.entries and self._is_time_up():
                break
            self._train(candidate)
        return self._conclude(name)

    def _is_time_up(self) -> bool:
        """Whether the budget leaves no time for one more candidate and the test of what is first,
        in folds if there are any."""
        tested = len(self._tested())
        trainings = 1 + tested * len(self.trials.exam.folds)
        needed = trainings * self._mean_seconds + tested * self.seconds
        return time.perf_counter() - self.began + needed >= seconds_of(self.trials.config.budget)

    @property
    def _fewest(self) -> int:
        """The number of losses, each of which is to be tried once; of one loss, two candidates."""
        grid = self.trials.grid
        return min(len(grid), max(2, len({candidate.loss for candidate in grid})))

    @property
    def _later(self) -> int:
        """The most trainings after the candidates: of the first one and plain cosine in folds."""
        return 2 * len(self.trials.exam.folds)

    @property
    def _mean_seconds(self) -> float:
        return sum(entry.seconds for entry in self.entries) / len(self.entries)

    def _budget_needed(self) -> str:
        """The budget in which a candidate of each loss has all its steps, if this one has cut the
        steps or left out a loss; else empty."""
        last = self.trials.rungs[-1]
        if last == self.trials.wanted_steps and len(self.entries) >= self._fewest:
            return ""
        seconds = self._mean_seconds * self.trials.wanted_steps / last
        needed = (self._fewest + self._later) * seconds + 4 * self.seconds
        return f"{max(1, math.ceil(MARGIN * needed / 60))}m"

    def _train(self, candidate: Candidate) -> None:
        folder = self.folder(candidate)
        is_kept = partial(self._is_kept, candidate)
        entry = self.trials.train(candidate, self.trials.rungs, is_kept, folder)
        self.entries.append(entry)
        gc.collect()  # the Trainer is part of cycles
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        done = f"[{minutes}:{seconds:02d}] {len(self.entries)}. {entry.name}"
        self.say(f"{done}: {entry.shown_score} after {entry.steps:,} steps")

    def _ranked(self) -> list[Entry]:
        """The candidates by their steps and nDCG@10; of equal ones, cosine."""
        return sorted(
            self.entries,
            key=lambda entry: (-entry.steps, -entry.score, entry.candidate.loss != "cosine"),
        )

    def _finished(self) -> list[Entry]:
        """Of these, the candidates that were trained to the last step and did not diverge."""
        last = self.trials.rungs[-1]
        return [x for x in self._ranked() if x.steps == last and math.isfinite(x.score)]

    def _tested(self) -> list[Entry]:
        """The first candidate, and plain cosine at its best setting on dev, if it is another."""
        finished = self._finished()
        plain = [entry for entry in finished if entry.candidate.loss == "cosine"]
        return finished[:1] + plain[: finished[:1] != plain[:1]]

    def _is_kept(self, candidate: Candidate, steps: int, ndcg: float) -> bool:
        """Whether a candidate trains on after the first rung, as the best of its loss, or is saved
        at the end, as one of the first two or as plain cosine."""
        if math.isnan(ndcg):
            return False
        rivals = [entry for entry in self.entries if math.isfinite(entry.score)]
        ahead = [entry.candidate for entry in rivals if dict(entry.curve).get(steps, -1) > ndcg]
        if steps == self.trials.rungs[-1]:
            return len(ahead) < 2 or candidate.loss == "cosine"
        return candidate.loss not in {other.loss for other in ahead}

    def folder(self, candidate: Candidate) -> Path:
        """The folder in which a model is kept until the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def _conclude(self, name: str) -> CompareResult:
        grid = self.trials.grid
        entries = self._ranked()
        compared = {entry.candidate.loss for entry in self._finished()}
        missing = [c.loss for c in grid if c.loss not in compared]
        needed = self._budget_needed()
        verdict, over_cosine = self._judge(not needed)
        result = CompareResult(
            name,
            entries,
            verdict,
            over_cosine,
            self.pretrained,
            dev_queries=len(self.trials.dev.query_ids),
            left_out=len(grid) - len(entries),
            not_compared=tuple(dict.fromkeys(missing)),
            notes=self.trials.exam.notes,
            steps=self.trials.wanted_steps,
            budget_needed=needed,
        )
        if not result.is_alone:
            options = result.winner.candidate.options(self.trials.config, result.steps)
            result = replace(result, train_options=options)
        self._write(result)
        return result

    def _judge(self, decides: bool) -> tuple[Verdict, Difference | None]:
        """The verdict on the winner, and what the first candidate gains over plain cosine, if it is
        another one."""
        tested = self._tested()
        if not any(entry.candidate.loss == "cosine" for entry in tested):
            raise InputError("Plain cosine diverged everywhere; give lower --learning-rates.")
        self.say("Measuring the best candidates.")
        found = [self.trials.judge(entry, self.folder(entry.candidate)) for entry in tested]
        over_cosine = None
        if len(found) > 1:
            over_cosine = found[0].ranking.minus(found[1].ranking, seed=self.trials.config.seed)
            if not over_cosine.is_better:
                found.reverse()
        after, *shown = found
        verdict = verdict_of(
            self.trials.exam,
            [self.models[0], after, *self.models[1:]],
            shown=shown,
            seed=self.trials.config.seed,
            decides=decides,
        )
        return verdict.placed(self.places | {after.name: HERE}), over_cosine

    def _write(self, result: CompareResult) -> None:
        """Writes the files; compare.json, which marks the comparison as finished, comes last."""
        text = "\n\n".join([result.to_markdown(), *result.notes])
        model = self.output / "model"
        self.folder(result.winner.candidate).rename(model)
        shutil.rmtree(self.output / "models")
        table = result.test_table.to_markdown()
        add_section(model / "README.md", f"### Retrieval\n\n{table}")
        if result.test.decision is not None:
            result.test.decision.save(model)
        (self.output / "compare.md").write_text(f"{text}\n", encoding="utf-8")
        result.save(self.output / "compare.json")
