"""Revela's Eq. 3-8 as they are printed: loops over documents, heads and tokens, in float64. And tiny decoders."""

from __future__ import annotations

import math
from types import MethodType

import _tiny
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

VOCABULARY = 40
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma")


def decoder(family: str) -> PreTrainedModel:
    """A random decoder in float64, large weights, norms computed in float64 too (transformers' go to float32)."""
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": False}
    model = _tiny.decoder(family, **ids, **options).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_rms_norm, module)
    return model.eval()


def _rms_norm(self: nn.Module, x: Tensor) -> Tensor:
    gain = 1.0 + self.weight if "Gemma" in type(self).__name__ else self.weight
    eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
    return gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (L, d)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def weights_of(query: Tensor, keys: Tensor) -> Tensor:
    """What one token reads of each of the others: a softmax."""
    scores = torch.stack([query @ key / math.sqrt(len(query)) for key in keys])
    powers = (scores - scores.max()).exp()
    return powers / powers.sum()


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Eq. 4 for one document and one head: (L, d)."""
    return torch.stack([weights_of(q, key[: k + 1]) @ value[: k + 1] for k, q in enumerate(query)])


def cross_attention(query: Tensor, key: Tensor, value: Tensor, v_norm: bool, eps: float = 1e-6) -> Tensor:
    """Eq. 5 and 6 for one pair of documents and one head: (L_i, d)."""
    rows = []
    for q in query:
        weights = weights_of(q, key)
        b, size = weights @ value, weights @ value.norm(dim=1)
        rows.append(b / (size + eps) if v_norm else b)
    return torch.stack(rows)


def streams(
    lm: PreTrainedModel, documents: list[Tensor], similarity: Tensor, groups: list[int], v_norm: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Two passes, document by document, without padding: last states e_i and h_i, (L_i, D)."""
    model, config = lm.model, lm.config
    e = [model.embed_tokens(ids) for ids in documents]
    if config.model_type == "gemma" and not hasattr(model.embed_tokens, "embed_scale"):
        e = [x * config.hidden_size**0.5 for x in e]
    h = list(e)
    n_heads, n_keys = config.num_attention_heads, config.num_key_value_heads
    shared = [a * n_keys // n_heads for a in range(n_heads)]  # the key head of each query head
    for layer in model.layers:
        attention = layer.self_attn

        def heads(x: Tensor, projection: nn.Module, count: int, norm: str | None, attention=attention) -> list[Tensor]:
            split = projection(x).view(len(x), count, -1)
            if norm is not None and hasattr(attention, norm):
                split = getattr(attention, norm)(split)
            if norm is None:
                return list(split.unbind(1))
            cos, sin = model.rotary_emb(x[None], torch.arange(len(x))[None])
            return [rotate(one, cos[0], sin[0]) for one in split.unbind(1)]

        queries, keys, values, own = {}, {}, {}, {}
        for stream, states in (("e", e), ("h", h)):
            for i, x in enumerate(states):
                x = layer.input_layernorm(x)
                queries[stream, i] = heads(x, attention.q_proj, n_heads, "q_norm")
                keys[stream, i] = heads(x, attention.k_proj, n_keys, "k_norm")
                values[stream, i] = heads(x, attention.v_proj, n_keys, None)
                own[stream, i] = [
                    causal_attention(queries[stream, i][a], keys[stream, i][c], values[stream, i][c])
                    for a, c in enumerate(shared)
                ]
        after: dict[str, list[Tensor]] = {"e": [], "h": []}
        for stream, states in (("e", e), ("h", h)):
            for i, x in enumerate(states):
                mixed = list(own[stream, i])
                if stream == "h":
                    for a in range(n_heads):
                        for j in range(len(documents)):
                            if j != i and groups[i] == groups[j]:
                                k, v = keys["e", j][shared[a]], values["e", j][shared[a]]
                                read = cross_attention(queries["h", i][a], k, v, v_norm)
                                mixed[a] = mixed[a] + similarity[i, j] * read  # Eq. 7, 8
                x = x + attention.o_proj(torch.cat(mixed, -1))
                after[stream].append(x + layer.mlp(layer.post_attention_layernorm(x)))
        e, h = after["e"], after["h"]
    return [model.norm(x) for x in e], [model.norm(x) for x in h]


def next_token_loss(lm: PreTrainedModel, states: list[Tensor], documents: list[Tensor]) -> Tensor:
    """Mean over all tokens that have a predecessor."""
    losses = []
    for x, ids in zip(states, documents, strict=True):
        for k in range(len(ids) - 1):
            logits = lm.lm_head(x[k])
            losses.append(torch.logsumexp(logits, 0) - logits[ids[k + 1]])
    return sum(losses) / len(losses)


def padded(documents: list[Tensor], side: str = "right", extra: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, L)."""
    length = max(map(len, documents)) + extra
    ids, mask = torch.zeros(2, len(documents), length, dtype=torch.long)
    for i, tokens in enumerate(documents):
        place = slice(0, len(tokens)) if side == "right" else slice(length - len(tokens), length)
        ids[i, place], mask[i, place] = tokens, 1
    return ids, mask


def unpadded(states: Tensor, mask: Tensor) -> list[Tensor]:
    return [x[keep.bool()] for x, keep in zip(states, mask, strict=True)]
