"""Ranking with embeddings that spread over all directions."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer

from st_magnitude._checks import at_least
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.losses.regularizers import SIGReg
from st_magnitude.similarity import COSINE, Similarity

__all__ = ["SIGRegInfoNCE"]

CITATION = """
@misc{balestriero2025lejepa,
    title={LeJEPA: Provable and Scalable Self-Supervised Learning Without the Heuristics},
    author={Randall Balestriero and Yann LeCun},
    year={2025},
    eprint={2511.08544},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""


class SIGRegInfoNCE(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` plus :class:`~st_magnitude.SIGReg` on the embeddings of all columns.

        L = InfoNCE + weight · SIGReg

    It is for embeddings that crowd in a cone or in few dimensions: after training with small batches, before truncation
    or quantisation, or for a backbone that was never trained to embed. It spreads the variance evenly over the
    dimensions; it is not designed to raise retrieval scores. The Trainer logs both terms by name. The class is a
    shorthand: every loss of this package takes ``regularizers=[(SIGReg(), 0.05)]``.

    Args:
        model: The SentenceTransformer to train.
        weight: Weight of SIGReg, for statistics that grow with the batch (``scale_by_n=True``, the default). The values
            of the preset ``"blog"`` are 1.5 N to 3 N times smaller.
        similarity: A Similarity or its name. SIGReg depends on directions only (unless its ``scale`` is None), so that
            the norm stays free under a similarity that keeps magnitude.
        sigreg: The regularizer; None: ``SIGReg()``. Use ``SIGReg("exact")`` for small batches and ``SIGReg(dims=...)``
            for prefixes.
        **options: All other arguments of MagnitudeRankingLoss, such as ``terms``, ``scale``, more ``regularizers`` or
            ``mini_batch_size``, with which SIGReg still sees the whole batch.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if weight is negative.

    Example:
        ::

            loss = stm.SIGRegInfoNCE(model, weight=0.05, sigreg=stm.SIGReg(dims=(96, 192, 384)))
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

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
        **options: Any,
    ) -> None:
        at_least("weight", weight, 0, " and is usually 0.05")
        regularizers = [(sigreg or SIGReg(), weight), *options.pop("regularizers", ())]
        super().__init__(model, similarity, regularizers=regularizers, **options)
