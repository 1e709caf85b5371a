"""Training on a folder of retrieval data: what ``st-magnitude train`` and the demo run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import BatchSamplers

from st_magnitude.commands.core import limit_length
from st_magnitude.commands.train.config import TrainConfig
from st_magnitude.corpus.beir import RetrievalData
from st_magnitude.evaluation.geometry import card_evaluators
from st_magnitude.losses import (
    CosineRankingLoss,
    DNormRankingLoss,
    DotRankingLoss,
    LearnableNormLoss,
    MagnitudeRankingLoss,
    QNormRankingLoss,
    temp_agg,
    temp_agg_mrl,
)
from st_magnitude.surgery.export import load, write_model
from st_magnitude.surgery.normalize import prepare
from st_magnitude.training.trainer import check_output, has_fast_bf16, train_or_stop

__all__ = ["LOSSES", "TrainConfig", "train"]

logger = logging.getLogger(__name__)

LOSSES: dict[str, type[MagnitudeRankingLoss]] = {
    "cosine": CosineRankingLoss,
    "dot": DotRankingLoss,
    "qnorm": QNormRankingLoss,
    "dnorm": DNormRankingLoss,
    "learnable": LearnableNormLoss,
}


def train(
    model: SentenceTransformer | str,
    data: RetrievalData,
    output: str | Path,
    config: TrainConfig | None = None,
    *,
    loss_options: dict[str, Any] | None = None,
) -> SentenceTransformerTrainer:
    """Fine-tunes a model with in-batch and explicit negatives, and saves it with a model card.

    The card names the loss and its citation, and has norms and isotropy of a sample of the texts before and after.

    Args:
        model: A model, which is trained in place and prepared for the loss (Normalize is stripped or added), or the
            folder or hub id of one, which is loaded after everything else has been checked.
        data: Training data. Judged negatives become hard negatives.
        output: Folder for the model. The checkpoints of the run are in ``output/checkpoints``.
        config: Settings of the run; by default ``TrainConfig()``.
        loss_options: Further arguments of the loss.

    Returns:
        The trainer, with the model in ``trainer.model`` and the log in ``trainer.state.log_history``.

    Raises:
        ValueError: If the data has a single document or fewer than two pairs a process, dims or temperatures do not
            suit the loss (see `temp_agg_mrl`), or the model has no limit of tokens and a max_length is given.
        FileExistsError: If output holds a finished model, or an unfinished run and ``config.resume`` is False.
        OSError: If the model cannot be found.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a checkpoint.
    """
    config = config or TrainConfig()
    output = Path(output)
    checkpoint = check_output(output, config.resume)
    num_negatives = int(any(data.negatives.values())) if config.negatives is None else config.negatives
    rows = data.triplets(num_negatives, config.seed)
    if len(rows) < 2:
        raise ValueError(f"The data has {len(rows)} training pair; ranking needs at least two in a batch.")
    before, after = card_evaluators(data.queries, data.corpus, data.relevant_docs, config.card_sample, config.seed)
    if isinstance(model, str):
        model = load(model)
    if config.max_length is not None:
        limit_length(model, config.max_length)
    prepare(model, "dot" if config.loss == "learnable" else config.loss)
    options: dict[str, Any] = {"mini_batch_size": config.mini_batch_size, **(loss_options or {})}
    if config.dims is not None:
        options["terms"] = temp_agg_mrl(config.dims, (0.05,) if config.temperatures is None else config.temperatures)
    elif config.temperatures is not None:
        options["terms"] = temp_agg(config.temperatures)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        learning_rate_mapping=LearnableNormLoss.learning_rate_mapping() if config.loss == "learnable" else None,
        warmup_steps=config.warmup_ratio,
        bf16=has_fast_bf16() if config.bf16 is None else config.bf16,
        use_cpu=model.device.type == "cpu",
        batch_sampler=_batch_sampler(rows, config.batch_size),
        dataloader_drop_last=True,
        logging_steps=10,
        save_steps=config.save_steps,
        save_total_limit=1,
        seed=config.seed,
        report_to=[],
    )
    if arguments.n_gpu > 1:
        logger.warning(f"One process for {arguments.n_gpu} GPUs is slow: start one for each (docs/devices.md).")
    if len(rows) < 2 * (processes := arguments.world_size):
        raise ValueError(f"{len(rows)} training pairs are too few for {processes} processes: start fewer.")
    arguments.per_device_train_batch_size = min(config.batch_size, len(rows) // processes)
    objective = LOSSES[config.loss](model, **{"gather_across_devices": processes > 1} | options)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=objective)
    is_first = trainer.is_world_process_zero()  # which measures and saves
    if is_first:
        before(model, epoch=0, steps=0)
    train_or_stop(trainer, checkpoint)
    if is_first:
        after(model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        write_model(model, output)
        record = {
            "loss": type(objective).__name__,
            **objective.get_config_dict(),
            "processes": processes,
            "geometry": {"before": before.metrics, "after": after.metrics},
            "log": trainer.state.log_history,
        }
        (output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return trainer


def _batch_sampler(rows: Dataset, batch_size: int) -> BatchSamplers:
    """Batches without a text twice, which would be its own negative, where there is room for such batches."""
    commonest = max(Counter(text for column in rows.column_names for text in rows[column]).values())
    if commonest * batch_size <= len(rows):
        return BatchSamplers.NO_DUPLICATES
    logger.info("One text stands in %d of %d rows: batches may hold a text twice.", commonest, len(rows))
    return BatchSamplers.BATCH_SAMPLER
