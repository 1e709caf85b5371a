"""The similarity by which a model is scored."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output, refuse_other_models, unwrapped

__all__ = ["are_unit", "own_scoring", "raw_scoring_of", "scoring_of"]


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether all norms are 1 up to the precision of half floats, as after Normalize."""
    return bool(np.abs(norms - 1).max() < 1e-3)


def scoring_of(
    model: SentenceTransformer, similarity: Similarity | str | None = None
) -> Similarity:
    """The given similarity, or the one that the model states."""
    model = refuse_other_models(model, "A measurement")
    if similarity is None:
        closing = getattr(list(model.children())[-1], "similarity", None)
        similarity = closing if isinstance(closing, Similarity) else model.similarity_fn_name
        if isinstance(similarity, str) and similarity not in ("cosine", "dot"):
            raise ValueError(
                f"The model's similarity_fn_name is {similarity!r}, which is not an inner product;"
                ' pass a similarity, such as similarity="cosine".'
            )
    return Similarity(*Similarity.named(similarity).exponents)


def own_scoring(model: SentenceTransformer) -> Similarity:
    """The similarity that the model states; cosine if it states a distance."""
    model = refuse_other_models(model, "A measurement")
    return scoring_of(model, None if model.similarity_fn_name in ("cosine", "dot") else COSINE)


def raw_scoring_of(
    model: SentenceTransformer, similarity: Similarity | str | None = None
) -> Similarity:
    """`scoring_of` for embeddings that were taken before a closing Normalize."""
    own = scoring_of(model, similarity)
    if similarity is not None or not normalizes_output(model):
        return own
    if own != COSINE and is_cut(model):
        raise ValueError(
            f"This model is cut to truncate_dim={unwrapped(model).truncate_dim} after Normalize "
            "and scores by dot, which no similarity of its raw embeddings does. Pass "
            "similarity='cosine'."
        )
    return COSINE
