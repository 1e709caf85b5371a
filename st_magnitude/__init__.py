"""Train a retriever on your own pairs: large batches in a fraction of the time and memory, and a
verdict on what helped.

Every name is imported when it is first used, so ``import st_magnitude`` and ``st-magnitude --help``
are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude import clip as clip
    from st_magnitude import geometry as geometry
    from st_magnitude import revela as revela
    from st_magnitude.comparison.run import compare
    from st_magnitude.data.pairs import load_splits
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.diagnosis.diagnose import diagnose
    from st_magnitude.evaluation.abstention import calibrate_abstention
    from st_magnitude.evaluation.calibration import calibrate_exponent, calibrate_prior
    from st_magnitude.evaluation.mining import mine_negatives
    from st_magnitude.kernel.infonce import infonce
    from st_magnitude.kernel.terms import Term
    from st_magnitude.losses import (
        CosineRankingLoss,
        DNormRankingLoss,
        DotRankingLoss,
        LearnableNormLoss,
        MagnitudeRankingLoss,
        QNormRankingLoss,
        SIGRegInfoNCE,
        SimilarityMSELoss,
        TempAggLoss,
        TempAggMRLLoss,
        TempSpecMRLLoss,
    )
    from st_magnitude.losses.prior import DocumentPrior
    from st_magnitude.losses.regularizers import SIGReg
    from st_magnitude.saving.export import export, load
    from st_magnitude.serving.check import check_serving
    from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
    from st_magnitude.surgery.gradients import attach_grad_scale, cut_init
    from st_magnitude.surgery.normalize import prepare, strip_normalize
    from st_magnitude.training.attach import attach
    from st_magnitude.training.monitor import NormMonitor

__version__ = "0.1.0"

__all__ = [
    "COSINE",
    "DNORM",
    "DOT",
    "QNORM",
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DocumentPrior",
    "DotRankingLoss",
    "LearnableNormLoss",
    "MagnitudeRankingLoss",
    "NormMonitor",
    "QNormRankingLoss",
    "RetrievalData",
    "SIGReg",
    "SIGRegInfoNCE",
    "Similarity",
    "SimilarityMSELoss",
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
    "Term",
    "attach",
    "attach_grad_scale",
    "calibrate_abstention",
    "calibrate_exponent",
    "calibrate_prior",
    "check_serving",
    "compare",
    "cut_init",
    "diagnose",
    "export",
    "infonce",
    "load",
    "load_splits",
    "mine_negatives",
    "prepare",
    "strip_normalize",
]

__getattr__, __dir__ = lazy_names(__name__)
