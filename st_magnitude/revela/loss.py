"""RevelaLoss: a retriever learns which documents help a language model to predict the next token."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from st_magnitude._trainer import calling_trainer
from st_magnitude.revela.attention import SPARSE_BELOW, Backend, Neighbours, attach, next_token_loss, two_streams
from st_magnitude.revela.chunking import looks_like_code
from st_magnitude.revela.data import GroupCollator
from st_magnitude.revela.models import tokenizer_of
from st_magnitude.similarity import COSINE
from st_magnitude.surgery import set_similarity_function, unwrapped

__all__ = ["RevelaLoss", "group_similarity"]

logger = logging.getLogger(__name__)

ONE_HOT = 0.999  # a row whose largest weight exceeds this passes next to no gradient
PRESETS: dict[str, dict[str, Any]] = {"paper": {"temperature": 1e-4}}


CITATION = """
@inproceedings{cai2026revela,
    title={Revela: Dense Retriever Learning via Language Modeling},
    author={Fengyu Cai and Tong Chen and Xinran Zhao and Sihao Chen and Hongming Zhang and Sherry Tongshuang Wu and
        Iryna Gurevych and Heinz Koeppl},
    booktitle={The Fourteenth International Conference on Learning Representations},
    year={2026},
    eprint={2506.16552},
    archivePrefix={arXiv}
}
"""


def group_similarity(queries: Tensor, passages: Tensor, groups: Tensor, temperature: float) -> Tensor:
    """Sim of section 3.3: a softmax over the other documents of the group.

        Sim(D_i, D_j) = exp(S_ij / tau) / sum_{k != i} exp(S_ik / tau),   S_ij = cos(q_i, p_j)

    Args:
        queries: (B, D), embeddings of the query part of each document.
        passages: (B, D), embeddings of the whole documents.
        groups: (B,), the group of each document.
        temperature: tau.

    Returns:
        (B, B), zero on the diagonal and between groups, in float32 at least whatever autocast says (under bf16 one
        step of a cosine is 39 logits at tau = 1e-4). Rows sum to 1; that of a document without company is 0.

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


