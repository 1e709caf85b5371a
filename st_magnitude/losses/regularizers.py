"""Regularizers: functions of embeddings (n, D) that return a scalar.

Every loss of this package takes them: ``regularizers=[(SIGReg(), 0.05)]``, where SIGReg is in
:mod:`st_magnitude.losses.sigreg`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from st_magnitude.similarity import at_least_float32

__all__ = ["Penalties", "Regularizer", "covariance_penalty", "norm_variance_penalty"]

Regularizer = Callable[[Tensor], Tensor]


class Penalties(nn.ModuleDict):
    """Weighted regularizers by the names that they are logged under.

    The name is that of the function or class in snake case, or its attribute ``name``: ``sigreg``, ``sigreg_2``.

    Args:
        regularizers: Functions of the embeddings (n, D) of all columns that return a scalar, or pairs of one and its
            weight, which is 1 otherwise. A regularizer with a method ``of_columns`` gets the list of columns, (B, D)
            each, through that method instead.
    """

    def __init__(self, regularizers: Iterable[Regularizer | tuple[Regularizer, float]]) -> None:
        self.weighted: dict[str, tuple[Regularizer, float]] = {}
        for item in regularizers:
            regularizer, weight = item if isinstance(item, tuple) else (item, 1.0)
            name = _snake_case(regularizer)
            numbered = (f"{name}_{number}" for number in itertools.count(2))
            name = next(free for free in itertools.chain([name], numbered) if free not in self.weighted)
            self.weighted[name] = (regularizer, weight)
        super().__init__({name: r for name, (r, _) in self.weighted.items() if isinstance(r, nn.Module)})

    def __bool__(self) -> bool:
        return bool(self.weighted)

    def forward(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """The weighted penalties of the embeddings of a batch, (B, D) for each column."""
        penalties = {}
        for name, (regularizer, weight) in self.weighted.items():
            of_columns = getattr(regularizer, "of_columns", None)
            penalty = regularizer(torch.cat(list(columns))) if of_columns is None else of_columns(columns)
            penalties[name] = weight * penalty
        return penalties

    def get_config_dict(self) -> dict[str, float]:
        """The weights by name."""
        return {name: weight for name, (_, weight) in self.weighted.items()}


def _snake_case(regularizer: Regularizer) -> str:
    name = str(getattr(regularizer, "name", None) or getattr(regularizer, "__name__", type(regularizer).__name__))
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def covariance_penalty(embeddings: Tensor) -> Tensor:
    """Sum of the squared off-diagonal covariances, over D: (n, D) -> scalar.

        1/D sum_{a != b} C_ab²,   C the covariance of the raw embeddings, with n - 1

    It removes linear dependence between coordinates and leaves their variances alone. The rows are those of this rank
    only. One row gives 0.

    Example:
        >>> import torch
        >>> covariance_penalty(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))  # C = [[2, 2], [2, 2]]
        tensor(4.)

    Source: Bardes et al., VICReg, ICLR 2022, Eq. 4.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = at_least_float32(embeddings)
        x = x - x.mean(dim=0)
        covariance = x.T @ x / max(len(x) - 1, 1)  # (D, D)
        return (covariance.square().sum() - covariance.diagonal().square().sum()) / x.shape[1]


def norm_variance_penalty(embeddings: Tensor) -> Tensor:
    """Variance of the norms relative to their mean, the squared coefficient of variation: (n, D) -> scalar.

        mean_i (|x_i| - m)² / m²,   m = mean_i |x_i|

    It is for training by cosine, where nothing else keeps the norms together. The rows are those of this rank only.

    Example:
        >>> import torch
        >>> norm_variance_penalty(torch.tensor([[3.0, 4.0], [0.0, 15.0]]))  # norms 5 and 15
        tensor(0.2500)
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        x = at_least_float32(embeddings)
        norms = torch.linalg.vector_norm(x, dim=1)
        mean = norms.mean()
        return (norms - mean).square().mean() / mean.square().clamp_min(torch.finfo(x.dtype).tiny)
