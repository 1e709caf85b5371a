"""One training run of a comparison: the same rows in the same order, and the same searches, for every candidate."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import PrinterCallback, TrainerCallback

from st_magnitude._files import whole_folder
from st_magnitude.comparison.candidates import Candidate, Costs
from st_magnitude.comparison.config import CompareConfig
from st_magnitude.comparison.data import Splits
from st_magnitude.data.task import NotFiniteError
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.finetune.run import describe, make_trainer, reading, save_trained, training_arguments, training_rows
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.export import load
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output, output_width

__all__ = ["Setup"]

EXPONENTS = [1.0, 0.0, *(i / 20 for i in range(1, 20))]  # of documents; of two that are tied, the first one counts
PROBE_TEXTS, PROBE_STEPS, PROBE_SECONDS = 64, 30, 3.0


@dataclass(frozen=True)
class Setup:
    """Shared by all candidates: the pretrained model, the rows in their order, and the searches."""

    base: SentenceTransformer
    splits: Splits
    config: CompareConfig

    @classmethod
    def of(cls, model: Any, splits: Splits, config: CompareConfig) -> Setup:
        """Loads or copies the model, which is the last thing that can be wrong with the arguments."""
        if isinstance(model, str):
            base = load(model)
        else:
            base = copy.deepcopy(model) if isinstance(model, SentenceTransformer) else model()
        with reading(base, config.max_length):
            pass  # a model without such a limit is refused
        width = output_width(base)
        if config.dim is not None and width is not None and config.dim > width:
            raise ValueError(
                f"dim is {config.dim}, and the embeddings of this model have {width} dimensions; give at most that."
            )
        base.truncate_dim = config.dim or base.truncate_dim  # of searches; training still sees all dimensions
        return cls(base, splits, config)

    @cached_property
    def rows(self) -> Dataset:
        return training_rows(self.splits.train, self.config.negatives, self.config.seed)

    @property
    def is_static(self) -> bool:
        return any(isinstance(module, StaticEmbedding) for module in self.base)

    @property
    def most_steps(self) -> int:
        """Steps of the largest number of epochs."""
        return max(1, round(self.config.epochs * max(1, len(self.rows) // self.config.batch_size)))

    def trainer(self, candidate: Candidate, steps: int, output: Path) -> SentenceTransformerTrainer:
        """A Trainer with a copy of the pretrained model."""
        model = copy.deepcopy(self.base)
        settings = candidate.settings(self.config, model, steps)
        quiet = {"save_strategy": "no", "disable_tqdm": True}
        arguments = training_arguments(settings, self.rows, output, model, **quiet)
        describe(model, self.splits.train)
        model.model_card_data.widget = [{"text": self.rows[0]["anchor"]}]  # else every Trainer computes examples
        trainer = make_trainer(model, self.rows, arguments, settings, candidate.loss_options())
        trainer.remove_callback(PrinterCallback)
        return trainer

    def measure(self, model: SentenceTransformer) -> tuple[float, float]:
        """nDCG@10 on dev at the document exponent that is best there, and this exponent; nan if training diverged.

        The model reads texts of its own length, as it will be saved, while training may read shorter ones.
        """
        exponent = float(scoring_of(model).exponents[1])
        exponents = [1.0] if normalizes_output(model) else [*EXPONENTS, exponent]
        try:
            with reading(model, None if self.config.max_length is None else self.base.max_seq_length):
                encoded = self.splits.dev.encode(model)
        except NotFiniteError:
            return float("nan"), exponent
        tops = encoded.tops([Similarity(query=1.0, document=exponent) for exponent in exponents])
        means = [float(encoded.ndcg(top).mean()) for top in tops]
        best = max(means)
        return best, exponents[means.index(best)]

    def train(
        self, candidate: Candidate, rungs: list[int], goes_on: Callable[[int, float, float], bool], folder: Path
    ) -> None:
        """Trains a candidate from rung to rung.

        Args:
            candidate: The candidate.
            rungs: Numbers of steps after which it is measured; the last one is the whole run.
            goes_on: Receives the steps, nDCG@10 on dev and the exponent at a rung. It says whether to train on, and at
                the last rung whether to save the model.
            folder: Where.
        """
        trainer = self.trainer(candidate, rungs[-1], folder.parent)
        trainer.add_callback(_AtRungs(self, rungs[:-1], goes_on))
        with reading(trainer.model, self.config.max_length):
            trainer.train()
        if trainer.state.global_step < rungs[-1]:
            return
        # accelerate leaves its autocast around forward, which would still encode in bfloat16
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        ndcg, exponent = self.measure(trainer.model)
        if goes_on(rungs[-1], ndcg, exponent):
            if exponent != scoring_of(trainer.model).exponents[1]:
                prepare(trainer.model, Similarity(query=1.0, document=exponent))
            with whole_folder(folder, overwrite=True) as new:
                save_trained(trainer, new, {"dev": {"queries": len(self.splits.dev.query_ids), "ndcg": ndcg}})

    def time(self, candidate: Candidate, output: Path) -> tuple[Costs, float]:
        """The costs of a candidate by a few texts and steps, and the seconds of a search on the test split."""
        splits, texts = self.splits, list(islice(self.splits.dev.corpus.values(), PROBE_TEXTS))
        self.base.encode_document(texts[:2], show_progress_bar=False)  # the first call is slower
        began = time.perf_counter()
        self.base.encode_document(texts, show_progress_bar=False)
        per_text = (time.perf_counter() - began) / len(texts)
        dev, test = (per_text * (len(task.query_ids) + len(task.corpus)) for task in (splits.dev, splits.test))
        trainer, pace = self.trainer(candidate, PROBE_STEPS, output), _Pace()
        trainer.add_callback(pace)
        with reading(trainer.model, self.config.max_length):
            trainer.train()
        return Costs(pace.step_seconds, dev), test


class _AtRungs(TrainerCallback):
    """Measures a model at the rungs before the last one, and ends its training there if it is behind."""

    def __init__(self, setup: Setup, rungs: list[int], goes_on: Callable[[int, float, float], bool]) -> None:
        self.setup, self.rungs, self.goes_on = setup, rungs, goes_on

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.rungs:
            control.should_training_stop = not self.goes_on(state.global_step, *self.setup.measure(model))


class _Pace(TrainerCallback):
    """Times the steps of a run, and stops it after some seconds, but not before it has timed two steps."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times.append(time.perf_counter())
        control.should_training_stop = len(self.times) > 2 and self.times[-1] - self.times[0] > PROBE_SECONDS

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, without the first one, which is slower."""
        return (self.times[-1] - self.times[1]) / max(1, len(self.times) - 2)
