"""LateInteractionLoss: in-batch ranking by MaxSim, with the exponents of a similarity on the vectors of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import CachedMultiVectorMultipleNegativesRankingLoss
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores
from sentence_transformers.util import (
    all_gather,
    all_gather_padded,
    cat_padded_token_embeddings,
    get_rank,
    stack_padded_token_embeddings,
)
from torch import Tensor

from st_magnitude._checks import at_least, positive
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.losses.base import CITATION, mean_norm
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.similarity import QNORM, Similarity, at_least_float32
from st_magnitude.surgery.raw import unwrapped
from st_magnitude.surgery.tokens import normalized_roles

__all__ = ["LateInteractionLoss"]


class LateInteractionLoss(CachedMultiVectorMultipleNegativesRankingLoss):
    """In-batch softmax ranking (InfoNCE) by MaxSim for a MultiVectorEncoder, whose token vectors may keep their norm.

    For queries with token vectors q_1 ... q_T and documents with token vectors d_1, d_2, ...:

        S(Q, D) = mean_i max_j s(q_i, d_j),    s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document
        L = mean_Q [ -log softmax_D( S(Q, D) / (temperature · size) - log q(D) ) at D = D_Q ] + norm_penalty · P
        size = mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document)
        P = mean|d| / sqrt(mean|d|^2)

    The means run over all tokens of the batch at hand, of all devices if documents are gathered. ``size`` is 1 for
    cosine, so a temperature means the same for all similarities. Because it is not a constant, a token that matches
    nothing lowers the loss with a smaller norm, and what has a small norm need not be stored:
    :class:`~st_magnitude.NormPruning`.

    With cosine the loss equals sentence-transformers' ``MultiVectorMultipleNegativesRankingLoss`` with
    ``scale=1 / temperature`` and ``similarity_fct=mean_colbert_scores``. The scores are computed by
    sentence-transformers.

    Args:
        model: The MultiVectorEncoder to train. The loss sets its ``similarity_fn_name``.
        similarity: A Similarity of tokens or its name. With ``"qnorm"`` document tokens keep their norm. With
            ``"dot"`` the norms of query tokens are weights of the sum as well.
        temperature: Temperature of the softmax. Tune it before anything else, between 0.01 and 0.1.
        length_normalize: True divides a score by the number of query tokens (``similarity_fn_name="meanmaxsim"``).
            False leaves the sum (``"maxsim"``); a temperature of 1 then suits queries of 20 tokens as 0.05 does with
            True. Rankings are equal.
        norm_penalty: Weight of P, which is 1 if all document tokens have equal norms and falls when few of them hold
            most of the norm (L1 over L2, a measure of sparsity). A common factor of all norms does not change it.
        prior: :class:`~st_magnitude.DocumentPrior`, whose log q is subtracted from the logits.
        mini_batch_size: Number of texts for which the model holds activations at a time (GradCache). None: no caching.
        gather_across_devices: Whether the documents of all devices are negatives. Batches must have equal sizes.
        chunk_elements: Number of elements that sentence-transformers' scoring holds at a time; None: its default.

    Raises:
        TypeError: If the model is not a MultiVectorEncoder.
        ValueError: If the model normalises tokens where the similarity needs their norm, or does not where the
            similarity removes it; if norm_penalty is given for documents without norms; if an argument is out of range.

    Inputs: (anchor, positive), (anchor, positive, negative) or (anchor, positive, negative_1, ..., negative_n).

    Example:
        ::

            model = stm.prepare(MultiVectorEncoder("sentence-transformers/all-MiniLM-L6-v2"), "qnorm")
            loss = stm.LateInteractionLoss(model, temperature=0.03)
            MultiVectorEncoderTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: Khattab and Zaharia, ColBERT, SIGIR 2020 (MaxSim); Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 7;
    Hurley and Rickard, Comparing Measures of Sparsity, 2009 (P).
    """

    citation = CITATION

    def __init__(
        self,
        model: MultiVectorEncoder,
        similarity: Similarity | str = QNORM,
        *,
        temperature: float = 0.05,
        length_normalize: bool = True,
        norm_penalty: float = 0.0,
        prior: DocumentPrior | None = None,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
        chunk_elements: int | None = None,
    ) -> None:
        self._check_model(model, Similarity.named(similarity), norm_penalty)
        positive("temperature", temperature)
        if mini_batch_size is not None:
            at_least("mini_batch_size", mini_batch_size, 1, ", or None for no caching")
        score = partial(colbert_scores, length_normalize=length_normalize, chunk_elements=chunk_elements)
        super().__init__(
            model,
            scale=1 / temperature,
            similarity_fct=score,
            mini_batch_size=mini_batch_size,  # type: ignore[arg-type]
            gather_across_devices=gather_across_devices,
        )
        self.similarity = Similarity.named(similarity)
        self.temperature, self.length_normalize, self.norm_penalty = temperature, length_normalize, norm_penalty
        self.prior = prior
        self.uses_gradient_cache = mini_batch_size is not None
        self._log_q: list[Tensor] = []  # of the batch at hand, by columns
        self._has_begun = False
        unwrapped(model).similarity_fn_name = "meanmaxsim" if length_normalize else "maxsim"

    @staticmethod
    def _check_model(model: MultiVectorEncoder, similarity: Similarity, norm_penalty: float) -> None:
        if not isinstance(unwrapped(model), MultiVectorEncoder):
            raise TypeError(f"LateInteractionLoss needs a MultiVectorEncoder; got a {type(unwrapped(model)).__name__}.")
        exponents = dict(zip(("query", "document"), similarity.exponents, strict=True))
        removed = {role for role, exponent in exponents.items() if exponent == 1}
        if (normalized := normalized_roles(unwrapped(model))) != removed:
            corner = Similarity(float("query" in removed), float("document" in removed)).name
            raise ValueError(
                f"LateInteractionLoss with {similarity} removes the norms of {_tokens(removed)}, and this model "
                f"normalises {_tokens(normalized)}, so the saved model would not score as it was trained. Call "
                f"stm.prepare(model, {corner!r}) before you build the loss."
            )
        at_least("norm_penalty", norm_penalty, 0)
        if norm_penalty and exponents["document"] == 1:
            raise ValueError(
                f"norm_penalty={norm_penalty} is for documents whose norms count, and {similarity} removes them. Use "
                "'qnorm' or 'dot', or leave it out."
            )

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None = None) -> Tensor:
        features = [dict(column) for column in sentence_features]
        if len(features) < 2:
            raise ValueError(
                f"LateInteractionLoss needs at least two text columns, anchor and positive; got {len(features)}."
            )
        if self.prior is not None:
            # Before the model, which changes features in place.
            self._log_q = self.prior.log_q(features[1:])
            if not self._has_begun:
                self.prior.warn_if_unknown(self._log_q[0])
        self._has_begun = True
        if self.uses_gradient_cache:
            return super().forward(features)
        query = self.model(features[0], task=features[0].get("task", "query"))
        embeddings, masks = embed_columns_padded(self.model, features[1:], task_default="document")
        columns = [query["token_embeddings"], *embeddings]
        return self.calculate_loss(
            [[x] for x in columns], [[mask] for mask in (query["attention_mask"].bool(), *masks)]
        )

    def calculate_loss(
        self, reps: list[list[Tensor]], masks_chunks: list[list[Tensor]], *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the whole batch, from the token vectors of its mini-batches: (n, T, D) each."""
        gather = self.gather_across_devices
        (queries, query_mask), *documents = map(cat_padded_token_embeddings, reps, masks_chunks)
        log_q, offset = self._log_q, 0
        if gather:
            documents = [all_gather_padded(x, mask, with_grad=True) for x, mask in documents]
            log_q, offset = [all_gather(x) for x in log_q], get_rank() * len(queries)
        tokens, mask = stack_padded_token_embeddings(
            *map(list, zip(*documents, strict=True))
        )  # (M, N, T, D), (M, N, T)
        scores = self.similarity_fct(
            self._divided(queries, query_mask, self.similarity.gamma_query, gather),
            self._divided(tokens, mask, self.similarity.gamma_document),
            queries_mask=query_mask,
            documents_mask=mask,
        )  # (B, M · N), the columns of a row next to each other
        logits = scores * self.scale
        if log_q:
            logits = logits - torch.stack(log_q, dim=1).flatten()
        positives = (torch.arange(len(queries), device=queries.device) + offset) * len(documents)
        loss = F.cross_entropy(logits, positives)
        if self.norm_penalty:
            loss = loss + self.norm_penalty * _evenness(tokens, mask)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def _divided(self, tokens: Tensor, mask: Tensor, gamma: float | Tensor, across_devices: bool = False) -> Tensor:
        """Tokens (..., D) over the mean norm, then over a power of their own, in the precision that they have."""
        flat = at_least_float32(tokens.flatten(0, -2))
        if gamma != 1:
            norms = torch.linalg.vector_norm(flat, dim=1)
            flat = flat / mean_norm(norms, mask.flatten().to(norms.dtype), across_devices)
        return divide_by_norms(flat, (flat.shape[1],), gamma)[0].view_as(tokens).to(tokens.dtype)

    def get_config_dict(self) -> dict[str, Any]:
        query, document = self.similarity.exponents
        return {
            "similarity": {"query": query, "document": document},
            "temperature": self.temperature,
            "length_normalize": self.length_normalize,
            "norm_penalty": self.norm_penalty,
            "prior": None if self.prior is None else self.prior.get_config_dict(),
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
        }


def _evenness(tokens: Tensor, mask: Tensor) -> Tensor:
    """mean|x| / sqrt(mean|x|^2) of the tokens (..., D) of a mask (...): 1 for equal norms, a scalar."""
    tokens = at_least_float32(tokens)
    with torch.autocast(tokens.device.type, enabled=False):
        squares = tokens.square().sum(dim=-1)
        tiny = torch.finfo(squares.dtype).tiny  # the root has no derivative at 0
        number = mask.sum().clamp(min=1)
        mean = (squares.clamp(min=tiny).sqrt() * mask).sum() / number
        return mean / ((squares * mask).sum() / number).clamp(min=tiny).sqrt()


def _tokens(roles: Iterable[str]) -> str:
    return " and ".join(f"{role} tokens" for role in sorted(roles, reverse=True)) or "no tokens"
