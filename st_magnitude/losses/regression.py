"""SimilarityMSELoss, for symmetric tasks, whose training data are pairs of texts with a score."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal

from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.functional import mse_loss

from st_magnitude._checks import InputError
from st_magnitude.losses.base import EmbeddingLoss
from st_magnitude.similarity import COSINE, Similarity

logger = logging.getLogger(__name__)


class SimilarityMSELoss(EmbeddingLoss):
    """Regression of scores of pairs, as STS has them, on any :class:`~st_magnitude.Similarity`.

        L = mean_i ( lambda · s(a_i, b_i) - score_i )²

    With cosine it is sentence-transformers' ``CosineSimilarityLoss``, the best choice for STS
    (docs/losses.md). ``"qnorm"`` and ``"dnorm"`` are the paper's Sent1Norm and Sent2Norm, for
    comparison: with them s(a, b) != s(b, a), which does not suit a symmetric task (Cor. 6.1).

    Args:
        model: The SentenceTransformer to train, which the loss prepares as
            :func:`~st_magnitude.prepare` does.
        similarity: A Similarity or its name.
        scale: The factor lambda. ``"auto"`` is one over the mean norms that the similarity leaves
            in, 1 / (mean|a|^(1 - gamma_query) · mean|b|^(1 - gamma_document)), of the batch at
            hand; 1 for cosine. The paper's 0.01 is meant for dot products of 100 to 1,000.
        group_by_length: Whether texts of like length share a forward pass, copies once. False: the
            passes of sentence-transformers.

    Raises:
        ValueError: If the similarity keeps magnitude but only some routes of the model end in
            ``Normalize``, or ``truncate_dim`` cuts what it returns, or sentence-transformers'
            ``MatryoshkaLoss`` is wrapped around the loss; if there are not two text columns and a
            score for each pair.

    Inputs: (text, text) with a label, the score in [0, 1] or [-1, 1]. Divide the scores of STS-B,
        0 to 5, by 5. The loss warns about scores beyond 1 in the first batch.

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Table 5, App. F.1 and S (lambda = 0.01).
    """

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity | str = COSINE,
        scale: float | Literal["auto"] = "auto",
        *,
        group_by_length: bool = True,
    ) -> None:
        super().__init__(model, similarity, scale, 1.0, group_by_length)
        self.prepare_model()

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        if self.similarity.keeps_magnitude:
            self.refuse_matryoshka("Use the loss alone.")
        return self.compute_loss_from_embeddings(self.embed(list(sentence_features)), labels)

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None
    ) -> Tensor:
        """The loss of raw embeddings, two tensors (B, D), and scores (B,)."""
        if len(embeddings) != 2:
            raise InputError(
                f"SimilarityMSELoss compares two text columns; the dataset has {len(embeddings)}."
            )
        self.refuse_unequal(list(map(len, embeddings)))
        a, b = embeddings  # (B, D) each
        if labels is None or labels.numel() != len(a):
            number = 0 if labels is None else labels.numel()
            raise InputError(
                f"SimilarityMSELoss needs one score for each of {len(a)} pairs; got {number}. Name"
                ' the column of scores "score" or "label".'
            )
        if not self._has_begun and (largest := labels.abs().max().item()) > 1:
            logger.warning(
                f"Scores reach {largest:.3g}, but calibrated similarities lie in [-1, 1]. Divide"
                " the scores by their range (STS-B: by 5)."
            )
        self.start()
        a, b = self.by_mean_norms([a, b], self.similarity)
        predicted = self.similarity.pairwise(a, b)  # (B,)
        if self.scale != "auto":
            predicted = self.scale * predicted
        loss = mse_loss(predicted, labels.to(predicted.dtype).view(-1))
        self.watch(embeddings, labels, {"mse": loss})
        return loss
