"""The texts of a batch in one row of tokens, without padding, on a CPU.

sentence-transformers packs a batch like this for FlashAttention and pads it otherwise, so that a lemma of 5 tokens
costs as much as the longest one of its column. Here only the attention pads, so that a step is faster, and the
embeddings and gradients are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DataCollatorWithFlattening

KEYS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


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
    q, k, v = (x[0].transpose(0, 1)[index].transpose(1, 2) for x in (query, key, value))  # (n, H, L, D)
    found = scaled_dot_product_attention(q, k, v, mask[:, None, None], dropout, scale=scaling)
    return found.transpose(1, 2)[mask].unsqueeze(0), None


AttentionInterface.register("packed", attend)


def without_padding(model: SentenceTransformer) -> SentenceTransformer:
    """The model, which reads texts without padding from here on; its Transformer, if it has one, must be an encoder."""
    encoder = model[0]
    if isinstance(encoder, Transformer):
        encoder.model.config._attn_implementation = "packed"
        encoder.data_collator = DataCollatorWithFlattening(return_seq_idx=True, return_flash_attn_kwargs=True)
        encoder.can_flatten_inputs = True
        encoder._flatten_position_offset = encoder._infer_flatten_position_offset()
        if encoder.model_forward_params is not None:
            encoder.model_forward_params |= KEYS
    return model
