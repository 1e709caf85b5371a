"""Losses that keep magnitude for open_clip, and models that do not normalise.

Names are imported when they are first used: ``import st_magnitude`` does not need open_clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.clip.evaluation import evaluate_retrieval
    from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss
    from st_magnitude.clip.model import rescale_output, unnormalize

__all__ = ["PRESETS", "AsymmetricClipLoss", "evaluate_retrieval", "rescale_output", "unnormalize"]

__getattr__, __dir__ = lazy_names(__name__)
