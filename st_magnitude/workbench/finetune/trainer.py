"""The Trainer of a run: its rows, its loss and its arguments."""

from __future__ import annotations

import copy
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import BatchSamplers, NoDuplicatesBatchSampler
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, set_seed

from st_magnitude._checks import InputError, foreign
from st_magnitude._upstream import has_fast_bf16, tell_texts_by_numbers
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.losses.base import half_weights
from st_magnitude.losses.exponents import usual_rate
from st_magnitude.losses.named import LOSSES
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.losses.temperature import temp_agg, temp_agg_mrl
from st_magnitude.saving.export import limit_length
from st_magnitude.surgery.adapters import add_lora, has_adapter
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import prompt_of, readers_of
from st_magnitude.surgery.vocabulary import trimmed_vocabulary
from st_magnitude.training.run_folder import WORK
from st_magnitude.training.stopping import refuse_diverged
from st_magnitude.workbench.finetune.settings import TrainConfig

__all__ = ["TIMED_STEPS", "is_uneven", "make_rows", "make_trainer", "reading", "sampler_of"]
__all__ += ["seconds_per_step", "steps_of", "train_copy", "trained_copy", "with_defaults"]

logger = logging.getLogger(__name__)

MANY_ROWS = 50_000  # above, small batches take a static table minutes
RATE = 5e-5  # of the weights of an encoder
STEPS = 40  # of an encoder, at the least, if these are at most MOST_EPOCHS
MOST_EPOCHS = 8.0
TIMED_STEPS = 3


@contextmanager
def reading(model: SentenceTransformer, length: int | SentenceTransformer | None) -> Iterator[None]:
    """Within the block, a model reads at most this number of tokens, or as many as a model of its
    kind; None changes nothing. ValueError: it reads texts of any number."""
    if length is None:
        yield
        return
    readers: list[Any] = readers_of(model)
    before = [getattr(reader, "max_seq_length", None) for reader in readers]
    if isinstance(length, int):
        limit_length(model, length)
    else:
        for reader, other in zip(readers, readers_of(length), strict=True):
            reader.max_seq_length = other.max_seq_length
    try:
        yield
    finally:
        for reader, limit in zip(readers, before, strict=True):
            reader.max_seq_length = limit


def make_rows(
    data: RetrievalData, negatives: int | None, seed: int, warns: bool = False
) -> Dataset:
    """Rows of `RetrievalData.triplets`; by default with one negative if some are judged."""
    number = int(any(data.negatives.values())) if negatives is None else negatives
    rows = data.triplets(number, seed)
    left = sum(map(len, data.relevant.values())) - len(rows)
    if warns and left:  # once, and not in each fold
        logger.warning(
            f"Left out {left:,} training pairs of which a text is a query of dev, of test, or of"
            " other held-out queries."
        )
    return rows


def is_uneven(positives: Iterable[str]) -> bool:
    """Whether some documents are positives more often than others; else a prior is constant."""
    return len(set(Counter(positives).values())) > 1


