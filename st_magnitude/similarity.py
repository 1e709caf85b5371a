"""Similarity: a pair of norm exponents, one per role.

Every score in this package is an inner product of two embeddings, each divided by a power of its
own norm (*Beyond the Unit Hypersphere*, arXiv 2602.09229, Eq. 7):

    s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document
            = |q|^(1 - gamma_query) |d|^(1 - gamma_document) cos(q, d)

The four corners of the unit square have names: ``COSINE`` (1, 1), ``DOT`` (0, 0), ``QNORM`` (1, 0),
``DNORM`` (0, 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from st_magnitude._checks import InputError

__all__ = ["COSINE", "DNORM", "DOT", "QNORM", "Similarity", "safe_norm"]

Embeddings: TypeAlias = "Tensor | Sequence[Tensor] | ArrayLike"


def safe_norm(embeddings: Tensor) -> Tensor:
    """Norms that are safe to divide by or to take the logarithm of: (..., D) -> (..., 1), with 1 in
    place of 0.

    With it a zero vector stays a zero vector, scores 0 against everything, and has finite
    gradients.
    """
    norm: Tensor = torch.linalg.vector_norm(embeddings, dim=-1, keepdim=True)
    # In float32 the square of 1e19 overflows; an infinite norm would give finite scores but
    # gradients of nan.
    return norm.masked_fill(norm == 0, 1.0).clamp(max=torch.finfo(norm.dtype).max)


def at_least_float32(embeddings: Embeddings) -> Tensor:
    """Converts tensors, arrays and lists of either to float tensors. Half precision and integers
    become float32."""
    if isinstance(embeddings, (list, tuple)) and embeddings and isinstance(embeddings[0], Tensor):
        embeddings = torch.stack(list(embeddings))
    elif not isinstance(embeddings, Tensor):
        embeddings = torch.as_tensor(np.asarray(embeddings))
    return embeddings if embeddings.dtype == torch.float64 else embeddings.float()


def without_autocast(x: Tensor) -> torch.autocast:
    """A context in which operations on the device of a tensor keep their precision."""
    device = x.device.type
    is_known = torch.amp.is_autocast_available(device)
    return torch.autocast(device if is_known else "cpu", enabled=False)


class Similarity:
    """Inner product after dividing each side by a power of its norm.

    Args:
        gamma_query: The exponent of the query in [0, 1]; a float, or a 0-d tensor when it is
            learned.
        gamma_document: The exponent of the document, likewise.

    Raises:
        ValueError: If an exponent lies outside [0, 1] or is a tensor that is not 0-d.

    Scores are computed in float32 with autocast off; float64 inputs stay float64. A zero vector
    scores 0. In float32 norms must lie between 1e-18 and 1e18, because their squares vanish or
    overflow further out; take float64 there. An instance is a ``similarity_fct`` for
    sentence-transformers' losses and a member of ``score_functions`` for its evaluators. What a
    vector database stores and gets sent are ``similarity.document(x).numpy()`` and
    ``similarity.query(x).numpy()``: with the metric **inner product** the database returns the
    score.

    Example:
        >>> import torch
        >>> from st_magnitude import COSINE, QNORM, Similarity
        >>> queries, documents = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]])
        >>> QNORM(queries, documents)
        tensor([[1.6000, 0.6000]])
        >>> COSINE.pairwise(queries, documents[:1])
        tensor([0.8000])
        >>> Similarity(gamma_query=1.0, gamma_document=0.5)
        Similarity(gamma_query=1.0, gamma_document=0.5)

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 7 and 20.
    """

    __slots__ = ("gamma_document", "gamma_query")

    gamma_query: float | Tensor
    gamma_document: float | Tensor

    def __init__(
        self, gamma_query: float | Tensor = 1.0, gamma_document: float | Tensor = 1.0
    ) -> None:
        self.gamma_query = _checked_exponent("gamma_query", gamma_query)
        self.gamma_document = _checked_exponent("gamma_document", gamma_document)

    @classmethod
    def named(cls, name: str | Similarity) -> Similarity:
        """The similarity called ``"cosine"``, ``"dot"``, ``"qnorm"`` or ``"dnorm"``; a Similarity
        is returned as it is.

        Raises:
            ValueError: If there is not a similarity of that name.
        """
        if isinstance(name, Similarity):
            return name
        try:
            return _NAMED[name.lower()]
        except (KeyError, AttributeError):
            raise InputError(
                f"No similarity is called {name!r}. Choose one of {sorted(_NAMED)}."
            ) from None

    @property
    def name(self) -> str:
        """``"cosine"``, ``"dot"``, ``"qnorm"``, ``"dnorm"``, or as ``"exponents 1 and 0.5"``."""
        for name, corner in _NAMED.items():
            if self == corner:
                return name
        return "exponents {:g} and {:g}".format(*self.exponents)

    @property
    def exponents(self) -> tuple[float, float]:
        """(gamma_query, gamma_document) as plain numbers."""
        query, document = (
            g.item() if isinstance(g, Tensor) else g
            for g in (self.gamma_query, self.gamma_document)
        )
        return query, document

    @property
    def keeps_magnitude(self) -> bool:
        """Whether the norm of either side changes the score: for all but cosine."""
        return self != COSINE

    def query(self, embeddings: Embeddings) -> Tensor:
        """Queries as they enter the product, x / |x|^gamma_query: (..., D) -> (..., D)."""
        return _divide_by_norm(embeddings, self.gamma_query)

    def document(self, embeddings: Embeddings) -> Tensor:
        """Documents as they enter the product, x / |x|^gamma_document: (..., D) -> (..., D)."""
        return _divide_by_norm(embeddings, self.gamma_document)

    def document_divisor(self, embeddings: Embeddings) -> Tensor:
        """The divisor of `document`, |x|^gamma_document or 1 for zeros: (..., D) -> (..., 1).

        It turns inner products of raw documents into scores for several exponents without another
        matrix product.
        """
        return _norm_power(at_least_float32(embeddings), self.gamma_document)

    def __call__(self, queries: Embeddings, documents: Embeddings) -> Tensor:
        """All scores: (n, D), (m, D) -> (n, m). A single vector counts as one row."""
        rows = torch.atleast_2d(self.query(queries))
        columns = torch.atleast_2d(self.document(documents))
        with without_autocast(rows):
            return torch.matmul(rows, columns.to(rows.dtype).T)

    def pairwise(self, queries: Embeddings, documents: Embeddings) -> Tensor:
        """Scores of row i against row i: (n, D), (n, D) -> (n,)."""
        return (self.query(queries) * self.document(documents)).sum(dim=-1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Similarity):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[float, ...]:
        """Exponents to compare; a tensor, whose value may change, is equal to itself alone."""
        gammas = self.gamma_query, self.gamma_document
        return tuple(id(g) if isinstance(g, Tensor) else g for g in gammas)

    def __repr__(self) -> str:
        return "Similarity(gamma_query={}, gamma_document={})".format(*self.exponents)


def _checked_exponent(name: str, gamma: float | Tensor) -> float | Tensor:
    if isinstance(gamma, Tensor):
        if gamma.ndim != 0:
            raise InputError(f"A learned {name} must be a 0-d tensor, got {tuple(gamma.shape)}.")
        return gamma
    if not 0.0 <= gamma <= 1.0:
        raise InputError(f"{name} must lie in [0, 1], got {gamma}: 0 keeps the norm, 1 removes it.")
    return float(gamma)


def _divide_by_norm(embeddings: Embeddings, gamma: float | Tensor) -> Tensor:
    embeddings = at_least_float32(embeddings)
    if not isinstance(gamma, Tensor) and gamma == 0.0:
        return embeddings
    return embeddings / _norm_power(embeddings, gamma)


def _norm_power(embeddings: Tensor, gamma: float | Tensor) -> Tensor:
    """|x|^gamma, with 1 for a zero vector: (..., D) -> (..., 1)."""
    with without_autocast(embeddings):
        norm = safe_norm(embeddings)
        return norm if not isinstance(gamma, Tensor) and gamma == 1.0 else norm**gamma


COSINE = Similarity(gamma_query=1.0, gamma_document=1.0)
DOT = Similarity(gamma_query=0.0, gamma_document=0.0)
QNORM = Similarity(gamma_query=1.0, gamma_document=0.0)
DNORM = Similarity(gamma_query=0.0, gamma_document=1.0)
_NAMED = {"cosine": COSINE, "dot": DOT, "qnorm": QNORM, "dnorm": DNORM}
