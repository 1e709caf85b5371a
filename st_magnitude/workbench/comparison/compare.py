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

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude._files import locked_folder, moved_in, refuse_used_folder
from st_magnitude.judge import Difference, judge
from st_magnitude.saving.card import add_section, model_name
from st_magnitude.saving.export import load
from st_magnitude.saving.find import refuse_missing
from st_magnitude.surgery.scoring import score_by_cosine
from st_magnitude.surgery.tokens import remembered_tokens
from st_magnitude.workbench.comparison.config import Candidate, CompareConfig, seconds_of
from st_magnitude.workbench.comparison.result import CompareResult, Entry
from st_magnitude.workbench.comparison.trials import Trials, exam_of
from st_magnitude.workbench.files.pairs import Data, load_splits
from st_magnitude.workbench.finetune.trainer import reading
from st_magnitude.workbench.judging.choice import System, short_names
from st_magnitude.workbench.judging.contestants import Contestant, search, task_of
from st_magnitude.workbench.judging.verdict import BEFORE, Verdict, verdict_of

__all__ = ["CompareConfig", "CompareResult", "compare"]

FEWEST = 2  # candidates that a budget is to hold
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
    best one is compared with plain cosine at its own best setting and at each other one that dev
    does not tell from it, and all with the pretrained model and with BM25, on the test split, which
    is read once. Where nobody gave a test split, a static table is judged in folds as by `train`.
    Plain cosine is recommended unless the best one is clearly better than each of them.

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
        run = _Run(trials, new, pretrained, models, seconds, began, say)
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
    entries: list[Entry] = field(default_factory=list)  # candidates that are done

    def plan(self, measuring: float) -> int | None:
        """The steps of a candidate with which the budget holds `FEWEST` candidates, their second
        seeds and the test; None if those of the settings fit.

        Args:
            measuring: The seconds of a measurement on dev.
        """
        wanted = self.trials.rungs[-1]
        pace = self.trials.seconds_per_step(self.output / "models")
        left = seconds_of(self.trials.config.budget) - (time.perf_counter() - self.began)
        of_one = (left - 2 * self.seconds) / self._trainings(FEWEST) - 2 * measuring
        if of_one >= wanted * pace:
            return None
        steps = min(wanted, max(FEWEST_STEPS, int(of_one / pace)))
        self.say(
            f"A step takes {pace:.1f} s, so a candidate has {steps:,} steps instead of {wanted:,}:"
            f" {self.trials.config.budget} are for {FEWEST} candidates at least. For more steps,"
            " give a longer --budget."
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
        for entry in self._rivals():
            self._train_again(entry)
        return self._conclude(name)

    def _is_time_up(self) -> bool:
        """Whether the budget leaves no time for one more candidate and what comes after it."""
        needed = self._trainings(1) * self._longest + 2 * self.seconds
        return time.perf_counter() - self.began + needed >= seconds_of(self.trials.config.budget)

    def _trainings(self, candidates: int) -> int:
        """The trainings of so many candidates, and of the first two and the controls with a second
        seed and in folds."""
        return candidates + (2 + len(self._controls())) * (1 + len(self.trials.exam.folds))

    @property
    def _longest(self) -> float:
        return max(entry.seconds for entry in self.entries)

    def _budget_needed(self) -> str:
        """The budget in which `FEWEST` candidates have all their steps, if this one has cut the
        steps or left fewer candidates; else empty."""
        last = self.trials.rungs[-1]
        fewest = min(FEWEST, len(self.trials.grid))
        if last == self.trials.wanted_steps and len(self.entries) >= fewest:
            return ""
        seconds = self._longest * self.trials.wanted_steps / last
        needed = self._trainings(FEWEST) * seconds + 4 * self.seconds
        return f"{max(1, math.ceil(MARGIN * needed / 60))}m"

    def _train(self, candidate: Candidate) -> None:
        folder = self.folder(candidate)
        is_kept = partial(self._is_kept, candidate)
        entry = self.trials.train(candidate, self.trials.rungs, is_kept, folder)
        self.entries.append(entry)
        self._note(f"{len(self.entries)}. {entry.name}", entry)

    def _train_again(self, entry: Entry) -> None:
        """Trains a candidate with a second seed."""
        folder = self.folder(entry.candidate)
        seed = self.trials.config.seed + 1
        last = self.trials.rungs[-1:]
        again = self.trials.train(entry.candidate, last, lambda *_: False, folder, seed)
        place = self.entries.index(entry)
        self.entries[place] = replace(entry, second_seed=again.curve[-1][1])
        self._note(f"{entry.name}, second seed", again)

    def _note(self, name: str, entry: Entry) -> None:
        gc.collect()  # the Trainer is part of cycles
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        done = f"[{minutes}:{seconds:02d}] {name}"
        self.say(f"{done}: {entry.shown_score} after {entry.steps:,} steps")

    def _ranked(self) -> list[Entry]:
        """The candidates by their steps and nDCG@10; of equal ones, cosine. Those with a second
        seed come first, by their means."""
        return sorted(
            self.entries,
            key=lambda entry: (
                entry.second_seed is None,
                -entry.steps,
                -entry.mean_score,
                entry.candidate.loss != "cosine",
            ),
        )

    def _finished(self) -> list[Entry]:
        """The candidates that were trained to the last step and did not diverge, by nDCG@10 with
        the first seed; of equal ones, cosine."""
        last = self.trials.rungs[-1]
        entries = self.entries
        found = [entry for entry in entries if entry.steps == last and math.isfinite(entry.score)]
        return sorted(found, key=lambda entry: (-entry.score, entry.candidate.loss != "cosine"))

    def _is_tied(self, best: Entry, other: Entry) -> bool:
        """Whether dev does not tell two candidates apart."""
        differences = np.subtract(best.ndcg, other.ndcg)
        return judge(differences, seed=self.trials.config.seed).verdict == "undecided"

    def _controls(self) -> list[Entry]:
        """Plain cosine at its best setting on dev, and at each that dev does not tell from it."""
        plain = [entry for entry in self._finished() if entry.candidate.loss == "cosine"]
        controls = plain[:1] + [entry for entry in plain[1:] if self._is_tied(plain[0], entry)]
        return [entry for entry in self._ranked() if entry in controls]

    def _rivals(self) -> list[Entry]:
        """The first candidate, and the second and the controls where dev does not tell them from
        it; empty if it tells all."""
        finished = self._finished()
        others = [entry for entry in self._controls() if entry not in finished[:2]]
        tied = [x for x in finished[1:2] + others if self._is_tied(finished[0], x)]
        return finished[:1] + tied if tied else []

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
        verdict, over_cosine, control = self._judge(not needed)
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
            control=control,
        )
        if not result.is_alone:
            options = result.winner.candidate.options(self.trials.config, result.steps)
            result = replace(result, train_options=options)
        self._write(result)
        return result

    def _judge(self, decides: bool) -> tuple[Verdict, Difference | None, str]:
        """The verdict on the winner. If the first candidate is not plain cosine, also what it gains
        over the control that comes closest, and the name of that one."""
        controls = self._controls()
        if not controls:
            raise InputError("Plain cosine diverged everywhere; give lower --learning-rates.")
        self.say("Measuring the best candidates.")
        winner = first = self._ranked()[0]
        found = {first.name: self._search(first)}
        gains = {}
        if first.candidate.loss != "cosine":
            found |= {entry.name: self._search(entry) for entry in controls}
            best = found[first.name].ranking
            for entry in controls:
                plain = found[entry.name].ranking
                gains[entry.name] = best.minus(plain, seed=self.trials.config.seed)
        control = min(gains, key=lambda name: gains[name].low, default="")
        over_cosine = gains.get(control)
        if over_cosine is not None and not over_cosine.is_better:
            winner = controls[0]
        after = found.pop(winner.name)
        verdict = verdict_of(
            self.trials.exam,
            self.models[0],
            after,
            self.models[1:],
            shown=[*found.values()],
            seed=self.trials.config.seed,
            decides=decides,
        )
        return verdict, over_cosine, control

    def _search(self, entry: Entry) -> System:
        ranking = self.trials.judge(entry, self.folder(entry.candidate))
        return System(entry.name, ranking, entry.exponent)

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
