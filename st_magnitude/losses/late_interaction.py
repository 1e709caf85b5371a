"""LateInteractionLoss: in-batch ranking by MaxSim under a similarity of token vectors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.losses.merged_forward import embed_columns_padded
from sentence_transformers.multi_vector_encoder.losses import (
    CachedMultiVectorMultipleNegativesRankingLoss,
)
from sentence_transformers.multi_vector_encoder.scoring import colbert_scores, mean_colbert_scores
from sentence_transformers.util import (
    all_gather,
    all_gather_padded,
    cat_padded_token_embeddings,
    get_rank,
    stack_padded_token_embeddings,
)
from torch import Tensor, nn

from st_magnitude._checks import positive
from st_magnitude.kernel.norms import divide_by_norms
from st_magnitude.losses.base import CITATION, PreparesModel, mean_norm
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.losses.texts import Features, refuse_labels, warn_without_prompts
from st_magnitude.similarity import QNORM, Similarity, at_least_float32
from st_magnitude.surgery.raw import unwrapped
from st_magnitude.surgery.tokens import normalized_roles


class LateInteractionLoss(PreparesModel, CachedMultiVectorMultipleNegativesRankingLoss):
    """InfoNCE by MaxSim for a MultiVectorEncoder, whose token vectors may keep their norm.

    For queries with token vectors q_1 ... q_T and documents with token vectors d_1, d_2, ...:

        S(Q, D) = mean_i max_j s(q_i, d_j),
        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document
        L = mean_Q [ -log softmax_D( S(Q, D) / (temperature · size) - log q(D) ) at D = D_Q ]
        size = mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document)

    The means run over all tokens of the batch at hand, of all devices if documents are gathered.
    ``size`` is 1 for cosine. Because it is not a constant, a token that matches nothing lowers the
    loss with a smaller norm, and what has a small norm need not be stored:
    :class:`~st_magnitude.NormPruning`. sentence-transformers computes the scores.

    Args:
        model: The MultiVectorEncoder to train. The loss sets its ``similarity_fn_name``.
        similarity: A Similarity of tokens or its name. ``"qnorm"`` keeps the norms of document
            tokens, and ``"dot"`` those of query tokens as well, as weights of the sum. With
            ``"cosine"`` the loss is ``MultiVectorMultipleNegativesRankingLoss`` with ``scale=1 /
            temperature`` and ``mean_colbert_scores``.
        temperature: Temperature of the softmax. Tune it before anything else, between 0.01 and 0.1.
        length_normalize: True: the score is the mean over query tokens, as written above. False:
            their sum, ColBERT's, for which a temperature is as many times higher as queries have
            tokens. Rankings are equal.
        prior: :class:`~st_magnitude.DocumentPrior`, whose log q is subtracted from the logits.
        mini_batch_size: Number of texts for which the model holds activations at a time
            (GradCache). None: no caching.
        gather_across_devices: Whether documents of all devices are negatives, for equal batches.

    Raises:
        TypeError: If the model is not a MultiVectorEncoder.
        ValueError: If the model does not normalise the tokens whose norms the similarity removes,
            and no others.

    Inputs: (anchor, positive) or (anchor, positive, negative_1, ..., negative_n), without labels.

    Example:
        ::

            model = MultiVectorEncoder("sentence-transformers/all-MiniLM-L6-v2")
            model = stm.prepare(model, "qnorm")
            loss = stm.LateInteractionLoss(model, temperature=0.03)
            MultiVectorEncoderTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: Khattab and Zaharia, ColBERT, SIGIR 2020 (MaxSim); Beyond the Unit Hypersphere, arXiv
        2602.09229, Eq. 7.
    """

    citation = CITATION

    def __init__(
        self,
        model: MultiVectorEncoder,
        similarity: Similarity | str = QNORM,
        *,
        temperature: float = 0.05,
        length_normalize: bool = True,
        prior: DocumentPrior | None = None,
        mini_batch_size: int | None = None,
        gather_across_devices: bool = False,
    ) -> None:
        similarity = Similarity.named(similarity)
        positive("temperature", temperature)
        super().__init__(
            model,
            scale=1 / temperature,
            similarity_fct=mean_colbert_scores if length_normalize else colbert_scores,
            mini_batch_size=mini_batch_size,  # type: ignore[arg-type]
            gather_across_devices=gather_across_devices,
        )
        self.similarity = similarity
        self.temperature = temperature
        self.prior = prior
        self.length_normalize = length_normalize
        self.uses_gradient_cache = mini_batch_size is not None
        self._has_begun = False
        self._log_q: list[Tensor] = []  # of the batch at hand, by columns
        self.prepare_model()

    def prepare_model(self) -> None:
        model = unwrapped(self.model)
        check_tokens(model, self.similarity)
        model.similarity_fn_name = "meanmaxsim" if self.length_normalize else "maxsim"

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor:
        refuse_labels("LateInteractionLoss", labels)
        features = [dict(column) for column in sentence_features]
        if len(features) < 2:
            raise ValueError(
                "LateInteractionLoss needs at least two text columns, anchor and positive; got"
                f" {len(features)}."
            )
        if torch.is_grad_enabled() and not self._has_begun:
            self._has_begun = True
            warn_without_prompts(features, self.model, type(self).__name__)
        if self.prior is not None:  # before the model, which changes features in place
            self._log_q = self.prior.log_q(features[1:])
        if self.uses_gradient_cache:
            return super().forward(features)
        query = self.model(features[0], task=features[0].get("task", "query"))
        embeddings, masks = embed_columns_padded(self.model, features[1:], task_default="document")
        columns = [query["token_embeddings"], *embeddings]
        masks = [query["attention_mask"].bool(), *masks]
        return self.calculate_loss([[x] for x in columns], [[mask] for mask in masks])

    def calculate_loss(
        self,
        reps: list[list[Tensor]],
        masks_chunks: list[list[Tensor]],
        *,
        with_backward: bool = False,
    ) -> Tensor:
        """The loss of the whole batch, from token vectors (n, T, D) of its mini-batches."""
        (queries, query_mask), *documents = map(cat_padded_token_embeddings, reps, masks_chunks)
        log_q, offset = self._log_q, 0
        if self.gather_across_devices:
            documents = [all_gather_padded(x, mask, with_grad=True) for x, mask in documents]
            log_q, offset = [all_gather(x) for x in log_q], get_rank() * len(queries)
        tokens, mask = stack_padded_token_embeddings(
            [x for x, _ in documents], [mask for _, mask in documents]
        )
        scores = self.similarity_fct(
            _divided(queries, query_mask, self.similarity.gamma_query, self.gather_across_devices),
            _divided(tokens, mask, self.similarity.gamma_document),  # (M, N, T, D)
            queries_mask=query_mask,
            documents_mask=mask,
        )  # (B, M · N), the columns of a row next to each other
        logits = scores * self.scale
        if log_q:
            logits = logits - torch.stack(log_q, dim=1).flatten()
        positives = (torch.arange(len(queries), device=queries.device) + offset) * len(documents)
        loss = F.cross_entropy(logits, positives)
        if with_backward:
            loss.backward()
            loss = loss.detach()
        return loss

    def get_config_dict(self) -> dict[str, object]:
        query, document = self.similarity.exponents
        return {
            "similarity": {"query": query, "document": document},
            "temperature": self.temperature,
            "length_normalize": self.length_normalize,
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
            "prior": None if self.prior is None else self.prior.get_config_dict(),
        }


def check_tokens(model: nn.Module, similarity: Similarity) -> None:
    """Refuses a model that would not score as a loss with this similarity trains it."""
    if not isinstance(model, MultiVectorEncoder):
        raise TypeError(
            f"LateInteractionLoss needs a MultiVectorEncoder; got a {type(model).__name__}."
        )
    removed = {
        role
        for role, gamma in zip(("query", "document"), similarity.exponents, strict=True)
        if gamma == 1
    }
    if (normalized := normalized_roles(model)) != removed:
        corner = Similarity(float("query" in removed), float("document" in removed)).name
        raise ValueError(
            f"LateInteractionLoss with {similarity} removes the norms of {_tokens(removed)}, and"
            f" this model normalises {_tokens(normalized)}, so the saved model would not score as"
            f" it was trained. Call stm.prepare(model, {corner!r}) before you build the loss."
        )


def _tokens(roles: set[str]) -> str:
    return " and ".join(f"{role} tokens" for role in sorted(roles, reverse=True)) or "no tokens"


def _divided(
    tokens: Tensor, mask: Tensor, gamma: float | Tensor, across_devices: bool = False
) -> Tensor:
    """Tokens (..., D) over their mean norm and over a power of their own, in their precision."""
    flat = at_least_float32(tokens.flatten(0, -2))
    if gamma != 1:
        norms = torch.linalg.vector_norm(flat, dim=1)
        flat = flat / mean_norm(norms, mask.flatten().to(norms.dtype), across_devices)
    return divide_by_norms(flat, (flat.shape[1],), gamma)[0].view_as(tokens).to(tokens.dtype)
