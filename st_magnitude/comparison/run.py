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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import needs
from st_magnitude._config import list_differences
from st_magnitude.comparison.config import FACTOR, Candidate, CompareConfig, seconds_of
from st_magnitude.comparison.result import CompareResult, Entry, OnTest
from st_magnitude.comparison.trial import Setup, make_splits
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.metrics import model_name
from st_magnitude.finetune.comparison import own_ndcg
from st_magnitude.finetune.run import digest_of, reading
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.surgery.card import add_section
from st_magnitude.surgery.export import load

__all__ = ["CompareConfig", "CompareResult", "compare"]


def compare(
    model: SentenceTransformer | str,
    data: RetrievalData | str | Path,
    output: str | Path,
    config: CompareConfig | None = None,
    *,
    dev: RetrievalData | None = None,
    test: RetrievalData | None = None,
    say: Callable[[str], None] = print,
) -> CompareResult:
    """Tells which loss to train with on your data, or that plain cosine is best, within a budget of time.

    The candidates are Cosine, QNorm, Dot, Learnable and TempAggMRL at the same temperatures and learning rates, with
    and without SIGReg, and Cosine with a document prior if some documents are positives more often than others. All see
    the same batches in the same order, and each is measured at the document exponent that is best on dev. Optuna's
    successive halving stops those that are behind. The best one on dev is compared with plain cosine at its own best
    temperature, and both with the pretrained model, on the test split, which is read once. Without a clear difference
    plain cosine is recommended.

    Args:
        model: A model, or the folder or hub id of one. It is not changed.
        data: A folder in BEIR's layout, whose splits the config names, or the data to train on.
        output: New folder for the winning model (``model``), ``compare.json``, ``compare.md``, ``train.yaml`` for
            ``st-magnitude train --config``, and Optuna's ``study.log``. An unfinished comparison is continued, and
            shared with other processes that make the same call, also on other machines.
        config: Settings.
        dev: Data to rank the candidates on; None: the split of the folder, else held-out training queries.
        test: Data for the final figures; None: as for dev.
        say: Function that receives the progress line by line.

    Raises:
        ValueError: If a query is in two splits, or no query of a split has a relevant document.
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
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare trains in one process; start it without torchrun or accelerate launch.")
    if (output / "compare.json").exists():
        raise FileExistsError(f"{output} holds a finished comparison. Choose another output folder.")
    splits = make_splits(data, config, dev, test)
    for note in splits.notes:
        say(f"Note: {note}")
    settings = {key: value for key, value in vars(config).items() if key != "budget"}
    settings["model"] = model if isinstance(model, str) else None
    settings["data"] = [digest_of(part) for part in (splits.train, splits.dev, splits.test)]
    base = load(model) if isinstance(model, str) else model
    with reading(base, config.max_length):
        pass  # a model without such a limit is refused
    try:
        run = _Run(Setup(base, splits, config), output, say, began, json.loads(json.dumps(settings)))
        return run.finish(model if isinstance(model, str) else model_name(base))
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
        self.grid, self.rungs, self.states = setup.grid, setup.rungs, optuna.trial.TrialState
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
                pruner=optuna.pruners.SuccessiveHalvingPruner(self.rungs[0], reduction_factor=FACTOR),
                direction="maximize",
                load_if_exists=True,
            )
            known = self.study.user_attrs
            if "pretrained" not in known:  # else this process continues or joins a comparison
                self.study.set_user_attr("settings", settings)
                self.study.set_user_attr("pretrained", float(own_ndcg(setup.base, setup.splits.dev).mean()))
            elif differences := list_differences(known["settings"], settings):
                raise FileExistsError(
                    f"The comparison in {output} was started with other settings: {differences}. Give the same "
                    "settings to continue it, or choose another output folder."
                )
        stops = [f", about a third of them beyond {rung:,}" for rung in self.rungs[:-1]]
        say(f"{len(self.grid)} candidates of up to {self.rungs[-1]:,} steps{''.join(stops)}")
        if done := len(self.entries()):
            say(f"Continuing after {done} training runs.")

    def entries(self) -> list[Entry]:
        """The candidates that are measured, the best first, and of equals plain cosine."""
        found = []
        for trial in self.study.get_trials(deepcopy=False, states=(self.states.COMPLETE, self.states.PRUNED)):
            seconds = trial.duration.total_seconds() if trial.duration else 0.0
            curve, candidate = sorted(trial.intermediate_values.items()), Candidate(**trial.user_attrs["candidate"])
            found.append(Entry(candidate, curve, trial.user_attrs["exponent"], seconds))
        order = {candidate: (not candidate.is_plain_cosine, i) for i, candidate in enumerate(self.grid)}
        return sorted(found, key=lambda entry: (-entry.steps, -entry.score, order[entry.candidate]))

    def finish(self, name: str) -> CompareResult:
        """Trains candidates until none is left or the time is up. The last process reads the test split and writes."""
        is_waiting = False
        while True:
            with self.lock:
                taken, others = self._claim()
                if taken is None and not others:
                    return self._conclude(name)
            if taken is not None:
                candidate, lock = taken
                with lock:
                    self._train(candidate)
                continue
            if not is_waiting:
                self.say(f"Waiting for {others} candidates of other processes.")
            is_waiting = True
            time.sleep(0.5)

    def _claim(self) -> tuple[tuple[Candidate, FileLock] | None, int]:
        """A candidate to train, with its lock, and the number of those that other processes train."""
        entries, others = self.entries(), 0
        is_over = bool(entries) and time.perf_counter() - self.began >= seconds_of(self.setup.config.budget)
        done = {entry.candidate for entry in entries} if "test" not in self.study.user_attrs else {*self.grid}
        for candidate in (candidate for candidate in self.grid if candidate not in done):
            lock = FileLock(f"{self.folder(candidate)}.lock", timeout=0)
            try:
                lock.acquire()
            except Timeout:
                others += 1
                continue
            if not is_over:
                return (candidate, lock), others
            lock.release()
        return None, others

    def _train(self, candidate: Candidate) -> None:
        trial = self.study.ask()
        trial.set_user_attr("candidate", vars(candidate))
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

        self.setup.train(candidate, self.rungs, goes_on, self.folder(candidate))
        steps, ndcg = max(curve.items())
        is_whole = steps == self.rungs[-1] and not math.isnan(ndcg)
        self.study.tell(trial, ndcg if is_whole else None, None if is_whole else self.states.PRUNED)
        gc.collect()  # the Trainer is part of cycles
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        score = "diverged" if math.isnan(ndcg) else f"{ndcg:.4f} after {steps:,} steps"
        self.say(f"[{minutes}:{seconds:02d}] {len(self.entries())}/{len(self.grid)} {candidate.name}: {score}")

    def _is_best_cosine(self, candidate: Candidate, steps: int, ndcg: float) -> bool:
        """Whether a candidate is plain cosine at its best temperature so far: the control, which always goes on."""
        trials = self.study.get_trials(deepcopy=False)
        better = [
            trial.user_attrs["candidate"] for trial in trials if trial.intermediate_values.get(steps, ndcg) > ndcg
        ]
        return candidate.is_plain_cosine and not any(Candidate(**other).is_plain_cosine for other in better)

    def folder(self, candidate: Candidate) -> Path:
        """Where a model waits for the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def _conclude(self, name: str) -> CompareResult:
        """The result, with files that the first process to come here writes."""
        entries, splits, config = self.entries(), self.setup.splits, self.setup.config
        if "test" not in self.study.user_attrs:
            whole = (entry for entry in entries if entry.steps == self.rungs[-1] and math.isfinite(entry.score))
            cosine = next((entry for entry in whole if entry.candidate.is_plain_cosine), None)
            if cosine is None:
                raise ValueError("Training with plain cosine diverged at every setting; give lower --learning-rates.")
            models = {entry.name: load(str(self.folder(entry.candidate))) for entry in (cosine, entries[0])}
            models = {"pretrained": self.setup.base, **models}
            figures = {of: own_ndcg(model, splits.test).tolist() for of, model in models.items()}
            self.study.set_user_attr("test", figures)  # nDCG@10 of every query, which other processes read here
        scores: dict[str, list[float]] = self.study.user_attrs["test"]
        (_, before), (_, control), *others = scores.items()
        gain = partial(paired_bootstrap, seed=config.seed)
        on_test = OnTest(
            queries=len(splits.test.query_ids),
            documents=len(splits.test.corpus),
            ndcg={of: sum(score) / len(score) for of, score in scores.items()},
            over_pretrained={of: gain(score, before) for of, score in scores.items() if of != "pretrained"},
            over_cosine=gain(others[0][1], control) if others else None,
        )
        pretrained, left_out = self.study.user_attrs["pretrained"], len(self.grid) - len(entries)
        dev_queries = len(splits.dev.query_ids)
        result = CompareResult(name, entries, on_test, pretrained, dev_queries, left_out, config.budget, splits.notes)
        if not (self.output / "compare.json").exists():
            self._write(result)
        return result

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
        text = "\n\n".join([result.to_markdown(), *result.notes])
        (output / "compare.md").write_text(f"{text}\n", encoding="utf-8")
        shutil.rmtree(output / "models")
        result.save(output / "compare.json")
