"""In-batch attention: every layer of a decoder also attends to the other documents of its group.

transformers needs no fork for this. The batch is stacked as [e; h] (2B sequences), transformers'
``AttentionInterface`` calls the function of this module in every layer, and the retriever's
similarities reach it as a keyword argument of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from st_magnitude._upstream import supports_attention_interface

NAME = "st_magnitude_in_batch"

SPARSE_BELOW = 1e-7  # pairs of a smaller similarity change no float32 output
TOKENS_PER_CHUNK = 512  # tokens whose logits are held at a time
EPS = 1e-6  # of Eq. 6
MASKED = -1e3  # the bias of padding: exp() of it is 0, and float16 holds it divided by the scale


class Neighbours:
    """Which documents attend to which others, and how much; the same for all layers of a pass.

    Row i of similarity (B, B) holds Sim(D_i, ·), zero on the diagonal and between groups, and
    attention_mask is (B, L). Only pairs above 1e-7 get a gradient. They are chosen on the CPU, once
    in a pass: layers do not wait for the GPU. ``v_norm``: whether to divide by value norms, Eq. 6.
    """

    def __init__(self, similarity: Tensor, attention_mask: Tensor, *, v_norm: bool = True) -> None:
        self.similarity = similarity
        self.v_norm = v_norm
        self.key_mask = attention_mask.bool()
        self.calls = 0  # number of layers that have used this object
        allowed = (similarity.detach() > SPARSE_BELOW).cpu()
        device = similarity.device
        self.read = [row.nonzero()[:, 0].to(device) for row in allowed]  # by each document


def in_batch_attention(
    query: Tensor, key: Tensor, value: Tensor, neighbours: Neighbours, scaling: float | None = None
) -> Tensor:
    """b_i of Eq. 7, what each document reads from the other documents of its group.

        b_i = sum_{j != i} Sim(D_i, D_j) · b~_ij                                             (Eq. 7)
        b~_ij = P V_j / (P |V_j| + eps),   P = softmax(Q_i K_j^T · scaling), each j alone  (5, 6)

    The rows of P sum to one, so P |V| + eps = P (|V| + eps), and

        b~_ij = softmax(Q_i K_j^T · scaling + log(|V_j| + eps)) · V_j / (|V_j| + eps)

    is one ordinary attention with a bias, which is an additional channel of the keys and meets a 1
    in the queries; the same channel hides padding. So no mask and no (L, L) scores exist outside
    PyTorch's fused kernel. Documents are handled one at a time, and again in the backward pass.

    Queries (B, H, L, d) of the h stream, keys (B, H_kv, L, d) and values (B, H_kv, L, d_v) of the e
    stream give (B, H, L, d_v), with sums over documents in float32 or wider.

    Source: Revela (Cai et al.), section 3.2.
    """
    n_documents, n_heads, length, dim = query.shape
    value_dim = value.shape[-1]  # differs from dim in multi-head latent attention
    scaling = scaling or dim**-0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    bias = value.new_zeros(value.shape[:-1], dtype=wide)  # (B, H_kv, L), in scores
    if neighbours.v_norm:
        sizes = torch.linalg.vector_norm(value, dim=-1, dtype=wide) + EPS
        value = (value / sizes[..., None]).to(value.dtype)
        bias = sizes.log()
    bias = bias.masked_fill(~neighbours.key_mask[:, None], MASKED)
    key = torch.cat([key, (bias[..., None] / scaling).to(key.dtype)], -1)  # (B, H_kv, L, d + 1)
    # fused kernels need a multiple of 8 dimensions d', the same for all three
    width = -(-max(dim + 1, value_dim) // 8) * 8
    key = pad(key, (0, width - dim - 1))
    value = pad(value, (0, width - value_dim))
    query = pad(pad(query, (0, 1), value=1.0), (0, width - dim - 1))
    query = query.reshape(n_documents, key.shape[1], -1, width)  # (B, H_kv, rL, d')

    def attend(
        query: Tensor, key: Tensor, value: Tensor, weights: Tensor, others: Tensor
    ) -> Tensor:
        # one document (H_kv, rL, d') reads P others, (P, H_kv, L, d')
        same = query.repeat(len(others), 1, 1, 1)
        found = scaled_dot_product_attention(same, key[others], value[others], scale=scaling)
        return (found * weights[others].to(wide)[:, None, None, None]).sum(0)

    parts = []
    for own, weights, others in zip(query, neighbours.similarity, neighbours.read, strict=True):
        inputs = (own, key, value, weights, others)
        parts.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))
    read = torch.stack(parts)[..., :value_dim]
    return read.reshape(n_documents, n_heads, length, value_dim).to(query.dtype)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    in_batch: Neighbours | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer for the stacked batch [e; h]: self-attention (Eq. 4), and h + b for h (Eq. 8)."""
    output, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    if in_batch is None:
        return output, None
    names = ("softcap", "s_aux", "position_bias")
    if unsupported := [name for name in names if kwargs.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} passes {unsupported} to attention, which Eq. 5 does not have."
        )
    in_batch.calls += 1
    e, h = output.chunk(2)  # (B, L, H, d) each
    keys, _ = key.chunk(2)
    values, _ = value.chunk(2)
    _, queries = query.chunk(2)
    b = in_batch_attention(queries, keys, values, in_batch, scaling)  # (B, H, L, d)
    return torch.cat([e, h + b.transpose(1, 2)]), None


