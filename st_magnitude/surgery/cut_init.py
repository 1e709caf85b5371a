"""Cut-initialisation: weights divided before training, so that norms begin small and cosine gradients large."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_magnitude.geometry import spearman
from st_magnitude.similarity import COSINE
from st_magnitude.surgery.normalize import PROBE, is_multiple, last_affine_parameters, rescale_output, restore
from st_magnitude.surgery.raw import raw_embeddings, unwrapped
from st_magnitude.surgery.towers import towers_of

__all__ = ["CutReport", "cut_init"]

logger = logging.getLogger(__name__)

# These parameters are logarithms and logits: dividing them is not dividing a weight.
_NEVER_CUT = ("logit_scale", "logit_bias", "query_bias", "document_bias")


@dataclass(frozen=True)
class CutReport:
    """The parameters that :func:`cut_init` divided, and the embeddings of a probe before and after.

    Attributes:
        c: The divisor.
        parameters: Names and shapes of the divided parameters.
        norms_before: Norms of the probe's raw embeddings by role, (n,) each.
        norms_after: The same norms after the cut.
        spearman: Rank correlation by role between the cosines of all pairs of the probe before and after. A value of 1
            means that the model ranks as it did; nan means that all pairs have the same cosine.
    """

    c: float
    parameters: dict[str, tuple[int, ...]]
    norms_before: dict[str, NDArray[np.float64]]
    norms_after: dict[str, NDArray[np.float64]]
    spearman: dict[str, float]

    def __str__(self) -> str:
        lines = [f"{len(self.parameters)} parameter(s) divided by {self.c:g}"]
        lines += [f"  {name}  {' x '.join(map(str, shape)) or 'scalar'}" for name, shape in self.parameters.items()]
        for role, before in self.norms_before.items():
            after = self.norms_after[role]
            lines.append(
                f"norms of {role}: {before.mean():.4g} -> {after.mean():.4g}, ratio {after.mean() / before.mean():.4f} "
                f"({len(before)} probes); Spearman of similarities {self.spearman[role]:.3f}"
            )
        return "\n".join(lines)


def cut_init(
    model: nn.Module,
    c: float = 3.0,
    where: Literal["output", "all"] | Callable[[str, nn.Parameter], bool] = "output",
    probe: Any = None,
) -> CutReport:
    """Divides weights by c before training, so that norms begin small and cosine gradients large. In place.

    - ``"output"`` divides weight and bias of the last affine map, as :func:`rescale_output` does, or the last
      projections of a CLIP. Norms become exactly 1/c of what they were and similarities stay: it is safe on pretrained
      models, also on those that end in Normalize. The result is checked on the probe. Under a cosine loss only this
      last map learns faster, c² times under SGD: since similarities stay, the layers below it get the same gradient as
      before.
    - ``"all"`` divides every parameter, as the paper's Listing 1 does, for models that are not trained yet. It destroys
      what a trained model has learned (see the Spearman correlation of the report), and logs a warning.
    - A function of name and parameter chooses freely.

    A tied parameter is divided once. ``logit_scale``, ``logit_bias`` and learned exponents are never divided.

    Args:
        model: A SentenceTransformer, a CLIP of open_clip or, with ``"all"`` or a function, any module.
        c: The divisor. The paper takes 3 for contrastive and 9 for attraction-only losses, with weight decay.
        where: The parameters to divide, see above.
        probe: Texts; for a CLIP a pair (images, tokens); for any other module its input. With None, eight sentences,
            or eight random images and token sequences; any other module is then not measured.

    Raises:
        ValueError: If c is not positive, no last affine map is found, the embeddings do not follow it, or no parameter
            was chosen. The model is then unchanged.

    Example:
        >>> from sentence_transformers.base.modules import Dense
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> modules = [BoW(["red", "green"]), Dense(2, 2, bias=False, activation_function=None)]
        >>> report = cut_init(SentenceTransformer(modules=modules, device="cpu"), c=4, probe=["red", "red green"])
        >>> report.parameters
        {'1.linear.weight': (2, 2)}
        >>> (report.norms_after["text"] / report.norms_before["text"]).round(6)
        array([0.25, 0.25])

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 6, Listing 1.
    """
    if not c > 0 or c == float("inf"):
        raise ValueError(f"c must be a positive number, got {c}; the paper takes 3 and 9.")
    if not callable(where) and where not in ("output", "all"):
        raise ValueError(f"where must be 'output', 'all' or a function of (name, parameter), got {where!r}.")
    model = unwrapped(model)
    if where == "all" and _looks_trained(model):
        logger.warning(
            "cut_init(where='all') on a model whose weights look trained: dividing all of them destroys what it has "
            "learned. where='output' changes norms only."
        )
    with raw_embeddings(model) if isinstance(model, SentenceTransformer) else nullcontext():
        chosen = _chosen(model, where, probe)
        before = _embeddings(model, probe)
        if where == "output" and isinstance(model, SentenceTransformer):
            rescale_output(model, 1 / c, probe)
            after = _embeddings(model, probe)
        else:
            after = _divide(model, chosen, c, probe, before if where == "output" else {})
    return CutReport(
        c,
        {name: tuple(p.shape) for name, p in chosen.items()},
        {role: x.norm(dim=1).numpy() for role, x in before.items()},
        {role: x.norm(dim=1).numpy() for role, x in after.items()},
        {role: _similarity_ranks(before[role], after[role]) for role in before},
    )


def _divide(
    model: nn.Module, chosen: Mapping[str, nn.Parameter], c: float, probe: Any, expected: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Divides the parameters and returns the embeddings of the probe, if these are the expected ones divided by c."""
    parameters = list(chosen.values())
    originals = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.div_(c)
    after = _embeddings(model, probe)
    if not all(is_multiple(after[role], x, 1 / c, parameters) for role, x in expected.items()):
        restore(parameters, originals)
        raise ValueError(
            f"The embeddings of this model do not follow {', '.join(chosen)}: something nonlinear comes after. Choose "
            "the parameters yourself: where=lambda name, parameter: ..."
        )
    return after


