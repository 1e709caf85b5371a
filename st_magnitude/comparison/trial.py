"""One training run of a comparison: the same rows in the same order, and the same searches, for every candidate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import PrinterCallback, TrainerCallback

from st_magnitude._files import whole_folder
from st_magnitude.comparison.candidates import Candidate
from st_magnitude.comparison.config import CompareConfig
from st_magnitude.comparison.data import Splits
from st_magnitude.data.task import NotFiniteError
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.finetune.run import is_uneven, make_trainer, reading, save_trained, training_rows
from st_magnitude.losses.negatives import tokens_of
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.export import load
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["Setup"]

EXPONENTS = [1.0, 0.0, *(i / 20 for i in range(1, 20))]  # of documents; of two that are tied, the first one counts

GoesOn = Callable[[int, float, float], bool]


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
        return cls(base, splits, config)

    @cached_property
    def rows(self) -> Dataset:
        return training_rows(self.splits.train, self.config.negatives, self.config.seed)

    @property
    def is_static(self) -> bool:
        return any(isinstance(module, StaticEmbedding) for module in self.base)

    @property
    def has_prior(self) -> bool:
        """Whether documents differ in how often they are positives, and the model has tokens to know them by."""
        return is_uneven(self.rows["positive"]) and tokens_of(self.base.preprocess(["a"])) is not None

    @property
    def steps(self) -> int:
        """Steps of a whole run: of the largest number of epochs, but not more than the largest number of steps."""
        return min(self.config.max_steps, max(1, round(self.config.epochs * len(self.rows) / self.config.batch_size)))

    def trainer(self, candidate: Candidate, steps: int, output: Path) -> SentenceTransformerTrainer:
        """A Trainer with a copy of the pretrained model."""
        model = copy.deepcopy(self.base)
        model.model_card_data.widget = [{"text": self.rows[0]["anchor"]}]  # else every Trainer computes examples
        settings, options = candidate.settings(self.config, model, steps), candidate.loss_options()
        quiet = {"save_strategy": "no", "disable_tqdm": True}
        trainer = make_trainer(model, self.splits.train, self.rows, settings, output, options, **quiet)
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

    def train(self, candidate: Candidate, rungs: list[int], goes_on: GoesOn, folder: Path) -> None:
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


class _AtRungs(TrainerCallback):
    """Measures a model at the rungs before the last one, and ends its training there if it is behind."""

    def __init__(self, setup: Setup, rungs: list[int], goes_on: GoesOn) -> None:
        self.setup, self.rungs, self.goes_on = setup, rungs, goes_on

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step in self.rungs:
            control.should_training_stop = not self.goes_on(state.global_step, *self.setup.measure(model))
