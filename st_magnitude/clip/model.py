"""CLIP models whose forward pass keeps the norms of embeddings.

An open_clip model normalises in ``forward``, and not in ``encode_image`` and ``encode_text``. The functions here change
the class of the instance only, so parameters, their names and checkpoints stay open_clip's own.
"""

# mypy: disable-error-code="no-untyped-def, misc"

import logging
from collections.abc import Callable
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor, nn

from st_magnitude._checks import INSTALL
from st_magnitude.surgery.raw import unwrapped

try:
    from open_clip.model import CLIP, CustomTextCLIP
except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit torch
    reason = " ".join(str(error).split())
    raise ImportError(
        f"st_magnitude.clip needs open_clip, which cannot be imported ({reason}). Install it "
        f'{INSTALL} ".[clip]". If torchvision fails, its version does not fit torch: install both in one step, '
        "`pip install --upgrade torch torchvision`."
    ) from error

__all__ = ["UnnormalizedCLIP", "UnnormalizedCustomTextCLIP", "rescale_output", "unnormalize"]

logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)

# The paths at which open_clip's models keep the last projection of each tower. The first that exists counts.
_PROJECTIONS = {
    "image": ("visual.proj", "visual.attnpool.c_proj", "visual.head"),
    "text": ("text_projection", "text.text_projection", "text.proj"),
}

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


_UNNORMALIZED: dict[type[nn.Module], type[nn.Module]] = {
    CLIP: UnnormalizedCLIP,
    CustomTextCLIP: UnnormalizedCustomTextCLIP,
}


def unnormalize(model: Model) -> Model:
    """Removes the normalisation from the forward pass, so image and text embeddings keep their norms. In place.

    ``model(images, text)`` then returns the embeddings of ``encode_image`` and ``encode_text`` with
    ``normalize=False``, and ``get_logits`` uses them. Parameters and the keys of ``state_dict`` do not change: stock
    open_clip loads the checkpoints and encodes by ``encode_image(x, normalize=False)``.

    Args:
        model: A CLIP or CustomTextCLIP (SigLIP) of open_clip, also inside DistributedDataParallel.

    Raises:
        TypeError: If it is another model, whose forward may do anything.

    Norms are large at first (7 and 12 in a small model), and ``logit_scale`` cannot go below 1: call
    :func:`rescale_output` before training.

    Example:
        ::

            model, _, preprocess = open_clip.create_model_and_transforms("ViT-B-32", output_dict=True)
            model = stm.clip.rescale_output(stm.clip.unnormalize(model))
            loss = stm.clip.AsymmetricClipLoss.from_preset("imgnorm-i2t")
            loss(**model(images, texts)).backward()

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, section 6.5 and App. F.2.
    """
    inner = unwrapped(model)
    kind = type(inner)
    if kind in _UNNORMALIZED:
        inner.__class__ = _UNNORMALIZED[kind]
    elif kind not in _UNNORMALIZED.values():
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} is not one of the open_clip models that are known here (CLIP and "
            "CustomTextCLIP, before scripting or tracing). Script a model after unnormalize(model); in a class of your "
            "own, let forward return encode_image(image, normalize=False) and encode_text(text, normalize=False)."
        )
    return model


