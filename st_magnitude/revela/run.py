"""From a folder of text to a retriever: what ``st-magnitude revela`` does."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_magnitude._config import digest
from st_magnitude._files import locked_folder
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation import HybridEvaluator
from st_magnitude.evaluation.geometry import card_evaluators
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.documents import Documents, iterate_documents
from st_magnitude.revela.groups import build_groups
from st_magnitude.revela.loss import RevelaLoss
from st_magnitude.revela.models import load_lm, load_retriever
from st_magnitude.revela.trainer import RevelaTrainer, lora_config
from st_magnitude.training.trainer import check_output, check_same_run, has_fast_bf16, record_run, train_or_stop

__all__ = ["RevelaConfig", "run"]

RUNS = ("dense", "bm25", "hybrid")
UNSEEN = 16  # groups held out for the gains, at most a tenth of all
# Settings that may change when a run is resumed
FREE = {"epochs", "max_steps", "gradient_checkpointing", "bf16", "save_steps", "keep_checkpoints", "resume"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides warnings of transformers about names that it will rename, which the user of a command cannot change."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


@_quiet()
def run(
    corpus: Documents,
    retriever: str | Path,
    lm: str | Path,
    output: str | Path,
    config: RevelaConfig | None = None,
    *,
    data: RetrievalData | None = None,
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Trains a retriever on raw text with a language model, and measures it before and after.

    The last groups, up to sixteen, are held out for ``reading_gain`` and ``choice_gain`` (see `RevelaLoss`).

    Args:
        corpus: As for `build_groups`: a file or folder of text, Markdown, source code or JSON lines, or documents.
        retriever: Folder or hub id of a SentenceTransformer, all of which is trained, or of a bare decoder, which gets
            last-token pooling and a LoRA.
        lm: Folder or hub id of a causal decoder; it gets a LoRA.
        output: Folder for the retriever (a plain SentenceTransformer with its LoRA merged) and ``revela.json``.
        config: Settings of the run; by default ``RevelaConfig()``.
        data: Judged queries for the retriever, for BM25 and for both fused, before and after training.
        say: Function that gets the lines of the report.

    Returns:
        The content of ``revela.json``: settings, log and gains; with ``data`` also the figures on it, with differences.
        Of several processes, the first has all of it.

    Raises:
        ValueError: If the corpus has nothing to train on, or a model is not supported.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume`` is False, or a run
            that was started with other models, settings or groups.
        OSError, ImportError: If a model or the corpus cannot be found, another process writes to the output, or a
            package is missing.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, after the current step is done and saved as a checkpoint.
    """
    config, output = config or RevelaConfig(), Path(output)
    with locked_folder(output):
        return _run(corpus, str(retriever), str(lm), output, config, data, say)