def base_model(lm: nn.Module) -> PreTrainedModel:
    """The transformers model inside peft's wrapper, with its LoRA layers."""
    base: PreTrainedModel = getattr(lm, "get_base_model", lambda: lm)()  # type: ignore[assignment]
    return base


def _check_supported(base: PreTrainedModel) -> None:
    """Refuses a language model whose attention differs from Eq. 3-8, naming the reason."""
    config = base.config.get_text_config()
    factors = {name: getattr(config, name, None) for name in ("logit_scale", "logits_scaling")}
    caps = ("attn_logit_softcapping", "final_logit_softcapping", "attn_logit_softcap")
    factors |= {name: getattr(config, name, None) or 1 for name in caps}
    changed = {name: value for name, value in factors.items() if value not in (None, 1, 1.0)}
    reason = ""
    if getattr(config, "is_encoder_decoder", False) or base.get_output_embeddings() is None:
        reason = "is not a causal decoder with an output layer; use AutoModelForCausalLM."
    elif not supports_attention_interface(base):
        reason = (
            "does not compute attention through transformers' AttentionInterface. Use another "
            "decoder; Llama, Qwen2, Qwen3, Mistral, SmolLM, Gemma (1) and DeepSeek V3 work."
        )
    elif base.get_decoder() is base:
        reason = "does not separate its decoder from its output layer; use another model."
    elif any(getattr(module, "is_causal", True) is False for module in base.modules()):
        reason = "attends in both directions; use a causal decoder."
    elif any(name.endswith("sinks") for name, _ in base.named_parameters()):
        reason = "has attention sinks, which Eq. 5 does not include; it is not supported."
    elif changed:
        reason = f"scales or caps its scores or logits, which is not supported: {changed}."
    if reason:
        raise ValueError(f"{type(base).__name__} {reason}")


def set_in_batch_attention(lm: nn.Module) -> None:
    """Switches all layers of a decoder to in-batch attention, in place; it is not saved. Without
    ``in_batch`` (generation, evaluation) the model computes what ``sdpa`` computes."""
    base = base_model(lm)
    _check_supported(base)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers builds no mask
    base.set_attn_implementation(NAME)


def two_streams(lm: nn.Module, input_ids: Tensor, neighbours: Neighbours) -> tuple[Tensor, Tensor]:
    """Last hidden states, (B, L, D) each, of the plain model (e) and of h, which reads others too
    (section 3.4), of documents (B, L) with padding on the right, where they mean nothing."""
    base = base_model(lm)
    decoder = base.get_decoder()
    neighbours.calls = 0
    # causal attention needs no mask: no token sees the padding after it
    output = decoder(input_ids=input_ids.repeat(2, 1), use_cache=False, in_batch=neighbours)
    e, h = output.last_hidden_state.chunk(2)
    if neighbours.calls != decoder.config.num_hidden_layers:
        raise ValueError(
            f"In-batch attention reached {neighbours.calls} of {decoder.config.num_hidden_layers} "
            f"layers of {type(base).__name__}; the others compute something other than attention, "
            "or drop keyword arguments."
        )
    return e, h


def next_token_loss(
    lm: nn.Module, states: Tensor, input_ids: Tensor, attention_mask: Tensor
) -> Tensor:
    """Mean next-token cross-entropy in nats of states (B, L, D); 0 if no token has a predecessor.
    Logits exist for 512 tokens at a time, and are computed again in the backward pass."""
    head = base_model(lm).get_output_embeddings()
    mask = attention_mask.to(torch.bool)
    counted = mask[:, 1:] & mask[:, :-1]
    states = states[:, :-1][counted]  # (N, D)
    labels = input_ids[:, 1:][counted]  # (N,)

    def summed(states: Tensor, labels: Tensor) -> Tensor:
        logits = head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(logits, labels, reduction="sum")

    total = states.sum() * 0.0
    parts = (rows.split(TOKENS_PER_CHUNK) for rows in (states, labels))
    for part, targets in zip(*parts, strict=True):
        total = total + checkpoint(summed, part, targets, use_reentrant=False)
    return total / max(len(labels), 1)
