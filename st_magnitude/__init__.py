from st_magnitude.infonce import Term, infonce
from st_magnitude.losses import (
    CosineRankingLoss,
    DNormRankingLoss,
    DotRankingLoss,
    LearnableNormLoss,
    MagnitudeRankingLoss,
    QNormRankingLoss,
)
from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery import add_normalize, export, load, prepare, rescale_output, strip_normalize

__all__ = [
    "COSINE",
    "DNORM",
    "DOT",
    "QNORM",
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DotRankingLoss",
    "LearnableNormLoss",
    "MagnitudeRankingLoss",
    "QNormRankingLoss",
    "Similarity",
    "Term",
    "add_normalize",
    "export",
    "infonce",
    "load",
    "prepare",
    "rescale_output",
    "strip_normalize",
]
