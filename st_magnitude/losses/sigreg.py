"""SIGRegInfoNCE: a ranking loss whose embeddings become isotropic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import at_least
from st_magnitude.losses.base import with_options_of
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.losses.regularizers import CITATION, Regularizer, SIGReg
from st_magnitude.similarity import COSINE, Similarity


class SIGRegInfoNCE(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` plus :class:`~st_magnitude.SIGReg` on all embeddings.

        L = InfoNCE + weight · SIGReg

    It is for embeddings that crowd in a cone or in few dimensions. It spreads the variance evenly
    over the dimensions; it is not designed to raise retrieval scores. The Trainer logs both terms
    by name. The class is a shorthand: every ranking loss takes ``regularizers=[(SIGReg(), 0.05)]``.

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

    citation = CITATION

    @with_options_of(MagnitudeRankingLoss)
    def __init__(
        self,
        model: SentenceTransformer,
        weight: float = 0.05,
        similarity: Similarity | str = COSINE,
        *,
        sigreg: SIGReg | None = None,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        **options: Any,
    ) -> None:
        at_least("weight", weight, 0, " and is usually 0.05")
        regularizers = [(sigreg or SIGReg(), weight), *regularizers]
        super().__init__(model, similarity, regularizers=regularizers, **options)
