"""compare tells which loss to train with: candidates are ranked on dev, with one look at test."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from st_magnitude._files import locked_folder, moved_in, written
from st_magnitude.comparison.config import Candidate, CompareConfig, seconds_of
from st_magnitude.comparison.result import BM25, CompareResult, Entry, OnTest
from st_magnitude.comparison.trials import Trials, make_splits
from st_magnitude.data.pairs import Splits
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.judge import Gain, judge
from st_magnitude.finetune.measure import bm25_if_installed, found_by
from st_magnitude.finetune.trainer import check_length
from st_magnitude.finetune.verdict import own_ndcg
from st_magnitude.saving.card import add_section, model_name
from st_magnitude.saving.export import load
from st_magnitude.training.run_folder import list_differences

__all__ = ["CompareConfig", "CompareResult", "compare"]


def compare(
    model: SentenceTransformer | str,
    data: RetrievalData | Splits | str | Path,
    output: str | Path,
    config: CompareConfig | None = None,
    *,
    dev: RetrievalData | None = None,
    test: RetrievalData | None = None,
    say: Callable[[str], None] = print,
) -> CompareResult:
    """Tells which loss to train with on your data, or that plain cosine is best, within a budget.

    Candidates are trained on the same batches and ranked on dev (docs/compare.md names them). The
    best one is compared with plain cosine at its own best temperature, and both with the pretrained
    model, on the test split, which is read once. Without a clear difference plain cosine is
    recommended.

    Args:
        model: A model, or the folder or hub id of one. It is not changed.
        data: A source of `load_splits`, what it returned, or the data to train on.
        output: New folder for the winning model (``model``), ``compare.json`` and ``compare.md``.
            An unfinished comparison is continued.
        dev: Data to rank the candidates on; None: the split of the folder, else held-out queries.
        test: Data for the final figures; None: as for dev.
        say: Function that receives the progress line by line.

    Raises:
        ValueError: If a query or its text is in two splits, no query of a split has a relevant
            document, or plain cosine diverges at every setting.
        FileExistsError: If output holds other files, a finished comparison, or other settings.
        OSError: If a model cannot be written, or another process writes to output.
        KeyboardInterrupt: At Ctrl-C. The same call continues.
    """
    config = config or CompareConfig()
    output = Path(output).absolute()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare trains in one process; start it without torchrun or accelerate.")
    if (output / "compare.json").exists():
        _clean_up(output)  # a process may have been killed before it did
        raise FileExistsError(f"{output} holds a finished comparison. Choose another folder.")
    splits = make_splits(data, config, dev, test)
    for note in splits.notes:
        say(f"Note: {note}")
    settings = {key: value for key, value in vars(config).items() if key != "budget"}
    settings["model"] = model if isinstance(model, str) else None
    settings["data"] = [splits[name].digest for name in ("train", "dev", "test")]
    base = load(model) if isinstance(model, str) else model
    check_length(base, config.max_length)
    try:
        with locked_folder(output):
            run = _Run(Trials(base, splits, config), output, say)
            run.begin(json.loads(json.dumps(settings)))
            return run.finish(model if isinstance(model, str) else model_name(base))
    except KeyboardInterrupt:
        message = f"Stopped. Give the same command again to continue with {output}."
        raise KeyboardInterrupt(message) from None


class _Run:
    def __init__(self, trials: Trials, output: Path, say: Callable[[str], None]) -> None:
        self.trials = trials
        self.output = output
        self.say = say
        self.began = time.perf_counter()
        self.rungs = trials.rungs
        self.file = output / "progress.json"  # what follows, until the result is written
        self.settings: dict[str, object] = {}
        self.pretrained = float("nan")  # nDCG@10 on dev
        self.entries: list[Entry] = []  # the candidates that are done, the first ones of the grid
        self.test: dict[str, list[float]] = {}  # nDCG@10 of every query of the test split

    def begin(self, settings: dict[str, object]) -> None:
        """Measures the pretrained model, or reads what an earlier call measured."""
        self.settings = settings
        if self.file.exists():
            self._read()
        else:
            if any(not path.name.startswith(".") for path in self.output.iterdir()):
                raise FileExistsError(f"{self.output} is not empty; choose another folder.")
            self.pretrained = float(own_ndcg(self.trials.base, self.trials.splits["dev"]).mean())
            self._save()
        (self.output / "models").mkdir(exist_ok=True)
        self.say(f"{len(self.trials.grid)} candidates of up to {self.rungs[-1]:,} steps")
        if self.entries:
            self.say(f"Continuing after {len(self.entries)} training runs.")

    def _read(self) -> None:
        try:
            known = json.loads(self.file.read_text(encoding="utf-8"))
            settings, self.pretrained, self.test = (
                known[name] for name in ("settings", "pretrained", "test")
            )
            for row in known["entries"]:
                self.entries.append(Entry(**row | {"candidate": Candidate(**row["candidate"])}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.file} is damaged; choose another output folder.") from error
        if differences := list_differences(settings, self.settings):
            raise FileExistsError(
                f"The comparison in {self.output} was started with other settings: {differences}. "
                "Give the same settings to continue it, or choose another output folder."
            )

    def _save(self) -> None:
        known = {"settings": self.settings, "pretrained": self.pretrained, "test": self.test}
        known["entries"] = [asdict(entry) for entry in self.entries]
        with written(self.file) as file:
            json.dump(known, file)

    def finish(self, name: str) -> CompareResult:
        if not self.test:
            for candidate in self.trials.grid[len(self.entries) :]:
                if self.entries and self._is_over():
                    break
                self._train(candidate)
            for entry in self._rivals():
                if entry.second_seed is None:
                    self._train_again(entry)
        return self._conclude(name)

    def _is_over(self) -> bool:
        """Whether no candidate may begin. Time for two runs with a second seed is reserved."""
        kept = 2 * max((entry.seconds for entry in self._rivals()), default=0.0)
        budget = seconds_of(self.trials.config.budget)
        return time.perf_counter() - self.began + kept >= budget

    def _train(self, candidate: Candidate) -> None:
        folder = self.folder(candidate)
        shutil.rmtree(folder, ignore_errors=True)  # a process was killed before it noted the model
        entry = self.trials.train(candidate, self.rungs, partial(self._goes_on, candidate), folder)
        self.entries.append(entry)
        self._note(f"{len(self.entries)}/{len(self.trials.grid)} {entry.name}", entry)

    def _train_again(self, entry: Entry) -> None:
        """Trains a candidate with a second seed."""
        folder = self.folder(entry.candidate)
        seed = self.trials.config.seed + 1
        again = self.trials.train(entry.candidate, self.rungs[-1:], lambda *_: False, folder, seed)
        known = replace(entry, second_seed=again.curve[-1][1])
        self.entries[self.entries.index(entry)] = known
        self._note(f"{entry.name}, second seed", again)

    def _note(self, name: str, entry: Entry) -> None:
        self._save()
        gc.collect()  # the Trainer is part of cycles
        minutes, seconds = divmod(int(time.perf_counter() - self.began), 60)
        done = f"[{minutes}:{seconds:02d}] {name}"
        self.say(f"{done}: {entry.shown_score} after {entry.steps:,} steps")

    def _ranked(self) -> list[Entry]:
        """The candidates by their steps and nDCG@10; of equal ones, cosine. Where the first two
        have a second seed, the mean orders them."""
        found = sorted(
            self.entries,
            key=lambda entry: (-entry.steps, -entry.score, entry.candidate.loss != "cosine"),
        )
        if all(entry.second_seed is not None for entry in found[:2]):
            found[:2] = sorted(found[:2], key=lambda entry: -entry.mean_score)
        return found

    def _whole(self) -> list[Entry]:
        """Those that were trained to their end."""
        last = self.rungs[-1]
        return [e for e in self._ranked() if e.steps == last and math.isfinite(e.score)]

    def _rivals(self) -> list[Entry]:
        """The first two, if dev does not tell them apart."""
        first = self._whole()[:2]
        if len(first) < 2:
            return []
        differences = np.subtract(first[0].ndcg, first[1].ndcg)
        is_open = judge(differences, seed=self.trials.config.seed).verdict == "undecided"
        return first if is_open else []

    def _goes_on(self, candidate: Candidate, steps: int, ndcg: float) -> bool:
        """Whether a candidate trains on after the first rung, as the best of its loss, or is saved
        at the end, as one of the first two or the control."""
        if math.isnan(ndcg):
            return False
        rivals = [entry for entry in self.entries if math.isfinite(entry.score)]
        ahead = [entry.candidate for entry in rivals if dict(entry.curve).get(steps, -1) > ndcg]
        if steps == self.rungs[-1] and len(ahead) < 2:
            return True
        if steps == self.rungs[-1] and candidate.loss != "cosine":
            return False
        return candidate.loss not in {other.loss for other in ahead}

    def folder(self, candidate: Candidate) -> Path:
        """The folder in which a model is kept until the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def _conclude(self, name: str) -> CompareResult:
        splits = self.trials.splits
        grid = self.trials.grid
        entries = self._ranked()
        whole = self._whole()
        compared = {entry.candidate.loss for entry in whole}
        missing = [c.loss for c in grid if c.loss not in compared]
        result = CompareResult(
            name,
            entries,
            self._on_test(whole),
            self.pretrained,
            dev_queries=len(splits["dev"].query_ids),
            left_out=len(grid) - len(entries),
            not_compared=tuple(dict.fromkeys(missing)),
            notes=tuple(splits.notes),
        )
        options = result.winner.candidate.options(self.trials.config, self.rungs[-1])
        result = replace(result, train_options=options)
        self._write(result)
        return result

    def _on_test(self, whole: list[Entry]) -> OnTest:
        test = self.trials.splits["test"]
        if not self.test:
            cosine = next((entry for entry in whole if entry.candidate.loss == "cosine"), None)
            if cosine is None:
                raise ValueError("Plain cosine diverged everywhere; give lower --learning-rates.")
            models = {"pretrained": self.trials.base}
            for entry in (cosine, whole[0]):
                models[entry.name] = load(str(self.folder(entry.candidate)))
            self.test = {of: own_ndcg(model, test).tolist() for of, model in models.items()}
            if (lexical := bm25_if_installed(test)) is not None:
                self.test[BM25] = [*found_by(lexical, test).ndcg.values()]
            self._save()
        before, bm25 = self.test["pretrained"], self.test.get(BM25)
        trained = {of: x for of, x in self.test.items() if of not in ("pretrained", BM25)}
        control, *others = trained.values()

        def gain(after: list[float], before: list[float]) -> Gain:
            return judge(np.subtract(after, before), seed=self.trials.config.seed).gain

        return OnTest(
            queries=len(test.query_ids),
            documents=len(test.corpus),
            ndcg={of: sum(score) / len(score) for of, score in self.test.items()},
            over_pretrained={of: gain(x, before) for of, x in trained.items()},
            over_bm25={of: gain(x, bm25) for of, x in trained.items() if bm25 is not None},
            over_cosine=gain(others[0], control) if others else None,
        )

    def _write(self, result: CompareResult) -> None:
        """Writes the files; compare.json, which marks the comparison as finished, comes last."""
        text = "\n\n".join([result.to_markdown(), *result.notes])
        with moved_in(self.output, "compare.json") as new:
            shutil.copytree(self.folder(result.winner.candidate), new / "model")
            table = result.test_table.to_markdown()
            add_section(new / "model" / "README.md", f"### Retrieval\n\n{table}")
            (new / "compare.md").write_text(f"{text}\n", encoding="utf-8")
            result.save(new / "compare.json")
        _clean_up(self.output)


def _clean_up(output: Path) -> None:
    """Removes what a finished comparison no longer needs."""
    (output / "progress.json").unlink(missing_ok=True)
    shutil.rmtree(output / "models", ignore_errors=True)
