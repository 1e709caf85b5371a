"""Ranking with embeddings that spread over all directions."""

from __future__ import annotations

from typing import Any

from sentence_transformers import SentenceTransformer

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

    For embeddings that crowd in a cone or in few dimensions: after training with small batches, before truncation or
    quantisation, for a backbone that was never trained to embed. It evens the variance out over the dimensions; it is
    not made to raise retrieval scores. Both terms are logged by name. A shorthand: any loss here takes
    ``regularizers=[(SIGReg(), 0.05)]``.

    Args:
        model: The SentenceTransformer to train.
        weight: Of SIGReg. For statistics that grow with the batch (the default, ``scale_by_n=True``); the preset
            ``"blog"`` has values some 1.5 N to 3 N times smaller.
        similarity: A Similarity or its name. SIGReg looks at directions only (unless its ``scale`` is None), so that
            length stays free under one that keeps magnitude.
        sigreg: The regularizer; default: ``SIGReg()``. ``SIGReg("exact")`` for small batches, ``SIGReg(dims=...)`` for
            prefixes.
        **options: All others of MagnitudeRankingLoss: ``terms``, ``scale``, further ``regularizers``,
            ``mini_batch_size`` (SIGReg then still acts on the whole batch), ...

    Raises:
        ValueError: As MagnitudeRankingLoss does; if weight is negative.

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
        if not weight >= 0:
            raise ValueError(f"weight must not be negative, got {weight}; the usual one is 0.05.")
        regularizers = [(sigreg or SIGReg(), weight), *options.pop("regularizers", ())]
        super().__init__(model, similarity, regularizers=regularizers, **options)
