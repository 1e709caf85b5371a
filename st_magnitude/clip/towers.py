"""The towers of an open_clip model: its encoders, their last projections, and inputs to try them on."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["embed", "encoders", "last_projection", "output_parameters", "random_pair"]

# The paths at which open_clip's models keep the last projection of each tower. The first that exists counts.
_PROJECTIONS = {
    "image": ("visual.proj", "visual.attnpool.c_proj", "visual.head"),
    "text": ("text_projection", "text.text_projection", "text.proj"),
}


def encoders(model: nn.Module) -> tuple[str, ...]:
    """The names of the two encoders, if they normalise in ``encode(inputs, normalize=...)``."""
    names = ("encode_image", "encode_text")
    normalizes_within = any("normalize" not in signature(getattr(model, name)).parameters for name in names)
    if hasattr(model, "_encode_image") or normalizes_within:
        raise ValueError(
            f"{type(model).__name__} does not normalise in encode_image(..., normalize=) and encode_text(..., "
            "normalize=), so GradScale cannot be put before its normalisation. Call stm.grad_scale(features) in the "
            "loss, on features that are not normalised yet."
        )
    return names


def output_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names, weights and biases of the last projection of the image tower and of the text tower."""
    for tower, paths in _PROJECTIONS.items():
        found = last_projection(model, tower)
        if not found:
            raise ValueError(
                f"No last affine map found in the {tower} tower of {type(model).__name__} (looked for "
                f"{', '.join(paths)}). Choose the parameters yourself: where=lambda name, parameter: ..."
            )
        yield from found


def last_projection(model: nn.Module, tower: str) -> list[tuple[str, nn.Parameter]]:
    """Names, weight and bias of the last projection of a tower. The list is empty if the tower has no projection."""
    for path in _PROJECTIONS[tower]:
        try:
            projection: Any = model.get_submodule(path.rpartition(".")[0])
        except AttributeError:
            continue
        projection = getattr(projection, path.rpartition(".")[2], None)
        if isinstance(projection, nn.Parameter):
            return [(path, projection)]
        if isinstance(projection, nn.Module):
            linear = [m for m in projection.named_modules(prefix=path) if isinstance(m[1], nn.Linear)]
            if linear:
                return [(f"{linear[-1][0]}.{name}", p) for name, p in linear[-1][1].named_parameters()]
    return []


def embed(model: Any, probe: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """What the encoders return for (images, tokens), or for random ones."""
    images, tokens = random_pair(model) if probe is None else probe
    return {"image": model.encode_image(images), "text": model.encode_text(tokens)}


def random_pair(model: Any) -> tuple[Tensor, Tensor]:
    """Eight random images, in the precision of the model, and eight token sequences of the sizes that it names."""
    try:
        size = model.visual.image_size
        text = getattr(model, "text", model)
        context, vocabulary = text.context_length, text.vocab_size
    except AttributeError as error:
        raise ValueError(f"This model does not say its input sizes ({error}): pass probe=(images, tokens).") from None
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    parameters = list(model.visual.parameters())
    like = next((p for p in parameters if p.ndim == 4), parameters[0])  # the convolution that reads the pixels
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 3, height, width, generator=generator).to(like)
    return images, torch.randint(1, vocabulary, (8, context), generator=generator).to(like.device)
