"""From a folder of text to a retriever: what ``st-magnitude revela`` does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from sentence_transformers.util import is_sentence_transformer_model
from tokenizers.processors import Sequence as Processors
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from st_magnitude._files import locked_folder
from st_magnitude._upstream import has_fast_bf16
from st_magnitude.data.documents import Documents
from st_magnitude.data.retrieval import RetrievalData, digest
from st_magnitude.evaluation import HybridEvaluator
from st_magnitude.evaluation.judge import judge
from st_magnitude.result import points
from st_magnitude.revela.config import RevelaConfig
from st_magnitude.revela.groups import build_groups
from st_magnitude.revela.loss import RevelaLoss
from st_magnitude.revela.trainer import RevelaTrainer, lora_config
from st_magnitude.saving.export import loading
from st_magnitude.surgery.adapters import merge_lora
from st_magnitude.training import run_folder
from st_magnitude.training.stopping import train_or_stop

logger = logging.getLogger(__name__)

UNSEEN = 16  # groups held out for the gains, at most a tenth of all
# Settings that may change when a run is resumed
FREE = {"epochs", "max_steps", "gradient_checkpointing", "bf16", "save_steps", "resume"}
# without it, transformers asks at the terminal
_NO_CODE = {"trust_remote_code": False}


def load_lm(name: str | Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a causal decoder in float32, which leaves the precision to autocast, and its tokenizer.

    Raises:
        OSError: If there is no such folder or name on the hub.
        ValueError: If the model needs code of its own (``trust_remote_code``).
    """
    with loading("language model", str(name)):
        lm = AutoModelForCausalLM.from_pretrained(str(name), dtype=torch.float32, **_NO_CODE)
        return lm, AutoTokenizer.from_pretrained(str(name), **_NO_CODE)


def load_retriever(name: str | Path, max_length: int = 160) -> SentenceTransformer:
    """Loads a SentenceTransformer, or makes one of a bare decoder as the paper does.

    A decoder gets an end-of-text token after each text, whose state is the embedding (section 4.1,
    as in RepLLaMA), and reads at most ``max_length`` tokens.

    Raises:
        OSError: If there is no such model.
        ValueError: If the tokenizer of a bare decoder has no end-of-text token.
    """
    path = str(name)
    with loading("retriever", path):
        names: list[str] = []
        if not is_sentence_transformer_model(path):
            names = AutoConfig.from_pretrained(path, **_NO_CODE).architectures or []
        if not any(name.endswith("ForCausalLM") for name in names):
            return SentenceTransformer(path).float()  # small steps are lost in bfloat16
        decoder = Transformer(path, max_seq_length=max_length)
    _end_texts(decoder.tokenizer)
    pooling = Pooling(decoder.get_embedding_dimension(), "lasttoken")
    return SentenceTransformer(modules=[decoder, pooling])


