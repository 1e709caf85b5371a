"""Train embedding models whose geometry is used: magnitude-aware losses for sentence-transformers."""

from st_magnitude import clip, geometry, revela
from st_magnitude.corpus.encoding import encode_corpus
from st_magnitude.diagnosis.diagnose import diagnose
from st_magnitude.diagnosis.findings import Diagnosis
from st_magnitude.evaluation import CompressionEvaluator, GeometryEvaluator, MagnitudeEvaluator, ScoredPairsEvaluator
from st_magnitude.evaluation.calibration import ExponentCurve, calibrate_exponent
from st_magnitude.infonce import Term, infonce
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
from st_magnitude.losses.regularizers import SIGReg, covariance_penalty, norm_variance_penalty
from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.grad_scale import attach_grad_scale, grad_scale
from st_magnitude.surgery.normalize import (
    add_normalize,
    cut_init,
    export,
    load,
    prepare,
    rescale_output,
    strip_normalize,
)
from st_magnitude.training.monitor import NormMonitor

__version__ = "0.1.0"

__all__ = [
    "COSINE",
    "DNORM",
    "DOT",
    "QNORM",
    "CompressionEvaluator",
    "CosineRankingLoss",
    "DNormRankingLoss",
    "Diagnosis",
    "DotRankingLoss",
    "ExponentCurve",
    "GeometryEvaluator",
    "LearnableNormLoss",
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
    "attach_grad_scale",
    "calibrate_exponent",
    "clip",
    "covariance_penalty",
    "cut_init",
    "diagnose",
    "encode_corpus",
    "export",
    "geometry",
    "grad_scale",
    "infonce",
    "load",
    "norm_variance_penalty",
    "prepare",
    "rescale_output",
    "revela",
    "strip_normalize",
    "temp_agg",
    "temp_agg_mrl",
    "temp_spec_mrl",
]
