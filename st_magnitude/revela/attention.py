"""In-batch attention: every decoder layer of a language model also attends to the other documents of its group.

transformers needs no fork for this. The batch is stacked as [e; h] (2B sequences), transformers' ``AttentionInterface``
calls the function of this module in every layer, and the retriever's similarities reach it as a keyword argument of the
model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from st_magnitude._upstream import checkpoint_options, supports_attention_interface

__all__ = ["Neighbours", "attach", "base_model", "in_batch_attention", "next_token_loss", "two_streams"]

NAME = "st_magnitude_in_batch"

Backend = Literal["auto", "exact", "sparse"]
SPARSE_BELOW = 1e-7  # a smaller similarity does not change a float32 output
PAIRS_PER_CHUNK = 16
TOKENS_PER_CHUNK = 512  # of the logits
EPS = 1e-6  # of Eq. 6
MASKED = -1e3  # exp() of this score is 0 in every dtype, and float16 can hold the score divided by the scale


@dataclass
class Neighbours:
    """Which documents attend to which others, and with what weight; the same for all layers of a pass."""

    similarity: Tensor  # (B, B), row i holds Sim(D_i, ·); zero on the diagonal and between groups
    # The pairs (i, j) to compute, grouped by ranges of i: (first, last + 1, i - first, j), the last two (P,).
    chunks: list[tuple[int, int, Tensor, Tensor]]
    key_mask: Tensor | None = None  # (B, L), True at tokens and False at padding; None if nothing is padded
    v_norm: bool = True  # whether to divide by the value norms, Eq. 6
    calls: int = 0  # number of layers that have used this object

    @classmethod
    def of(
        cls,
        similarity: Tensor,
        attention_mask: Tensor | None = None,
        groups: Tensor | None = None,
        *,
        backend: Backend = "auto",
        v_norm: bool = True,
    ) -> Neighbours:
        """Chooses the pairs for similarity (B, B), attention_mask (B, L) and groups (B,), one group by default.

        ``"exact"`` computes all pairs of a group. ``"sparse"`` computes those with a similarity above 1e-7: outputs
        change by less than the precision of float32, and the other pairs get no gradient. ``"auto"`` is sparse when
        that leaves out at least half of the pairs. The CPU chooses, once in a pass: layers do not wait for the GPU.
        """
        count, device = len(similarity), similarity.device
        allowed = ~torch.eye(count, dtype=torch.bool)
        if groups is not None:
            groups = groups.cpu()
            allowed &= groups[:, None] == groups[None]
        if backend != "exact":
            active = allowed & (similarity.detach() > SPARSE_BELOW).cpu()
            if backend == "sparse" or 2 * int(active.sum()) <= int(allowed.sum()):
                allowed = active
        chunks, first = [], 0
        queries, sources = (index.to(device) for index in allowed.nonzero(as_tuple=True))
        pairs = [0, *allowed.sum(1).cumsum(0).tolist()]  # pairs[i] is where the pairs of document i begin
        for last in range(1, count + 1):
            if last == count or pairs[last + 1] - pairs[first] > PAIRS_PER_CHUNK:
                part = slice(pairs[first], pairs[last])
                chunks.append((first, last, queries[part] - first, sources[part]))
                first = last
        key_mask = None
        if attention_mask is not None:
            tokens = attention_mask.cpu().bool()
            if empty := (~tokens.any(1)).nonzero().flatten().tolist():
                raise ValueError(f"Documents {empty} of the batch have no tokens; remove empty chunks.")
            key_mask = None if bool(tokens.all()) else tokens.to(device)
        return cls(similarity, chunks, key_mask, v_norm)


def in_batch_attention(
    query: Tensor, key: Tensor, value: Tensor, neighbours: Neighbours, scaling: float | None = None
) -> Tensor:
    """Returns b_i of Eq. 7, which each document takes from the other documents of its group.

        b_i = sum_{j != i} Sim(D_i, D_j) · b~_ij                                                         (Eq. 7)
        b~_ij = P V_j / (P |V_j| + eps),   P = softmax(Q_i K_j^T · scaling), full, for each j by itself    (Eq. 5, 6)

    Eq. 6 needs no second product. The rows of P sum to one, so P |V| + eps = P (|V| + eps), and

        b~_ij = softmax(Q_i K_j^T · scaling + log(|V_j| + eps)) · V_j / (|V_j| + eps)

    is one ordinary attention with a bias. The bias is an additional channel of the keys, which meets a 1 in the
    queries; the same channel hides padding. Therefore no mask and no (L, L) scores exist outside PyTorch's fused
    kernel, which shares a key head among the query heads of its group. The function handles a few pairs at a time and
    recomputes them in the backward pass.

    Args:
        query: (B, H, L, d) queries of the h stream, positions applied.
        key: (B, H_kv, L, d) keys of the e stream; H is a multiple of H_kv.
        value: (B, H_kv, L, d_v) values of the e stream; d_v differs from d in multi-head latent attention.
        neighbours: The weights and the pairs that count.
        scaling: Factor of the scores, d^-0.5 by default.

    Returns:
        (B, H, L, d_v) in the query's dtype; sums over documents are taken in float32 or wider.

    Example:
        >>> import torch
        >>> q, k, v = torch.randn(3, 3, 4, 5, 8).unbind()  # 3 documents, 4 heads, 5 tokens
        >>> similarity = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.2, 0.8, 0.0]])
        >>> in_batch_attention(q, k, v, Neighbours.of(similarity)).shape
        torch.Size([3, 4, 5, 8])

    Source: Revela (Cai et al.), section 3.2.
    """
    n_documents, n_heads, length, dim = query.shape
    value_dim = value.shape[-1]
    if scaling is None:
        scaling = dim**-0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    bias = value.new_zeros(value.shape[:-1], dtype=wide)  # (B, H_kv, L), in scores
    if neighbours.v_norm:
        sizes = torch.linalg.vector_norm(value, dim=-1, dtype=wide) + EPS
        value = (value / sizes[..., None]).to(value.dtype)
        bias = sizes.log()
    if neighbours.key_mask is not None:
        bias = bias.masked_fill(~neighbours.key_mask[:, None].to(bias.device), MASKED)
    key = torch.cat([key, (bias[..., None] / scaling).to(key.dtype)], -1)  # (B, H_kv, L, d + 1)
    width = -(-max(dim + 1, value_dim) // 8) * 8  # d': fused kernels need a multiple of 8, the same for all three
    key, value = pad(key, (0, width - dim - 1)), pad(value, (0, width - value_dim))
    query = pad(pad(query, (0, 1), value=1.0), (0, width - dim - 1))
    query = query.reshape(n_documents, key.shape[1], -1, width)  # (B, H_kv, rL, d')

    def attend(query: Tensor, key: Tensor, value: Tensor, similarity: Tensor, i: Tensor, j: Tensor) -> Tensor:
        found = scaled_dot_product_attention(query[i], key[j], value[j], scale=scaling)  # (P, H_kv, rL, d')
        weighted = found * similarity[i, j].to(wide)[:, None, None, None]
        return torch.zeros_like(query, dtype=wide).index_add(0, i, weighted)  # (n, H_kv, rL, d')

    parts = []
    for first, last, i, j in neighbours.chunks:
        inputs = (query[first:last], key, value, neighbours.similarity[first:last], i, j)
        # The backward pass computes the pairs again, so their outputs take no memory until then.
        if torch.is_grad_enabled():
            parts.append(checkpoint(attend, *inputs, use_reentrant=False, preserve_rng_state=False))  # no dropout
        else:
            parts.append(attend(*inputs))
    return torch.cat(parts)[..., :value_dim].reshape(n_documents, n_heads, length, value_dim).to(query.dtype)


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
    """Attention of one layer for the stacked batch [e; h]: self-attention for both (Eq. 4), and h + b for h (Eq. 8).

    Without ``in_batch`` this is transformers' ``sdpa``.
    """
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if in_batch is None:
        return output, None
    if unsupported := sorted(name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None):
        raise ValueError(f"{type(module).__name__} passes {unsupported} to attention, which Eq. 5 does not include.")
    in_batch.calls += 1
    e, h = output.chunk(2)  # (B, L, H, d) each
    keys, _ = key.chunk(2)
    values, _ = value.chunk(2)
    _, queries = query.chunk(2)
    b = in_batch_attention(queries, keys, values, in_batch, scaling)  # (B, H, L, d)
    return torch.cat([e, h + b.transpose(1, 2)]), None


def base_model(lm: nn.Module) -> PreTrainedModel:
    """The transformers model inside peft's wrapper, with its LoRA layers."""
    return lm.get_base_model() if hasattr(lm, "get_base_model") else lm  # type: ignore[operator, return-value]


