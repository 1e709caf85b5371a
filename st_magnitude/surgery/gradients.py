"""GradScale and cut-initialisation: the size of the steps that a cosine loss makes, whatever the norms are.

The gradient of a cosine loss at an embedding z has the size sin φ / |z| (*On the Importance of Embedding Norms in
Self-Supervised Learning*, Prop. 3.1), so embeddings with large norms hardly move. GradScale multiplies this gradient by
|z|. Cut-initialisation begins with small norms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, MutableMapping
from contextlib import ExitStack
from typing import Any, Literal, TypeVar

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_magnitude._upstream import forward_hooks
from st_magnitude.surgery.normalize import rescale_output
from st_magnitude.surgery.raw import raw_embeddings, raw_producers, unwrapped

__all__ = ["attach_grad_scale", "cut_init", "grad_scale"]

logger = logging.getLogger(__name__)

SMALLEST_NORM = 1e-6  # smaller norms, also the norms of zero rows, count as this

# These parameters are logarithms and logits: dividing them is not dividing a weight.
_NEVER_CUT = ("logit_scale", "logit_bias", "query_bias", "document_bias")

Model = TypeVar("Model", bound=nn.Module)


def grad_scale(x: Tensor, power: float = 1.0) -> Tensor:
    """Returns the same embeddings, and multiplies their gradient row by row: (..., D) -> (..., D).

        forward z,   backward |z|^power · g

    GradScale belongs before the normalisation: after it, all norms are 1 and it does nothing. The resulting gradient
    field is not the gradient of any loss (Prop. D.1). The factor is a constant to higher derivatives, computed in
    float32 (float64 for float64). Norms below 1e-6 count as 1e-6, and the factor is always finite.

    Args:
        x: Embeddings.
        power: 1 cancels the 1/|z| of every cosine-based loss, 0 changes nothing, and a negative power slows embeddings
            with large norms even more. The learning rate may have to fall by the size of the norms; the paper divides
            it by 6.

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
    if not math.isfinite(power):
        raise ValueError(f"power must be a finite number (1 cancels the norm, 0 changes nothing), got {power!r}.")
    if power == 0 or not torch.is_grad_enabled():
        return x
    fixed = x.detach()
    norm = torch.linalg.vector_norm(fixed if x.dtype == torch.float64 else fixed.float(), dim=-1, keepdim=True)
    factor = (norm.clamp(min=SMALLEST_NORM) ** power).clamp(max=torch.finfo(x.dtype).max)  # (..., 1)
    # x - fixed is zero, so the value is x to the last bit; its derivative is the factor. The product is computed in the
    # precision of the factor and rounded once.
    return fixed + (factor * (x - fixed)).to(x.dtype)


def attach_grad_scale(model: nn.Module, power: float = 1.0, *, after: nn.Module | None = None) -> ExitStack:
    """Applies :func:`grad_scale` to the raw embeddings of a model during training. In place; it is never saved.

    In a SentenceTransformer it comes after the module before the last Normalize or ExponentNorm, in every route of a
    last Router. In any other module it scales the output: a tensor, a tuple that begins with a tensor, or a dict with
    ``"sentence_embedding"``. A model with two encoders (CLIP) needs ``grad_scale(features)`` in the loss instead.

    Losses, cached losses, autocast, DistributedDataParallel and torch.compile work as before.

    Args:
        model: The model to train.
        power: Exponent of the norm.
        after: The module whose output is scaled, if another one than above.

    Returns:
        A handle: ``close()``, or the end of a ``with`` block around it, removes GradScale from the model.

    Raises:
        ValueError: If the model has GradScale already; at the first training batch, if all norms that reach it are 1.

    Example:
        >>> from sentence_transformers.base.modules import Normalize
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> handle = attach_grad_scale(model, power=1.0)
        >>> handle.close()
    """
    grad_scale(torch.zeros(1), power)  # checks the power
    model = unwrapped(model)
    if any(isinstance(hook, _Hook) for module in model.modules() for hook in forward_hooks(module)):
        raise ValueError("This model has GradScale already: call close() on the handle of the first attachment.")
    handle = ExitStack()
    for module in raw_producers(model) if after is None else [after]:
        handle.callback(module.register_forward_hook(_Hook(power)).remove)
    return handle


