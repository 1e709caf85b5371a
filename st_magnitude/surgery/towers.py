"""Models that have an encoder per role instead of one output, such as CLIP: what surgery asks about them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, Protocol, cast

from torch import Tensor, nn

__all__ = ["Towers", "towers_of"]

# The methods that mark such a model, and the module that knows it, which is imported when the first one comes.
_KNOWN = {("encode_image", "encode_text"): "st_magnitude.clip.towers"}


class Towers(Protocol):
    """What a module knows about one kind of model with several encoders."""

    def encoders(self, model: nn.Module) -> tuple[str, ...]:
        """The names of the methods ``encode(inputs, normalize=False)`` that its forward pass calls."""

    def output_parameters(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, weights and biases of the last affine map of every encoder."""

    def embed(self, model: nn.Module, probe: Any) -> dict[str, Tensor]:
        """Raw embeddings of a probe, or of random inputs for None, by role: (n, D) each."""


def towers_of(model: nn.Module) -> Towers | None:
    """What is known about the encoders of a model; None for a model with one output."""
    for methods, home in _KNOWN.items():
        if all(hasattr(model, name) for name in methods):
            return cast(Towers, import_module(home))
    return None
