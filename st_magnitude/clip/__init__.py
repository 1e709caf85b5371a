"""Losses that keep magnitude for open_clip, and models that do not normalise (arXiv 2602.09229, section 6.5).

The modules are imported when they are first used: ``import st_magnitude`` does not need open_clip.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from st_magnitude._checks import INSTALL
from st_magnitude._lazy import lazy_names

if TYPE_CHECKING:
    from st_magnitude.clip.evaluation import evaluate_retrieval
    from st_magnitude.clip.loss import PRESETS, AsymmetricClipLoss
    from st_magnitude.clip.model import rescale_output, unnormalize

__all__ = ["PRESETS", "AsymmetricClipLoss", "evaluate_retrieval", "rescale_output", "unnormalize"]

__getattr__, __dir__ = lazy_names(__name__)


def require_open_clip() -> None:
    """Imports open_clip.

    Raises:
        ImportError: If it is missing or broken: a torchvision that does not fit torch raises RuntimeError at import.
    """
    try:
        import_module("open_clip")
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ImportError(
            f"st_magnitude.clip needs open_clip, which cannot be imported ({reason}). Install it "
            f'{INSTALL} ".[clip]". If torchvision fails, its version does not fit torch: install both in one step, '
            "`pip install --upgrade torch torchvision`."
        ) from error