def _run(
    corpus: Documents,
    retriever: str,
    lm: str,
    output: Path,
    config: RevelaConfig,
    data: RetrievalData | None,
    say: Callable[[str], Any],
) -> dict[str, Any]:
    checkpoint = check_output(output, config.resume)
    model = load_retriever(retriever, config.max_length)  # before the documents are read, which may take minutes
    language_model, tokenizer = load_lm(lm)
    loss = RevelaLoss(
        model,
        language_model,
        tokenizer,
        temperature=config.temperature,
        read_weight=config.read_weight,
        v_norm=config.v_norm,
        max_length=config.max_length,
    )
    groups = build_groups(iterate_documents(corpus), group_size=config.group_size, max_words=config.max_words)
    number = max(1, len(groups) - min(UNSEEN, -(-len(groups) // 10)))
    train, unseen = groups.select(range(number)), groups.select(range(number, len(groups)))
    settings = {key: value for key, value in vars(config).items() if key not in FREE}
    settings |= {"retriever": retriever, "lm": lm, "groups": digest(map("\0".join, groups["chunks"]))}
    if checkpoint is not None:
        check_same_run(output, settings)
    say(f"Training: {len(train):,} groups of {config.group_size} chunks, and {len(unseen)} held out.")
    is_decoder = any(getattr(module, "is_causal", False) for module in model.modules())
    trainer = _trainer(config, loss, train, unseen, output, is_decoder)
    is_first = trainer.is_world_process_zero()
    if is_first and checkpoint is None:
        record_run(output, settings)
    measured = _Measured(data, config.seed, say) if data is not None and is_first else None
    gains = {"before": _gains(trainer, say)} if len(unseen) else {}
    if measured is not None:
        measured.measure("before", model, trainer)
    if checkpoint is not None:
        trainer.load_lm_checkpoint(checkpoint)  # a run that has made all its steps does not train
    train_or_stop(trainer, checkpoint)
    if len(unseen):
        gains["after"] = _gains(trainer, say)
    if is_decoder:
        trainer.merge()
    record: dict[str, Any] = {
        "corpus": str(corpus) if isinstance(corpus, str | Path) else None,
        "groups": {"train": len(train), "held_out": len(unseen)},
        "loss": loss.get_config_dict(),
        "processes": trainer.args.world_size,
        "log": trainer.state.log_history,
        "gains": gains,
    }
    if is_first:
        if measured is not None:
            measured.measure("after", model, trainer)
            record |= measured.record()
        model.save_pretrained(str(output))
        (output / "revela.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if not config.keep_checkpoints:
            shutil.rmtree(output / "checkpoints", ignore_errors=True)
    return record


def _trainer(
    config: RevelaConfig, loss: RevelaLoss, groups: Dataset, unseen: Dataset, output: Path, is_decoder: bool
) -> RevelaTrainer:
    lora = lora_config(r=config.lora_rank, lora_alpha=max(1, config.lora_rank // 4))
    learning_rate = config.learning_rate
    if learning_rate is None:
        learning_rate = 3e-4 if is_decoder else 5e-5
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=learning_rate,
        gradient_checkpointing=config.gradient_checkpointing,
        bf16=has_fast_bf16() if config.bf16 is None else config.bf16,
        use_cpu=loss.model.device.type == "cpu",
        save_steps=config.save_steps,
        save_total_limit=1,
        seed=config.seed,
        report_to=[],
    )
    rows_a_step = config.batch_size * config.gradient_accumulation_steps * arguments.world_size
    steps = config.max_steps if config.max_steps > 0 else max(1, int(config.epochs * len(groups) / rows_a_step))
    arguments.warmup_steps = min(config.warmup_steps, steps // 10)
    arguments.logging_steps = max(1, min(10, steps // 5))
    return RevelaTrainer(
        model=loss.model,
        args=arguments,
        loss=loss,
        train_dataset=groups,
        eval_dataset=unseen if len(unseen) else None,
        lm_lora=lora,
        lm_learning_rate=config.lm_learning_rate,
        retriever_lora=lora if is_decoder else None,
    )


def _gains(trainer: RevelaTrainer, say: Callable[[str], Any]) -> dict[str, float]:
    """The gains of reading other documents and of choosing among them, on held-out groups, in nats."""
    trainer.evaluate()
    found = {name: trainer.state.log_history[-1][f"eval_{name}"] for name in ("reading_gain", "choice_gain")}
    say("Gain on held-out groups:  reading {reading_gain:+.3f} nats, choice {choice_gain:+.3f} nats".format(**found))
    return found


class _Measured:
    """Figures of a retriever, alone and fused with BM25, before and after training."""

    def __init__(self, data: RetrievalData, seed: int, say: Callable[[str], Any]) -> None:
        judged = (data.queries, data.corpus, data.relevant)
        self.ranking = HybridEvaluator(*judged, write_csv=False, show_progress_bar=len(data.corpus) > 1000)
        self.shapes = dict(zip(("before", "after"), card_evaluators(data, seed=seed), strict=True))
        self.say = say
        self.metrics: dict[str, dict[str, float]] = {}
        self.per_query: dict[str, dict[str, list[float]]] = {}

    def measure(self, when: str, model: SentenceTransformer, trainer: RevelaTrainer) -> None:
        self.metrics[when] = self.ranking(model)
        self.per_query[when] = {name: list(self.ranking.per_query[name]) for name in RUNS}
        self.shapes[when](model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        figures = "  ".join(f"{name} {self.metrics[when][f'{name}_ndcg@10']:.3f}" for name in RUNS)
        self.say(f"{when:6}  nDCG@10:  {figures}")

    def record(self) -> dict[str, Any]:
        differences = {}
        for name in ("dense", "hybrid"):
            difference = paired_bootstrap(self.per_query["after"][name], self.per_query["before"][name])
            differences[name] = difference
            self.say(
                f"{name}: {difference[0]:+.3f} nDCG@10, 95 % interval [{difference[1]:+.3f}, {difference[2]:+.3f}]"
            )
        geometry = {shape.name: shape.metrics for shape in self.shapes.values()}
        return {**self.metrics, "differences": differences, "geometry": geometry}