def with_defaults(config: TrainConfig, model: SentenceTransformer, num_rows: int) -> TrainConfig:
    """The settings with the defaults for a kind of model; of tables docs/research/known.md."""
    is_table = has_static_embedding_input(model)
    is_plain = config.loss == "cosine" and config.dims is None and config.temperatures is None
    batch_size = config.batch_size or (512 if is_table and num_rows > MANY_ROWS else 32)
    per_epoch = max(1, num_rows // batch_size)
    defaults = {
        "epochs": 3.0 if is_table else min(max(1.0, STEPS / per_epoch), MOST_EPOCHS),
        "batch_size": batch_size,
        "temperature": 0.1 if is_table and is_plain else None,
    }
    given = {name: value for name, value in vars(config).items() if value is not None}
    return TrainConfig(**defaults | given)


def steps_of(config: TrainConfig, model: SentenceTransformer, num_rows: int) -> int:
    """The steps of a training."""
    if config.max_steps > 0:
        return config.max_steps
    config = with_defaults(config, model, num_rows)
    per_epoch = max(1, num_rows // cast(int, config.batch_size))
    return max(1, math.ceil(cast(float, config.epochs) * per_epoch))


def make_trainer(
    model: SentenceTransformer,
    data: RetrievalData,
    rows: Dataset,
    config: TrainConfig,
    output: Path,
    saves: bool = True,
) -> SentenceTransformerTrainer:
    """The Trainer of a run, with a model fit for the loss. One that saves nothing shows nothing."""
    config = with_defaults(config, model, len(rows))
    card = model.model_card_data
    card.ir_model = True
    card.task_name = "semantic search and other retrieval tasks"
    name = data.name.partition(", ")[0]  # without the split
    card.train_datasets = [{"name": name}] if name else card.train_datasets
    if config.lora is not None:
        set_seed(config.seed)
        add_lora(model, config.lora)
    args = _arguments(config, rows, output, model, saves)
    _cast_half_weights(model)
    named = LOSSES[config.loss]
    prepare(model, named.similarity)
    options: dict[str, Any] = {
        "gather_across_devices": args.world_size > 1,
        "mini_batch_size": config.mini_batch_size,
    }
    if config.prior and is_uneven(rows["positive"]):
        options["prior"] = _prior(model, rows, config)
    loss_class = named.load(with_dims=config.dims is not None)
    loss = loss_class(model, **options, **_terms(config))
    if not saves:  # otherwise every Trainer computes examples
        card.widget = [{"text": rows[0]["anchor"]}]
    trainer = _Trainer(model=model, args=args, train_dataset=rows, loss=loss)
    if not saves:
        trainer.remove_callback(PrinterCallback)
    if trainer.pop_callback(ProgressCallback):
        trainer.add_callback(_Progress)
    return trainer


def _rate(model: SentenceTransformer) -> float:
    """The default rate: that of the kind of model, but for the weights of an encoder, for which
    short trainings want more."""
    is_usual = has_static_embedding_input(model) or has_adapter(model)
    return usual_rate(model) if is_usual else RATE


class _Progress(ProgressCallback):
    """Shows the loss in the bar; the history of the Trainer has all figures."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        if self.training_bar is not None and "loss" in logs:
            self.training_bar.set_postfix(loss=logs["loss"])


def train_copy(
    model: SentenceTransformer,
    data: RetrievalData,
    rows: Dataset,
    config: TrainConfig,
    output: Path,
    *callbacks: TrainerCallback,
) -> SentenceTransformerTrainer:
    """Trains a copy of a model without checkpoints, and returns the Trainer that has the copy."""
    trainer = make_trainer(copy.deepcopy(model), data, rows, config, output, saves=False)
    for callback in callbacks:
        trainer.add_callback(callback)
    with reading(trainer.model, config.max_length), trimmed_vocabulary(trainer):
        trainer.train()
    # accelerate leaves its autocast around forward: later encoding would still use bfloat16
    trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    return trainer


def trained_copy(
    data: RetrievalData, model: SentenceTransformer, config: TrainConfig, output: Path
) -> SentenceTransformer:
    """A copy of a model that was trained on data, such as those of a fold."""
    rows = make_rows(data, config.negatives, config.seed)
    trainer = train_copy(model, data, rows, config, output)
    refuse_diverged(trainer)
    return trainer.model


def seconds_per_step(
    model: SentenceTransformer,
    data: RetrievalData,
    rows: Dataset,
    config: TrainConfig,
    output: Path,
) -> float:
    """How long a step of training takes, by a few steps of a copy."""
    clock = _Clock()
    train_copy(model, data, rows, config, output, clock)
    return float(np.median(np.diff(clock.times)))


class _Clock(TrainerCallback):
    """The times at which steps end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.times.append(time.perf_counter())


def _cast_half_weights(model: SentenceTransformer) -> None:
    """Casts weights to float32, but for those under an adapter: bfloat16 loses small steps."""
    if not (half := half_weights(model)):
        return
    logger.warning(
        "The weights to train are stored in %s, which small steps hardly change. They are float32"
        " from now on.",
        str(half[0].dtype).removeprefix("torch."),
    )
    if not has_adapter(model):
        model.float()
    for parameter in half:
        parameter.data = parameter.data.float()


def _terms(config: TrainConfig) -> dict[str, Any]:
    terms: dict[str, Any] = {"temperature": config.temperature}
    if LOSSES[config.loss].has_temperatures:
        terms |= {"dims": config.dims, "temperatures": config.temperatures}
        return {name: value for name, value in terms.items() if value is not None}
    if config.dims is not None:
        terms["terms"] = temp_agg_mrl(config.dims, config.temperatures or (0.05,))
    elif config.temperatures is not None:
        terms["terms"] = temp_agg(config.temperatures)
    return terms


def _prior(model: SentenceTransformer, rows: Dataset, config: TrainConfig) -> DocumentPrior:
    """The prior of the rows, whose texts are known by their tokens, cut as in training."""
    negatives = [text for column in rows.column_names[2:] for text in rows[column]]
    prompt = prompt_of(model, "document") if config.prompts else None
    with reading(model, config.max_length):
        return DocumentPrior.from_texts(
            model, rows["positive"], negatives or None, prompt=prompt, task="document"
        )


class _Trainer(SentenceTransformerTrainer):
    """Makes batches without repeated texts in a tenth of the time."""

    def get_batch_sampler(self, dataset: Any, *args: Any, **options: Any) -> Any:
        sampler = super().get_batch_sampler(dataset, *args, **options)
        if isinstance(sampler, NoDuplicatesBatchSampler):
            tell_texts_by_numbers(sampler, dataset)
        return sampler


class _Arguments(SentenceTransformerTrainingArguments):
    """Leaves at least one step after the warm-up. The first step of a warm-up has the rate 0, so a
    run of one step would not train."""

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return min(super().get_warmup_steps(num_training_steps), num_training_steps - 1)


@foreign()  # such as --bf16 on a device without it
def _arguments(
    config: TrainConfig, rows: Dataset, output: Path, model: SentenceTransformer, saves: bool
) -> SentenceTransformerTrainingArguments:
    is_table = has_static_embedding_input(model)
    roles = dict.fromkeys(rows.column_names, "document") | {rows.column_names[0]: "query"}
    prompts = {name: prompt_of(model, role) for name, role in roles.items() if config.prompts}
    arguments = _Arguments(
        prompts={name: prompt for name, prompt in prompts.items() if prompt} or None,
        router_mapping=roles if any(isinstance(module, Router) for module in model) else {},
        output_dir=str(output / WORK),
        num_train_epochs=cast(float, config.epochs),
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=cast(int, config.batch_size),
        learning_rate=_rate(model) if config.learning_rate is None else config.learning_rate,
        warmup_steps=0.1,  # a share
        bf16=has_fast_bf16() if config.bf16 is None else config.bf16,
        use_cpu=model.device.type == "cpu",
        batch_sampler=sampler_of(config, rows, warns=saves),
        dataloader_drop_last=True,
        logging_steps=0.05,
        save_steps=config.save_steps,
        save_total_limit=1,
        seed=config.seed,
        report_to=[],
        save_strategy="steps" if saves else "no",
        disable_tqdm=None if saves else is_table or not sys.stderr.isatty(),
    )
    _fit_batch(arguments, len(rows), warns=saves and arguments.process_index == 0)
    return arguments


def _fit_batch(arguments: SentenceTransformerTrainingArguments, rows: int, warns: bool) -> None:
    if arguments.n_gpu > 1:
        logger.warning(
            f"One process for {arguments.n_gpu} GPUs is slow; start one for each (docs/train.md)."
        )
    most = rows // arguments.world_size
    size = arguments.per_device_train_batch_size
    if most < 2:
        least = 2 * arguments.world_size
        raise InputError(f"A training needs at least {least} pairs, got {rows}: add rows.")
    if size > most and warns:  # once, and not in each fold
        logger.warning(
            f"The batch size of {size:,} is more than the {rows:,} training pairs fill: every step"
            f" takes {most:,} pairs on each process, and an epoch is one step."
        )
    arguments.per_device_train_batch_size = min(size, most)


def sampler_of(config: TrainConfig, rows: Dataset, warns: bool = True) -> BatchSamplers:
    """Batches of different texts, if at least half of an epoch fits into them. A prior asks for
    batches at random, as it corrects for how often a document is drawn."""
    if config.prior and is_uneven(rows["positive"]):
        return BatchSamplers.BATCH_SAMPLER
    size = min(cast(int, config.batch_size), len(rows))
    wanted = max(1, len(rows) // max(1, size) // 2)
    sampler = NoDuplicatesBatchSampler(rows, size, drop_last=True, generator=torch.Generator())
    tell_texts_by_numbers(sampler, rows)
    found = sum(1 for _ in islice(sampler, wanted))
    if found == wanted:
        return BatchSamplers.NO_DUPLICATES
    if warns:  # once, and not in each fold
        logger.warning(
            f"Batches of {size:,} repeat texts, as {len(rows):,} rows fill"
            f" {f'{found:,} of them' if found else 'none'} without repeats. Smaller batches give"
            " each text more different negatives."
        )
    return BatchSamplers.BATCH_SAMPLER
