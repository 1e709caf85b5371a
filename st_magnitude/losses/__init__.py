from st_magnitude.losses.exponents import (
    CosineRankingLoss,
    DNormRankingLoss,
    DotRankingLoss,
    LearnableNormLoss,
    QNormRankingLoss,
)
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.losses.regression import SimilarityMSELoss
from st_magnitude.losses.sigreg import SIGRegInfoNCE
from st_magnitude.losses.temperature import (
    TempAggLoss,
    TempAggMRLLoss,
    TempSpecMRLLoss,
    temp_agg,
    temp_agg_mrl,
)

__all__ = [
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DotRankingLoss",
    "LearnableNormLoss",
    "MagnitudeRankingLoss",
    "QNormRankingLoss",
    "SIGRegInfoNCE",
    "SimilarityMSELoss",
    "TempAggLoss",
    "TempAggMRLLoss",
    "TempSpecMRLLoss",
    "temp_agg",
    "temp_agg_mrl",
]