@torch.no_grad()
def rescale_output(model: Model, images: Tensor | None = None, texts: Tensor | None = None) -> Model:
    """Divides the last projection of each tower by the mean norm of its embeddings, which becomes 1. In place.

        x -> x / mean|x|,   image and text embeddings each by its own mean over the probe

    Cosines, rankings by dot product and Cohen's d do not change. Only the size of the logits changes: with norms of 7
    and 12 and open_clip's initial logit_scale of 14.3, they would be several hundred, and logit_scale stays above 1.

    Args:
        model: A CLIP or CustomTextCLIP of open_clip, whether it normalises or not.
        images: A batch of preprocessed images for the probe, (n, 3, H, W); by default, eight random images.
        texts: A batch of token ids for the probe, (m, L); by default, eight random sequences.

    Raises:
        ValueError: If neither tower ends in a linear projection, the embeddings do not follow it, or their mean norm is
            zero or not finite.

    A tower that does not end in a projection (SigLIP's image tower of timm) is left unchanged, with a warning that
    gives its mean norm. Norms are measured in the present mode of the model, training or evaluation; the statistics of
    batch normalisation do not change.

    Example:
        ::

            model = stm.clip.rescale_output(stm.clip.unnormalize(model), images=batch, texts=tokens)

    Source: the convention of scale="auto", arXiv 2602.09229, section 3.1.
    """
    inner: Any = unwrapped(model)
    if images is None or texts is None:
        random_images, random_texts = _random_pair(inner)
        images = random_images if images is None else images
        texts = random_texts if texts is None else texts
    probes = {"image": (inner.encode_image, images), "text": (inner.encode_text, texts)}
    projections = {tower: _last_projection(inner, tower) for tower in probes}
    weights = [parameter for projection in projections.values() for parameter in projection]
    buffers = list(inner.buffers())  # forward passes in training mode move the statistics
    originals = [tensor.clone() for tensor in (*buffers, *weights)]

    norms = {tower: _mean_norm(*probe) for tower, probe in probes.items()}
    for tower, projection in projections.items():
        for parameter in projection:
            parameter.div_(norms[tower])
        if not projection:
            logger.warning(
                "rescale_output: the %s tower of %s does not end in a linear projection; its mean norm stays %.4g.",
                tower,
                type(inner).__name__,
                norms[tower],
            )
    precision = 3e-2 if any(p.dtype in (torch.float16, torch.bfloat16) for p in weights) else 1e-3
    failures = [
        f"the {tower} embeddings had a mean norm of {norms[tower]:.4g}, and divided by it they have {after:.4g}"
        for tower, probe in probes.items()
        if projections[tower] and not abs((after := _mean_norm(*probe)) - 1) < precision
    ]
    if not weights:
        failures = ["no tower ends in a linear projection"]
    for tensor, original in zip((*buffers, *(weights if failures else [])), originals, strict=False):
        tensor.copy_(original)
    if failures:
        raise ValueError(
            f"{type(inner).__name__} cannot be rescaled: {'; '.join(failures)}. Check model and probe, or divide the "
            "initial logit_scale instead: create_model(..., init_logit_scale=...)."
        )
    return model


def _last_projection(model: nn.Module, tower: str) -> list[nn.Parameter]:
    """Weight and bias of the last projection of a tower. The list is empty if the tower has no projection."""
    for path in _PROJECTIONS[tower]:
        parent, _, name = path.rpartition(".")
        try:
            projection = getattr(model.get_submodule(parent), name, None)
        except AttributeError:
            continue
        if isinstance(projection, nn.Parameter):
            return [projection]
        if isinstance(projection, nn.Module):
            linear = [m for m in projection.modules() if isinstance(m, nn.Linear)]
            return list(linear[-1].parameters()) if linear else []
    return []


def _mean_norm(encode: Callable[..., Tensor], inputs: Tensor) -> float:
    """The mean norm of the embeddings, with the same dropout at every call and the global generator untouched."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.linalg.vector_norm(encode(inputs, normalize=False).cpu().double(), dim=-1).mean().item()


def _random_pair(model: Any) -> tuple[Tensor, Tensor]:
    """Eight random images, in the precision of the model, and eight token sequences of the sizes that it names."""
    size, text = model.visual.image_size, getattr(model, "text", model)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    parameters = list(model.visual.parameters())
    like = next((p for p in parameters if p.ndim == 4), parameters[0])  # the convolution that reads the pixels
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, height, width, generator=generator).to(like)
    return images, torch.randint(1, text.vocab_size, (8, text.context_length), generator=generator).to(like.device)
