"""Checks of what a ranking loss would train."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from st_magnitude.kernel.terms import Term
from st_magnitude.similarity import Similarity

logger = logging.getLogger(__name__)


class Late:
    """Reads numbers of a batch without a wait for the GPU, where the next batch shows them."""

    def __init__(self) -> None:
        self._numbers: Tensor | None = None

    def __call__(self, numbers: Tensor) -> list[int]:
        """Takes numbers (n,); returns them, or on a GPU those of the batch before, if any."""
        before = self._numbers
        self._numbers = torch.zeros(numbers.shape, dtype=numbers.dtype, pin_memory=numbers.is_cuda)
        self._numbers.copy_(numbers, non_blocking=numbers.is_cuda)
        known = before if numbers.is_cuda else self._numbers
        return [] if known is None else known.tolist()


def check_dims(name: str, terms: Sequence[Term], width: int | None) -> None:
    """Refuses prefixes longer than the embeddings, and warns if no term compares all dimensions.

    ``width`` is the number of dimensions of the embeddings, or None if it is unknown.
    """
    dims = {term.dim for term in terms if term.dim is not None}
    if width is None:
        return
    if too_long := sorted(dim for dim in dims if dim > width):
        raise ValueError(
            f"Terms compare {too_long} dimensions, but the embeddings of this model have {width}. "
            f"Choose dims in 1..{width}."
        )
    if width not in dims and all(term.dim is not None for term in terms):
        logger.warning(
            "No term of %s compares all %d dimensions, so those beyond %d are not trained. Add a"
            " term with dim=%d.",
            name,
            width,
            max(dims),
            width,
        )


def warn_of_exponent(name: str, similarity: Similarity) -> None:
    """Warns that a model without ExponentNorm scores without a fractional document exponent."""
    query, document = similarity.exponents
    if 0 < document < 1:
        logger.warning(
            "%s trains with a document exponent of %.3g, but the saved model will score with dot"
            " products. Call stm.prepare(model, Similarity(%.3g, %.3g)), which adds the module that"
            " applies the exponent.",
            name,
            document,
            query,
            document,
        )
