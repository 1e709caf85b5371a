"""Losses. Every name is imported when it is first used, so the commands load the table alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.losses.exponents import CosineRankingLoss as CosineRankingLoss
    from st_magnitude.losses.exponents import DNormRankingLoss as DNormRankingLoss
    from st_magnitude.losses.exponents import DotRankingLoss as DotRankingLoss
    from st_magnitude.losses.exponents import LearnableNormLoss as LearnableNormLoss
    from st_magnitude.losses.exponents import QNormRankingLoss as QNormRankingLoss
    from st_magnitude.losses.ranking import MagnitudeRankingLoss as MagnitudeRankingLoss
    from st_magnitude.losses.regression import SimilarityMSELoss as SimilarityMSELoss
    from st_magnitude.losses.sigreg import SIGRegInfoNCE as SIGRegInfoNCE
    from st_magnitude.losses.temperature import TempAggLoss as TempAggLoss
    from st_magnitude.losses.temperature import TempAggMRLLoss as TempAggMRLLoss
    from st_magnitude.losses.temperature import TempSpecMRLLoss as TempSpecMRLLoss
    from st_magnitude.losses.temperature import temp_agg as temp_agg
    from st_magnitude.losses.temperature import temp_agg_mrl as temp_agg_mrl

__getattr__, __dir__, __all__ = lazy_names(__name__)
