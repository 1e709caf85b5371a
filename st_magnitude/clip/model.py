"""CLIP models whose forward pass keeps the norms of embeddings.

An open_clip model normalises in ``forward``, and not in ``encode_image`` and ``encode_text``. The functions here change
the class of the instance only, so that parameters, their names and checkpoints stay those of open_clip.
"""

# mypy: disable-error-code="no-untyped-def, misc"

import logging
from collections.abc import Callable
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from st_magnitude.clip import require_open_clip
from st_magnitude.clip.towers import last_projection, random_pair
from st_magnitude.surgery.raw import unwrapped

require_open_clip()

from open_clip.coca_model import CoCa  # noqa: E402
from open_clip.model import CLIP, CustomTextCLIP  # noqa: E402

__all__ = [
    "UnnormalizedCLIP",
    "UnnormalizedCoCa",
    "UnnormalizedCustomTextCLIP",
    "calibrate",
    "normalizes",
    "renormalize",
    "unnormalize",
]

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# TorchScript compiles the forward below. It infers the types, and needs annotations that are not postponed.


def _forward(self: Any, image: Optional[Tensor] = None, text: Optional[Tensor] = None):  # noqa: UP045
    """Returns what open_clip's forward returns, with embeddings that are not normalised: (B, D) each."""
    image_features = self.encode_image(image, normalize=False) if image is not None else None
    text_features = self.encode_text(text, normalize=False) if text is not None else None

    if self.output_dict:
        out_dict = {
            "image_features": image_features,
            "text_features": text_features,
            "logit_scale": self.logit_scale.exp(),
        }
        if self.logit_bias is not None:
            out_dict["logit_bias"] = self.logit_bias
        return out_dict

    if self.logit_bias is not None:
        return image_features, text_features, self.logit_scale.exp(), self.logit_bias
    return image_features, text_features, self.logit_scale.exp()


def _get_logits(self: Any, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """logit_scale · image · text + logit_bias, (B, B), and its transpose."""
    logits = self.logit_scale.exp() * self.encode_image(image) @ self.encode_text(text).T
    if self.logit_bias is not None:
        logits = logits + self.logit_bias
    return logits, logits.T


class UnnormalizedCLIP(CLIP):
    """open_clip's CLIP without the normalisation in ``forward``: see :func:`unnormalize`."""

    output_dict: torch.jit.Final[bool]
    forward = _forward
    get_logits = _get_logits


class UnnormalizedCustomTextCLIP(CustomTextCLIP):
    """open_clip's CustomTextCLIP (SigLIP, Hugging Face text towers) without the normalisation in ``forward``."""

    output_dict: torch.jit.Final[bool]
    forward = _forward
    get_logits = _get_logits


class UnnormalizedCoCa(CoCa):
    """open_clip's CoCa without the normalisation in ``forward``, and in its encoders unless they are asked for it."""

    def _encode_image(self, images, normalize: bool = False):
        latent, tokens = self.visual(images)
        return functional.normalize(latent, dim=-1) if normalize else latent, tokens

    def _encode_text(self, text, normalize: bool = False):
        latent, tokens = self.text(text)
        return functional.normalize(latent, dim=-1) if normalize else latent, tokens

    def encode_image(self, images, normalize: bool = False):
        return self._encode_image(images, normalize=normalize)[0]

    def encode_text(self, text, normalize: bool = False):
        return self._encode_text(text, normalize=normalize)[0]


_UNNORMALIZED: dict[type[nn.Module], type[nn.Module]] = {
    CLIP: UnnormalizedCLIP,
    CustomTextCLIP: UnnormalizedCustomTextCLIP,
    CoCa: UnnormalizedCoCa,
}
_NORMALIZED = {raw: stock for stock, raw in _UNNORMALIZED.items()}


def normalizes(model: nn.Module) -> bool:
    """Whether the forward pass of an open_clip model normalises its embeddings."""
    return type(unwrapped(model)) not in _NORMALIZED


def unnormalize(model: Model) -> Model:
    """Removes the normalisation from the forward pass, so that image and text embeddings keep their norms. In place.

    ``model(images, text)`` then returns the embeddings of ``encode_image`` and ``encode_text`` with
    ``normalize=False``, and ``get_logits`` uses them. Parameters and the keys of ``state_dict`` do not change, so
    that stock open_clip loads its checkpoints and encodes by ``encode_image(x, normalize=False)``; pickling,
    ``torch.jit.script`` (for models that it compiles) and ``isinstance`` still work.

    Args:
        model: A CLIP, CustomTextCLIP (SigLIP) or CoCa of open_clip, also inside DistributedDataParallel.

    Raises:
        TypeError: If it is another model, whose forward may do anything.

    Norms are large at first (7 and 12 in a small model), and ``logit_scale`` cannot go below 1: call
    :func:`calibrate` before training.

    Example:
        ::

            model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", output_dict=True)
            model = stm.clip.calibrate(stm.clip.unnormalize(model))
            loss = stm.clip.AsymmetricClipLoss.from_preset("imgnorm-i2t")
            loss(**model(images, texts)).backward()

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.5 and App. F.2.
    """
    return _swapped(model, _UNNORMALIZED)


def renormalize(model: Model) -> Model:
    """Undoes :func:`unnormalize`: the model is that of open_clip again, which normalises in ``forward``. In place."""
    return _swapped(model, _NORMALIZED)


def _swapped(model: Model, classes: dict[type[nn.Module], type[nn.Module]]) -> Model:
    inner = unwrapped(model)
    kind = type(inner)
    if kind in classes:
        inner.__class__ = classes[kind]
    elif kind not in classes.values():
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} is not one of the open_clip models that are known here (CLIP, "
            "CustomTextCLIP, CoCa, before scripting or tracing). Script a model after unnormalize(model); in a class "
            "of your own, let forward return encode_image(image, normalize=False) and encode_text(text, "
            "normalize=False)."
        )
    return model


