"""Vectors for an index that has cosine or L2, and not the inner product."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from st_magnitude.geometry.arrays import matrix_of

__all__ = ["augment", "augment_queries"]


def augment(documents: Any, max_norm: float | None = None) -> NDArray[np.float32]:
    """Documents of the same norm M, by one more dimension: (n, D) -> (n, D + 1).

        x' = (x, sqrt(M² - |x|²)),   q' = (q, 0),   q' · x' = q · x,   |q' - x'|² = |q|² + M² - 2 q · x

    Inner product, cosine and L2 rank these vectors alike, and as the inner product ranks the originals. An exhaustive
    search is exact. HNSW on augmented documents finds much less than HNSW on inner products (docs/serving.md): queries
    lie on the equator, documents with small norms at the pole, and all distances are alike.

    Args:
        documents: Documents that ``Similarity.document`` has divided, one in each row.
        max_norm: The norm M; by default the largest norm of these documents. Documents that are added later need the
            same M and must not have a larger norm. Leave room, such as twice the largest norm, and keep M with the
            index.

    Returns:
        C-contiguous float32. The first D columns are the documents unchanged.

    Raises:
        ValueError: If documents are not (n, D) or not finite, or max_norm is missing, not positive or exceeded.

    In float32 the inner product of the augmented vectors is as exact as that of the originals, since a query has 0
    where documents have the new dimension. L2 is not: it loses what is below about 1e-7 (M² + |q|²), so that near ties
    turn around where M is large beside the scores.

    Example:
        >>> documents = augment([[3.0, 4.0], [0.0, 3.0]])
        >>> documents
        array([[3., 4., 0.],
               [0., 3., 4.]], dtype=float32)
        >>> augment_queries([[1.0, 1.0]]) @ documents.T
        array([[7., 3.]], dtype=float32)

    Source: Bachrach et al., Speeding Up the Xbox Recommender System Using a Euclidean Transformation for Inner-Product
    Spaces, 2014, Theorem 1 (to L2; with normalised x' it is the simple LSH of Neyshabur and Srebro, On Symmetric and
    Asymmetric LSHs for Inner Product Search, 2015, which scales documents by 1 / M first).
    """
    rows = _rows(documents, "document")
    norms = np.linalg.norm(rows, axis=1)
    if max_norm is None:
        if not len(rows):
            raise ValueError("There are no documents to take the largest norm of: pass max_norm.")
        max_norm = float(norms.max())
    elif not (np.isfinite(max_norm) and max_norm > 0):
        raise ValueError(f"max_norm must be a positive, finite number, got {max_norm}.")
    # A norm in float32 that a caller has taken of the same documents may be a rounding below.
    if len(rows) and norms.max() > max_norm * (1 + 1e-6):
        worst = int(norms.argmax())
        raise ValueError(
            f"Document {worst} has the norm {norms[worst]:.6g}, more than max_norm = {max_norm:.6g}: rebuild this "
            "index with augment(all_documents, max_norm=...) and a larger max_norm. "
            f"{int((norms > max_norm * (1 + 1e-6)).sum())} of {len(rows)} documents have too large a norm."
        )
    # (M - |x|)(M + |x|) does not cancel as M² - |x|² does.
    rest = np.sqrt(np.clip(max_norm - norms, 0, None) * (max_norm + norms))
    return np.concatenate([rows, rest[:, None]], axis=1).astype(np.float32)


def augment_queries(queries: Any) -> NDArray[np.float32]:
    """Queries for an index of augmented documents, (q, 0): (n, D) -> (n, D + 1).

    Example:
        >>> augment_queries([[1.0, 2.0]])
        array([[1., 2., 0.]], dtype=float32)
    """
    rows = _rows(queries, "query")
    return np.concatenate([rows, np.zeros((len(rows), 1))], axis=1).astype(np.float32)


def _rows(embeddings: Any, role: str) -> NDArray[np.float64]:
    """Checked rows in float64: (n, D)."""
    rows = matrix_of(embeddings, at_least=0)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        raise ValueError(f"The {role} embedding in row {int(finite.argmin())} is not finite.")
    return rows
