"""GradScale and cut-initialisation, for losses by cosine: docs/papers.md says what they are for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from sentence_transformers.base.modules import Module
from torch import Tensor, nn

from st_magnitude._checks import InputError, InputTypeError, positive
from st_magnitude._upstream import forward_hooks
from st_magnitude.similarity import at_least_float32
from st_magnitude.surgery.raw import Model, raw_producers, unwrapped

__all__ = ["GradScale", "attach_grad_scale", "cut_init", "grad_scale"]

logger = logging.getLogger(__name__)

SMALLEST_NORM = 1e-6  # smaller norms, also the norms of zero rows, count as this

# logarithms and logits, not weights
_NEVER_CUT = ("logit_scale", "logit_bias", "scaled_query_bias", "scaled_document_bias")


def grad_scale(x: Tensor, power: float = 1.0) -> Tensor:
    """Returns the same embeddings, and multiplies their gradient row by row: (..., D) -> (..., D).

        forward z,   backward |z|^power · g

    It belongs before the normalisation: after it, all norms are 1 and it does nothing. The factor
    is a constant to higher derivatives, in at least float32 and finite. Norms below 1e-6 count as
    1e-6.

    Args:
        x: Embeddings.
        power: 1 cancels the 1/|z| of every cosine-based loss, and 0 changes nothing.

    Example:
        >>> import torch
        >>> x = torch.tensor([[3.0, 4.0], [0.6, 0.8]], requires_grad=True)
        >>> grad_scale(x, power=1.0).sum().backward()
        >>> x.grad
        tensor([[5., 5.],
                [1., 1.]])

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning,
    section 6 and App. D, Listing 2.
    """
    if power == 0 or not torch.is_grad_enabled():
        return x
    fixed = x.detach()
    norm = torch.linalg.vector_norm(at_least_float32(fixed), dim=-1, keepdim=True)
    factor = norm.clamp(min=SMALLEST_NORM) ** power  # (..., 1)
    factor = factor.clamp(max=torch.finfo(x.dtype).max)
    # x - fixed is zero, so the value is x to the last bit; its derivative is the factor. The
    # product is computed in the precision of the factor and rounded once.
    same: Tensor = fixed + (factor * (x - fixed)).to(x.dtype)
    return same


class GradScale(Module):
    """:func:`grad_scale` as a module, for the place in a model before its normalisation.

    It takes a tensor (..., D), or the features of a SentenceTransformer (TypeError otherwise).
    :func:`~st_magnitude.export` leaves it out of what it saves; ``save_pretrained`` keeps it, and
    then only :func:`~st_magnitude.load` loads the model.

    Raises:
        ValueError: At the first training batch, if all norms that reach it are 1.

    Example:
        >>> import torch
        >>> head = nn.Sequential(nn.Linear(2, 2, bias=False), GradScale())
        >>> torch.equal(head(torch.eye(2)), head[0].weight.T)
        True
    """

    config_keys: list[str] = ["power"]  # noqa: RUF012

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.power = power
        self.checked = False

    def forward(self, features: Any, **kwargs: object) -> Any:
        if isinstance(features, MutableMapping) and "sentence_embedding" in features:
            features["sentence_embedding"] = self._scaled(features["sentence_embedding"])
            return features
        if isinstance(features, Tensor):
            return self._scaled(features)
        raise InputTypeError(
            f"GradScale found no embeddings in a {type(features).__name__}. Put it after the module"
            " that returns them as a tensor, or call grad_scale(embeddings) in the loss."
        )

    def hook(self, _module: nn.Module, _inputs: object, output: Any) -> Any:
        return self(output)

    def save(self, output_path: str, *args: object, **kwargs: object) -> None:
        self.save_config(output_path)

    def _scaled(self, x: Tensor) -> Tensor:
        if not self.checked and not torch.compiler.is_compiling() and x.requires_grad:
            self.checked = True
            norms = torch.linalg.vector_norm(x.detach().float(), dim=-1)
            if norms.numel() > 1 and (norms - 1).abs().max() < 1e-3:
                raise InputError(
                    "All embeddings that reach GradScale have norm 1, so it comes after a "
                    "normalisation and does nothing. Put it before that."
                )
        return grad_scale(x, self.power)


@contextmanager
def without_grad_scale(model: nn.Sequential) -> Iterator[None]:
    """Within the block, a model lacks the :class:`GradScale` among its modules."""
    places = [(i, part) for i, part in enumerate(model) if isinstance(part, GradScale)]
    for i, _ in reversed(places):
        del model[i]
    try:
        yield
    finally:
        for i, part in places:
            model.insert(i, part)


def attach_grad_scale(model: nn.Module, power: float = 1.0) -> ExitStack:
    """Hooks :class:`GradScale` in behind raw embeddings. In place; it is never saved.

    ``close()`` of the returned handle removes it. In a SentenceTransformer it comes before the last
    Normalize or ExponentNorm, in every route of a last Router. Of any other module it scales the
    output.

    Raises:
        ValueError: If the model has GradScale already; at the first training batch, if all norms
            that reach it are 1.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.base.modules import Normalize
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red"]), Normalize()], device="cpu")
        >>> handle = attach_grad_scale(model, power=1.0)
        >>> handle.close()
    """
    parts = list(unwrapped(model).modules())
    hooks = [hook for part in parts for hook in forward_hooks(part)]
    if any(isinstance(getattr(x, "__self__", x), GradScale) for x in parts + hooks):
        raise InputError(
            "This model has GradScale already: call close() on the handle of the first one."
        )
    torch.compiler.reset()  # a compiled module without hooks does not look for new ones
    handle = ExitStack()
    for module in raw_producers(model):
        handle.callback(module.register_forward_hook(GradScale(power).hook).remove)
    return handle


def cut_init(
    model: Model,
    c: float = 3.0,
    where: Literal["all"] | Callable[[str, nn.Parameter], bool] = "all",
) -> Model:
    """Divides weights by c before training: norms begin small and cosine gradients large. In place.

    Args:
        model: Any module.
        c: The divisor. The paper takes 3 for contrastive and 9 for attraction-only losses.
        where: ``"all"`` divides every parameter, which destroys what a trained model has learned. A
            function of name and parameter chooses: for open_clip's ViT models, for example,
            ``lambda name, _: name in ("visual.proj", "text_projection")``. ``logit_scale``,
            ``logit_bias`` and learned exponents are never divided.

    Raises:
        ValueError: If ``where`` chose no parameter.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.base.modules import Dense
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> modules = [BoW(["red", "green"]), Dense(2, 2, bias=False, activation_function=None)]
        >>> model = SentenceTransformer(modules=modules, device="cpu")
        >>> before = model.encode("red")
        >>> (before / cut_init(model, c=4).encode("red")).round(4)
        array([4., 4.], dtype=float32)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning,
    section 6, Listing 1.
    """
    positive("c", c)
    if not callable(where) and where != "all":
        raise InputError(f"where must be 'all' or a function; got {where!r}.")
    inner: nn.Module = unwrapped(model)
    chosen = []
    for name, parameter in inner.named_parameters():
        is_weight = name.split(".")[-1] not in _NEVER_CUT
        if is_weight and (where == "all" or where(name, parameter)):
            chosen.append(parameter)
    if not chosen:
        raise InputError("cut_init: `where` chose no parameter, so there is nothing to divide.")
    if where == "all" and _looks_trained(inner):
        logger.warning(
            "cut_init divides all weights of a model that looks trained, which destroys what it has"
            " learned. Name the parameters of a new head: where=lambda name, parameter: ..."
        )
    with torch.no_grad():
        for parameter in chosen:
            parameter.div_(c)
    return model


def _looks_trained(model: nn.Module) -> bool:
    """Whether a weight or a bias of a normalisation layer is not constant; all begin as 1 and 0."""
    layers = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    vectors = [p for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 1]
    return any(bool((vector != vector[0]).any()) for vector in vectors)
