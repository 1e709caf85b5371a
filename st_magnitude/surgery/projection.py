"""Fewer dimensions without training: the principal axes of a corpus, as a stock Dense module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router
from torch import Tensor, nn

from st_magnitude.similarity import COSINE
from st_magnitude.surgery.raw import encode_raw, normalizes_output, raw_end, refuse_other_models

__all__ = ["principal_axes", "project"]


def principal_axes(documents: Tensor, dim: int) -> Tensor:
    """The leading eigenvectors of the mean of d dᵀ over documents, orthonormal: (N, D) -> (D, dim).

    Of all subspaces of ``dim`` dimensions theirs loses the least of the squared norms of documents.
    The mean is not subtracted, so all axes together leave every inner product as it was.

    Source: Eckart and Young, The Approximation of One Matrix by Another of Lower Rank, 1936.

    Example:
        >>> principal_axes(torch.tensor([[3.0, 0.0], [0.0, 1.0], [-2.0, 0.0]]), 1).abs()
        tensor([[1.],
                [0.]])
    """
    moments = sum((x.double().T @ x.double() for x in documents.split(65_536)), torch.zeros(()))
    return torch.linalg.eigh(moments).eigenvectors.flip(1)[:, :dim].to(documents.dtype)


def project(
    model: SentenceTransformer, texts: Sequence[str], dim: int, **encode: Any
) -> SentenceTransformer:
    """Shortens the embeddings of a model to their principal axes on a corpus, in place.

    A stock Dense module goes in front of the Normalize or ExponentNorm at the end. Its prefixes are
    the best shorter ones: ``model.truncate_dim`` may cut further. For a model that was not trained
    for prefixes this usually keeps more than a prefix; ``st-magnitude compress`` measures both.

    Args:
        model: The model; a cosine model is fitted on unit vectors.
        texts: A sample of the corpus, several times as many texts as dimensions.
        dim: Number of dimensions that stay, at most those of the model.
        **encode: Options of ``model.encode_document``; it shows a progress bar.

    Raises:
        TypeError: If the model is not a SentenceTransformer.
        ValueError: If dim is not between 1 and the dimensions of the model, or its last module is a
            Router that normalises.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "hive", "wax"])], device="cpu")
        >>> abs(project(model, ["bee hive", "hive bee", "wax"], 2).encode_document("bee").round(2))
        array([0.71, 0.  ], dtype=float32)
    """
    inner = refuse_other_models(model, "project")
    place = raw_end(list(inner))
    if isinstance(inner[-1], Router) and normalizes_output(inner):
        raise ValueError(
            "The Router at the end of this model normalises, and a projection belongs before that."
        )
    encode = {"show_progress_bar": True} | encode
    with inner.truncate_embeddings(None):
        documents = encode_raw(inner, list(texts), "document", **encode).cpu()
    width = documents.shape[1]
    if not 1 <= dim <= width:
        raise ValueError(
            f"dim must be between 1 and {width}, the dimensions of the model; got {dim}."
        )
    if inner.similarity_fn_name == "cosine":
        documents = COSINE.document(documents)
    axes = principal_axes(documents, dim)
    dense = Dense(width, dim, bias=False, activation_function=nn.Identity())
    dense.linear.weight.data = axes.T.contiguous().to(next(inner.parameters(), axes).dtype)
    inner.insert(place, dense.to(inner.device))
    return model
