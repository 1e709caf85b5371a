"""Training on retrieval data, as ``st-magnitude train`` does it."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import BatchSamplers

from st_magnitude._config import digest
from st_magnitude._files import locked_folder
from st_magnitude.data.beir import refuse_shared
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.geometry import card_evaluators
from st_magnitude.finetune.comparison import Comparison, compare, own_ndcg
from st_magnitude.finetune.merge import Merge, merge_with_base, parameters_of
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.geometry import norm_warning
from st_magnitude.kernel.terms import LearnedTemperature
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
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.result import to_plain
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.card import add_section
from st_magnitude.surgery.export import limit_length, load, one_line_about_the_disk, write_model
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import normalizes_output, prompt_of
from st_magnitude.training.trainer import check_output, check_same_run, has_fast_bf16, record_run, train_or_stop

__all__ = ["LOSSES", "TrainConfig", "TrainedModel", "train"]

logger = logging.getLogger(__name__)

LOSSES: dict[str, type[MagnitudeRankingLoss]] = {
    "cosine": CosineRankingLoss,
    "dot": DotRankingLoss,
    "qnorm": QNormRankingLoss,
    "dnorm": DNormRankingLoss,
    "learnable": LearnableNormLoss,
}


# Settings that may change when a run is resumed
FREE = {"epochs", "max_steps", "mini_batch_size", "bf16", "save_steps"}
FREE |= {"serve_length", "merge", "max_loss", "keep_anyway", "keep_scoring", "keep_checkpoints", "resume"}


@dataclass(frozen=True)
class TrainedModel:
    """The result of `train`. Of several processes, only the first has the geometry and the comparison."""

    trainer: SentenceTransformerTrainer
    geometry: dict[str, dict[str, float]]  # norms and isotropy of a sample of the texts, "before" and "after"
    comparison: Comparison | None  # with the pretrained model; None without dev data
    output: Path | None  # None: the model is clearly worse than the pretrained one and was not saved
    prior: str | None = None  # with ``config.prior``: what it was counted from, or why it was left out
    merge: Merge | None = None  # with ``config.merge``: nDCG@10 by the weight of the trained model

    @property
    def norm_warning(self) -> str:
        """The `st_magnitude.geometry.norm_warning` of the sample; empty if there is none."""
        return _about_norms(self.geometry)


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
    """Fine-tunes a model with in-batch and explicit negatives, and saves it with a model card and ``training.json``.

    With dev data, the model is compared with the pretrained one as it was given, and saved with the document exponent
    that scores best (see `compare`). A model that is clearly worse is saved only with ``config.keep_anyway``.
    Checkpoints are in ``output/checkpoints`` and are removed when the model is saved.

    Args:
        model: A model, which is trained in place and prepared for the loss (Normalize is stripped or added), or the
            folder or hub id of one, which is loaded after everything else has been checked.
        data: Training data. Judged negatives become hard negatives.
        output: Folder for the model.
        config: Settings of the run.
        dev: Held-out data to compare on.
        keep: Data of other domains, on which the merged model may lose ``config.max_loss`` at most.
        loss_options: Further arguments of the loss.

    Raises:
        ValueError: If the data have too few pairs or share queries with dev, or a setting does not suit the model.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume`` is False, or a run
            that was started with other settings or data.
        OSError: If the model cannot be found, nothing can be written, or another process writes to the output.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a checkpoint.
    """
    config, output = config or TrainConfig(), Path(output)
    if config.merge and dev is None:
        raise ValueError("merge (--merge) chooses the weight on dev data: pass dev, or add a dev split.")
    if keep and not config.merge:
        raise ValueError("Data to keep (--keep-data) are for merge=True (--merge); pass both or neither.")
    with locked_folder(output):
        if dev is not None:
            refuse_shared(dev.asked, data.asked, "dev", "train")
        checkpoint = check_output(output, config.resume)
        settings = {"model": model if isinstance(model, str) else None, "data": digest_of(data)}
        settings |= {key: value for key, value in vars(config).items() if key not in FREE}
        if checkpoint is not None:
            check_same_run(output, settings)
        rows = training_rows(data, config.negatives, config.seed)
        _warn_without_negatives(config.loss, data, rows)
        before, after = card_evaluators(data, seed=config.seed)
        model = load(model) if isinstance(model, str) else model
        with reading(model, config.max_length), reading(model, config.serve_length):
            pass  # a model without such a limit is refused before anything is encoded
        is_first = os.environ.get("RANK", "0") == "0"  # which measures and saves
        pretrained = own_ndcg(model, dev) if dev is not None and is_first else None
        base = deepcopy(model).cpu() if config.merge and is_first else None  # the trainer needs the device's memory
        trainer = make_trainer(model, data, rows, config, output, loss_options)
        if is_first:
            before(model, epoch=0, steps=0)
            if checkpoint is None:
                record_run(output, settings)
        with reading(model, config.max_length):
            train_or_stop(trainer, checkpoint)
        if not is_first:
            return TrainedModel(trainer, {}, None, output)
        if config.serve_length is not None:
            limit_length(model, config.serve_length)
        comparison = merge = None
        if base is not None and dev is not None:
            calibrate = not (config.keep_scoring or normalizes_output(model))
            base = base.to(model.device)
            merge = merge_with_base(model, base, dev, keep, max_loss=config.max_loss, calibrate=calibrate)
            model.load_state_dict(parameters_of(merge.model), strict=False)  # its scoring is chosen by `compare`
        after(model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        geometry = {"before": before.metrics, "after": after.metrics}
        prior = _about_prior(rows) if config.prior else None
        if dev is not None and pretrained is not None:
            comparison = compare(model, dev, pretrained, config.keep_scoring, config.seed)
            if comparison.saved != comparison.as_trained:
                prepare(model, Similarity(query=1.0, document=comparison.saved.exponent))
            if comparison.is_worse and not config.keep_anyway:
                logger.warning(
                    f"Nothing was saved to {output}. The last checkpoint remains: resume=True and keep_anyway=True "
                    "(--resume --keep-anyway) save its model."
                )
                return TrainedModel(trainer, geometry, comparison, None, prior, merge)
        figures = {"geometry": geometry, "merge": merge and merge.to_dict(), "dev": comparison}
        sections = {"Merged with the base": merge.to_markdown() if merge else None, "Document prior": prior}
        if dev is not None and comparison is not None:
            sections = {f"Retrieval ({dev.name})": comparison.to_markdown(), **sections}
        save_trained(trainer, output, figures, sections)
        if not config.keep_checkpoints:
            shutil.rmtree(output / "checkpoints", ignore_errors=True)
        return TrainedModel(trainer, geometry, comparison, output, prior, merge)


@contextmanager
def reading(model: SentenceTransformer, length: int | None) -> Iterator[None]:
    """Within the block, a model reads this number of tokens of a text; None leaves its own limit."""
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
    """Rows of `RetrievalData.triplets`; by default with one negative each if the data has judged negatives."""
    return data.triplets(int(any(data.negatives.values())) if negatives is None else negatives, seed)


def _warn_without_negatives(loss: str, data: RetrievalData, rows: Dataset) -> None:
    """Warns of a loss that keeps document norms where no row shows a never-relevant document."""
    answers = set().union(*data.relevant.values())
    has_negatives = len(rows.column_names) > 2 and set().union(*data.negatives.values()) - answers
    if loss in ("qnorm", "dot", "learnable") and not has_negatives:
        logger.warning(
            f"loss={loss!r} keeps the norms of documents, but no training row has a negative that "
            "is judged 0 and answers no query, from which norms learn what is never relevant. Add "
            "such judgments, best of documents that resemble the queries (docs/norms.md), or use "
            "loss='cosine'."
        )


def is_uneven(positives: Iterable[str]) -> bool:
    """Whether some documents are positives more often than others, without which a prior changes nothing."""
    return len(set(Counter(positives).values())) > 1


def _about_norms(geometry: dict[str, dict[str, float]]) -> str:
    before, after = (geometry.get(key, {}).get("cohens_d", math.nan) for key in ("before", "after"))
    return norm_warning(after, before)


def _about_prior(rows: Dataset) -> str:
    counts = Counter(rows["positive"])
    if not is_uneven(rows["positive"]):
        return f"All {len(counts):,} documents are equally often positives. A prior changes nothing and was left out."
    return (
        f"Trained with the prior of {len(counts):,} documents in {len(rows):,} pairs, of which the most frequent one "
        f"has {max(counts.values()):,} (logQ correction). The model holds the prior in its embeddings, so nothing has "
        "to be added when it is served."
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
    """The Trainer of a run, with a model fit for the loss. The last two arguments override what the settings say."""
    card: Any = model.model_card_data
    card.ir_model, card.task_name = True, "semantic search and other retrieval tasks"
    card.train_datasets = [{"name": data.name}] if data.name else card.train_datasets
    args = _arguments(config, rows, output, model, arguments)
    prepare(model, "dot" if config.loss == "learnable" else config.loss)
    terms: dict[str, Any] = {"temperature": config.temperature}
    if config.dims is not None:
        terms["terms"] = temp_agg_mrl(config.dims, (0.05,) if config.temperatures is None else config.temperatures)
    elif config.temperatures is not None:
        terms["terms"] = temp_agg(config.temperatures)
    options: dict[str, Any] = {"gather_across_devices": args.world_size > 1, "mini_batch_size": config.mini_batch_size}
    options |= {"margin": config.margin, "guide": None if config.guide is None else load(config.guide)}
    if config.prior and is_uneven(rows["positive"]):
        negatives = [text for column in rows.column_names[2:] for text in rows[column]]
        prompt = prompt_of(model, "document") if config.prompts else None
        with reading(model, config.max_length):  # a prior knows a text by the tokens that training reads
            options["prior"] = DocumentPrior.from_texts(
                model, rows["positive"], negatives or None, prompt=prompt, task="document"
            )
    loss = LOSSES[config.loss](model, **(options | (loss_options or {}) | terms))
    return SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss)


def save_trained(
    trainer: SentenceTransformerTrainer, output: Path, figures: dict[str, Any], sections: dict[str, str | None]
) -> None:
    """Writes the model, its card with further sections, and ``training.json``: the loss, the log and the figures."""
    card: Any = trainer.model.model_card_data
    loss: Any = trainer.loss  # which the card describes again, with the temperatures and exponents that it learned
    card.train_datasets = card.extract_dataset_metadata(trainer.train_dataset, card.train_datasets, loss, "train")
    record = {"loss": type(loss).__name__, **loss.get_config_dict(), "processes": trainer.args.world_size}
    record |= {**figures, "log": trainer.state.log_history}
    try:
        with one_line_about_the_disk(output):
            write_model(trainer.model, output)
            (output / "training.json").write_text(json.dumps(to_plain(record), indent=2) + "\n", encoding="utf-8")
            sections = sections | {
                "Norms": _about_norms(figures.get("geometry", {})),
                "Prompts": _about_prompts(trainer),
            }
            for title, text in sections.items():
                if text:
                    add_section(output / "README.md", f"### {title}\n\n{text}\n")
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise OSError(
            f"The trained model cannot be written to {output} ({reason}). Make room, and run again with resume=True "
            "(--resume)."
        ) from error


def _about_prompts(trainer: SentenceTransformerTrainer) -> str | None:
    """Whether training read the prompts of the model; None for a model that has none."""
    own = {role: prompt_of(trainer.model, role) for role in ("query", "document")}
    if not any(own.values()):
        return None
    named = ", ".join(f"{role} {prompt!r}" for role, prompt in own.items())
    how = "with" if trainer.args.prompts else "without"
    return f"Trained {how} the prompts that `encode_query` and `encode_document` put before a text: {named}."


class _Arguments(SentenceTransformerTrainingArguments):
    """Leaves at least one step after the warm-up, whose first step has the rate 0: a run of one step trains."""

    def get_warmup_steps(self, num_training_steps: int) -> int:
        return min(super().get_warmup_steps(num_training_steps), num_training_steps - 1)


def _arguments(
    config: TrainConfig, rows: Dataset, output: Path, model: SentenceTransformer, more: dict[str, Any]
) -> SentenceTransformerTrainingArguments:
    """Arguments of the Trainer for these settings; ``more`` overrides any of them."""
    own_rates = LearnableNormLoss.learning_rate_mapping() if config.loss == "learnable" else {}
    if config.temperature == "learned":
        own_rates |= LearnedTemperature.learning_rate_mapping()
    # A text would be its own negative in a batch that holds it twice, but one text may be too common to avoid that.
    commonest = max(Counter(text for column in rows.column_names for text in rows[column]).values())
    is_rare = commonest * config.batch_size <= len(rows)
    roles = dict.fromkeys(rows.column_names, "document") | {rows.column_names[0]: "query"}
    prompts = {name: prompt_of(model, role) for name, role in roles.items()} if config.prompts else {}
    settings: dict[str, Any] = {
        "prompts": {name: prompt for name, prompt in prompts.items() if prompt} or None,
        "router_mapping": roles if any(isinstance(module, Router) for module in model) else {},
        "output_dir": str(output / "checkpoints"),
        "num_train_epochs": config.epochs,
        "max_steps": config.max_steps,
        "per_device_train_batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
        "learning_rate_mapping": own_rates,
        "warmup_steps": config.warmup_ratio,
        "bf16": has_fast_bf16() if config.bf16 is None else config.bf16,
        "use_cpu": model.device.type == "cpu",
        "batch_sampler": BatchSamplers.NO_DUPLICATES if is_rare else BatchSamplers.BATCH_SAMPLER,
        "dataloader_drop_last": True,
        "logging_steps": 10,
        "save_steps": config.save_steps,
        "save_total_limit": 1,
        "seed": config.seed,
        "report_to": [],
    }
    arguments = _Arguments(**(settings | more))
    if arguments.n_gpu > 1:
        logger.warning(f"One process for {arguments.n_gpu} GPUs is slow; start one for each (docs/devices.md).")
    most = len(rows) // arguments.world_size
    if most < 2:
        raise ValueError(f"{len(rows)} training pairs are too few for {arguments.world_size} processes, of two each.")
    if config.batch_size > most and arguments.process_index == 0:
        logger.warning(
            f"batch_size={config.batch_size:,} is more than the {len(rows):,} training pairs fill: every step takes "
            f"{most:,} pairs on each process, and an epoch is one step."
        )
    arguments.per_device_train_batch_size = min(config.batch_size, most)
    return arguments


def digest_of(data: RetrievalData) -> str:
    """A digest of texts and judgments, by which a run that resumes knows its data."""
    rows: list[tuple[str, ...]] = [*data.queries.items(), *data.corpus.items()]
    rows += [(q, d, str(grade)) for q, found in data.relevant.items() for d, grade in sorted(found.items())]
    rows += [(q, *sorted(ids)) for q, ids in data.negatives.items()]
    return digest(text for row in rows for text in row)
