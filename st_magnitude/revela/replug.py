"""ReplugLoss: a retriever learns to rank documents by how much they help a frozen language model."""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from st_magnitude.revela.attention import base_model, check_supported
from st_magnitude.revela.group_loss import CITATION as REVELA
from st_magnitude.revela.group_loss import ONE_HOT, GroupLoss
from st_magnitude.revela.score_cache import ScoreCache
from st_magnitude.similarity import COSINE

__all__ = ["Divergence", "ReplugLoss", "ScoreCache", "continuation_losses", "divergence"]

TOKENS_PER_CHUNK = 512  # number of rows of logits at a time
SAMPLED = 1024  # number of values of a parameter that identify it

CITATION = """
@inproceedings{shi2024replug,
    title = {{REPLUG}: Retrieval-Augmented Black-Box Language Models},
    author = {Shi, Weijia and Min, Sewon and Yasunaga, Michihiro and Seo, Minjoon and James, Richard and Lewis, Mike
              and Zettlemoyer, Luke and Yih, Wen-tau},
    booktitle = {Proceedings of NAACL-HLT 2024 (Volume 1: Long Papers)},
    pages = {8371--8384},
    year = {2024},
    eprint = {2301.12652},
    archivePrefix = {arXiv},
}
"""


class Divergence(NamedTuple):
    """The result of :func:`divergence`."""

    kl: Tensor
    """Mean over the documents that have a candidate, a scalar."""
    target: Tensor
    """P_Phi, (B, B): row i holds the language model's distribution over the candidates of document i, 0 elsewhere."""
    predicted: Tensor
    """P_Theta, (B, B): the retriever's distributions, without gradient."""


def divergence(
    queries: Tensor,
    passages: Tensor,
    losses: Tensor,
    candidates: Tensor,
    retriever_temperature: float,
    lm_temperature: float,
) -> Divergence:
    """Divergence between the retriever's ranking and the language model's, with both distributions.

        mean_i KL(P_Phi(. | i) || P_Theta(. | i)),
        P_Theta(j | i) = softmax_j( cos(q_i, p_j) / tau_r ),   P_Phi(j | i) = softmax_j( -l_ij / eta_m )

    Both softmaxes run over the candidates of i, the pairs that ``candidates`` (B, B) marks; a document without any does
    not count. Queries and passages are (B, D), losses l_ij = -log g(D_i | D_j) are (B, B). Results are in float32 or
    wider even under autocast.

    Example:
        >>> import torch
        >>> x, others = torch.eye(3)[[0, 1, 1]], ~torch.eye(3, dtype=torch.bool)
        >>> losses = torch.tensor([[0.0, 2.0, 2.0], [2.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
        >>> result = divergence(x, x, losses, others, retriever_temperature=1.0, lm_temperature=1.0)
        >>> result.target[1]
        tensor([0.2689, 0.0000, 0.7311])
        >>> bool(result.kl < 1e-6)
        True

    Source: Revela (Cai et al.), appendix A.3, after REPLUG LSR (Shi et al., arXiv 2301.12652).
    """
    with torch.autocast(queries.device.type, enabled=False):
        scores = COSINE(queries, passages) / retriever_temperature  # (B, B)
        lowest = torch.finfo(scores.dtype).min
        predicted = scores.masked_fill(~candidates, lowest).log_softmax(-1)
        target = (-losses.to(scores) / lm_temperature).masked_fill(~candidates, lowest).log_softmax(-1)
        weights = target.exp() * candidates  # (B, B)
        terms = (weights * (target - predicted)).masked_fill(~candidates, 0.0)
        kl = terms.sum() / candidates.any(1).sum().clamp(min=1)
        return Divergence(kl, weights, predicted.detach().exp() * candidates)


