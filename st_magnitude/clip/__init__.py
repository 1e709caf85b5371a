"""Losses that keep magnitude for open_clip, and models that do not normalise.

Names are imported when they are first used: ``import st_magnitude`` does not need open_clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.clip.evaluation import evaluate_retrieval as evaluate_retrieval
    from st_magnitude.clip.loss import PRESETS as PRESETS
    from st_magnitude.clip.loss import AsymmetricClipLoss as AsymmetricClipLoss
    from st_magnitude.clip.model import rescale_output as rescale_output
    from st_magnitude.clip.model import unnormalize as unnormalize

__getattr__, __dir__, __all__ = lazy_names(__name__)
