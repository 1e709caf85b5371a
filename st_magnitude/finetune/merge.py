"""merge_with_base: parameters between the base and the trained model, which keep more of what the
base could do."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Module
from sentence_transformers.sentence_transformer.modules import Dropout
from torch import Tensor

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.calibration import calibrate_exponent, warn_if_few
from st_magnitude.finetune.verdict import own_ndcg, own_similarity
from st_magnitude.modules import ExponentNorm
from st_magnitude.result import Result, Table
from st_magnitude.saving.export import load
from st_magnitude.surgery.adapters import refuse_quantized
from st_magnitude.surgery.normalize import prepare
from st_magnitude.surgery.raw import is_sentence_norm, refuse_other_models

__all__ = ["Merge", "merge_with_base", "parameters_of"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Merge(Result):
    """A merged model, and nDCG@10 of every weight on the data that chose it and on the data to
    keep."""

    model: SentenceTransformer
    weight: float  # the chosen weight of the trained model; the base has 1 - weight
    weights: NDArray[np.float64]  # all weights, (W,), in rising order
    exponents: NDArray[np.float64]  # the document exponent by which each of them was scored, (W,)
    names: list[str]  # of the data sets: the one that chose, then those to keep
    ndcg: list[NDArray[np.float64]]  # of every query, one (W, n) for each data set
    # of the base as it was given, under its own similarity, one (n,) for each data set
    base: list[NDArray[np.float64]]

    def tables(self) -> Iterable[Table]:
        """nDCG@10 by weight."""
        rows: list[list[object]] = [["base as given", "", *(x.mean() for x in self.base), ""]]
        for i, (weight, exponent) in enumerate(zip(self.weights, self.exponents, strict=True)):
            mark = "chosen" if weight == self.weight else ""
            rows.append([f"{weight:g}", f"{exponent:g}", *(x[i].mean() for x in self.ndcg), mark])
        title = "nDCG@10 by the weight of the trained model (the base has the rest)"
        note = f"The weight was chosen on {self.names[0]}, whose figures are therefore optimistic."
        yield Table(["weight", "document exponent", *self.names, ""], rows, title, note)

    def to_dict(self) -> dict[str, object]:
        """The choice and mean nDCG@10 by weight, as JSON has them."""
        curves = zip(self.names, self.base, self.ndcg, strict=True)
        data = [
            {"name": n, "base": float(b.mean()), "ndcg@10": x.mean(axis=1).tolist()}
            for n, b, x in curves
        ]
        weights, exponents = self.weights.tolist(), self.exponents.tolist()
        return {"weight": self.weight, "weights": weights, "exponents": exponents, "data": data}


def merge_with_base(
    model: SentenceTransformer,
    base: SentenceTransformer | str | Path,
    data: RetrievalData,
    keep: Sequence[RetrievalData] = (),
    weights: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    max_loss: float = 0.01,
    calibrate: bool = False,
) -> Merge:
    """Interpolates the parameters of a trained model with those of its base, which forgets less of
    other domains.

        theta(w) = (1 - w) · theta_base + w · theta_trained

    The weight with the highest nDCG@10 on ``data`` is chosen, of those at which no data set of
    ``keep`` loses more than ``max_loss`` from the base as it was given; if there is none, the one
    that loses least, with a warning. The merged model has the modules and the scoring of the
    trained one. Neither of the two is changed.

    Args:
        model: The trained model. LoRA adapters stay adapters, and are scaled.
        base: The model that the training began with, or its folder or hub id.
        data: Held-out data of the domain of training, usually a dev split.
        keep: Data of other domains, which the merged model must not lose.
        weights: Weights of the trained model in [0, 1].
        max_loss: Largest loss of mean nDCG@10 on each data set of ``keep``.
        calibrate: Whether each weight, and the merged model, is scored by its calibrated exponent
            (`calibrate_exponent` on ``data``), because norms weaken towards the base.

    Raises:
        ValueError: If a weight is outside of [0, 1], the model is quantized, or modules or
            parameters of the two models differ other than by Normalize, ExponentNorm and LoRA; the
            message names them. With ``calibrate``, if the model normalises.

    Source: Wortsman et al., Robust Fine-Tuning of Zero-Shot Models, CVPR 2022 (arXiv 2109.01903).

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = ["bees", "wax"]
        >>> base, model = (
        ...     SentenceTransformer(modules=[BoW(words)], device="cpu") for _ in range(2)
        ... )
        >>> data = RetrievalData({"q": "bees"}, {"d1": "bees", "d2": "wax"}, {"q": {"d1"}})
        >>> # Of equal ones, the nearest to the base
        >>> merge_with_base(model, base, data, weights=[0.5, 1.0]).weight
        0.5
    """
    refuse_other_models(model, "merge_with_base")
    refuse_quantized(model.named_parameters(), "merge_with_base")
    tried = np.unique(np.asarray(weights, dtype=np.float64))
    if not (tried.size and tried[0] >= 0 and tried[-1] <= 1):
        raise ValueError(f"Weights of the trained model lie in [0, 1], got {list(weights)}.")
    base = load(base) if isinstance(base, (str, Path)) else base
    merged, tasks = deepcopy(model), [data, *keep]
    starts, ends = _starts(model, base), parameters_of(model)
    warn_if_few(data.query_ids, "a weight")

    def set_weight(weight: float) -> None:
        state = {
            k: torch.lerp(starts[k], end, weight) if end.is_floating_point() else end
            for k, end in ends.items()
        }
        merged.load_state_dict(state, strict=False)  # exponents stay

    before, similarities, rows = [own_ndcg(base, task) for task in tasks], [], []
    for weight in tried:
        set_weight(float(weight))
        similarity = own_similarity(merged)
        if calibrate:
            similarity = calibrate_exponent(merged, data).best_similarity
        similarities.append(similarity)
        rows.append([own_ndcg(merged, task, similarity) for task in tasks])
    ndcg = [np.stack(of_task) for of_task in zip(*rows, strict=True)]  # (W, n) each
    # (1 + K, W)
    losses = np.stack([b.mean() - x.mean(axis=1) for b, x in zip(before, ndcg, strict=True)])
    worst = losses[1:].max(axis=0) if keep else np.zeros(len(tried))
    if worst.min() > max_loss:
        logger.warning(
            f"Every weight loses more than {max_loss} nDCG@10; the one that loses least is chosen."
        )
    chosen = int(np.where(worst <= max(max_loss, worst.min()), losses[0], np.inf).argmin())
    set_weight(float(tried[chosen]))
    if calibrate:
        prepare(merged, similarities[chosen])
    names = [task.name or (f"keep {i}" if i else "data") for i, task in enumerate(tasks)]
    exponents = np.array([float(similarity.exponents[1]) for similarity in similarities])
    return Merge(merged, float(tried[chosen]), tried, exponents, names, ndcg, before)


def parameters_of(model: SentenceTransformer) -> dict[str, Tensor]:
    """The state of a model without that of ExponentNorm, which belongs to the scoring."""
    norms = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, ExponentNorm)
    )
    return {name: value for name, value in model.state_dict().items() if not name.startswith(norms)}


def _starts(model: SentenceTransformer, base: SentenceTransformer) -> dict[str, Tensor]:
    """For each parameter of the trained model that of the base. LoRA adds B · A to a matrix, so B
    starts at 0."""
    here, there, rest, found = _modules(model), _modules(base), parameters_of(base), {}
    different = [name for name in sorted(here.keys() | there) if here.get(name) != there.get(name)]
    for name, end in parameters_of(model).items():
        start = rest.pop(name.replace(".base_layer.", ".").replace("base_model.model.", ""), None)
        if start is None and ".lora_" in name and "magnitude" not in name:
            start = end if "_A." in name else torch.zeros_like(end)
        if start is None or start.shape != end.shape:
            different.append(name)
        else:
            found[name] = start.to(end)
    if different := [*different, *rest]:
        raise ValueError(
            f"{len(different)} modules or parameters of the trained model and the base differ, such"
            f" as {', '.join(different[:3])}. Pass the base that the model was trained from,"
            " without adapters of its own."
        )
    return found


def _modules(model: SentenceTransformer) -> dict[str, str]:
    """Name to class, and settings where there are no parameters, of all modules but norms."""
    return {
        name: type(module).__name__ if list(module.parameters()) else str(module)
        for name, module in model.named_modules()
        if isinstance(module, Module)
        and not (is_sentence_norm(module) or isinstance(module, (ExponentNorm, Dropout)))
    }
