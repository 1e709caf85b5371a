from st_magnitude.losses.ranking import (
    CosineRankingLoss,
    DNormRankingLoss,
    DotRankingLoss,
    LearnableNormLoss,
    MagnitudeRankingLoss,
    QNormRankingLoss,
)

__all__ = [
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DotRankingLoss",
    "LearnableNormLoss",
    "MagnitudeRankingLoss",
    "QNormRankingLoss",
]
