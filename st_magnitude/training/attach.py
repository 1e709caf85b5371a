"""A loss in a Trainer: its figures in the log, and data that it cannot train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from datasets import Dataset, IterableDataset
from sentence_transformers import SentenceTransformerTrainer
from sentence_transformers.base.losses import has_static_embedding_input
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerState

from st_magnitude._checks import InputError
from st_magnitude._distributed import engine_of_trainer
from st_magnitude.losses.base import EmbeddingLoss
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.training.monitor import NormMonitor

# Options of ranking losses that change no tensor which processes exchange
NOT_EXCHANGED = {"terms", "margin", "margin_strategy"}

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def attach(trainer: AnyTrainer) -> AnyTrainer:
    """Lets a Trainer log the figures of losses, and checks that it can train them on its data.

    The log shows as ``excluded_negatives`` the share of documents that are no negatives, in the
    first batch since the line before. This figure and those of a NormMonitor reach Weights & Biases
    and others.

    Args:
        trainer: The Trainer, before ``train``, which is also returned. A second call does nothing.

    Raises:
        ValueError: If a loss needs DistributedDataParallel, and the Trainer uses FSDP or DeepSpeed;
            if a row of a column is a list of texts; if a static table gets a stream that accelerate
            cuts; or if several processes train on several data sets whose losses gather in
            different ways, which would wait for each other forever.

    Example:
        ::

            loss = stm.QNormRankingLoss(model)
            trainer = SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss)
            stm.attach(trainer).train(resume_from_checkpoint=True)
    """
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, _LossLog) for callback in callbacks):
        _check(trainer)
        trainer.add_callback(_LossLog(trainer))
    # The figures reach the callbacks after these two; all others keep their order.
    callbacks.sort(key=lambda callback: not isinstance(callback, NormMonitor | _LossLog))
    return trainer


def _check(trainer: Trainer) -> None:
    losses = _losses_by_name(trainer)
    engine = engine_of_trainer(trainer)
    for loss in losses.values():
        for part in _embedding_losses(loss):
            part.check_engine(engine)
    for name, place, dataset in _data_sets(trainer):
        loss_of_it = losses.get(name, losses.get(""))
        if loss_of_it is not None and _embedding_losses(loss_of_it):
            refuse_lists(dataset, place)
            if isinstance(dataset, IterableDataset):
                refuse_dispatched_tables(trainer, place)
    if trainer.args.world_size > 1:
        refuse_unlike_gathering(losses)


def _losses_by_name(trainer: Trainer) -> dict[str, nn.Module]:
    losses = getattr(trainer, "loss", None)
    by_name = losses if isinstance(losses, dict) else {"": losses}
    return {name: loss for name, loss in by_name.items() if isinstance(loss, nn.Module)}


def _embedding_losses(loss: nn.Module) -> list[EmbeddingLoss]:
    """The losses of this package in a loss: itself, or what it wraps."""
    return [module for module in loss.modules() if isinstance(module, EmbeddingLoss)]


def _data_sets(trainer: Trainer) -> Iterator[tuple[str, str, object]]:
    """The data sets of both splits, each with its name and its place in the arguments."""
    for split in ("train_dataset", "eval_dataset"):
        given = getattr(trainer, split)
        for name, dataset in (given if isinstance(given, dict) else {"": given}).items():
            yield name, f"{split}[{name!r}]" if name else split, dataset


def refuse_lists(dataset: object, place: str) -> None:
    """Refuses a data set in which a row is a list: a tokenizer reads two texts as one pair."""
    features = getattr(dataset, "features", None) or {}
    for name, feature in features.items():
        if getattr(getattr(feature, "feature", None), "dtype", "") in ("string", "large_string"):
            raise InputError(
                f"A row of the column {name!r} of {place} is a list of texts, which would be read"
                " as one text. Give each text a column of its own: negative_1, negative_2, and so"
                " on. Where a row has fewer, repeat one of its negatives: a ranking loss counts"
                " duplicates once."
            )


def refuse_dispatched_tables(trainer: Trainer, place: str) -> None:
    """Refuses a stream of texts for a static table, whose batches accelerate cuts by rows."""
    loading: Any = trainer.args.accelerator_config
    if loading.dispatch_batches is not False and has_static_embedding_input(trainer.model):
        raise InputError(
            f"{place} is a stream, which accelerate cuts into batches in a way that does not fit"
            " the tokens of a static table. Pass accelerator_config={'dispatch_batches': False} to"
            " the training arguments."
        )


def refuse_unlike_gathering(losses: Mapping[str, nn.Module]) -> None:
    """Refuses losses that exchange different tensors, if one of them gathers."""
    exchanged = set()
    gathers = False
    for loss in losses.values():
        config = dict(getattr(loss, "get_config_dict", dict)())
        config["regularizers"] = sorted(config.get("regularizers", ()))
        options = {name: value for name, value in config.items() if name not in NOT_EXCHANGED}
        flags = []
        for module in loss.modules():
            flags += [getattr(module, name, False) for name in ("gather_across_devices", "gather")]
        exchanged.add(repr((type(loss).__name__, options, flags)))
        gathers |= any(flags)
    if gathers and len(exchanged) > 1:
        raise InputError(
            f"The losses of the data sets {', '.join(losses)} gather from all processes in"
            " different ways, and each process may have a batch of another data set, so they would"
            " wait for each other forever. Give all data sets a loss with the same options, or let"
            " none of them gather: gather_across_devices=False, SIGReg(gather=False)."
        )


def refuse_without_negatives(trainer: SentenceTransformerTrainer) -> None:
    """Refuses data in which most rows have no negative, by 1,024 rows in random batches."""
    loss = trainer.loss
    data = trainer.train_dataset
    if not isinstance(loss, MagnitudeRankingLoss) or not isinstance(data, Dataset):
        return
    size = trainer.args.per_device_train_batch_size * trainer.args.world_size
    rows = data.shuffle(seed=0)
    shares = []
    last = max(min(len(rows), 1024) - size, 0)  # the start of the last batch
    for start in range(0, last + 1, size):
        chosen = rows.select(range(start, min(start + size, len(rows))))
        batch = trainer.data_collator(list(chosen))
        features, _ = trainer.collect_features(batch)
        texts = loss.texts_of(features)
        if not texts.bare:
            return
        is_answer = torch.cat(list(texts.keys[1:])) == texts.keys[1][:, None]  # (B, M)
        is_query = torch.cat(list(texts.bare[1:])) == texts.bare[0][:, None]
        shares.append((is_answer | is_query).all(dim=1).float().mean().item())
    if (share := sum(shares) / len(shares)) > 0.5:
        raise InputError(
            f"{share:.0%} of the rows have no negative in a batch of {size}, and would learn"
            " nothing: all other documents have the text of the positive, as far as the model"
            f" reads (max_seq_length={trainer.model.max_seq_length}), or are the query itself."
            " Read more tokens (max_length), leave out a prompt or letterhead that fills them,"
            " take a model whose tokenizer knows the language, or raise the batch size."
        )


class _LossLog(TrainerCallback):
    """Adds the figures of losses to each line of the log that has the training loss."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def on_log(self, args: object, state: TrainerState, control: object, **given: Any) -> None:
        if "loss" not in given["logs"]:
            return
        figures: dict[str, float] = {}
        for name, loss in _losses_by_name(self.trainer).items():
            ending = f"_{name}" if name else ""
            for part in _embedding_losses(loss):
                figures |= {key + ending: figure for key, figure in part.get_log().items()}
        given["logs"].update(figures)  # for the callbacks after this one
        state.log_history[-1].update(figures)