@torch.no_grad()
def calibrate(model: Model, images: Tensor | None = None, texts: Tensor | None = None, batch_size: int = 64) -> Model:
    """Divides the last projection of each tower by the mean norm of its embeddings, which becomes 1. In place.

        x -> x / mean|x|,   image and text embeddings each by its own mean over the probe

    Cosines, rankings by dot product and Cohen's d do not change. Only the size of the logits changes: with norms of 7
    and 12 and open_clip's initial logit_scale of 14.3, they would be several hundred, and logit_scale stays above 1.

    Args:
        model: A CLIP, CustomTextCLIP or CoCa of open_clip, whether it normalises or not.
        images: Preprocessed images for the probe, (n, 3, H, W); by default, eight random images.
        texts: Token ids for the probe, (m, L); by default, eight random sequences.
        batch_size: Number of inputs encoded at a time.

    Raises:
        ValueError: If neither tower ends in a linear projection, the embeddings do not follow it, or their mean norm is
            zero or not finite. The model is then unchanged.

    A tower that does not end in a projection (SigLIP's image tower of timm) is left unchanged, with a warning that
    gives its mean norm. Norms are measured in the present mode of the model, training or evaluation; the statistics of
    batch normalisation do not change.

    Example:
        ::

            model = stm.clip.calibrate(stm.clip.unnormalize(model), images=batch, texts=tokens)

    Source: the convention of scale="auto", arXiv 2602.09229, section 3.1.
    """
    inner: Any = unwrapped(model)
    if images is None or texts is None:
        random_images, random_texts = random_pair(inner)
        images = random_images if images is None else images
        texts = random_texts if texts is None else texts
    buffers = {name: b.clone() for name, b in inner.named_buffers()}
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        found = [
            _scale_tower(inner, tower, encode, inputs.split(batch_size), originals)
            for tower, encode, inputs in (("image", inner.encode_image, images), ("text", inner.encode_text, texts))
        ]
        if not any(found):
            raise ValueError(
                f"No tower of {type(inner).__name__} ends in a linear projection that could be rescaled. Divide the "
                "initial logit_scale instead: create_model(..., init_logit_scale=...)."
            )
    except BaseException:
        for parameter, original in originals:
            parameter.copy_(original)
        raise
    finally:
        for name, buffer in inner.named_buffers():
            buffer.copy_(buffers[name])
    return model


def _scale_tower(
    model: nn.Module,
    tower: str,
    encode: Callable[..., Tensor],
    batches: tuple[Tensor, ...],
    originals: list[tuple[nn.Parameter, Tensor]],
) -> bool:
    """Divides the projection of a tower by the mean norm, and appends its originals; False without a projection."""
    norm = _mean_norm(encode, batches)
    if not 0 < norm < float("inf"):
        raise ValueError(f"The {tower} embeddings of this probe have a mean norm of {norm}: check model and probe.")
    projection = last_projection(model, tower)
    if not projection:
        logger.warning(
            "calibrate: the %s tower of %s does not end in a linear projection; its mean norm stays %.4g.",
            tower,
            type(model).__name__,
            norm,
        )
        return False
    for _, parameter in projection:
        originals.append((parameter, parameter.clone()))
        parameter.div_(norm)
    after = _mean_norm(encode, batches)
    half = any(p.dtype in (torch.float16, torch.bfloat16) for _, p in projection)
    if abs(after - 1) > (3e-2 if half else 1e-3):
        raise ValueError(
            f"The {tower} embeddings do not follow {projection[0][0]}: divided by {norm:.4g}, their mean norm is "
            f"{after:.4g} instead of 1. Something nonlinear comes after it; set init_logit_scale instead."
        )
    logger.info("calibrate: %s divided by %.4g, the mean norm of %s embeddings.", projection[0][0], norm, tower)
    return True


def _mean_norm(encode: Callable[..., Tensor], batches: tuple[Tensor, ...]) -> float:
    """The mean norm of the embeddings, with the same dropout at every call and the global generator untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        norms = [torch.linalg.vector_norm(encode(x, normalize=False).double(), dim=-1) for x in batches]
    return torch.cat(norms).mean().item()