class _Hook:
    """The forward hook. It scales embeddings, and checks once that their norms are not all 1."""

    def __init__(self, power: float) -> None:
        self.power = power
        self.checked = False

    def __call__(self, module: nn.Module, _inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self._scaled(output)
        if isinstance(output, tuple) and output and isinstance(output[0], Tensor) and not _has_towers(module):
            return (self._scaled(output[0]), *output[1:])
        if isinstance(output, MutableMapping) and "sentence_embedding" in output:
            output["sentence_embedding"] = self._scaled(output["sentence_embedding"])
            return output
        raise TypeError(
            f"GradScale found no embeddings in the output of {type(module).__name__} ({type(output).__name__}). Attach "
            "it to the module that returns them as a tensor, or call grad_scale(embeddings) in the loss."
        )

    def _scaled(self, x: Tensor) -> Tensor:
        if not self.checked and not torch.compiler.is_compiling() and x.requires_grad:
            self.checked = True
            norms = torch.linalg.vector_norm(x.detach().float(), dim=-1)
            if norms.numel() > 1 and (norms - 1).abs().max() < 1e-3:
                raise ValueError(
                    "All embeddings that reach GradScale have norm 1, so it comes after a normalisation and does "
                    "nothing. Attach it to the module before that, attach_grad_scale(model, power, after=module), or "
                    "remove the normalisation from the model."
                )
        return grad_scale(x, self.power)


def _has_towers(module: nn.Module) -> bool:
    """Whether the output begins with the embeddings of one encoder of several, as in open_clip's models."""
    return hasattr(module, "encode_image") and hasattr(module, "encode_text")


def cut_init(
    model: Model,
    c: float = 3.0,
    where: Literal["output", "all"] | Callable[[str, nn.Parameter], bool] = "output",
) -> Model:
    """Divides weights by c before training, so norms begin small and cosine gradients large. In place.

    - ``"output"`` divides weight and bias of the last affine map of a SentenceTransformer, as :func:`rescale_output`
      does and with its check. Norms become exactly 1/c of what they were and similarities stay: it is safe on
      pretrained models, also on models that end in Normalize. Under a cosine loss only this last map learns faster, c²
      times under SGD: since similarities stay, the layers below it get the same gradient as before.
    - ``"all"`` divides every parameter, as the paper's Listing 1 does, for models that are not trained yet. It destroys
      what a trained model has learned, and logs a warning if the model looks trained.
    - A function of name and parameter chooses freely. For open_clip's ViT models, for example,
      ``lambda name, _: name in ("visual.proj", "text_projection")``.

    ``logit_scale``, ``logit_bias`` and learned exponents are never divided.

    Args:
        model: A SentenceTransformer or, with ``"all"`` or a function, any module.
        c: The divisor. The paper takes 3 for contrastive and 9 for attraction-only losses, with weight decay.
        where: The parameters to divide, see above.

    Raises:
        ValueError: If c is not positive, no last affine map is found, the embeddings do not follow it, or no parameter
            was chosen. The model is then unchanged.

    Example:
        >>> from sentence_transformers.base.modules import Dense
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> modules = [BoW(["red", "green"]), Dense(2, 2, bias=False, activation_function=None)]
        >>> model = SentenceTransformer(modules=modules, device="cpu")
        >>> before = model.encode("red")
        >>> (before / cut_init(model, c=4).encode("red")).round(4)
        array([4., 4.], dtype=float32)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 6, Listing 1.
    """
    if not 0 < c < math.inf:
        raise ValueError(f"c must be a positive number, got {c}; the paper takes 3 and 9.")
    if not callable(where) and where not in ("output", "all"):
        raise ValueError(f"where must be 'output', 'all' or a function of (name, parameter), got {where!r}.")
    inner = unwrapped(model)
    if where == "output":
        if not isinstance(inner, SentenceTransformer):
            raise ValueError(
                f"where='output' finds the last affine map of a SentenceTransformer, and this is a "
                f"{type(inner).__name__}. Choose the parameters yourself: where=lambda name, parameter: ..."
            )
        with raw_embeddings(inner):
            rescale_output(inner, 1 / c)
        return model
    if where == "all" and _looks_trained(inner):
        logger.warning(
            "cut_init(where='all') on a model whose weights look trained: dividing all of them destroys what it has "
            "learned. where='output' changes norms only."
        )
    choose = where if callable(where) else lambda *_: True
    named = ((name, p) for name, p in inner.named_parameters() if name.rpartition(".")[2] not in _NEVER_CUT)
    chosen = [p for name, p in named if choose(name, p)]
    if not chosen:
        raise ValueError("cut_init found no parameter to divide: `where` chose none, or the model has none.")
    with torch.no_grad():
        for parameter in chosen:
            parameter.div_(c)
    return model


def _looks_trained(model: nn.Module) -> bool:
    """Whether a normalisation layer has a bias that is not 0 or a weight that is not constant; all begin with both."""
    for module in model.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if "norm" in type(module).__name__.lower() and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            if isinstance(bias, nn.Parameter) and bias.any():
                return True
            if (weight != weight[0]).any():
                return True
    return False
