"""RevelaLoss: a retriever learns which documents help a language model to predict the next token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from st_magnitude.revela.attention import SPARSE_BELOW, Backend, Neighbours, attach, next_token_loss, two_streams
from st_magnitude.revela.group_loss import ONE_HOT, GroupLoss
from st_magnitude.similarity import COSINE

__all__ = ["RevelaLoss", "group_similarity"]


def group_similarity(queries: Tensor, passages: Tensor, groups: Tensor, temperature: float) -> Tensor:
    """Sim of section 3.3, a softmax over the other documents of the group: (B, D), (B, D), (B,) -> (B, B).

        Sim(D_i, D_j) = exp(S_ij / tau) / sum_{k != i} exp(S_ik / tau),   S_ij = cos(q_i, p_j)

    Queries are the embeddings of the query part of each document, passages those of whole documents, and groups the
    number of the group of each. The result is zero on the diagonal and between groups, in float32 or wider even under
    autocast (in bfloat16 one step of a cosine is 39 logits at tau = 1e-4). Rows sum to 1; the row of a document that is
    alone in its group is 0.

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
        others = (groups[:, None] == groups[None]) & ~torch.eye(len(groups), dtype=torch.bool, device=groups.device)
        weights = scores.masked_fill(~others, torch.finfo(scores.dtype).min).softmax(-1)
        return weights * others


