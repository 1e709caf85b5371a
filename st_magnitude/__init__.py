"""Train embedding models whose geometry is used: magnitude-aware losses for sentence-transformers.

Every name is imported when it is first used, so that ``import st_magnitude`` and ``st-magnitude --help`` are fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude import clip, geometry, revela
    from st_magnitude.comparison.config import CompareConfig
    from st_magnitude.comparison.run import compare
    from st_magnitude.data.encode import encode_corpus
    from st_magnitude.data.encoder import Encoder
    from st_magnitude.diagnosis.diagnose import diagnose
    from st_magnitude.diagnosis.findings import Diagnosis
    from st_magnitude.evaluation import (
        CompressionEvaluator,
        GeometryEvaluator,
        MagnitudeEvaluator,
        ScoredPairsEvaluator,
    )
    from st_magnitude.evaluation.abstention import Abstention, answerable, calibrate_abstention
    from st_magnitude.evaluation.admission import Admission, admit
    from st_magnitude.evaluation.calibration import ExponentCurve, calibrate_exponent
    from st_magnitude.evaluation.mining import mine_negatives
    from st_magnitude.kernel.infonce import infonce
    from st_magnitude.kernel.reference import infonce_reference
    from st_magnitude.kernel.terms import LearnedTemperature, Term
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
        temp_agg,
        temp_agg_mrl,
        temp_spec_mrl,
    )
    from st_magnitude.losses.sigreg import SIGReg
    from st_magnitude.serving.check import check_serving
    from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
    from st_magnitude.surgery.export import export, load
    from st_magnitude.surgery.gradients import attach_grad_scale, cut_init, grad_scale
    from st_magnitude.surgery.normalize import add_normalize, prepare, rescale_output, strip_normalize
    from st_magnitude.training.monitor import NormMonitor
    from st_magnitude.training.state import attach

__version__ = "0.1.0"

__all__ = [
    "COSINE",
    "DNORM",
    "DOT",
    "QNORM",
    "Abstention",
    "Admission",
    "CompareConfig",
    "CompressionEvaluator",
    "CosineRankingLoss",
    "DNormRankingLoss",
    "Diagnosis",
    "DotRankingLoss",
    "Encoder",
    "ExponentCurve",
    "GeometryEvaluator",
    "LearnableNormLoss",
    "LearnedTemperature",
    "MagnitudeEvaluator",
    "MagnitudeRankingLoss",
    "NormMonitor",
    "QNormRankingLoss",
    "SIGReg",
    "SIGRegInfoNCE",
    "ScoredPairsEvaluator",
    "Similarity",
    "SimilarityMSELoss",
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
    "Term",
    "add_normalize",
    "admit",
    "answerable",
    "attach",
    "attach_grad_scale",
    "calibrate_abstention",
    "calibrate_exponent",
    "check_serving",
    "clip",
    "compare",
    "cut_init",
    "diagnose",
    "encode_corpus",
    "export",
    "geometry",
    "grad_scale",
    "infonce",
    "infonce_reference",
    "load",
    "mine_negatives",
    "prepare",
    "rescale_output",
    "revela",
    "strip_normalize",
    "temp_agg",
    "temp_agg_mrl",
    "temp_spec_mrl",
]

__getattr__, __dir__ = lazy_names(__name__)
