"""SIGRegInfoNCE: a ranking loss whose embeddings become isotropic."""

from __future__ import annotations

from sentence_transformers import SentenceTransformer
from typing_extensions import Unpack

from st_magnitude._checks import at_least
from st_magnitude.losses.ranking import MagnitudeRankingLoss, TermOptions
from st_magnitude.losses.regularizers import CITATION, SIGReg
from st_magnitude.similarity import COSINE, Similarity


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

    citation = CITATION

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
