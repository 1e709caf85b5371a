"""Evaluators for sentence-transformers' Trainer, `fit` and model cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.evaluation.compression import CompressionCell as CompressionCell
    from st_magnitude.evaluation.compression import CompressionEvaluator as CompressionEvaluator
    from st_magnitude.evaluation.hybrid import HybridEvaluator as HybridEvaluator
    from st_magnitude.evaluation.hybrid import bm25_run as bm25_run
    from st_magnitude.evaluation.hybrid import dense_run as dense_run
    from st_magnitude.evaluation.hybrid import reciprocal_rank_fusion as reciprocal_rank_fusion
    from st_magnitude.evaluation.magnitude import MagnitudeEvaluator as MagnitudeEvaluator

__getattr__, __dir__, __all__ = lazy_names(__name__)