class RevelaLoss(nn.Module):
    """Next-token prediction with in-batch attention; its gradient trains the retriever, and the language model too.

        L = -mean log P(x_l | x_<l, {D_j}_{j != i}),   where every layer adds sum_j Sim(D_i, D_j) · b~_ij to attention,
        Sim = softmax_j( cos(E(query part of D_i), E(D_j)) / tau ) without the diagonal

    One row of the dataset is one group of documents that belong together, from
    :func:`~st_magnitude.revela.build_groups`. In :class:`~st_magnitude.revela.RevelaTrainer` everything fits together.
    With sentence-transformers' own Trainer give it ``data_collator=loss.collator``. In ``fit`` a row is an
    ``InputExample`` with the documents of a group as its texts; the loss then reads them back from the retriever's
    tokens, in lower case if its tokenizer is uncased.

    Both of these train all parameters of the language model that require gradients, at the retriever's learning rate:
    freeze it, or wrap it with peft before. They neither save it nor synchronise it between processes; RevelaTrainer
    does.

    Args:
        model: The retriever. Its ``prompts`` for "query" and "document" become the prefixes, its similarity cosine:
            what it was trained with is what it is used with.
        lm: A causal decoder of transformers, peft around it or not; see :func:`~st_magnitude.revela.attention.attach`.
        lm_tokenizer: Its tokenizer; by default the one saved beside it.
        temperature: tau. The paper's is 1e-4 (``RevelaLoss.preset("paper", ...)``), for decoders under bf16; encoders
            that were trained contrastively have cosines so far apart that rows become one-hot there, and learn nothing.
        query_part: ``"half"``: the first half of a document's words asks, which forbids matching by copying, as for the
            paper's Wikipedia; documents marked as code always ask as a whole. ``"full"``: all do.
        prefixes: Before queries and before passages.
        max_length: Tokens of a text, for retriever and language model alike.
        read_weight: w in h = s + w · b; the paper's is 1 (see docs/revela.md for what that does to a language model
            at first).
        auxiliary_weight: Weight of the plain model's next-token loss (the e stream), 0 in the paper.
        v_norm: Eq. 6; off for the ablation.
        eps: The epsilon of Eq. 6.
        backend: ``"exact"``, ``"sparse"`` or ``"auto"``, see :meth:`~st_magnitude.revela.attention.Neighbours.of`.

    Raises:
        ValueError: If the language model is not supported, has no tokenizer or padding token, or an argument is out of
            range.

    Logged with the loss: ``next_token`` (nats), ``auxiliary``, ``one_hot`` (share of rows with a weight above 0.999),
    ``active_pairs`` (share above 1e-7), ``top_similarity`` (mean of the largest weight).

    Example:
        ::

            groups = stm.revela.build_groups(texts)
            loss = stm.revela.RevelaLoss(model, AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M"))
            stm.revela.RevelaTrainer(model=model, loss=loss, train_dataset=groups).train()

    Source: Revela (Cai et al.), sections 3 and 4.1.
    """

    citation = CITATION

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
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}; the paper's is 1e-4.")
        if not read_weight > 0:
            raise ValueError(f"read_weight must be positive, got {read_weight}; the paper's is 1.")
        if auxiliary_weight < 0:
            raise ValueError(f"auxiliary_weight must not be negative, got {auxiliary_weight}.")
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}; the paper's is 1e-6.")
        attach(lm)
        if lm_tokenizer is None:
            lm_tokenizer = tokenizer_of(lm)
        self.model = model
        self.lm = lm
        self.temperature = temperature
        self.read_weight = read_weight
        self.auxiliary_weight = auxiliary_weight
        self.v_norm = v_norm
        self.eps = eps
        self.backend = backend
        self.collator = GroupCollator(
            model.preprocess, lm_tokenizer, prefixes=prefixes, query_part=query_part, max_length=max_length
        )
        model.prompts.update(query=prefixes[0], document=prefixes[1])
        set_similarity_function(model, COSINE)
        self._warned: set[str] = set()

    @classmethod
    def preset(cls, name: str, model: SentenceTransformer, lm: nn.Module, *args: Any, **overrides: Any) -> RevelaLoss:
        """The settings of a publication: ``"paper"``."""
        if name not in PRESETS:
            raise ValueError(f"No preset {name!r}: choose from {sorted(PRESETS)}.")
        return cls(model, lm, *args, **(PRESETS[name] | overrides))

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        features = list(sentence_features)
        if not (len(features) == 3 and "group" in features[2]):
            features = read_back(self, features)
        query, passage, text = features
        self.lm.train(self.model.training)  # from_pretrained leaves it in eval mode: no dropout, no checkpointing
        queries = self.model(query)["sentence_embedding"]  # (B, D)
        passages = self.model(passage)["sentence_embedding"]  # (B, D)
        similarity = group_similarity(queries, passages, text["group"], self.temperature)  # (B, B)
        self._watch(similarity)

        ids, mask = text["input_ids"], text["attention_mask"]
        neighbours = Neighbours.of(
            self.read_weight * similarity, mask, text["group"], backend=self.backend, v_norm=self.v_norm, eps=self.eps
        )
        e, h = two_streams(self.lm, ids, mask, neighbours)  # (B, L, D_lm) each
        loss = next_token_loss(self.lm, h, ids, mask)
        logs = {"next_token": loss.detach(), **_shape(similarity.detach(), text["group"])}
        if self.auxiliary_weight:
            auxiliary = self.auxiliary_weight * next_token_loss(self.lm, e, ids, mask)
            loss = loss + auxiliary
            logs["auxiliary"] = auxiliary.detach()
        self._log(logs)
        return loss

    def _watch(self, similarity: Tensor) -> None:
        """Warn, once, when training cannot move the retriever."""
        if not (self.training and torch.is_grad_enabled()):
            return
        if not similarity.requires_grad:
            self._warn("frozen", "No parameter of the retriever requires gradients: only the language model learns.")
            return

        def check(gradient: Tensor) -> None:
            if not gradient.any():
                self._warn(
                    "no gradient",
                    "The retriever got no gradient in this step: the language model does not read other documents. Is "
                    "its gradient checkpointing reentrant, or every chunk a single token?",
                )

        similarity.register_hook(check)

    def _log(self, logs: dict[str, Tensor]) -> None:
        if logs["one_hot"] > 0.9:
            self._warn(
                "one-hot",
                f"{float(logs['one_hot']):.0%} of the rows of Sim are one-hot at temperature={self.temperature:g}: "
                "they pass no gradient to the retriever. Raise the temperature (0.05 suits encoders).",
            )
        if (trainer := calling_trainer()) is not None and hasattr(trainer, "track_loss_components"):
            trainer.track_loss_components(logs)

    def _warn(self, name: str, message: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(message)

    def get_config_dict(self) -> dict[str, Any]:
        return {
            "lm": getattr(getattr(self.lm, "config", None), "_name_or_path", "") or type(self.lm).__name__,
            "temperature": self.temperature,
            "query_part": self.collator.query_part,
            "prefixes": list(self.collator.prefixes),
            "max_length": self.collator.max_length,
            "read_weight": self.read_weight,
            "auxiliary_weight": self.auxiliary_weight,
            "v_norm": self.v_norm,
            "backend": self.backend,
        }


def read_back(loss: Any, features: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """From fit(): one column of tokens for each place in the group, (n, L) each, to what ``loss.collator`` makes."""
    if len(features) < 2 or any(column["input_ids"].ndim != 2 for column in features):
        raise ValueError(
            f"{type(loss).__name__} needs whole groups. Train with RevelaTrainer, or give the Trainer "
            "data_collator=loss.collator and rows from build_groups; in fit(), each InputExample holds the texts "
            "of one group (at least two), and the retriever has a tokenizer with padding."
        )
    model: Any = unwrapped(loss.model)
    columns = [model.tokenizer.batch_decode(column["input_ids"], skip_special_tokens=True) for column in features]
    if model.tokenizer.decode(model.tokenizer("A b")["input_ids"], skip_special_tokens=True) != "A b":
        loss._warn(
            "decoded",
            "The language model reads what the retriever's tokenizer kept of the texts (no capitals, perhaps). "
            "RevelaTrainer, or data_collator=loss.collator, gives it the texts themselves.",
        )
    groups = [list(row) for row in zip(*columns, strict=True)]
    batch = loss.collator.texts_to_batch(groups, [[looks_like_code(text) for text in row] for row in groups])
    device = features[0]["input_ids"].device
    return [
        {
            key.removeprefix(name): value.to(device) if isinstance(value, Tensor) else value
            for key, value in batch.items()
            if key.startswith(name)
        }
        for name in ("query_", "passage_", "lm_")
    ]


def _shape(similarity: Tensor, groups: Tensor) -> dict[str, Tensor]:
    """How peaked Sim is."""
    top = similarity.max(1).values  # (B,)
    pairs = (groups[:, None] == groups[None]).sum() - len(groups)
    return {
        "one_hot": (top > ONE_HOT).float().mean(),
        "active_pairs": (similarity > SPARSE_BELOW).sum() / pairs.clamp(min=1),
        "top_similarity": top.float().mean(),
    }
