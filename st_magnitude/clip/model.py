"""CLIP models whose forward pass keeps the norms of embeddings."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from st_magnitude._checks import INSTALL
from st_magnitude.surgery.raw import Model, unwrapped

try:
    from open_clip.hf_model import HFTextEncoder
    from open_clip.model import CLIP, CustomTextCLIP
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit torch
    reason = " ".join(str(error).split())
    raise ImportError(
        f"st_magnitude.clip needs open_clip, which cannot be imported ({reason}). Install it "
        f'{INSTALL} ".[clip]". If torchvision fails, its version does not fit torch: install both '
        "in one step, `pip install --upgrade torch torchvision`."
    ) from error

logger = logging.getLogger(__name__)

# Where open_clip's models keep the last projection of each tower; the first that exists counts.
_PROJECTIONS = {
    "image": ("visual.proj", "visual.attnpool.c_proj", "visual.head"),
    "text": ("text_projection", "text.text_projection", "text.proj"),
}


def _forward(
    model: CLIP, image: Tensor | None = None, text: Tensor | None = None
) -> dict[str, Tensor | None] | tuple[Tensor | None, ...]:
    """Features (B, D) of images and texts, logit_scale after exp(), and logit_bias if any."""
    out = {
        "image_features": None if image is None else model.encode_image(image),
        "text_features": None if text is None else model.encode_text(text),
        "logit_scale": model.logit_scale.exp(),
    }
    if model.logit_bias is not None:
        out["logit_bias"] = model.logit_bias
    return out if model.output_dict else tuple(out.values())


def _get_logits(model: CLIP, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """logit_scale · image · text + logit_bias, (B, B), and its transpose."""
    logits = model.logit_scale.exp() * model.encode_image(image) @ model.encode_text(text).T
    if model.logit_bias is not None:
        logits = logits + model.logit_bias
    return logits, logits.T


class UnnormalizedCLIP(CLIP):
    """CLIP without the normalisation in ``forward``: see :func:`unnormalize`."""

    forward = _forward
    get_logits = _get_logits


class UnnormalizedCustomTextCLIP(CustomTextCLIP):
    """CustomTextCLIP (SigLIP, towers of transformers) without the normalisation."""

    forward = _forward
    get_logits = _get_logits


RAW = {CLIP: UnnormalizedCLIP, CustomTextCLIP: UnnormalizedCustomTextCLIP}


def unnormalize(model: Model) -> Model:
    """Removes the normalisation from the forward pass, so embeddings keep their norms. In place.

    ``model(images, text)`` then returns what ``encode_image`` and ``encode_text`` return with
    ``normalize=False``, and ``get_logits`` uses it. Stock open_clip loads the checkpoints.

    Args:
        model: A CLIP or CustomTextCLIP (SigLIP) of open_clip, also inside DistributedDataParallel.

    Raises:
        TypeError: If it is another model, whose forward may do anything.

    docs/clip.md has an example.

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.5 and App. F.2.
    """
    inner: nn.Module = unwrapped(model)
    kind = type(inner)
    if kind in RAW:
        inner.__class__ = RAW[kind]
    elif kind not in RAW.values():
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} is not one of the open_clip models that are known "
            "here: CLIP and CustomTextCLIP, neither scripted nor traced. In a class of your own, "
            "let forward return the embeddings of encode_image and encode_text."
        )
    return model


@torch.no_grad()
def rescale_output(
    model: Model, images: Tensor | None = None, texts: Tensor | None = None
) -> Model:
    """Divides the last projection of each tower by the mean norm of its embeddings. In place.

        x -> x / mean|x|,   image and text embeddings each by its own mean over the probe

    Cosines and rankings do not change, but logits do.

    Args:
        model: A CLIP or CustomTextCLIP of open_clip, whether it normalises or not.
        images: Preprocessed images for the probe, (n, 3, H, W); by default, eight random images.
        texts: Token ids for the probe, (m, L); by default, eight random sequences.

    Raises:
        ValueError: If neither tower ends in a linear projection, or a mean norm is zero or not
            finite. The model is then as it was.

    A tower that does not end in a projection (SigLIP's image tower of timm) stays as it is, with a
    warning. Norms are measured in the present mode of the model, training or evaluation.
    """
    inner = cast(CLIP, unwrapped(model))
    name = type(inner).__name__
    projections = {tower: _last_projection(inner, tower) for tower in _PROJECTIONS}
    if not any(projections.values()):
        raise ValueError(
            f"{name} cannot be rescaled, because no tower ends in a linear projection. Divide the "
            "initial logit_scale instead: create_model(..., init_logit_scale=...)."
        )
    probed = copy.deepcopy(inner)  # whose statistics a forward pass in training mode moves
    norms = {
        "image": _mean_norm(probed.encode_image, _images(inner) if images is None else images),
        "text": _mean_norm(probed.encode_text, _texts(inner) if texts is None else texts),
    }
    if not all(0 < norm < float("inf") for norm in norms.values()):
        raise ValueError(
            f"{name} cannot be rescaled, because mean norms are {norms}. Check model and probe."
        )
    for tower, projection in projections.items():
        for parameter in projection:
            parameter.div_(norms[tower])
        if not projection:
            logger.warning(
                f"The {tower} tower of {name} does not end in a linear projection; its mean norm "
                f"stays {norms[tower]:.4g}."
            )
    return model


def _last_projection(model: nn.Module, tower: str) -> list[nn.Parameter]:
    """Weight and bias of the last projection of a tower; nothing if there is no projection."""
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    for path in _PROJECTIONS[tower]:
        if path in parameters:
            return [parameters[path]]
        if path in modules:
            linear = [part for part in modules[path].modules() if isinstance(part, nn.Linear)]
            return list(linear[-1].parameters()) if linear else []
    return []


def _mean_norm(encode: Callable[..., Tensor], inputs: Tensor) -> float:
    with torch.random.fork_rng():  # dropout takes nothing from the global generator
        embeddings = encode(inputs, normalize=False)
    return torch.linalg.vector_norm(embeddings.cpu().double(), dim=-1).mean().item()


def _images(model: CLIP) -> Tensor:
    """Eight random images (8, 3, H, W), in the precision of the model."""
    size = model.visual.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    generator = torch.Generator().manual_seed(0)
    convolution = next(p for p in model.visual.parameters() if p.ndim == 4)  # reads the pixels
    return torch.randn(8, 3, height, width, generator=generator).to(convolution)


def _texts(model: CLIP) -> Tensor:
    """Eight random sequences of tokens (8, L)."""
    text = getattr(model, "text", model)
    length = text.context_length
    if isinstance(text, HFTextEncoder):  # 0 is no limit, and RoBERTa's positions begin after 1
        length = min(length - 2, 77) if length else 77
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, text.vocab_size, (8, length), generator=generator)
    return tokens.to(next(text.parameters()).device)
