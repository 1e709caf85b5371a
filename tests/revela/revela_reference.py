"""Revela's Eq. 3-8 as printed: two passes with loops over documents, heads and tokens.

Within a document (Eq. 4) transformers' own layers attend by torch's attention.
"""

import math

import _tiny
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

VOCABULARY = 40


def decoder(family: str = "llama", **options: object) -> PreTrainedModel:
    """A random decoder in float64, with large weights."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "tie_word_embeddings": False}
    return _tiny.decoder(family, std=0.3, **sizes | options).double().eval()


def weights_of(query: Tensor, keys: Tensor) -> Tensor:
    """How much one token reads of each of the others: a softmax."""
    scores = torch.stack([query @ key / math.sqrt(len(query)) for key in keys])
    powers = (scores - scores.max()).exp()
    return powers / powers.sum()


def cross_attention(
    query: Tensor, key: Tensor, value: Tensor, v_norm: bool, eps: float = 1e-6
) -> Tensor:
    """Eq. 5 and 6 for one pair of documents and one head: (L_i, d)."""
    rows = []
    for q in query:
        weights = weights_of(q, key)
        b, size = weights @ value, weights @ value.norm(dim=1)
        rows.append(b / (size + eps) if v_norm else b)
    return torch.stack(rows)


class TwoPasses:
    """The first pass records keys and values, and in the second each document reads the others."""

    def __init__(self, lm: PreTrainedModel, similarity: Tensor, v_norm: bool) -> None:
        self.lm, self.similarity, self.v_norm = lm, similarity, v_norm
        self.recorded: dict[int, list[tuple[Tensor, Tensor]]] = {}
        AttentionInterface.register("two_passes", self.attention)
        AttentionMaskInterface.register("two_passes", sdpa_mask)
        lm.set_attn_implementation("two_passes")

    def states(self, documents: list[Tensor], is_second: bool) -> list[Tensor]:
        self.is_second, found = is_second, []
        for self.document, ids in enumerate(documents):
            self.layer = 0
            found.append(
                self.lm.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            )
        return found

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask, **options
    ) -> tuple[Tensor, None]:
        output, _ = sdpa_attention_forward(module, query, key, value, *mask, **options)
        if not self.is_second:
            self.recorded.setdefault(self.document, []).append((key[0], value[0]))
            return output, None
        scaling = options.get("scaling") or query.shape[-1] ** -0.5
        heads = []
        for a, q in enumerate(query[0] * scaling * query.shape[-1] ** 0.5):
            read = value.new_zeros(len(q), value.shape[-1])
            for j, layers in self.recorded.items():
                if self.similarity[self.document, j] > 0:
                    keys, values = (
                        states[a * key.shape[1] // query.shape[1]] for states in layers[self.layer]
                    )
                    b = cross_attention(q, keys, values, self.v_norm)
                    read = read + self.similarity[self.document, j] * b
            heads.append(read)
        self.layer += 1
        return output + torch.stack(heads, 1)[None], None


def streams(
    lm: PreTrainedModel, documents: list[Tensor], similarity: Tensor, v_norm: bool = True
) -> tuple[list[Tensor], list[Tensor]]:
    """Last states e_i and h_i, (L_i, D), document by document, without padding."""
    passes = TwoPasses(lm, similarity, v_norm)
    return passes.states(documents, is_second=False), passes.states(documents, is_second=True)


def next_token_loss(lm: PreTrainedModel, states: list[Tensor], documents: list[Tensor]) -> Tensor:
    """Mean over all tokens that have a predecessor."""
    losses = []
    for x, ids in zip(states, documents, strict=True):
        for k in range(len(ids) - 1):
            logits = lm.get_output_embeddings()(x[k])
            losses.append(torch.logsumexp(logits, 0) - logits[ids[k + 1]])
    return sum(losses) / len(losses)


def padded(documents: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (B, L)."""
    ids = pad_sequence(documents, batch_first=True)
    lengths = torch.tensor([len(tokens) for tokens in documents])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def unpadded(states: Tensor, mask: Tensor) -> list[Tensor]:
    return [x[keep.bool()] for x, keep in zip(states, mask, strict=True)]
