"""RevelaLoss: a retriever learns which documents help to predict the next token."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from st_magnitude._checks import InputError, positive
from st_magnitude._upstream import SINCE_6_2
from st_magnitude.losses.base import check_weights, half_weights
from st_magnitude.revela import attention
from st_magnitude.revela.attention import Neighbours, next_token_loss, two_streams
from st_magnitude.revela.groups import Group, GroupCollator
from st_magnitude.similarity import COSINE
from st_magnitude.surgery.normalize import set_similarity_function
from st_magnitude.surgery.raw import prompt_of, unwrapped

logger = logging.getLogger(__name__)

ONE_HOT = 0.999  # a row whose largest weight exceeds this value passes almost no gradient

CITATION = """
@inproceedings{cai2026revela,
    title={Revela: Dense Retriever Learning via Language Modeling},
    author={Fengyu Cai and Tong Chen and Xinran Zhao and Sihao Chen and Hongming Zhang and
        Sherry Tongshuang Wu and Iryna Gurevych and Heinz Koeppl},
    booktitle={The Fourteenth International Conference on Learning Representations},
    year={2026},
    eprint={2506.16552},
    archivePrefix={arXiv}
}
"""


def group_similarity(
    queries: Tensor, passages: Tensor, groups: Tensor, temperature: float
) -> Tensor:
    """Sim of section 3.3: (B, D), (B, D), (B,) -> (B, B).

        Sim(D_i, D_j) = exp(S_ij / tau) / sum_{k != i} exp(S_ik / tau),   S_ij = cos(q_i, p_j)

    Queries are the embeddings of the query parts of documents, passages the embeddings of whole
    documents, and groups the numbers of their groups, over which the softmax runs. The result is
    zero on the diagonal and between groups, in float32 or wider even under autocast.

    Example:
        >>> import torch
        >>> x = torch.eye(3)[[0, 1, 1, 2]]
        >>> group_similarity(x, x, torch.tensor([0, 0, 0, 1]), temperature=0.1).round(decimals=3)
        tensor([[0.0000, 0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 1.0000, 0.0000],
                [0.0000, 1.0000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.0000, 0.0000]])
    """
    with torch.autocast(queries.device.type, enabled=False):
        scores = COSINE(queries, passages) / temperature  # (B, B)
        same = torch.eye(len(groups), dtype=torch.bool, device=groups.device)
        others = (groups[:, None] == groups[None]) & ~same
        weights = scores.masked_fill(~others, torch.finfo(scores.dtype).min).softmax(-1)
        return weights * others


class RevelaLoss(nn.Module):
    """Next-token prediction with in-batch attention, which trains retriever and language model.

        L = -mean log P(x_l | x_<l, {D_j}_{j != i})

    where every layer adds sum_j Sim(D_i, D_j) · b~_ij to attention, with
    Sim = softmax_j( cos(E(query part of D_i), E(D_j)) / tau ) without the diagonal.
    The query part is the first half of a document's words, so copying cannot match, or all of code.

    One row of the dataset is one group of related documents, from
    :func:`~st_magnitude.revela.build_groups`; in ``fit``, an ``InputExample`` has the documents of
    a group. Train with :class:`~st_magnitude.revela.RevelaTrainer`.

    Args:
        model: The retriever. Its ``prompts`` for "query" and "document" become the prefixes, and
            its similarity becomes cosine, so it is used as it was trained.
        lm: A causal decoder of transformers, with or without peft.
        temperature: Temperature tau. The paper's is 1e-4 (docs/revela.md).
        prefixes: Prefixes of queries and of passages; None: the prompts that the model has or, if
            it has none, the paper's, "Query: " and "Passage: ".
        max_length: Largest number of tokens of a text, for retriever and language model.
        read_weight: Weight w in h = s + w · b; the paper's is 1 (docs/revela.md shows its effect).
        v_norm: Whether to divide by value norms (Eq. 6); the paper's ablation does not.

    Raises:
        ValueError: If the language model is not supported, an argument is out of range, or
            sentence-transformers is older than 6.2; at a batch, if its rows are not groups.

    Source: Revela (Cai et al.), sections 3 and 4.1.
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        lm: nn.Module,
        lm_tokenizer: PreTrainedTokenizerBase,
        *,
        temperature: float = 0.05,
        prefixes: tuple[str, str] | None = None,
        max_length: int = 160,
        read_weight: float = 1.0,
        v_norm: bool = True,
    ) -> None:
        super().__init__()
        if not SINCE_6_2:  # whose Trainer clears the gradients of the language model
            raise InputError("RevelaLoss needs sentence-transformers 6.2 or later; upgrade it.")
        positive("temperature", temperature)
        positive("read_weight", read_weight)
        if prefixes is None:
            prefixes = prompt_of(model, "query"), prompt_of(model, "document")
            prefixes = prefixes if any(prefixes) else ("Query: ", "Passage: ")
        attention.set_in_batch_attention(lm)
        self.collator = GroupCollator(
            model.preprocess, lm_tokenizer, prefixes=prefixes, max_length=max_length
        )
        self.model = model
        self.lm = lm
        self.temperature = temperature
        self.read_weight = read_weight
        self.v_norm = v_norm
        model.prompts.update(query=prefixes[0], document=prefixes[1])
        set_similarity_function(model, COSINE)
        self.logs: dict[str, Tensor] = {}  # of the last batch, whose means RevelaTrainer logs
        self._has_looked = False  # at a batch of the training, which waits for the device once

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor:
        features = list(sentence_features)
        if len(features) != 3 or "group" not in features[2]:  # fit() has no collator of ours
            features = self._decode(features)
        query, passage, text = features
        # from_pretrained leaves it in eval mode: no dropout, no checkpointing
        self.lm.train(self.model.training)
        queries = self.model(query)["sentence_embedding"]  # (B, D)
        passages = self.model(passage)["sentence_embedding"]  # (B, D)
        similarity = group_similarity(queries, passages, text["group"], self.temperature)  # (B, B)
        e, loss = self._read(similarity, text)
        one_hot = (similarity.detach().amax(1) > ONE_HOT).float().mean()
        logs = {"next_token": loss.detach(), "one_hot": one_hot}
        if not self.model.training:
            even = group_similarity(queries, passages, text["group"], math.inf)
            _, uniform = self._read(even, text)
            alone = next_token_loss(self.lm, e, text["input_ids"], text["attention_mask"])
            logs["reading_gain"] = (alone - loss).detach()
            logs["choice_gain"] = (uniform - loss).detach()
        if self.training and torch.is_grad_enabled() and not self._has_looked:
            self._has_looked = True
            check_weights(self.model, "RevelaLoss")
            if half_weights(self.lm):
                check_weights(self.lm, "The language model of RevelaLoss")
            if one_hot > 0.9:
                logger.warning(
                    f"{one_hot:.0%} of the rows of Sim are one-hot at temperature="
                    f"{self.temperature}, so they pass no gradient to the retriever. Raise the "
                    "temperature (0.05 suits encoders)."
                )
        self.logs = logs
        return loss

    def _read(self, similarity: Tensor, text: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The e stream (B, L, D_lm), and the next-token loss of the h stream."""
        ids = text["input_ids"]
        mask = text["attention_mask"]
        neighbours = Neighbours(self.read_weight * similarity, mask, v_norm=self.v_norm)
        e, h = two_streams(self.lm, ids, neighbours)
        return e, next_token_loss(self.lm, h, ids, mask)

    def _decode(self, features: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        """Features from fit()'s columns of tokens, one for each place in the group, (n, L) each."""
        if len(features) < 2 or any(column["input_ids"].ndim != 2 for column in features):
            raise ValueError(
                "RevelaLoss needs whole groups. Train with RevelaTrainer, or give the Trainer "
                "data_collator=loss.collator and rows from build_groups; in fit(), each "
                "InputExample holds the texts of one group (at least two), and the retriever has a "
                "tokenizer with padding."
            )
        tokenizer: PreTrainedTokenizerBase = unwrapped(self.model).tokenizer
        ids = [column["input_ids"] for column in features]
        columns = [tokenizer.batch_decode(x, skip_special_tokens=True) for x in ids]
        rows = [Group(chunks=chunks) for chunks in zip(*columns, strict=True)]
        return [batch_to_device(part, ids[0].device) for part in self.collator.features(rows)]

    def get_config_dict(self) -> dict[str, object]:
        return {
            "lm": attention.base_model(self.lm).config.name_or_path or type(self.lm).__name__,
            "temperature": self.temperature,
            "read_weight": self.read_weight,
            "v_norm": self.v_norm,
            "prefixes": list(self.collator.prefixes),
            "max_length": self.collator.max_length,
        }
