"""One training run of a comparison: the same rows in the same order, and the same searches, for every candidate."""

from __future__ import annotations

import copy
import gc
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from transformers import PrinterCallback, TrainerCallback

from st_magnitude._files import whole_folder
from st_magnitude.commands.compare.candidates import Candidate, grids
from st_magnitude.commands.compare.config import CompareConfig
from st_magnitude.commands.compare.data import Splits
from st_magnitude.commands.compare.study import Measurement
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import NotFiniteError
from st_magnitude.finetune.comparison import compare, own_ndcg
from st_magnitude.finetune.run import describe, make_trainer, save_trained, training_arguments, training_rows
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.losses.temperature import quarters
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.export import limit_length, load
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import output_width

__all__ = ["Bench"]


@dataclass(frozen=True)
class Bench:
    """What all candidates share: the pretrained model, the rows in their order, and the searches."""

    base: SentenceTransformer
    splits: Splits
    output: Path
    config: CompareConfig

    @classmethod
    def of(cls, model: Any, splits: Splits, output: Path, config: CompareConfig) -> Bench:
        """Loads or copies the model, which is the last thing that can be wrong with the arguments."""
        if isinstance(model, str):
            base = load(model)
        else:
            base = copy.deepcopy(model) if isinstance(model, SentenceTransformer) else model()
        if config.max_length is not None:
            limit_length(base, config.max_length)
        if config.dim is not None:
            keep_dimensions(base, config.dim)
        return cls(base, splits, output, config)

    @cached_property
    def rows(self) -> Dataset:
        return training_rows(self.splits.train, self.config.negatives, self.config.seed)

    @cached_property
    def dev(self) -> RetrievalData:
        return RetrievalData(self.splits.dev.queries, self.splits.dev.corpus, self.splits.dev.relevant)

    @cached_property
    def test(self) -> RetrievalData:
        return RetrievalData(self.splits.test.queries, self.splits.test.corpus, self.splits.test.relevant)

    @cached_property
    def pretrained(self) -> NDArray[np.float64]:
        """nDCG@10 of every dev query before training."""
        return own_ndcg(self.base, self.dev)

    @cached_property
    def candidates(self) -> list[list[Candidate]]:
        """Sets of candidates, from the largest, which holds the others, to the smallest."""
        return grids(self.config, any(isinstance(module, StaticEmbedding) for module in self.base))

    @property
    def notes(self) -> list[str]:
        """Sentences about the data and the embeddings."""
        dim = self.config.dim
        kept = f"Every search keeps the first {dim} dimensions, and the saved model has truncate_dim={dim}."
        return [*self.splits.notes, *([kept] if dim is not None else [])]

    @property
    def most_steps(self) -> int:
        """Steps of the largest number of epochs."""
        return max(1, round(self.config.epochs * max(1, len(self.rows) // self.config.batch_size)))

    def settings(self, candidate: Candidate, steps: int) -> TrainConfig:
        return candidate.settings(self.config, quarters(self.base), steps)

    def folder(self, candidate: Candidate) -> Path:
        """Where the model of a finalist waits for the end."""
        return self.output / "models" / candidate.name.replace(" ", "-").replace("=", "")

    def measured(self, candidate: Candidate, steps: int, keep: bool = False, limit: float = math.inf) -> Measurement:
        """Trains a copy of the pretrained model and scores it on dev. A model to keep is saved as it scores best there.

        The measurement has fewer steps if training was stopped after the limit, in seconds.
        """
        began, pace = time.perf_counter(), Pace(limit)
        model, settings = copy.deepcopy(self.base), self.settings(candidate, steps)
        quiet = {"save_strategy": "no", "disable_tqdm": True}
        arguments = training_arguments(settings, self.rows, self.output, model, **quiet)
        describe(model, self.splits.train)
        model.model_card_data.widget = [{"text": self.rows[0]["anchor"]}]  # else every Trainer computes examples
        trainer = make_trainer(model, self.rows, arguments, settings, candidate.loss_options())
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(pace)
        trainer.train()
        # accelerate leaves its autocast around forward, so that encoding would still use bfloat16
        trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
        ndcg, exponent = math.nan, math.nan
        with suppress(NotFiniteError):
            found = compare(trainer.model, self.dev, self.pretrained, seed=self.config.seed)
            ndcg, exponent = found.saved.ndcg, found.saved.exponent
            if keep:
                if found.saved != found.as_trained:
                    prepare(trainer.model, Similarity(query=1.0, document=exponent))
                with whole_folder(self.folder(candidate), overwrite=True) as new:
                    save_trained(trainer, new, {"dev": found.to_dict()})
        steps = trainer.state.global_step
        del trainer
        gc.collect()  # the Trainer is part of cycles
        return Measurement(steps, ndcg, exponent, time.perf_counter() - began, pace.step_seconds)


def keep_dimensions(model: SentenceTransformer, dim: int) -> None:
    """Has ``encode`` cut the embeddings of a model to a prefix. Training still sees all dimensions."""
    width = output_width(model)
    if width is not None and dim > width:
        raise ValueError(f"dim is {dim}, and the embeddings of this model have {width} dimensions; give at most that.")
    model.truncate_dim = dim


class Pace(TrainerCallback):
    """Times the steps of a run, and stops it after so many seconds, but not before it has timed two steps."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > 3 and self.times[-1] - self.times[0] > self.limit:
            control.should_training_stop = True

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, without the first, which is slower."""
        first = 0 if len(self.times) == 2 else 1
        return (self.times[-1] - self.times[first]) / (len(self.times) - 1 - first)
