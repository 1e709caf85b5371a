"""GradScale: the forward pass is unchanged, and the gradient of each embedding is multiplied by a power of its norm.

The gradient of a cosine loss at an embedding z has the size 1/|z| (*On the Importance of Embedding Norms in
Self-Supervised Learning*, Prop. 3.1), so that embeddings with large norms hardly move. Multiplied by |z|, it no longer
depends on the norm.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from torch import Tensor, nn
from torch.nn import functional

from st_magnitude._upstream import forward_hooks
from st_magnitude.surgery.raw import is_sentence_norm, raw_end, raw_producers, unwrapped
from st_magnitude.surgery.towers import towers_of

__all__ = ["GradScaleHandle", "attach_grad_scale", "grad_scale"]

SMALLEST_NORM = 1e-6  # smaller norms, also those of zero rows, count as this


def grad_scale(x: Tensor, power: float = 1.0, *, divide_by_mean: bool = False) -> Tensor:
    """Returns the same embeddings, and multiplies their gradient row by row: (..., D) -> (..., D).

        forward z,   backward |z|^power · g

    Power 1 cancels the 1/|z| of every cosine-based loss, power 0 changes nothing, and a negative power slows embeddings
    with large norms even more. GradScale belongs before the normalisation: after it, all norms are 1 and it does
    nothing. The resulting gradient field is not that of any loss (Prop. D.1).

    The factor is computed in float32 (float64 for float64) and is a constant to higher derivatives. Norms below 1e-6
    count as 1e-6, and the factor is at most the largest number of the dtype, so that it is always finite.

    Args:
        x: Embeddings.
        power: Exponent p of the norm. The learning rate may have to fall by the size of the norms; the paper divides it
            by 6.
        divide_by_mean: Whether to divide the factors by their mean over the rows of this call, so that steps keep about
            their size. The mean is that of one forward pass: of a mini-batch under gradient caching, and of one rank
            among several.

    Raises:
        ValueError: If the power is not a finite number.
        TypeError: If x is not a floating-point tensor of at least one dimension.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0], [0.6, 0.8]], requires_grad=True)
        >>> grad_scale(x, power=1.0).sum().backward()
        >>> x.grad
        tensor([[5., 5.],
                [1., 1.]])

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 6 and App. D,
    Listing 2.
    """
    if not isinstance(power, (int, float)) or not math.isfinite(power):
        raise ValueError(f"power must be a finite number (1 cancels the norm, 0 changes nothing), got {power!r}.")
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim == 0:
        what = f"a {x.ndim}-d tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"grad_scale takes floating-point embeddings (..., D), got {what}.")
    if power == 0 or not torch.is_grad_enabled():
        return x
    fixed = x.detach()
    norm = torch.linalg.vector_norm(fixed if x.dtype == torch.float64 else fixed.float(), dim=-1, keepdim=True)
    factor = norm.clamp(min=SMALLEST_NORM) ** power  # (..., 1)
    factor = factor.clamp(max=torch.finfo(x.dtype).max)
    if divide_by_mean:
        factor = factor / factor.mean()
    # x - fixed is zero, so that the value is x to the last bit; its derivative is the factor. The product is computed
    # in the precision of the factor and rounded once.
    return fixed + (factor * (x - fixed)).to(x.dtype)


class GradScaleHandle:
    """The handle that :func:`attach_grad_scale` returns. It is also a context manager."""

    def __init__(self, removals: list[Any]) -> None:
        self._removals = removals

    def remove(self) -> None:
        """Removes GradScale from the model. A second call does nothing."""
        while self._removals:
            self._removals.pop()()

    def __enter__(self) -> GradScaleHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def attach_grad_scale(
    model: nn.Module, power: float = 1.0, *, after: nn.Module | None = None, divide_by_mean: bool = False
) -> GradScaleHandle:
    """Applies :func:`grad_scale` to the raw embeddings of a model during training. In place; it is never saved.

    ========================================  ================================================================
    model                                     where
    ========================================  ================================================================
    SentenceTransformer                       after the module before the last Normalize or ExponentNorm, in
                                              every route of a last Router; else after the last module
    CLIP of open_clip                         ``encode_image`` and ``encode_text``, before their normalisation
    any other module                          its output: a tensor, a tuple that begins with a tensor, or a
                                              dict with ``"sentence_embedding"``
    ========================================  ================================================================

    Losses, cached losses, autocast, DistributedDataParallel and torch.compile work as before.

    Args:
        model: The model to train.
        power: Exponent of the norm.
        after: The module whose output is scaled. With None, it is chosen as in the table.
        divide_by_mean: Whether to divide the factors by their mean.

    Raises:
        ValueError: If GradScale would come after Normalize, where it does nothing; if the model has it already; at the
            first training batch, if all norms that reach it are 1.

    Example:
        >>> from sentence_transformers.base.modules import Normalize
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> handle = attach_grad_scale(model, power=1.0)
        >>> handle.remove()
    """
    grad_scale(torch.zeros(1), power)  # checks the power
    model = unwrapped(model)
    scaled_encoders = [v for v in vars(model).values() if isinstance(v, partial) and v.func is _encode]
    if scaled_encoders or any(isinstance(h, _Hook) for module in model.modules() for h in forward_hooks(module)):
        raise ValueError("This model has GradScale already: call remove() on the handle of the first attachment.")
    if after is None and (towers := towers_of(model)) is not None:
        return GradScaleHandle(_wrap_encoders(model, towers.encoders(model), power, divide_by_mean))
    producers = raw_producers(model) if after is None else [_checked(after, model)]
    hooks = [module.register_forward_hook(_Hook(power, divide_by_mean)) for module in producers]
    return GradScaleHandle([hook.remove for hook in hooks])


class _Hook:
    """The forward hook. It scales embeddings, and checks once that their norms are not all 1."""

    def __init__(self, power: float, divide_by_mean: bool) -> None:
        self.scale = partial(grad_scale, power=power, divide_by_mean=divide_by_mean)
        self.checked = False

    def __call__(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._scaled(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
            return (self._scaled(output[0]), *output[1:])
        if isinstance(output, MutableMapping) and "sentence_embedding" in output:
            output["sentence_embedding"] = self._scaled(output["sentence_embedding"])
            return output
        raise TypeError(
            f"GradScale found no embeddings in the output of {type(module).__name__} ({type(output).__name__}). Attach "
            "it to the module that returns them as a tensor, or call stm.grad_scale(embeddings) in the loss."
        )

    def _scaled(self, x: Tensor) -> Tensor:
        if not self.checked and not torch.compiler.is_compiling() and x.requires_grad:
            self.checked = True
            _check_norms(x)
        return self.scale(x)


def _check_norms(x: Tensor) -> None:
    norms = torch.linalg.vector_norm(x.detach().float(), dim=-1)
    if norms.numel() > 1 and (norms - 1).abs().max() < 1e-3:
        raise ValueError(
            "All embeddings that reach GradScale have norm 1, so it comes after a normalisation and does nothing. "
            "Attach it to the module before that, attach_grad_scale(model, power, after=module), or remove the "
            "normalisation from the model."
        )


def _checked(after: nn.Module, model: nn.Module) -> nn.Module:
    """A module that the caller has chosen, unless GradScale does nothing after it."""
    if all(module is not after for module in model.modules()):
        raise ValueError(f"after={type(after).__name__} is not a module of this model.")
    if isinstance(model, SentenceTransformer):
        end = list(model.children())[raw_end(list(model.children())) :]
        routed = (m for router in model.modules() if isinstance(router, Router) for m in router.modules())
        if any(module is after for module in end) or (is_sentence_norm(after) and any(m is after for m in routed)):
            raise ValueError(
                f"{type(after).__name__} belongs to the normalisation of this model. After it, norms are gone and "
                "GradScale does nothing. Leave `after` out: GradScale then comes before it."
            )
    return after


def _wrap_encoders(model: nn.Module, names: tuple[str, ...], power: float, divide_by_mean: bool) -> list[Any]:
    """Sets scaled encoders as attributes of the instance, where ``forward`` and a deep copy of the model find them."""
    for name in names:
        encode = getattr(type(model), name)
        object.__setattr__(model, name, partial(_encode, encode, power, divide_by_mean, model))
    return [partial(vars(model).pop, name) for name in names]


def _encode(
    encode: Any, power: float, divide_by_mean: bool, model: nn.Module, inputs: Any, normalize: bool = False
) -> Tensor:
    x = grad_scale(encode(model, inputs, normalize=False), power, divide_by_mean=divide_by_mean)  # (n, D)
    return functional.normalize(x, dim=-1) if normalize else x