def _end_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes the tokenizer append its end-of-text token, which is saved, and count it."""
    if tokenizer.eos_token is None:
        raise ValueError(
            "The decoder's tokenizer has no end-of-text token, whose state would be the embedding."
        )
    if tokenizer("x")["input_ids"][-1] == tokenizer.eos_token_id:
        return
    special = [(tokenizer.eos_token, tokenizer.eos_token_id)]
    end = TemplateProcessing(single=f"$A:0 {tokenizer.eos_token}:0", special_tokens=special)
    core = tokenizer.backend_tokenizer
    core.post_processor = Processors([core.post_processor, end]) if core.post_processor else end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def run(
    corpus: Documents,
    retriever: str | Path,
    lm: str | Path,
    output: str | Path,
    config: RevelaConfig | None = None,
    *,
    data: RetrievalData | None = None,
    say: Callable[[str], None] = logger.info,
) -> dict[str, object]:
    """Trains a retriever on raw text with a language model, and measures it before and after.

    Args:
        corpus: As for `build_groups`. Its last groups, up to sixteen, are held out for
            ``reading_gain`` and ``choice_gain`` (docs/revela.md).
        retriever: Folder or hub id of a SentenceTransformer, all of which is trained, or of a bare
            decoder, which gets last-token pooling and a LoRA.
        lm: Folder or hub id of a causal decoder; it gets a LoRA.
        output: Folder for the retriever, a plain SentenceTransformer, and ``revela.json``.
        data: Judged queries for the retriever, for BM25 and for both fused, before and after.
        say: Function that receives the progress line by line.

    Returns:
        The content of ``revela.json``: settings, log, gains and, with ``data``, the figures on it.
        Of several processes, the first has all of it.

    Raises:
        ValueError: If the corpus has nothing to train on, or a model is not supported.
        FileExistsError: If output holds a finished model, an unfinished run and ``config.resume``
            is False, or a run that was started with other models, settings or groups.
        OSError: If a model or the corpus cannot be found, or another process writes to the output.
        KeyboardInterrupt: At Ctrl-C and at SIGTERM, once the step is done and saved.
    """
    config = config or RevelaConfig()
    output = Path(output)
    with locked_folder(output):
        checkpoint = run_folder.check_output(output, config.resume)
        # before the documents are read, which may take minutes
        model = load_retriever(retriever, config.max_length)
        loss = RevelaLoss(
            model,
            *load_lm(lm),
            temperature=config.temperature,
            read_weight=config.read_weight,
            v_norm=config.v_norm,
            max_length=config.max_length,
        )
        groups = build_groups(corpus, group_size=config.group_size, max_words=config.max_words)
        number = max(1, len(groups) - min(UNSEEN, -(-len(groups) // 10)))
        train = groups.select(range(number))
        unseen = groups.select([*range(number, len(groups))])  # none of a single group
        settings = {key: value for key, value in vars(config).items() if key not in FREE}
        settings |= {"retriever": str(retriever), "lm": str(lm)}
        settings["groups"] = digest(map("\0".join, groups["chunks"]))
        if checkpoint is not None:
            run_folder.check_same_run(output, settings)
        say(f"Training: {number:,} groups of {config.group_size} chunks, {len(unseen)} held out.")
        trainer = _trainer(config, loss, train, unseen, output)
        is_first = trainer.is_world_process_zero()
        if is_first and checkpoint is None:
            run_folder.record_run(output, settings)
        gains = {}
        if len(unseen):
            gains["before"] = _gains(trainer, say)
        record: dict[str, object] = {}
        evaluator = None
        if data is not None and is_first:
            judged = (data.queries, data.corpus, data.relevant)
            evaluator = HybridEvaluator(*judged, show_progress_bar=len(data.corpus) > 1000)
            record["before"] = _measure(evaluator, model, "before", say)
            before = dict(evaluator.per_query)
        if checkpoint is not None:  # a run that has made all its steps does not train
            trainer.load_lm_checkpoint(checkpoint)
        train_or_stop(trainer, checkpoint, say)
        if len(unseen):
            gains["after"] = _gains(trainer, say)
        merge_lora(model)
        record |= {
            "corpus": str(corpus) if isinstance(corpus, str | Path) else None,
            "groups": {"train": len(train), "held_out": len(unseen)},
            "loss": loss.get_config_dict(),
            "processes": trainer.args.world_size,
            "log": trainer.state.log_history,
            "gains": gains,
        }
        if is_first:
            if evaluator is not None:
                record["after"] = _measure(evaluator, model, "after", say)
                record["differences"] = _differences(evaluator.per_query, before, say)
            with run_folder.saved(model, output, "revela.json", record):
                pass  # nothing is added to it
            run_folder.remove_checkpoints(output)
        return record


def _trainer(
    config: RevelaConfig, loss: RevelaLoss, groups: Dataset, unseen: Dataset, output: Path
) -> RevelaTrainer:
    is_decoder = any(getattr(module, "is_causal", False) for module in loss.model.modules())
    lora = lora_config(r=config.lora_rank, lora_alpha=max(1, config.lora_rank // 4))
    rate = config.learning_rate
    if rate is None:
        rate = 3e-4 if is_decoder else 5e-5
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output / "checkpoints"),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=rate,
        gradient_checkpointing=config.gradient_checkpointing,
        bf16=has_fast_bf16() if config.bf16 is None else config.bf16,
        use_cpu=loss.model.device.type == "cpu",
        warmup_steps=config.warmup_steps,
        logging_steps=0.02,
        logging_first_step=True,
        save_steps=config.save_steps,
        save_total_limit=1,
        seed=config.seed,
        report_to=[],
    )
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


def _gains(trainer: RevelaTrainer, say: Callable[[str], None]) -> dict[str, float]:
    """The gains of reading others and of choosing among them, on held-out groups, in nats."""
    trainer.evaluate()
    found = trainer.state.log_history[-1]
    reading = found["eval_reading_gain"]
    choice = found["eval_choice_gain"]
    say(f"Gain on held-out groups:  reading {reading:+.3f} nats, choice {choice:+.3f} nats")
    return {"reading_gain": reading, "choice_gain": choice}


def _measure(
    evaluator: HybridEvaluator, model: SentenceTransformer, when: str, say: Callable[[str], None]
) -> dict[str, float]:
    found = evaluator(model)
    figures = (f"{name} {found[f'{name}_ndcg@10']:.3f}" for name in ("dense", "bm25", "hybrid"))
    say(f"{when:6}  nDCG@10:  {'  '.join(figures)}")
    return found


def _differences(
    after: Mapping[str, NDArray[np.float64]],
    before: Mapping[str, NDArray[np.float64]],
    say: Callable[[str], None],
) -> dict[str, tuple[float, float, float]]:
    gains = {}
    for name in ("dense", "hybrid"):
        gains[name] = judge(after[name] - before[name]).gain
        say(f"{name}: {points(gains[name])} of nDCG@10, with 95 % interval")
    return gains