@torch.no_grad()
def continuation_losses(
    lm: nn.Module,
    prefixes: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    pairs: Sequence[tuple[int, int]],
    pairs_per_batch: int = 16,
) -> Tensor:
    """-log g(continuation i | prefix j) in nats for pairs (i, j), summed over the tokens of the continuation: (P,).

    The model processes every prefix once; all its continuations share the keys and values of its tokens, without
    padding. It computes in its own dtype, even under autocast; sums are in float32 or wider. The last token of a prefix
    predicts the first of the continuation. The loss of an empty continuation is 0; an empty prefix is refused.

    Source: Revela, appendix A.3.
    """
    base = base_model(lm)
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    device = head.weight.device
    by_prefix: dict[int, list[int]] = defaultdict(list)  # numbers of pairs
    for number, (i, j) in enumerate(pairs):
        if not len(prefixes[j]):
            raise ValueError(f"Document {j} has no tokens, so it cannot be a prefix; remove empty chunks.")
        if len(continuations[i]):
            by_prefix[j].append(number)
    results: list[tuple[list[int], Tensor]] = []
    with torch.autocast(device.type, enabled=False):
        for some in _batches(list(by_prefix), pairs_per_batch):
            ids, _ = _padded([prefixes[j] for j in some], device)  # (n, L); padding comes last and is cut off
            output = decoder(input_ids=ids, past_key_values=DynamicCache(), use_cache=True)
            layers = [(keys, values) for keys, values, *_ in output.past_key_values]
            for row, j in enumerate(some):
                length = len(prefixes[j])
                kept = [tuple(x[row : row + 1, :, :length] for x in layer) for layer in layers]  # (1, H_kv, L_j, d)
                last = output.last_hidden_state[row, length - 1]  # (D,)
                for numbers in _batches(by_prefix[j], pairs_per_batch):
                    labels, mask = _padded([continuations[pairs[n][0]] for n in numbers], device)  # (m, L)
                    states = last.expand(len(numbers), 1, -1)
                    if labels.shape[1] > 1:
                        cache = DynamicCache([tuple(x.expand(len(numbers), -1, -1, -1) for x in y) for y in kept])
                        more = decoder(input_ids=labels[:, :-1], past_key_values=cache, use_cache=True)
                        states = torch.cat([states, more.last_hidden_state], 1)  # (m, L, D)
                    results.append((numbers, _sum_of_losses(head, states, labels, mask)))
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    losses = torch.zeros(len(pairs), dtype=wide, device=device)
    for numbers, values in results:
        losses[numbers] = values
    if not bool(losses.isfinite().all()):
        i, j = pairs[int((~losses.isfinite()).nonzero()[0])]
        raise ValueError(
            f"The loss of document {i} after document {j} is not finite; the language model computes in {base.dtype}. "
            "Load it in float32 or bfloat16, and check its weights."
        )
    return losses


