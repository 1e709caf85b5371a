"""Regularizers, functions of embeddings (n, D) that return a scalar: ``regularizers=[(SIGReg(), 0.05)]``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Penalties", "Regularizer"]

Regularizer = Callable[[Tensor], Tensor]


class Penalties(nn.ModuleDict):
    """Weighted regularizers by the names that they are logged under.

    The name is the name of the function or class in snake case, or its attribute ``name``: ``sigreg``, ``sigreg_2``.

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
            names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
            self.weighted[next(name for name in names if name not in self.weighted)] = (regularizer, weight)
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
