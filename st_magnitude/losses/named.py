"""The losses that ``st-magnitude train`` and ``compare`` know by name, without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from st_magnitude.losses.ranking import MagnitudeRankingLoss


@dataclass(frozen=True)
class NamedLoss:
    """A ranking loss of the commands."""

    path: str  # its module in st_magnitude.losses, and its class
    similarity: str  # what st_magnitude.prepare gets before the loss is built
    keeps_norms: bool = False  # whether its models score with the norms of documents
    is_compared: bool = False  # whether `compare` tries it
    # its class for several prefixes, if it has temperatures of its own: these two take
    # `temperatures`, and the second one `dims`; other losses take `terms`
    path_with_dims: str | None = None

    @property
    def has_temperatures(self) -> bool:
        return self.path_with_dims is not None

    def load(self, with_dims: bool = False) -> type[MagnitudeRankingLoss]:
        path = self.path_with_dims if with_dims and self.path_with_dims else self.path
        module, name = path.split(".")
        found: type[MagnitudeRankingLoss] = getattr(import_module(f"{__package__}.{module}"), name)
        return found


LOSSES = {
    "cosine": NamedLoss("exponents.CosineRankingLoss", "cosine", is_compared=True),
    "qnorm": NamedLoss("exponents.QNormRankingLoss", "qnorm", keeps_norms=True, is_compared=True),
    "dot": NamedLoss("exponents.DotRankingLoss", "dot", keeps_norms=True, is_compared=True),
    "dnorm": NamedLoss("exponents.DNormRankingLoss", "dnorm"),
    "learnable": NamedLoss(
        "exponents.LearnableNormLoss", "dot", keeps_norms=True, is_compared=True
    ),
    "tempagg": NamedLoss(
        "temperature.TempAggLoss", "cosine", path_with_dims="temperature.TempAggMRLLoss"
    ),
    "tempspec": NamedLoss(
        "temperature.TempSpecMRLLoss", "cosine", path_with_dims="temperature.TempSpecMRLLoss"
    ),
    "sigreg": NamedLoss("exponents.SIGRegInfoNCE", "cosine"),
}
