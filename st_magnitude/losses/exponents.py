"""Ranking losses by exponents, the four corners and learned ones, and one with a regularizer."""

from __future__ import annotations

import math

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses import has_static_embedding_input
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from st_magnitude._checks import InputError, at_least
from st_magnitude.losses.base import exponent_norm
from st_magnitude.losses.ranking import MagnitudeRankingLoss, TermOptions
from st_magnitude.losses.regularizers import CITATION as SIGREG_CITATION
from st_magnitude.losses.regularizers import SIGReg
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.raw import normalizes_output, unwrapped

EXPONENT_RATE = 1e-2  # of the biases of exponents, where the model has its usual rate


def usual_rate(model: SentenceTransformer) -> float:
    """The usual peak learning rate of AdamW for a kind of model."""
    if has_static_embedding_input(model):
        return 0.03  # a row of a table gets a gradient only where its token occurs
    return 2e-4 if any(".lora_" in name for name, _ in model.named_parameters()) else 2e-5


class CosineRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = cos(q, d): sentence-transformers'
    MultipleNegativesRankingLoss."""

    fixed_similarity = COSINE
    citation = MultipleNegativesRankingLoss.citation  # by the directions


class DotRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = q · d: both norms contribute (Eq. 4)."""

    fixed_similarity = DOT


class QNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with a normalised query, s(q, d) = q / |q| · d = |d| cos(q, d):
    the document's norm counts (Eq. 5)."""

    fixed_similarity = QNORM


class DNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with a normalised document, s(q, d) = q · d / |d| =
    |q| cos(q, d) (Eq. 6). The norm of a query is its inverse temperature. The trained model ranks
    by cosine (Prop. 4.2)."""

    fixed_similarity = DNORM


class LearnableNormLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` whose exponents are learned (arXiv 2602.09229, Eq. 7).

        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document,   gamma = sigmoid(bias)

    The exponents are parameters of the model, in its last module
    :class:`~st_magnitude.modules.ExponentNorm`, which the loss appends, and exempt from weight
    decay. They learn faster than the other weights: a bias at about 1e-2 where the optimizer has
    the usual rate of the model, and at another rate in proportion (docs/losses.md).

    Args:
        model: The model to train. If it has an ExponentNorm, training goes on from its exponents.
        gamma_query: First value of the query exponent, strictly between 0 and 1.
        gamma_document: The same of the document exponent.
        **options: All other arguments of MagnitudeRankingLoss, except similarity.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if an exponent starts at 0 or 1.

    Build an optimizer of your own after the loss, with the same rate for all weights. Load the
    saved model with :func:`st_magnitude.load`.
    """

    learns_exponents = True

    def __init__(
        self,
        model: SentenceTransformer,
        gamma_query: float = 0.5,
        gamma_document: float = 0.5,
        **options: Unpack[TermOptions],
    ) -> None:
        super().__init__(model, Similarity(gamma_query, gamma_document), **options)

    def check_model(self) -> None:
        model = unwrapped(self.model)
        # of the model's ExponentNorm, or given
        gamma_query, gamma_document = self.similarity.exponents
        if not (0 < gamma_query < 1 and 0 < gamma_document < 1):
            raise InputError(
                "Learned exponents must start strictly between 0 and 1; got"
                f" gamma_query={gamma_query} and gamma_document={gamma_document}. For fixed ones"
                " use MagnitudeRankingLoss(model, Similarity(...))."
            )
        super().check_model()
        has_exponents = isinstance(model[-1], ExponentNorm) and not normalizes_output(model)
        if isinstance(self.model, DistributedDataParallel) and not has_exponents:
            raise InputError(
                "LearnableNormLoss adds exponents to the model, which DistributedDataParallel"
                " would not average over the processes. Build the loss before you wrap the model."
            )

    def prepare_model(self) -> None:
        super().prepare_model()
        model = unwrapped(self.model)
        # a power of two, by which a division is exact: what resumes goes on from the same numbers
        model[-1].learn(2.0 ** round(math.log2(EXPONENT_RATE / usual_rate(model))))

    @property
    def similarity(self) -> Similarity:
        norm = exponent_norm(self.model)
        return self._similarity if norm is None else norm.similarity

    def get_log(self) -> dict[str, float]:
        query, document = (float(exponent.detach()) for exponent in self._learned())
        return {**super().get_log(), "gamma_query": query, "gamma_document": document}

    def _learned(self) -> list[Tensor]:
        similarity = self.similarity  # the model may have lost its ExponentNorm after the training
        exponents = similarity.gamma_query, similarity.gamma_document
        return [torch.as_tensor(exponent) for exponent in exponents]


class SIGRegInfoNCE(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` plus :class:`~st_magnitude.SIGReg` on all embeddings.

        L = InfoNCE + weight · SIGReg

    It spreads the variance evenly over the dimensions. The Trainer logs both terms by name. The
    class is a shorthand: every ranking loss takes ``regularizers=[(SIGReg(), 0.05)]``.

    Args:
        model: The SentenceTransformer to train.
        weight: Weight of SIGReg, whose distance from its best value grows with the batch.
        similarity: A Similarity or its name. SIGReg leaves the norm free, unless its ``scale`` is
            None.
        sigreg: The regularizer; None: ``SIGReg()``. Use ``SIGReg(dims=...)`` for prefixes.
        **options: All other arguments of MagnitudeRankingLoss.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if weight is negative.

    Source: LeJEPA, arXiv 2511.08544.
    """

    citation = SIGREG_CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        weight: float = 0.05,
        similarity: Similarity | str = COSINE,
        *,
        sigreg: SIGReg | None = None,
        **options: Unpack[TermOptions],
    ) -> None:
        at_least("weight", weight, 0, " and is usually 0.05")
        options["regularizers"] = [(sigreg or SIGReg(), weight), *options.get("regularizers", ())]
        super().__init__(model, similarity, **options)