class RevelaLoss(GroupLoss):
    """Next-token prediction with in-batch attention, whose gradient trains the retriever and the language model.

        L = -mean log P(x_l | x_<l, {D_j}_{j != i}),   where every layer adds sum_j Sim(D_i, D_j) · b~_ij to attention,
        Sim = softmax_j( cos(E(query part of D_i), E(D_j)) / tau ) without the diagonal

    One row of the dataset is one group of related documents, from :func:`~st_magnitude.revela.build_groups`. Train with
    :class:`~st_magnitude.revela.RevelaTrainer`. sentence-transformers' own Trainer needs
    ``data_collator=loss.collator``. In ``fit`` a row is an ``InputExample`` whose texts are the documents of a group;
    the loss then decodes them from the retriever's tokens, in lower case if its tokenizer is uncased.

    Both train all parameters of the language model that require gradients, at the retriever's learning rate: freeze it,
    or wrap it with peft first. They do not save it, synchronise it between processes or log what RevelaTrainer logs.

    Args:
        model: The retriever. Its ``prompts`` for "query" and "document" become the prefixes, and its similarity becomes
            cosine, so that it is used as it was trained.
        lm: A causal decoder of transformers, with or without peft; see :func:`~st_magnitude.revela.attention.attach`.
        lm_tokenizer: Tokenizer of the language model; by default the one saved beside it.
        temperature: Temperature tau. The paper's is 1e-4 (``RevelaLoss.preset("paper", ...)``), for decoders in
            bfloat16. With encoders that were trained contrastively, rows become one-hot at it and pass no gradient.
        query_part: ``"half"`` takes the first half of a document's words as its query, so that copying cannot match, as
            for the paper's Wikipedia; documents marked as code are queries as a whole. ``"full"`` takes all words.
        prefixes: Prefixes of queries and of passages.
        max_length: Largest number of tokens of a text, for retriever and language model.
        read_weight: Weight w in h = s + w · b; the paper's is 1 (docs/revela.md shows its effect on a language model at
            first).
        auxiliary_weight: Weight of the plain model's next-token loss (the e stream), 0 in the paper.
        v_norm: Whether to divide by value norms (Eq. 6); without it, the loss is the paper's ablation.
        eps: Epsilon of Eq. 6.
        backend: ``"exact"``, ``"sparse"`` or ``"auto"``, see :meth:`~st_magnitude.revela.attention.Neighbours.of`.

    Raises:
        ValueError, TypeError: If the language model is not supported, not a transformers model or has no tokenizer or
            padding token, or an argument is out of range.

    RevelaTrainer logs: ``next_token`` (nats), ``auxiliary``, ``one_hot`` (share of rows with a weight above 0.999),
    ``active_pairs`` (share of pairs above 1e-7), ``top_similarity`` (mean of the largest weight in a row). On the
    evaluation data it also logs two differences of the next-token loss in nats: ``reading_gain``, without other
    documents minus with them, and ``choice_gain``, with uniform weights minus with Sim. Where the first is 0, the
    retriever gets no signal; the second is what it has learned.

    Example:
        ::

            groups = stm.revela.build_groups(texts)
            loss = stm.revela.RevelaLoss(model, AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))
            stm.revela.RevelaTrainer(model=model, loss=loss, train_dataset=groups).train()

    Source: Revela (Cai et al.), sections 3 and 4.1.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"temperature": 1e-4}}

    def __init__(
        self,
        model: SentenceTransformer,
        lm: nn.Module,
        lm_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        temperature: float = 0.05,
        query_part: Literal["half", "full"] = "half",
        prefixes: tuple[str, str] = ("Query: ", "Passage: "),
        max_length: int = 160,
        read_weight: float = 1.0,
        auxiliary_weight: float = 0.0,
        v_norm: bool = True,
        eps: float = 1e-6,
        backend: Backend = "auto",
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}; the paper's is 1e-4.")
        if not read_weight > 0:
            raise ValueError(f"read_weight must be positive, got {read_weight}; the paper's is 1.")
        if not auxiliary_weight >= 0:
            raise ValueError(f"auxiliary_weight must not be negative, got {auxiliary_weight}.")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}; the paper's is 1e-6.")
        if backend not in get_args(Backend):
            raise ValueError(f"backend must be one of {get_args(Backend)}, got {backend!r}.")
        attach(lm)
        super().__init__(model, lm, lm_tokenizer, prefixes, query_part, max_length)
        self.temperature = temperature
        self.read_weight = read_weight
        self.auxiliary_weight = auxiliary_weight
        self.v_norm = v_norm
        self.eps = eps
        self.backend = backend

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        query, passage, text = self._features(sentence_features)
        self.lm.train(self.model.training)  # from_pretrained leaves it in eval mode: no dropout, no checkpointing
        queries = self.model(query)["sentence_embedding"]  # (B, D)
        passages = self.model(passage)["sentence_embedding"]  # (B, D)
        similarity = group_similarity(queries, passages, text["group"], self.temperature)  # (B, B)
        self._watch(similarity)

        ids, mask = text["input_ids"], text["attention_mask"]
        e, loss = self._read(similarity, text)
        logs = {"next_token": loss.detach(), **_shape(similarity.detach(), text["group"])}
        if not self.model.training:
            _, uniform = self._read(group_similarity(queries, passages, text["group"], math.inf), text)
            alone = next_token_loss(self.lm, e, ids, mask)
            logs |= {"reading_gain": (alone - loss).detach(), "choice_gain": (uniform - loss).detach()}
        if self.auxiliary_weight:
            auxiliary = self.auxiliary_weight * next_token_loss(self.lm, e, ids, mask)
            loss = loss + auxiliary
            logs["auxiliary"] = auxiliary.detach()
        if logs["one_hot"] > 0.9:
            self._warn(
                "one-hot",
                f"{float(logs['one_hot']):.0%} of the rows of Sim are one-hot at temperature={self.temperature:g}, so "
                "they pass no gradient to the retriever. Raise the temperature (0.05 suits encoders).",
            )
        self.logs = logs
        return loss

    def _read(self, similarity: Tensor, text: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The e stream (B, L, D_lm), and the next-token loss of the h stream, which reads as similarity says."""
        ids, mask = text["input_ids"], text["attention_mask"]
        neighbours = Neighbours.of(
            self.read_weight * similarity, mask, text["group"], backend=self.backend, v_norm=self.v_norm, eps=self.eps
        )
        e, h = two_streams(self.lm, ids, mask, neighbours)
        return e, next_token_loss(self.lm, h, ids, mask)

    def _watch(self, similarity: Tensor) -> None:
        """Warns once if training cannot change the retriever."""
        if not (self.training and torch.is_grad_enabled()):
            return
        if not similarity.requires_grad:
            self._warn("frozen", "No parameter of the retriever requires gradients, so only the language model learns.")
            return

        def check(gradient: Tensor) -> None:
            if not gradient.any():
                self._warn(
                    "no gradient",
                    "The retriever got no gradient in this step, because the language model does not attend to other "
                    "documents. Check whether its gradient checkpointing is reentrant, or every chunk a single token.",
                )

        similarity.register_hook(check)

    def get_config_dict(self) -> dict[str, Any]:
        return super().get_config_dict() | {
            "temperature": self.temperature,
            "read_weight": self.read_weight,
            "auxiliary_weight": self.auxiliary_weight,
            "v_norm": self.v_norm,
            "backend": self.backend,
        }


def _shape(similarity: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """Figures that tell how peaked Sim is."""
    top = similarity.max(1).values  # (B,)
    pairs = (groups[:, None] == groups[None]).sum() - len(groups)
    return {
        "one_hot": (top > ONE_HOT).float().mean(),
        "active_pairs": (similarity > SPARSE_BELOW).sum() / pairs.clamp(min=1),
        "top_similarity": top.float().mean(),
    }
