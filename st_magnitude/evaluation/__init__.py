"""Evaluators in the manner of sentence-transformers: they go where its own evaluators go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.evaluation.compression import CompressionCell, CompressionEvaluator
    from st_magnitude.evaluation.geometry import GeometryEvaluator
    from st_magnitude.evaluation.hybrid import (
        HybridEvaluator,
        bm25_run,
        dense_run,
        reciprocal_rank_fusion,
    )
    from st_magnitude.evaluation.magnitude import MagnitudeEvaluator

__all__ = [
    "CompressionCell",
    "CompressionEvaluator",
    "GeometryEvaluator",
    "HybridEvaluator",
    "MagnitudeEvaluator",
    "bm25_run",
    "dense_run",
    "reciprocal_rank_fusion",
]

__getattr__, __dir__ = lazy_names(__name__)