def _chosen(model: nn.Module, where: str | Callable[[str, nn.Parameter], bool], probe: Any) -> dict[str, nn.Parameter]:
    """The parameters to divide by name. Of tied parameters, only the first is among them."""
    named: Iterable[tuple[str, nn.Parameter]] = model.named_parameters()
    if where == "output" and isinstance(model, SentenceTransformer):
        last = {id(p) for p in last_affine_parameters(model, list(probe or PROBE))}
        named = ((name, p) for name, p in named if id(p) in last)
    elif where == "output":
        towers = towers_of(model)
        if towers is None:
            raise ValueError(
                "where='output' finds the last affine map of a SentenceTransformer or a CLIP, but not that of "
                f"{type(model).__name__}. Choose the parameters yourself: where=lambda name, parameter: ..."
            )
        named = towers.output_parameters(model)
    chosen: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for name, p in named:
        storage = p.data_ptr() or id(p)
        if name.rpartition(".")[2] in _NEVER_CUT or storage in seen or (callable(where) and not where(name, p)):
            continue
        seen.add(storage)
        chosen[name] = p
    if not chosen:
        raise ValueError("cut_init found no parameter to divide: `where` chose none, or the model has none.")
    return chosen


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


def _embeddings(model: nn.Module, probe: Any) -> dict[str, Tensor]:
    """The embeddings of a probe by role, in float64 on the CPU: (n, D) each."""
    if isinstance(model, SentenceTransformer):
        texts = list(probe) if probe is not None else list(PROBE)
        found = {"text": model.encode(texts, convert_to_tensor=True, show_progress_bar=False)}
    elif (towers := towers_of(model)) is not None:
        found = _in_eval_mode(model, lambda: towers.embed(model, probe))
    else:
        found = {} if probe is None else _in_eval_mode(model, lambda: {"output": model(probe)})
    return {role: _tensor(output).double().cpu() for role, output in found.items()}


@torch.no_grad()
def _in_eval_mode(model: nn.Module, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return call()
    finally:
        for module, training in modes.items():
            module.training = training


def _tensor(output: Any) -> Tensor:
    if isinstance(output, Mapping):
        output = output["sentence_embedding"]
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _similarity_ranks(before: Tensor, after: Tensor) -> float:
    rows, columns = torch.triu_indices(len(before), len(before), offset=1)
    if len(rows) < 2:
        return float("nan")
    return spearman(*(COSINE(x, x)[rows, columns].numpy().round(6) for x in (before, after)))
