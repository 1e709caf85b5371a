"""Training on a folder of retrieval data: what ``st-magnitude train`` and the demo run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import BatchSamplers

from st_magnitude.corpus.beir import RetrievalData
from st_magnitude.evaluation.geometry import NUM_DOCUMENTS, card_evaluators
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
from st_magnitude.surgery.normalize import export, load, prepare
from st_magnitude.training.trainer import check_output, has_fast_bf16, train_or_stop

__all__ = ["LOSSES", "train"]

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
    loss: str = "qnorm",
    *,
    dims: Sequence[int] | None = None,
    temperatures: Sequence[float] | None = None,
    max_length: int | None = None,
    num_negatives: int | None = None,
    epochs: float = 1.0,
    max_steps: int = -1,
    batch_size: int = 32,
    learning_rate: float = 2e-5,
    warmup_ratio: float = 0.1,
    mini_batch_size: int | None = None,
    bf16: bool | None = None,
    seed: int = 0,
    save_steps: int = 200,
    resume: bool = False,
    card_sample: int = NUM_DOCUMENTS,
    loss_options: dict[str, Any] | None = None,
) -> SentenceTransformerTrainer:
    """Fine-tunes a model with in-batch and explicit negatives, and saves it with a model card.

    The card names the loss and its citation, and has norms and isotropy of a sample of the texts before and after.

    Args:
        model: A model, trained in place and prepared for the loss (Normalize stripped or added), or the folder or hub
            id of one, which is loaded after everything else has been checked.
        data: Judged negatives, where there are any, become hard negatives.
        output: Folder for the model. Checkpoints of the run lie in ``output/checkpoints`` until it has ended.
        loss: A key of ``LOSSES``.
        dims: Prefixes to train beside or instead of the full dimension; default: the full dimension only.
        temperatures: To sum over, at every prefix (`temp_agg_mrl`); default: 0.05.
        max_length: Tokens of a text that the model reads, saved with it; default: as the model has it.
        num_negatives: Hard negatives a row; default: 1 if the data has judged negatives, else 0.
        epochs: Passes over the (query, relevant document) pairs.
        max_steps: Stop after so many steps; overrides epochs when positive.
        batch_size: Pairs a step, of every process that ``torchrun`` or ``accelerate launch`` started; the documents of
            all of them are negatives.
        learning_rate: Peak rate of AdamW; linear warm-up and decay. Learnable exponents have 1e-2.
        warmup_ratio: Share of the steps that warm up.
        mini_batch_size: Gradient caching by so many texts at a time.
        bf16: Autocast to bfloat16; default: where the hardware has it.
        seed: Of row order, negatives and dropout.
        save_steps: Steps between checkpoints.
        resume: Go on from the last checkpoint in ``output``.
        card_sample: Documents to encode before and after training, with a fifth as many queries, for the geometry in
            the model card.
        loss_options: Further arguments of the loss.

    Returns:
        The trainer, with the model in ``trainer.model`` and the log in ``trainer.state.log_history``.

    Raises:
        ValueError: If the loss is unknown, the data has a single document or fewer than two pairs a process, dims or
            temperatures do not suit the loss (see `temp_agg_mrl`), or the model reads texts of any length and a
            max_length is given.
        FileExistsError: If output holds a finished model, or an unfinished run and resume is False.
        OSError: If there is no model of that name.
        KeyboardInterrupt: At Ctrl-C, and at SIGTERM: the step that was being made is done and saved as a checkpoint.
    """
    if loss not in LOSSES:
        raise ValueError(f"No loss is called {loss!r}. Choose one of {', '.join(LOSSES)}.")
    output = Path(output)
    checkpoint = check_output(output, resume)
    if num_negatives is None:
        num_negatives = int(any(data.negatives.values()))
    rows = data.triplets(num_negatives, seed)
    if len(rows) < 2:
        raise ValueError(f"The data has {len(rows)} training pair; ranking needs at least two in a batch.")
    before, after = card_evaluators(data.queries, data.corpus, data.relevant_docs, card_sample, seed)
    if isinstance(model, str):
        model = load(model)
    if max_length is not None:
        limit_length(model, max_length)
    prepare(model, "dot" if loss == "learnable" else loss)
    options: dict[str, Any] = {"mini_batch_size": mini_batch_size, **(loss_options or {})}
    if dims is not None:
        options["terms"] = temp_agg_mrl(dims, (0.05,) if temperatures is None else temperatures)
    elif temperatures is not None:
        options["terms"] = temp_agg(temperatures)
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        learning_rate_mapping=LearnableNormLoss.learning_rate_mapping() if loss == "learnable" else None,
        warmup_steps=warmup_ratio,
        bf16=has_fast_bf16() if bf16 is None else bf16,
        use_cpu=model.device.type == "cpu",
        batch_sampler=_batch_sampler(rows, batch_size),
        dataloader_drop_last=True,
        logging_steps=10,
        save_steps=save_steps,
        save_total_limit=1,
        seed=seed,
        report_to=[],
    )
    if arguments.n_gpu > 1:
        logger.warning(f"One process for {arguments.n_gpu} GPUs is slow: start one for each (docs/devices.md).")
    if len(rows) < 2 * (processes := arguments.world_size):
        raise ValueError(f"{len(rows)} training pairs are too few for {processes} processes: start fewer.")
    arguments.per_device_train_batch_size = min(batch_size, len(rows) // processes)
    objective = LOSSES[loss](model, **{"gather_across_devices": processes > 1} | options)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=objective)
    is_first = trainer.is_world_process_zero()  # which measures and saves
    if is_first:
        before(model, epoch=0, steps=0)
    train_or_stop(trainer, checkpoint)
    if is_first:
        after(model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        export(model, output)
        record = {
            "loss": type(objective).__name__,
            **objective.get_config_dict(),
            "processes": processes,
            "geometry": {"before": before.metrics, "after": after.metrics},
            "log": trainer.state.log_history,
        }
        (output / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return trainer


def limit_length(model: SentenceTransformer, max_length: int) -> None:
    """Let the model read only so many tokens of a text.

    Raises:
        ValueError: If it has no such limit, as static models have none.
    """
    try:
        model.max_seq_length = max_length
    except AttributeError:
        raise ValueError("This model reads texts of any length: leave out max_length (--max-length).") from None


def _batch_sampler(rows: Dataset, batch_size: int) -> BatchSamplers:
    """Batches without a text twice, which would be its own negative, where there is room for such batches."""
    commonest = max(Counter(text for column in rows.column_names for text in rows[column]).values())
    if commonest * batch_size <= len(rows):
        return BatchSamplers.NO_DUPLICATES
    logger.info("One text stands in %d of %d rows: batches may hold a text twice.", commonest, len(rows))
    return BatchSamplers.BATCH_SAMPLER