def _check_supported(base: PreTrainedModel) -> None:
    """Refuses a language model whose attention differs from Eq. 3-8, naming the reason."""
    config = base.config.get_text_config()
    reason = ""
    if getattr(config, "is_encoder_decoder", False) or base.get_output_embeddings() is None:
        reason = "is not a causal decoder with an output layer; use AutoModelForCausalLM."
    elif not supports_attention_interface(base):
        reason = (
            "does not compute attention through transformers' AttentionInterface, so in-batch attention cannot reach "
            "it. Use another decoder; Llama, Qwen2, Qwen3, Mistral, SmolLM, Gemma (1) and DeepSeek V3 work."
        )
    elif base.get_decoder() is base:
        reason = "does not separate its decoder from its output layer (get_decoder); use another model."
    elif any(getattr(module, "is_causal", True) is False for module in base.modules()):
        reason = "attends in both directions; use a causal decoder."
    elif any(part.rsplit(".", 1)[-1] == "sinks" for part, _ in base.named_parameters()):
        reason = "has attention sinks, which Eq. 5 does not include; it is not supported."
    for option in ("attn_logit_softcapping", "final_logit_softcapping", "attn_logit_softcap"):
        if value := getattr(config, option, None):
            reason = reason or f"has {option} = {value}; softcapped models are not supported."
    for option in ("logit_scale", "logits_scaling"):
        if (value := getattr(config, option, None)) not in (None, 1, 1.0):
            reason = reason or f"has {option} = {value}; scaled logits are not supported."
    if reason:
        raise ValueError(f"{type(base).__name__} {reason}")


