"""Every private name of sentence-transformers, transformers and torch that this package relies on.

Each has the reason why no public name serves, and ``tests/test_upstream.py`` touches it, so an
upstream release that moves one fails in a test that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import gradcache
from sentence_transformers.base.losses.gradcache import (
    CachedLossMixin,
    _create_minibatch,
    _get_batch_size,
)
from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Router
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

# --- sentence-transformers ------------------------------------------------------------------------


def minibatch_of(features: dict[str, Tensor], begin: int, end: int) -> dict[str, Tensor]:
    """Rows begin to end of the features of one text column, as sentence-transformers' own cached
    losses slice them, flattened inputs included. Those of a table are not sliced."""
    return dict(features) if "offsets" in features else _create_minibatch(features, begin, end)


def batch_size_of(features: Mapping[str, Tensor]) -> int:
    """The number of texts in the features of one text column; flattened inputs make this more than
    a shape."""
    return len(features["offsets"]) if "offsets" in features else _get_batch_size(dict(features))


# Before 6.2 a cached loss synchronises gradients at each mini-batch, at which a rank with more of
# them waits forever, and the Trainer never clears the gradients of a loss's own parameters.
SINCE_6_2 = hasattr(gradcache, "_ddp_replay_context")


class CachedLoss(CachedLossMixin):
    """Gradient caching in which the column of a table is one mini-batch: it has no rows of tokens
    to cut, and sentence-transformers refuses it."""

    def embed_minibatch_iter(
        self, sentence_feature: dict[str, Tensor], *args: Any, **options: Any
    ) -> Iterator[tuple[Tensor, Any]]:
        if "offsets" in sentence_feature:
            options["ranges"] = [(0, batch_size_of(sentence_feature))]
        return super().embed_minibatch_iter(sentence_feature, *args, **options)


@contextmanager
def encodes_alone(model: SentenceTransformer) -> Iterator[None]:
    """Within the block, ``model.encode`` computes in this process only, and not in all of a
    Trainer, each with its own copy of the model. The public way is ``encode(device=...)``, which
    every call would have to pass."""
    shared = getattr(model, "_distributed_inference", None)  # releases below 6.2 have none
    model._distributed_inference = None
    try:
        yield
    finally:
        model._distributed_inference = shared


def tokenizer_of(model: BaseModel, task: str | None) -> Any:
    """The tokenizer that reads texts of a task. A Router has one for each route, and no public way
    to ask for it."""
    first: Any = model[0]
    if isinstance(first, Router):
        routes: Any = first.sub_modules
        first = routes[first._resolve_route(task=task, modality="text")][0]
    return first.tokenizer


def load_with_classes(
    path: str, classes: Mapping[str, type], **options: object
) -> SentenceTransformer:
    """Loads a model whose modules.json names classes of ours, without trust_remote_code for all
    other classes."""
    return SentenceTransformer._load_with_module_classes(path, dict(classes), **options)


def tell_texts_by_numbers(sampler: NoDuplicatesBatchSampler, rows: Dataset) -> None:
    """Gives a sampler a number for each different text: it makes the same batches without reading
    the rows one by one in every epoch. Its public option for this, ``precompute_hashes``, starts
    processes that hash the texts."""
    table = rows.with_format("arrow")[:]
    texts = pyarrow.chunked_array([part for column in table.columns for part in column.chunks])
    numbers = [np.asarray(part.indices) for part in texts.dictionary_encode().chunks]
    sampler.precompute_hashes = True
    sampler._row_hashes = np.concatenate(numbers).reshape(table.num_columns, -1).T


# --- transformers ---------------------------------------------------------------------------------


def load_checkpoint_into(trainer: Trainer, checkpoint: Path | str) -> None:
    """Loads the weights of a checkpoint without training; the public ``train`` would make one more
    step."""
    trainer._load_from_checkpoint(str(checkpoint))


def supports_attention_interface(model: PreTrainedModel) -> bool:
    """Whether a model computes its attention through transformers' AttentionInterface."""
    return bool(model._supports_attention_backend)


def forget_adapter(model: PreTrainedModel) -> None:
    """Makes a model whose adapters were merged an ordinary one; its public methods still expect the
    adapters, and after ``load_adapter`` it saves weights under the names of an adapter's file."""
    if getattr(model, "_hf_peft_config_loaded", False):
        model._hf_peft_config_loaded = False
        del model.peft_config
        model._weight_conversions = None  # type: ignore[assignment]
    model.requires_grad_(True)


# --- torch ----------------------------------------------------------------------------------------


def forward_hooks(module: nn.Module) -> list[object]:
    """The forward hooks of a module; torch can add and remove hooks, but cannot list them."""
    return list(module._forward_hooks.values())


def has_gradient_hooks(weight: Tensor) -> bool:
    """Whether hooks wait for the gradient of a weight; torch cannot list these either."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def num_writes(x: Tensor) -> int:
    """How often a tensor, or one that was detached from it, was written into in place."""
    return x._version


def has_fast_bf16() -> bool:
    """Whether this machine computes in bfloat16: GPUs since Ampere, and CPUs with instructions for
    it (AVX-512 BF16, AMX or Arm's), about which torch has no public question."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
