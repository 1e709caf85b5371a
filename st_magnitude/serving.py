"""What a vector database stores for a similarity, so that its inner product is the score.

Every similarity here is an inner product of vectors that were divided by a power of their length. A database can
compute inner products, but no such powers: the powers are taken once, when documents are indexed and queries are sent.

    s(q, d) = query_vectors(q) · index_vectors(d)

For an index that has cosine or L2 only, `augment` gives all documents one length, by one more dimension, and leaves
every inner product as it is. Where an index has the inner product, use that: HNSW found far more so (docs/serving.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from st_magnitude.similarity import Similarity

__all__ = ["augment", "augment_queries", "index_vectors", "query_vectors"]


def index_vectors(documents: Any, similarity: str | Similarity) -> NDArray[np.float32]:
    """Documents as the database stores them, x / |x|^gamma_document: (n, D) -> (n, D).

    The metric of the index is the **inner product**, for every similarity. Where gamma_document is 1 (cosine, DNorm)
    all vectors have length 1, and a cosine or L2 index ranks alike. Where it is smaller (dot, QNorm, between) an index
    that is declared as cosine discards what the model says with length, silently: many databases normalise on upload.

    Args:
        documents: Raw embeddings, one a row: array, tensor, or a list of either. Half precision is taken as float32.
        similarity: The Similarity that the model was trained or calibrated with, or its name. Learnable exponents count
            as the numbers that they are now.

    Returns:
        C-contiguous float32, which FAISS wants. A zero vector stays zero and scores 0.

    Raises:
        ValueError: If documents are not (n, D), or one of them is not finite; for an unknown name.

    Example:
        >>> index_vectors([[3.0, 4.0], [0.0, 2.0]], "cosine")
        array([[0.6, 0.8],
               [0. , 1. ]], dtype=float32)
        >>> index_vectors([[3.0, 4.0], [0.0, 2.0]], "qnorm")
        array([[3., 4.],
               [0., 2.]], dtype=float32)

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 7 and 20.
    """
    return _divided(documents, "document", Similarity.named(similarity).exponents[1])


def query_vectors(queries: Any, similarity: str | Similarity) -> NDArray[np.float32]:
    """Queries as they are sent to the database, x / |x|^gamma_query: (n, D) -> (n, D).

    The query exponent changes no ranking (Prop. 4.1 of the paper), but it makes the inner product that comes back the
    score of the similarity, so that a threshold means the same for every query.

    Args:
        queries: Raw embeddings, one a row, as in `index_vectors`.
        similarity: As in `index_vectors`.

    Raises:
        ValueError: As in `index_vectors`.

    Example:
        >>> query_vectors([[3.0, 4.0]], "qnorm") @ index_vectors([[3.0, 4.0]], "qnorm").T
        array([[5.]], dtype=float32)
    """
    return _divided(queries, "query", Similarity.named(similarity).exponents[0])


def augment(documents: Any, max_norm: float | None = None) -> NDArray[np.float32]:
    """Documents of one length M, by one more dimension: (n, D) -> (n, D + 1).

        x' = (x, sqrt(M² - |x|²)),   q' = (q, 0),   q' · x' = q · x,   |q' - x'|² = |q|² + M² - 2 q · x

    So inner product, cosine and L2 rank these vectors alike, and as the inner product ranks the originals: an index
    that has cosine or L2 only can search by inner product. It is exact for exhaustive search. HNSW
    on augmented documents is a poor second to HNSW on inner products, at any spread of norms that was measured
    (docs/serving.md): queries lie on the equator, short documents at the pole, and all distances are alike.

    Args:
        documents: What `index_vectors` returns, one a row.
        max_norm: M; by default the largest norm of these documents. Documents that are added later need the same M and
            may not be longer, so leave room (two times the largest, say), and keep M with the index.

    Returns:
        C-contiguous float32. The first D columns are the documents unchanged.

    Raises:
        ValueError: If documents are not (n, D) or not finite, if there are none and max_norm is not given, if max_norm
            is not a positive finite number, or if a document is longer than it.

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
        raise ValueError(f"max_norm must be a positive, finite length, got {max_norm}.")
    # A norm in float32 that a caller has taken of the same documents may be a rounding below.
    if len(rows) and norms.max() > max_norm * (1 + 1e-6):
        worst = int(norms.argmax())
        raise ValueError(
            f"Document {worst} has length {norms[worst]:.6g}, more than max_norm = {max_norm:.6g}, and so no place in "
            "this index: rebuild it with augment(all_documents, max_norm=...) and a larger max_norm. "
            f"{int((norms > max_norm * (1 + 1e-6)).sum())} of {len(rows)} documents are too long."
        )
    # (M - |x|)(M + |x|) does not cancel as M² - |x|² does.
    rest = np.sqrt(np.clip(max_norm - norms, 0, None) * (max_norm + norms))
    return np.concatenate([rows, rest[:, None]], axis=1).astype(np.float32)


def augment_queries(queries: Any) -> NDArray[np.float32]:
    """Queries for an index of augmented documents, (q, 0): (n, D) -> (n, D + 1).

    Args:
        queries: What `query_vectors` returns, one a row.

    Raises:
        ValueError: If queries are not (n, D) or not finite.

    Example:
        >>> augment_queries([[1.0, 2.0]])
        array([[1., 2., 0.]], dtype=float32)
    """
    rows = _rows(queries, "query")
    return np.concatenate([rows, np.zeros((len(rows), 1))], axis=1).astype(np.float32)


def _divided(embeddings: Any, role: str, gamma: float) -> NDArray[np.float32]:
    """x / |x|^gamma in float64, rounded once."""
    rows = _rows(embeddings, role)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms == 0, 1.0, norms) ** gamma).astype(np.float32)


def _rows(embeddings: Any, role: str) -> NDArray[np.float64]:
    """Finite rows in float64."""
    if isinstance(embeddings, Tensor):
        embeddings = embeddings.detach().cpu().double().numpy()
    elif isinstance(embeddings, (list, tuple)) and embeddings and isinstance(embeddings[0], Tensor):
        embeddings = np.stack([row.detach().cpu().double().numpy() for row in embeddings])
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2:
        raise ValueError(
            f"Expected {role} embeddings of shape (n, D), got {rows.shape}"
            + (": put a single vector into a list." if rows.ndim == 1 else ".")
        )
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        raise ValueError(f"The {role} embedding in row {int(finite.argmin())} is not finite.")
    return rows
