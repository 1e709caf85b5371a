"""A document prior in an index: one more dimension, for any index of the inner product."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from st_magnitude.geometry import Array, float64

Vectors = TypeVar("Vectors", NDArray[np.floating], Tensor)


def with_prior(documents: Vectors, log_p: ArrayLike, weight: float) -> Vectors:
    """Document vectors for an index that ranks by q · d + weight · log p(d): (N, D) -> (N, D + 1).

        d' = [d, weight · log p(d)],   q' = [q, 1],   q' · d' = q · d + weight · log p(d)

    The index must use the **inner product**. For a cosine model, normalise queries and documents
    first. The norm of a query weighs against the prior: treat queries as they were when the weight
    was chosen.

    Args:
        documents: Vectors as they would be stored without a prior, a numpy array or a torch
            tensor. The result is of the same kind, dtype and device. Not integers: add the prior
            before you quantize.
        log_p: Logarithm of the share of queries that each document answers, (N,). Smooth the
            counts, for example by adding 1 to each, which keeps it finite.
        weight: Factor of the prior, in units of the score. 0 ranks as without a prior.

    Raises:
        ValueError: If a number is missing or not finite, or not finite in the dtype of the
            documents, or that is an integer.

    Example:
        >>> documents = np.array([[1.0, 0.0], [0.8, 0.6]])
        >>> index = with_prior(documents, np.log([0.1, 0.9]), weight=0.2)
        >>> (with_prior_queries(np.array([[1.0, 0.0]])) @ index.T).round(3)
        array([[0.539, 0.779]])

    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019; Bachrach et al., Speeding Up the Xbox Recommender System Using a
    Euclidean Transformation for Inner-Product Spaces, RecSys 2014, on a bias as a dimension.
    """
    prior = weight * float64(log_p)
    if prior.shape != (len(documents),) or not np.isfinite(prior).all():
        raise ValueError(
            f"weight · log_p must be one finite number for each of {len(documents)} documents; got "
            f"an array of shape {prior.shape}. Smooth the counts if it contains infinities."
        )
    found = _with_column(documents, prior)
    if not np.isfinite(float64(found[:, -1])).all():
        raise ValueError(
            f"weight · log_p is up to {abs(prior).max():g}, which {documents.dtype} cannot hold;"
            " pass documents in float32."
        )
    return found


def with_prior_queries(queries: Vectors) -> Vectors:
    """Query vectors for an index of :func:`with_prior`, [q, 1]: (Q, D) -> (Q, D + 1)."""
    return _with_column(queries, np.ones(len(queries)))


def _with_column(x: Vectors, column: Array) -> Vectors:
    """One more column: (n, D), (n,) -> (n, D + 1)."""
    is_float = x.is_floating_point() if isinstance(x, Tensor) else x.dtype.kind == "f"
    if not is_float:
        raise ValueError(f"Vectors of {x.dtype} have no room for a prior; add it, then quantize.")
    if isinstance(x, Tensor):
        return torch.cat([x, torch.from_numpy(column).to(x.dtype).to(x.device)[:, None]], dim=1)
    with np.errstate(over="ignore"):  # which the caller looks for
        return np.concatenate([x, column.astype(x.dtype)[:, None]], axis=1)
