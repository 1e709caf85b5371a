"""The texts of a batch, read back from its tokens: what the features of a column say, and which prompt they have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sentence_transformers.base.model import BaseModel
from torch import Tensor

from st_magnitude._upstream import batch_size_of, tokenizer_of
from st_magnitude.surgery.raw import prompt_of, unwrapped

__all__ = ["Features", "spelled", "split_prompt", "tokens_of", "warn_without_prompts"]

logger = logging.getLogger(__name__)

Features = Mapping[str, Any]


def tokens_of(features: Features) -> tuple[Tensor, Tensor, Tensor] | None:
    """For each token of a column its id, the number of its text, and its place in it or -1 for padding: (N,) each.

    None for inputs that are not plain text, and for models without token ids.
    """
    if "input_ids" not in features or "pixel_values" in features or features.get("modality", "text") != "text":
        return None
    ids = features["input_ids"]
    if "offsets" in features or "cu_seq_lens_q" in features:  # a StaticEmbedding, or a batch for FlashAttention
        starts = features["offsets"] if "offsets" in features else features["cu_seq_lens_q"][:-1]
        tokens = torch.arange(ids.numel(), device=ids.device)
        texts = torch.searchsorted(starts.long(), tokens, right=True) - 1
        return ids.flatten(), texts, tokens - starts[texts]
    if "attention_mask" not in features:
        return None
    mask = features["attention_mask"].long()  # (B, L)
    texts = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    return ids.flatten(), texts.flatten(), (mask.cumsum(dim=1) * mask - 1).flatten()


def spelled(features: Features, model: BaseModel) -> list[str]:
    """The B texts of a column as the tokens of the model spell them; waits for the device."""
    tokens = tokens_of(features)
    if tokens is None:
        raise ValueError("A guide with another tokenizer reads texts, but a column of the batch holds other inputs.")
    rows: list[list[int]] = [[] for _ in range(batch_size_of(features))]
    for token, text, place in zip(*(x.tolist() for x in tokens), strict=True):
        if place >= 0:
            rows[text].append(token)
    tokenizer = tokenizer_of(model, features.get("task"))
    decode = getattr(tokenizer, "batch_decode", None) or tokenizer.decode_batch  # of transformers, or not
    found: list[str] = decode(rows, skip_special_tokens=True)
    return found


def split_prompt(features: Features, model: BaseModel) -> tuple[str, list[str]]:
    """The prompt of the model with which all texts of a column begin, or "", and the B texts without it."""
    texts = spelled(features, model)
    for prompt in sorted({prompt for prompt in model.prompts.values() if prompt}, key=len, reverse=True):
        [begin] = spelled(model.preprocess([prompt], task=features.get("task")), model)
        begin = begin.strip()  # empty if all its tokens are special or unknown, which texts do not show either
        if all(text.startswith(begin) for text in texts):
            return prompt, [text[len(begin) :].lstrip() for text in texts]
    return "", texts


def warn_without_prompts(columns: Sequence[Features], model: Any, who: str) -> None:
    """Warns if a model puts prompts before texts, and these columns, the queries first, have none."""
    model = unwrapped(model)
    if not isinstance(model, BaseModel):
        return
    for number, features in enumerate(columns, start=1):
        role = "query" if number == 1 else "document"
        # A Transformer notes the length of a prompt; a prompt may also stand in the data.
        if not (prompt := prompt_of(model, role)) or "prompt_length" in features or tokens_of(features) is None:
            continue
        if not split_prompt(features, model)[0]:
            logger.warning(
                "encode_%s puts the prompt %r before a text, but text column %d of the first batch of %s begins with "
                "no prompt of the model: it trains on other texts than it will be used with. Give "
                "SentenceTransformerTrainingArguments prompts={column: prompt} for each column.",
                role,
                prompt,
                number,
                who,
            )
