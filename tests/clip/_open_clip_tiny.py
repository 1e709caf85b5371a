"""Tiny random models of every open_clip class, and inputs for them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

open_clip = pytest.importorskip("open_clip", exc_type=(ImportError, RuntimeError))

LENGTH, WORDS = 6, 40
VISION = {"layers": 1, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16}
TEXT = {"layers": 1, "width": 32, "heads": 2, "context_length": LENGTH, "vocab_size": WORDS}
RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 32, "image_size": 32}


def clip(output_dict: bool = True, vision: dict = VISION, **options: object) -> nn.Module:
    return open_clip.model.CLIP(12, vision, TEXT, output_dict=output_dict, **options)


def custom_text(output_dict: bool = True, text: dict = TEXT, **options: object) -> nn.Module:
    return open_clip.model.CustomTextCLIP(12, VISION, text, output_dict=output_dict, **options)


def siglip(output_dict: bool = True) -> nn.Module:
    """A bias to the logits and a bias in the text projection."""
    text = TEXT | {"proj_bias": True, "no_causal_mask": True, "pool_type": "last"}
    return custom_text(output_dict, text, init_logit_bias=-10.0, init_logit_scale=2.3)


def resnet(output_dict: bool = True) -> nn.Module:
    """Batch normalisation, and a projection with a bias inside the attention pool."""
    return clip(output_dict, RESNET)


MODELS = {"clip": clip, "custom_text": custom_text, "siglip": siglip, "resnet": resnet}


def batch(model: nn.Module, size: int = 5) -> tuple[Tensor, Tensor]:
    """Images and token ids from the global generator."""
    side = model.visual.image_size
    side = side[0] if isinstance(side, (tuple, list)) else side
    return torch.randn(size, 3, side, side), torch.randint(1, WORDS, (size, LENGTH))