def _batches(items: list[int], size: int) -> Iterator[list[int]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids padded with 0 on the right, and a mask of the tokens; (n, L) each."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids.to(device), (torch.arange(ids.shape[1]) < lengths[:, None]).to(device)


def _sum_of_losses(head: nn.Module, states: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Sums of the losses (m,) of states (m, L, D) that predict labels (m, L)."""
    values = []
    for part, targets in zip(states[mask].split(TOKENS_PER_CHUNK), labels[mask].split(TOKENS_PER_CHUNK), strict=True):
        logits = head(part)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        values.append(cross_entropy(logits, targets, reduction="none"))
    flat = torch.cat(values)
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat).sum(1)


class ReplugLoss(GroupLoss):
    """REPLUG: the retriever ranks documents by how much they help a frozen language model to predict the query.

        L = mean_i KL( P_Phi(. | i) || P_Theta(. | i) ),          over the other documents j of the group
        P_Theta(j | i) = softmax_j( cos(E(query part of D_i), E(D_j)) / tau_r )
        P_Phi(j | i)   = softmax_j( log g(D_i | D_j) / eta_m ),   g the language model, D_j before D_i

    Rows, Trainers and ``fit`` are as for :class:`~st_magnitude.revela.RevelaLoss`: one row of the dataset is one group,
    from :func:`~st_magnitude.revela.build_groups`, and a Trainer other than :class:`~st_magnitude.revela.RevelaTrainer`
    needs ``data_collator=loss.collator``. The loss freezes the language model, in place, and never saves it.

    The language model scores every pair once, B (B - 1) continuations for a group of B. The scores, about 40 bytes
    each, are kept, so a second epoch over the same groups needs no language model. Runs with other retrievers,
    temperatures or ``per_token`` share them.

    Args:
        model: The retriever, whose prompts and similarity change as by RevelaLoss.
        lm: A causal decoder of transformers, with or without peft. It computes in its own dtype, even under autocast;
            load it in bfloat16 to save time on a GPU.
        retriever_temperature: Temperature tau_r.
        lm_temperature: Temperature eta_m in nats, per token, or per document without ``per_token``. The paper has 0.001
            for both temperatures (``ReplugLoss.preset("paper", ...)``; its printed formula also has
            ``include_self=True, per_token=False``), where nearly all targets are one-hot. With the defaults the
            distributions of the language model and of a pretrained encoder are about equally wide, some 4 of 16
            documents.
        include_self: Whether a document is its own candidate, as in the printed formula. A language model that can copy
            then puts nearly all of the target on the document itself, and the others do not count.
        per_token: Whether to divide log g(D_i | D_j) by the number of tokens of D_i, which the printed formula does
            not. Sums over 100 tokens differ by tens of nats for long documents and by one for short ones, so no
            temperature suits all rows; means do not depend on the number of tokens.
        cache_dir: Folder for the scores of the language model (a SQLite file), which processes and runs may share; with
            None the scores stay in memory, for this loss.
        pairs_per_batch: Number of sequences in a pass of the language model.

    The other arguments are those of :class:`~st_magnitude.revela.RevelaLoss`. The language model gets whole documents
    without prefixes.

    Where the tokenizer adds a beginning-of-text token before D_i, or an end-of-text token after either document, the
    loss leaves it out, so that D_i continues D_j.

    Raises:
        ValueError: If the language model is not supported, has no tokenizer or padding token, or has no room for two
            documents; if the cache is broken, or an argument is out of range; in training, if no parameter of the
            retriever requires gradients.
        TypeError: If the language model is not a transformers model.

    RevelaTrainer logs: ``kl`` (the loss itself), ``one_hot`` (share of target rows with a weight above 0.999),
    ``target_entropy`` and ``retriever_entropy`` (nats), ``cached`` (share of the scores that were known).

    Example:
        ::

            groups = stm.revela.build_groups(texts)
            lm, tokenizer = stm.revela.load_lm("HuggingFaceTB/SmolLM2-135M")
            loss = stm.revela.ReplugLoss(model, lm, tokenizer, cache_dir="scores")
            stm.revela.RevelaTrainer(model=model, loss=loss, train_dataset=groups).train()

    Source: Revela (Cai et al.), appendix A.3; REPLUG (Shi et al., arXiv 2301.12652).
    """

    citation: ClassVar[str] = CITATION + REVELA
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {"retriever_temperature": 0.001, "lm_temperature": 0.001}}

    def __init__(
        self,
        model: SentenceTransformer,
        lm: nn.Module,
        lm_tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        retriever_temperature: float = 0.05,
        lm_temperature: float = 0.1,
        query_part: Literal["half", "full"] = "half",
        prefixes: tuple[str, str] = ("Query: ", "Passage: "),
        max_length: int = 160,
        include_self: bool = False,
        per_token: bool = True,
        cache_dir: str | Path | None = None,
        pairs_per_batch: int = 16,
    ) -> None:
        for name, value in (("retriever_temperature", retriever_temperature), ("lm_temperature", lm_temperature)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive, got {value}; 0.05 to 0.1 suits most, the paper's is 0.001.")
        if pairs_per_batch < 1:
            raise ValueError(f"pairs_per_batch must be at least 1, got {pairs_per_batch}.")
        check_supported(lm)
        _check_room(lm, max_length)
        cache = ScoreCache(cache_dir)  # before the models are changed: it may be broken
        super().__init__(model, lm, lm_tokenizer, prefixes, query_part, max_length)
        lm.requires_grad_(False).eval()
        self.cache = cache
        self.retriever_temperature = retriever_temperature
        self.lm_temperature = lm_temperature
        self.include_self = include_self
        self.per_token = per_token
        self.pairs_per_batch = pairs_per_batch
        self._identity: bytes | None = None

    def train(self, mode: bool = True) -> ReplugLoss:
        super().train(mode)
        self.lm.eval()  # no dropout in the targets
        return self

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        query, passage, text = self._features(sentence_features)
        queries = self.model(query)["sentence_embedding"]  # (B, D)
        passages = self.model(passage)["sentence_embedding"]  # (B, D)
        if self.training and torch.is_grad_enabled() and not (queries.requires_grad or passages.requires_grad):
            raise ValueError(
                "No parameter of the retriever requires gradients, and the language model is frozen, so nothing would "
                "learn. Call model.requires_grad_(True), or add a LoRA to the retriever."
            )
        candidates = text["group"][:, None] == text["group"]  # (B, B)
        if not self.include_self:
            candidates = candidates & ~torch.eye(len(candidates), dtype=torch.bool, device=candidates.device)
        losses, known = self.losses(text["input_ids"], text["attention_mask"], candidates)
        result = divergence(queries, passages, losses, candidates, self.retriever_temperature, self.lm_temperature)
        self._watch(result, candidates, known)
        return result.kl

    def losses(self, input_ids: Tensor, attention_mask: Tensor, candidates: Tensor) -> tuple[Tensor, float]:
        """l_ij = -log g(D_i | D_j) of the candidates (B, B), computed or from the cache, and the share that was in the
        cache.

        Documents (B, L) are in the language model's tokens, padded on either side. The losses, (B, B) in float32 or
        wider and 0 at other pairs, are in nats, with ``per_token`` divided by the number of tokens of D_i.
        """
        begin, end = (getattr(self.collator.lm_tokenizer, f"{x}_token_id", None) for x in ("bos", "eos"))
        prefixes, continuations = [], []
        for row, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
            ids = [token for token, kept in zip(row, mask, strict=True) if kept]
            if ids[-1:] == [end]:
                ids = ids[:-1]
            prefixes.append(ids)
            continuations.append(ids[1:] if ids[:1] == [begin] else ids)
        pairs = [(i, j) for i, j in candidates.nonzero().tolist()]
        if self._identity is None:
            self._identity = _identity(self.lm)
        before, after = ([_digest(repr(ids).encode()) for ids in side] for side in (prefixes, continuations))
        keys = [_digest(self._identity + before[j] + after[i]) for i, j in pairs]
        known = self.cache.get(keys)
        share = sum(key in known for key in keys) / max(len(keys), 1)
        if unknown := {key: pair for key, pair in zip(keys, pairs, strict=True) if key not in known}:
            self.lm.eval()
            wanted = list(unknown.values())
            new = continuation_losses(self.lm, prefixes, continuations, wanted, self.pairs_per_batch)
            fresh = dict(zip(unknown, new.tolist(), strict=True))
            self.cache.put(fresh)
            known |= fresh
        wide = torch.promote_types(base_model(self.lm).dtype, torch.float32)
        losses = torch.zeros(candidates.shape, dtype=wide)
        for key, (i, j) in zip(keys, pairs, strict=True):
            losses[i, j] = known[key] / (max(len(continuations[i]), 1) if self.per_token else 1)
        return losses.to(candidates.device), share

    def _watch(self, result: Divergence, candidates: Tensor, known: float) -> None:
        """Sets the logs, and warns once if there is almost nothing to learn."""
        rows = candidates.sum(1) > 1  # a single candidate teaches nothing
        one_hot = (result.target[rows].max(1).values > ONE_HOT).float().mean() if rows.any() else rows.sum()
        if not rows.any():
            self._warn(
                "pairs",
                "Groups of two documents leave one candidate for each, so both distributions are 1 and the loss is 0. "
                "Build larger groups (the default of build_groups is 16).",
            )
        elif one_hot > 0.9:
            self._warn(
                "one-hot",
                f"{float(one_hot):.0%} of the language model's rankings are one-hot at "
                f"lm_temperature={self.lm_temperature:g}: only the first document of a ranking counts. Raise it "
                f"({'0.1 suits most' if self.per_token else 'or set per_token=True'}).",
            )
        self.logs = {
            "kl": result.kl.detach(),
            "one_hot": one_hot.float(),
            "target_entropy": _entropy(result.target),
            "retriever_entropy": _entropy(result.predicted),
            "cached": result.kl.new_tensor(known).detach(),
        }

    def get_config_dict(self) -> dict[str, Any]:
        return super().get_config_dict() | {
            "retriever_temperature": self.retriever_temperature,
            "lm_temperature": self.lm_temperature,
            "include_self": self.include_self,
            "per_token": self.per_token,
        }


def _entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the rows that are not empty, in nats."""
    return torch.special.entr(weights).sum() / weights.any(1).sum().clamp(min=1)


def _check_room(lm: nn.Module, max_length: int) -> None:
    """Refuses a language model that has no room for two documents, or whose cache cannot be shared."""
    base = base_model(lm)
    config = base.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 2 * max_length > positions:
        raise ValueError(
            f"Two documents of {max_length} tokens do not fit into the {positions} positions of {type(base).__name__}; "
            f"set max_length={positions // 2}."
        )
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    if kinds:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(
            f"{type(base).__name__} keeps other things of a text than keys and values ({names}), which several "
            "continuations cannot share. Use a decoder with attention in every layer."
        )


def _identity(lm: nn.Module) -> bytes:
    """A digest of a language model: configuration, dtypes, and up to about 2,000 values of every parameter."""
    base = base_model(lm)
    config = base.config.to_dict()
    for name in ("_name_or_path", "architectures", "transformers_version", "use_cache", "dtype"):
        config.pop(name, None)
    about = type(base).__name__ + json.dumps(config, sort_keys=True, default=str)
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name, parameter in base.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLED)].contiguous().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype} ".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
