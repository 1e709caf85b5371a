"""From a folder of text to a retriever: what ``st-magnitude revela`` does."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

from st_magnitude.corpus.beir import DataError
from st_magnitude.corpus.documents import read_documents, split_documents
from st_magnitude.evaluation import HybridEvaluator
from st_magnitude.evaluation.geometry import card_evaluators
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.revela.groups import build_groups
from st_magnitude.revela.loss import RevelaLoss
from st_magnitude.revela.models import load_lm, load_retriever, lora_config
from st_magnitude.revela.titles import TitleTask, title_task
from st_magnitude.revela.trainer import RevelaTrainer
from st_magnitude.training.trainer import check_output, has_fast_bf16, train_or_stop

__all__ = ["run"]

logger = logging.getLogger(__name__)

RUNS = ("dense", "bm25", "hybrid")


def run(
    corpus: str | Path,
    retriever: str | Path,
    lm: str | Path,
    output: str | Path,
    *,
    temperature: float = 0.05,
    read_weight: float = 1.0,
    v_norm: bool = True,
    group_size: int = 16,
    max_words: int = 120,
    shuffle_chunks: bool = False,
    max_length: int = 160,
    epochs: float = 1.0,
    max_steps: int = -1,
    batch_size: int = 1,
    gradient_accumulation_steps: int = 1,
    learning_rate: float | None = None,
    lm_learning_rate: float = 1e-4,
    lora_rank: int = 256,
    warmup_steps: int = 100,
    held_out: float = 0.1,
    max_queries: int = 300,
    gradient_checkpointing: bool = False,
    bf16: bool | None = None,
    save_steps: int = 200,
    resume: bool = False,
    seed: int = 0,
    say: Callable[[str], Any] = print,
) -> dict[str, Any]:
    """Learns a retriever from raw text with a language model, and measures it on documents that were held out.

    Args:
        corpus: Text, Markdown, reStructuredText, HTML, source or JSON-lines files, in a folder or one.
        retriever: Folder or hub id of a SentenceTransformer, all of which is trained, or of a bare decoder, which gets
            last-token pooling and a LoRA.
        lm: Folder or hub id of a causal decoder, or a GGUF file; it gets a LoRA.
        output: Folder for the retriever (a plain SentenceTransformer, its LoRA merged) and ``revela.json``.
        temperature: tau, see :class:`RevelaLoss`.
        read_weight: See :class:`RevelaLoss`.
        v_norm: See :class:`RevelaLoss`.
        group_size: Chunks that read each other.
        max_words: Words of a chunk.
        shuffle_chunks: The paper's "random" ablation, see :func:`build_groups`.
        max_length: Tokens of a chunk that the models read.
        epochs: Passes over the groups.
        max_steps: Stop after so many steps; overrides epochs when positive.
        batch_size: Groups a step, of every process that ``torchrun`` or ``accelerate launch`` started.
        gradient_accumulation_steps: Batches before each update.
        learning_rate: Of the retriever; by default 1e-4 for a LoRA (the paper's) and 2e-5 for a whole encoder.
        lm_learning_rate: Of the language model's LoRA.
        lora_rank: Of both; alpha is a quarter of it, as in the paper.
        warmup_steps: At most a tenth of all steps.
        held_out: Share of documents that are not trained on; their section titles ask for their chunks.
        max_queries: So many of the titles.
        gradient_checkpointing: Recompute activations of both models, for memory.
        bf16: Autocast to bfloat16; default: where the hardware has it.
        save_steps: Steps between checkpoints, in ``output/checkpoints``.
        resume: Go on from the last of them.
        seed: Of the split, the order and dropout.
        say: Takes the lines of the report.

    Returns:
        What is written to ``revela.json``: settings, nDCG@10, MRR@10 and recall of the retriever, of BM25 and of both
        by reciprocal rank fusion before and after, the differences with 95 % intervals, and the log. Of several
        processes the first measures, saves and returns it all.

    Raises:
        DataError: If the corpus gives nothing to train on.
        FileExistsError: If output holds a finished model, or an unfinished run and resume is False.
        OSError: If the retriever or the language model cannot be loaded.
        ImportError: Without peft, without bm25s if documents are held out, or without gguf for a GGUF file.
        ValueError: If a model is not supported, or an argument is out of range.
        KeyboardInterrupt: At Ctrl-C, and at SIGTERM, once the step that was being made is saved as a checkpoint.
    """
    output = Path(output)
    checkpoint = check_output(output, resume)
    documents = list(read_documents(corpus))
    train, test = split_documents(documents, held_out=held_out, seed=seed)
    groups = cast(
        Dataset,
        build_groups(train, group_size=group_size, max_words=max_words, shuffle_chunks=shuffle_chunks, seed=seed),
    )
    task = _task(test, max_words, max_queries, seed)
    say(f"{len(train):,} documents in {len(groups):,} groups of {group_size}; {len(test):,} held out: {task}")

    model = load_retriever(retriever, max_length)
    language_model, tokenizer = load_lm(lm)
    loss = RevelaLoss(
        model,
        language_model,
        tokenizer,
        temperature=temperature,
        read_weight=read_weight,
        v_norm=v_norm,
        max_length=max_length,
    )
    decoder = _is_decoder(model)
    lora = lora_config(r=lora_rank, lora_alpha=max(1, lora_rank // 4))
    if learning_rate is None:
        learning_rate = 1e-4 if decoder else 2e-5
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        learning_rate=learning_rate,
        gradient_checkpointing=gradient_checkpointing,
        bf16=has_fast_bf16() if bf16 is None else bf16,
        use_cpu=model.device.type == "cpu",
        save_steps=save_steps,
        save_total_limit=1,
        seed=seed,
        report_to=[],
    )
    rows_a_step = batch_size * gradient_accumulation_steps * arguments.world_size
    steps = max_steps if max_steps > 0 else max(1, int(epochs * len(groups) / rows_a_step))
    arguments.warmup_steps = min(warmup_steps, steps // 10)
    arguments.logging_steps = max(1, min(10, steps // 5))
    is_first = arguments.process_index == 0  # which measures and saves
    evaluator = _evaluator(task) if task is not None and is_first else None
    shapes = None
    if task is not None and is_first and len(task.corpus) > 1:
        shapes = card_evaluators(task.queries, task.corpus, task.relevant_docs, seed=seed)
        shapes[0](model, epoch=0, steps=0)
    before = _measure(evaluator, model)
    if before:
        say("before  " + _line(before))
    trainer = RevelaTrainer(
        model=model,
        args=arguments,
        loss=loss,
        train_dataset=groups,
        lm_lora=lora,
        lm_learning_rate=lm_learning_rate,
        retriever_lora=lora if decoder else None,
    )
    train_or_stop(trainer, checkpoint)
    if decoder:
        trainer.merge()
    record: dict[str, Any] = {
        "corpus": str(corpus),
        "documents": {"train": len(train), "held_out": len(test), "groups": len(groups)},
        "loss": loss.get_config_dict(),
        "processes": arguments.world_size,
        "log": trainer.state.log_history,
    }
    if not is_first:
        return record
    after = _measure(evaluator, model)
    if shapes is not None:
        shapes[1](model, epoch=round(trainer.state.epoch or 0), steps=trainer.state.global_step)
        record["geometry"] = {shape.name: shape.metrics for shape in shapes}
    model.save_pretrained(str(output))
    if before and after:
        say("after   " + _line(after))
        record["before"], record["after"] = before["metrics"], after["metrics"]
        record["differences"] = {}
        for name in ("dense", "hybrid"):
            difference = paired_bootstrap(after["per_query"][name], before["per_query"][name])
            record["differences"][name] = difference
            say(f"{name}: {difference[0]:+.3f} nDCG@10, 95 % interval [{difference[1]:+.3f}, {difference[2]:+.3f}]")
    (output / "revela.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _task(documents: list[Any], max_words: int, max_queries: int, seed: int) -> TitleTask | None:
    try:
        return title_task(documents, max_words=max_words, max_queries=max_queries, seed=seed)
    except DataError as error:
        logger.warning("No evaluation: %s", error)
        return None


def _evaluator(task: TitleTask) -> HybridEvaluator:
    return HybridEvaluator(
        task.queries, task.corpus, task.relevant_docs, write_csv=False, show_progress_bar=len(task.corpus) > 1000
    )


def _measure(evaluator: HybridEvaluator | None, model: SentenceTransformer) -> dict[str, Any]:
    if evaluator is None:
        return {}
    metrics = evaluator(model)
    return {"metrics": metrics, "per_query": {name: list(evaluator.per_query[name]) for name in RUNS}}


def _line(measured: dict[str, Any]) -> str:
    metrics = measured["metrics"]
    return "nDCG@10:  " + "  ".join(f"{name} {metrics[f'{name}_ndcg@10']:.3f}" for name in RUNS)


def _is_decoder(model: SentenceTransformer) -> bool:
    """Whether its attention is causal, so that LoRA's targets are those of the paper."""
    return any(getattr(module, "is_causal", False) for module in model.modules())
