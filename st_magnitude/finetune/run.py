"""Training on retrieval data, as ``st-magnitude train`` does it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import BatchSamplers
from torch import Tensor

from st_magnitude._config import digest
from st_magnitude._files import locked_folder, moved_in, one_line_about_the_disk
from st_magnitude.data.beir import refuse_shared
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.geometry import card_evaluators
from st_magnitude.finetune.comparison import Comparison, compare, own_ndcg
from st_magnitude.finetune.merge import Merge, merge_with_base, parameters_of
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.kernel.terms import LearnedTemperature
from st_magnitude.losses import (
    CosineRankingLoss,
    DNormRankingLoss,
    DotRankingLoss,
    LearnableNormLoss,
    MagnitudeRankingLoss,
    QNormRankingLoss,
    TempAggLoss,
    TempAggMRLLoss,
    temp_agg,
    temp_agg_mrl,
)
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.result import to_plain
from st_magnitude.saving.card import add_section
from st_magnitude.saving.export import limit_length, load, write_model
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import encode_raw, normalizes_output, prompt_of
from st_magnitude.training.run_folder import (
    check_output,
    check_same_run,
    has_fast_bf16,
    record_run,
    train_or_stop,
)

__all__ = ["LOSSES", "TrainConfig", "TrainedModel", "train"]

logger = logging.getLogger(__name__)

LOSSES: dict[str, type[MagnitudeRankingLoss]] = {
    "cosine": CosineRankingLoss,
    "dot": DotRankingLoss,
    "qnorm": QNormRankingLoss,
    "dnorm": DNormRankingLoss,
    "learnable": LearnableNormLoss,
    "tempagg": TempAggLoss,  # with dims TempAggMRLLoss
}


# Settings that may change when a run is resumed
FREE = {"epochs", "max_steps", "mini_batch_size", "bf16", "save_steps"}
FREE |= {
    "serve_length",
    "merge",
    "max_loss",
    "keep_anyway",
    "keep_scoring",
    "keep_checkpoints",
    "resume",
}


@dataclass(frozen=True)
class TrainedModel:
    """The result of `train`. Of several processes, only the first has the geometry and the
    comparison."""

    trainer: SentenceTransformerTrainer
    # norms and isotropy of a sample of the texts, "before" and "after"
    geometry: dict[str, dict[str, float]]
    comparison: Comparison | None  # with the pretrained model; None without dev data
    # None: the model is clearly worse than the pretrained one and was not saved
    output: Path | None
    # with ``config.prior``: what it was counted from, or why it was left out
    prior: str | None = None
    merge: Merge | None = None  # with ``config.merge``: nDCG@10 by the weight of the trained model
    # mean distance of embeddings from where they were, as a share of their norm
    moved: float = float("nan")


def train(
    model: SentenceTransformer | str,
    data: RetrievalData,
    output: str | Path,
    config: TrainConfig | None = None,
    *,
    dev: RetrievalData | None = None,
    keep: Sequence[RetrievalData] = (),
    loss_options: dict[str, Any] | None = None,
) -> TrainedModel:
    """Fine-tunes a model with in-batch and explicit negatives, and saves it with a model card and
    ``training.json``.

    With dev data, the model is compared with the pretrained one as it was given, and saved with the
    document exponent that scores best (see `compare`). A model that is clearly worse is saved only
    with ``config.keep_anyway``. Checkpoints are in ``output/checkpoints`` and are removed when the
    model is saved.

    Args:
        model: A model, which is trained in place and prepared for the loss (Normalize is stripped
            or added), or the folder or hub id of one, which is loaded after everything else has
            been checked.
        data: Training data. Judged negatives become hard negatives.
        output: Folder for the model.
        config: Settings of the run.
        dev: Held-out data to compare on.
        keep: Data of other domains, on which the merged model may lose ``config.max_loss`` at most.
        loss_options: Further arguments of the loss.

    Raises:
        ValueError: If the data have too few pairs or share queries with dev, or a setting does not
            suit the model.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume``
            is False, or a run that was started with other settings or data.
        OSError: If the model cannot be found, nothing can be written, or another process writes to
            the output.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a
            checkpoint.
    """
    config, output = config or TrainConfig(), Path(output)
    if config.merge and dev is None:
        raise ValueError(
            "merge (--merge) chooses the weight on dev data: pass dev, or add a dev split."
        )
    if keep and not config.merge:
        raise ValueError(
            "Data to keep (--keep-data) are for merge=True (--merge); pass both or neither."
        )
    with locked_folder(output):
        if dev is not None:
            refuse_shared(dev.asked, data.asked, "dev", "train")
        checkpoint = check_output(output, config.resume)
        settings = {"model": model if isinstance(model, str) else None, "data": digest_of(data)}
        settings |= {key: value for key, value in vars(config).items() if key not in FREE}
        if checkpoint is not None:
            check_same_run(output, settings)
        rows = training_rows(data, config.negatives, config.seed)
        before, after = card_evaluators(data, seed=config.seed)
        model = load(model) if isinstance(model, str) else model
        with reading(model, config.max_length), reading(model, config.serve_length):
            pass  # a model without such a limit is refused before anything is encoded
        is_first = os.environ.get("RANK", "0") == "0"  # which measures and saves
        pretrained = own_ndcg(model, dev) if dev is not None and is_first else None
        # the trainer needs the device's memory
        base = deepcopy(model).cpu() if config.merge and is_first else None
        trainer = make_trainer(model, data, rows, config, output, loss_options)
        if is_first:
            before(model, epoch=0, steps=0)
            start = encode_raw(model, before.texts["query"], "query")
            if checkpoint is None:
                record_run(output, settings)
        with reading(model, config.max_length):
            train_or_stop(trainer, checkpoint)
        if not is_first:
            return TrainedModel(trainer, {}, None, output)
        moved = _distance(start, encode_raw(model, before.texts["query"], "query"))
        if config.serve_length is not None:
            limit_length(model, config.serve_length)
        comparison = merge = None
        if base is not None and dev is not None:
            merge = _merge(model, base, dev, keep, config)
        after(model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        geometry = {"before": before.metrics, "after": after.metrics}
        prior = _about_prior(rows) if config.prior else None
        if dev is not None and pretrained is not None:
            weight = None if merge is None else merge.weight
            comparison = compare(model, dev, pretrained, config.keep_scoring, config.seed, weight)
            if comparison.saved != comparison.as_trained:
                prepare(model, Similarity(query=1.0, document=comparison.saved.exponent))
        trained = TrainedModel(trainer, geometry, comparison, output, prior, merge, moved)
        if comparison is not None and comparison.is_worse and not config.keep_anyway:
            logger.warning(
                f"Nothing was saved to {output}. The last checkpoint remains: resume=True and"
                " keep_anyway=True (--resume --keep-anyway) save its model."
            )
            return replace(trained, output=None)
        figures = {
            "geometry": geometry,
            "merge": merge and merge.to_dict(),
            "dev": comparison,
            "moved": moved,
        }
        sections = {
            "Merged with the base": merge.to_markdown() if merge else None,
            "Document prior": prior,
        }
        if dev is not None and comparison is not None:
            sections = {f"Retrieval ({dev.name})": comparison.to_markdown(), **sections}
        save_trained(trainer, output, figures, sections)
        if not config.keep_checkpoints:
            shutil.rmtree(output / "checkpoints", ignore_errors=True)
        return trained


def _merge(
    model: SentenceTransformer,
    base: SentenceTransformer,
    dev: RetrievalData,
    keep: Sequence[RetrievalData],
    config: TrainConfig,
) -> Merge:
    """Gives the model the parameters between its base and itself that dev data choose."""
    calibrate = not (config.keep_scoring or normalizes_output(model))
    base = base.to(model.device)
    merge = merge_with_base(model, base, dev, keep, max_loss=config.max_loss, calibrate=calibrate)
    # its scoring is chosen by `compare`
    model.load_state_dict(parameters_of(merge.model), strict=False)
    return merge


def _distance(start: Tensor, end: Tensor) -> float:
    """The mean distance between two matrices of embeddings, (n, D), as a share of the mean norm in
    the first."""
    return float((end - start).norm(dim=1).mean() / start.norm(dim=1).mean())


@contextmanager
def reading(model: SentenceTransformer, length: int | None) -> Iterator[None]:
    """Within the block, a model reads this number of tokens of a text; None leaves its own
    limit."""
    if length is None:
        yield
        return
    own = model.max_seq_length
    limit_length(model, length)
    try:
        yield
    finally:
        model.max_seq_length = own


def training_rows(data: RetrievalData, negatives: int | None, seed: int) -> Dataset:
    """Rows of `RetrievalData.triplets`; by default with one negative each if the data has judged
    negatives."""
    return data.triplets(
        int(any(data.negatives.values())) if negatives is None else negatives, seed
    )


def is_uneven(positives: Iterable[str]) -> bool:
    """Whether some documents are positives more often than others, without which a prior changes
    nothing."""
    return len(set(Counter(positives).values())) > 1


def _about_prior(rows: Dataset) -> str:
    counts = Counter(rows["positive"])
    if not is_uneven(rows["positive"]):
        return (
            f"All {len(counts):,} documents are equally often positives. A prior changes nothing"
            " and was left out."
        )
    return (
        f"Trained with the prior of {len(counts):,} documents in {len(rows):,} pairs, of which the"
        f" most frequent one has {max(counts.values()):,} (logQ correction). The model holds the"
        " prior in its embeddings, so nothing has to be added when it is served."
    )


def make_trainer(
    model: SentenceTransformer,
    data: RetrievalData,
    rows: Dataset,
    config: TrainConfig,
    output: Path,
    loss_options: dict[str, Any] | None = None,
    **arguments: Any,
) -> SentenceTransformerTrainer:
    """The Trainer of a run, with a model fit for the loss. The last two arguments override what the
    settings say."""
    card: Any = model.model_card_data
    card.ir_model, card.task_name = True, "semantic search and other retrieval tasks"
    card.train_datasets = [{"name": data.name}] if data.name else card.train_datasets
    args = _arguments(config, rows, output, model, arguments)
    prepare(model, {"learnable": "dot", "tempagg": "cosine"}.get(config.loss, config.loss))
    kind: type[MagnitudeRankingLoss] = LOSSES[config.loss]
    terms: dict[str, Any] = {"temperature": config.temperature}
    if config.loss == "tempagg":
        kind = TempAggLoss if config.dims is None else TempAggMRLLoss
        terms |= {"dims": config.dims, "temperatures": config.temperatures}
        terms = {name: value for name, value in terms.items() if value is not None}
    elif config.dims is not None:
        terms["terms"] = temp_agg_mrl(
            config.dims, (0.05,) if config.temperatures is None else config.temperatures
        )
    elif config.temperatures is not None:
        terms["terms"] = temp_agg(config.temperatures)
    options: dict[str, Any] = {
        "gather_across_devices": args.world_size > 1,
        "mini_batch_size": config.mini_batch_size,
    }
    options |= {
        "margin": config.margin,
        "guide": None if config.guide is None else load(config.guide),
    }
    if config.prior and is_uneven(rows["positive"]):
        negatives = [text for column in rows.column_names[2:] for text in rows[column]]
        prompt = prompt_of(model, "document") if config.prompts else None
        # a prior knows a text by the tokens that training reads
        with reading(model, config.max_length):
            options["prior"] = DocumentPrior.from_texts(
                model, rows["positive"], negatives or None, prompt=prompt, task="document"
            )
    loss = kind(model, **(options | (loss_options or {}) | terms))
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)


def save_trained(
    trainer: SentenceTransformerTrainer,
    output: Path,
    figures: dict[str, Any],
    sections: dict[str, str | None],
) -> None:
    """Writes the model, its card with further sections, and ``training.json``: the loss, the log
    and the figures."""
    card: Any = trainer.model.model_card_data
    # which the card describes again, with the temperatures and exponents that it learned
    loss: Any = trainer.loss
    card.train_datasets = card.extract_dataset_metadata(
        trainer.train_dataset, card.train_datasets, loss, "train"
    )
    record = {
        "loss": type(loss).__name__,
        **loss.get_config_dict(),
        "processes": trainer.args.world_size,
    }
    record |= {**figures, "log": trainer.state.log_history}
    remedy = "Make room, and run again with resume=True (--resume)."
    with one_line_about_the_disk(output, remedy), moved_in(output, "modules.json") as folder:
        write_model(trainer.model, folder)
        (folder / "training.json").write_text(
            json.dumps(to_plain(record), indent=2) + "\n", encoding="utf-8"
        )
        for title, text in (sections | {"Prompts": _about_prompts(trainer)}).items():
            if text:
                add_section(folder / "README.md", f"### {title}\n\n{text}\n")


def _about_prompts(trainer: SentenceTransformerTrainer) -> str | None:
    """Whether training read the prompts of the model; None for a model that has none."""
    own = {role: prompt_of(trainer.model, role) for role in ("query", "document")}
    if not any(own.values()):
        return None
    named = ", ".join(f"{role} {prompt!r}" for role, prompt in own.items())
    how = "with" if trainer.args.prompts else "without"
    return (
        f"Trained {how} the prompts that `encode_query` and `encode_document` put before a text:"
        f" {named}."
    )


class _Arguments(SentenceTransformerTrainingArguments):
    """Leaves at least one step after the warm-up, whose first step has the rate 0: a run of one
    step trains."""

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return min(super().get_warmup_steps(num_training_steps), num_training_steps - 1)


def _arguments(
    config: TrainConfig,
    rows: Dataset,
    output: Path,
    model: SentenceTransformer,
    more: dict[str, Any],
) -> SentenceTransformerTrainingArguments:
    """Arguments of the Trainer for these settings; ``more`` overrides any of them."""
    own_rates = LearnableNormLoss.learning_rate_mapping() if config.loss == "learnable" else {}
    if config.temperature == "learned":
        own_rates |= LearnedTemperature.learning_rate_mapping()
    roles = dict.fromkeys(rows.column_names, "document") | {rows.column_names[0]: "query"}
    prompts = (
        {name: prompt_of(model, role) for name, role in roles.items()} if config.prompts else {}
    )
    settings: dict[str, Any] = {
        "prompts": {name: prompt for name, prompt in prompts.items() if prompt} or None,
        "router_mapping": roles if any(isinstance(module, Router) for module in model) else {},
        "output_dir": str(output / "checkpoints"),
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps,
        "per_device_train_batch_size": config.batch_size,
        "learning_rate": (
            _default_rate(model) if config.learning_rate is None else config.learning_rate
        ),
        "learning_rate_mapping": own_rates,
        "warmup_steps": config.warmup_ratio,
        "bf16": has_fast_bf16() if config.bf16 is None else config.bf16,
        "use_cpu": model.device.type == "cpu",
        "batch_sampler": _sampler(config, rows),
        "dataloader_drop_last": True,
        "logging_steps": 10,
        "save_steps": config.save_steps,
        "save_total_limit": 1,
        "seed": config.seed,
        "report_to": [],
    }
    arguments = _Arguments(**(settings | more))
    if arguments.n_gpu > 1:
        logger.warning(
            f"One process for {arguments.n_gpu} GPUs is slow; start one for each (docs/devices.md)."
        )
    most = len(rows) // arguments.world_size
    if most < 2:
        raise ValueError(
            f"{len(rows)} training pairs are too few for {arguments.world_size} processes, of two"
            " each."
        )
    if config.batch_size > most and arguments.process_index == 0:
        logger.warning(
            f"batch_size={config.batch_size:,} is more than the {len(rows):,} training pairs fill:"
            f" every step takes {most:,} pairs on each process, and an epoch is one step."
        )
    arguments.per_device_train_batch_size = min(config.batch_size, most)
    return arguments


def _default_rate(model: SentenceTransformer) -> float:
    """The peak learning rate of AdamW for a kind of model, which the model card shows."""
    if has_static_embedding_input(model):
        return 0.03  # a row of a table gets a gradient only where its token occurs
    return 2e-4 if any(".lora_" in name for name, _ in model.named_parameters()) else 2e-5


def _sampler(config: TrainConfig, rows: Dataset) -> BatchSamplers:
    """Batches of different texts, if at least half of an epoch fits into them without a second
    pass.

    Where texts repeat, they hold more different negatives than batches at random. A prior asks for
    the latter, as it corrects for how often a document is drawn.
    """
    if config.prior and is_uneven(rows["positive"]):
        return BatchSamplers.BATCH_SAMPLER
    batches = max(1, len(rows) // config.batch_size // 2)
    for column in rows.column_names:
        counts = np.array(list(Counter(rows[column]).values()))
        if np.minimum(counts, batches).sum() < batches * min(config.batch_size, len(rows)):
            logger.warning(
                f"Batches of {config.batch_size:,} repeat texts, because {len(rows):,} rows hold"
                f" only {len(counts):,} different texts as {column}, or some too often. Smaller"
                " batches (--batch-size) give each text more different negatives."
            )
            return BatchSamplers.BATCH_SAMPLER
    return BatchSamplers.NO_DUPLICATES


def digest_of(data: RetrievalData) -> str:
    """A digest of texts and judgments, by which a run that resumes knows its data."""
    rows: list[tuple[str, ...]] = [*data.queries.items(), *data.corpus.items()]
    rows += [
        (q, d, str(grade))
        for q, found in data.relevant.items()
        for d, grade in sorted(found.items())
    ]
    rows += [(q, *sorted(ids)) for q, ids in data.negatives.items()]
    return digest(text for row in rows for text in row)