def attach(lm: nn.Module) -> None:
    """Switches all layers of a decoder to in-batch attention, in place; nothing of it is saved with the model.

    Without ``in_batch`` (generation, evaluation) the model computes what transformers' ``sdpa`` computes.

    Raises:
        ValueError: If the attention of the model differs from Eq. 3-8.
    """
    base = base_model(lm)
    _check_supported(base)
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)  # without it transformers builds no mask at all
    base.set_attn_implementation(NAME)


def two_streams(
    lm: nn.Module, input_ids: Tensor, attention_mask: Tensor, neighbours: Neighbours
) -> tuple[Tensor, Tensor]:
    """The last hidden states of both streams, (B, L, D) each: e of the plain model, and h, which attends to others too.

    Documents (B, L) may be padded on either side; values at padding are meaningless. The model must have been through
    :func:`attach`, and may not use reentrant gradient checkpointing.

    Source: Revela, Eq. 3-8, section 3.4.
    """
    base = base_model(lm)
    decoder = base.get_decoder()
    layers = [module for module in base.modules() if isinstance(module, GradientCheckpointingLayer)]
    recomputed = [layer for layer in layers if layer.gradient_checkpointing and layer.training]
    if any(checkpoint_options(layer).get("use_reentrant", True) for layer in recomputed):
        raise ValueError(
            f"Reentrant gradient checkpointing of {type(base).__name__} cuts the retriever off from its gradient; call "
            "lm.gradient_checkpointing_enable({'use_reentrant': False})."
        )
    mask = attention_mask.to(torch.bool)
    inputs: dict[str, Any] = {}
    if not bool((mask[:, 1:] <= mask[:, :-1]).all()):  # padding before tokens
        inputs["attention_mask"] = mask.repeat(2, 1).to(attention_mask.dtype)
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0).repeat(2, 1)
    # with padding on the right, causal attention needs no mask: tokens never see what comes after them
    neighbours.calls = 0
    states = decoder(input_ids=input_ids.repeat(2, 1), use_cache=False, in_batch=neighbours, **inputs).last_hidden_state
    if neighbours.calls != decoder.config.num_hidden_layers:
        raise ValueError(
            f"In-batch attention reached {neighbours.calls} of {decoder.config.num_hidden_layers} layers of "
            f"{type(base).__name__}; the others compute something other than attention, or drop keyword arguments."
        )
    e, h = states.chunk(2)
    return e, h


def next_token_loss(lm: nn.Module, states: Tensor, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats of states (B, L, D), over all tokens except the first of each document.

    The (tokens, vocabulary) logits exist for 512 tokens at a time, in float32, and the backward pass recomputes them.
    The loss is 0 if no document has two tokens.
    """
    head = base_model(lm).get_output_embeddings()
    mask = attention_mask.to(torch.bool)
    counted = mask[:, 1:] & mask[:, :-1]
    states, labels = states[:, :-1][counted], input_ids[:, 1:][counted]  # (N, D), (N,)

    def summed(states: Tensor, labels: Tensor) -> Tensor:
        logits = head(states)
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, reduction="sum")

    total = states.sum() * 0.0
    for part, targets in zip(states.split(TOKENS_PER_CHUNK), labels.split(TOKENS_PER_CHUNK), strict=True):
        total = total + checkpoint(summed, part, targets, use_reentrant=False)
    return total / max(len(labels), 1)
