"""REPLUG, the baseline of the Revela paper: a retriever learns to rank documents as a frozen
language model does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.utils.rnn import pad_sequence

from st_magnitude.revela import RevelaLoss
from st_magnitude.similarity import COSINE


class ReplugLoss(RevelaLoss):
    """KL between the language model's ranking of the other documents of the group and the
    retriever's.

        L = mean_i KL( P_Phi(. | i) || P_Theta(. | i) ),      over the others j of the group
        P_Theta(j | i) = softmax_j( cos(E(query part of D_i), E(D_j)) / temperature )
        P_Phi(j | i)   = softmax_j( log g(D_i | D_j) / lm_temperature ),   g the language model

    Two settings differ from the printed formula: a document is not its own candidate, and log g is
    a mean over tokens.

    Source: Revela (Cai et al.), appendix A.3, after REPLUG LSR (Shi et al., arXiv 2301.12652).
    """

    def __init__(self, *args: Any, lm_temperature: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lm_temperature = lm_temperature
        self.lm.requires_grad_(False)

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        query, passage, text = sentence_features
        queries, passages = (
            self.model(features)["sentence_embedding"] for features in (query, passage)
        )
        others = (text["group"][:, None] == text["group"]) & ~torch.eye(
            len(queries), dtype=torch.bool
        ).to(queries.device)
        scores = COSINE(queries, passages) / self.temperature  # (B, B)
        losses = continuation_losses(
            self.lm.eval(), text["input_ids"], text["attention_mask"], others
        ).to(scores)
        hidden = torch.finfo(scores.dtype).min
        predicted = scores.masked_fill(~others, hidden).log_softmax(-1)
        target = (-losses / self.lm_temperature).masked_fill(~others, hidden).log_softmax(-1)
        loss = (
            kl_div(predicted, target, reduction="none", log_target=True)
            .masked_fill(~others, 0.0)
            .sum(1)
            .mean()
        )
        self.logs = {"kl": loss.detach()}
        return loss


@torch.no_grad()
def continuation_losses(
    lm: nn.Module, ids: Tensor, mask: Tensor, pairs: Tensor, size: int = 64
) -> Tensor:
    """-log g(D_i | D_j) in nats per token of D_i for the marked pairs, 0 elsewhere: (B, B).

    Args:
        lm: A causal language model.
        ids: (B, L) tokens of the documents.
        mask: (B, L) 1 at tokens, 0 at padding.
        pairs: (B, B) True where D_i is scored after D_j.
        size: Number of pairs in a pass.
    """
    documents = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    found = torch.zeros(pairs.shape, device=ids.device)
    for some in pairs.nonzero().split(size):
        texts = [torch.cat([documents[j], documents[i]]) for i, j in some.tolist()]
        # after the tokens, so causal attention needs no mask
        padded = pad_sequence(texts, batch_first=True)
        logits = lm(input_ids=padded).logits.float()
        for row, (i, j) in enumerate(some.tolist()):
            before, count = len(documents[j]), len(documents[i])
            found[i, j] = cross_entropy(logits[row, before - 1 : before - 1 + count], documents[i])
    return found
