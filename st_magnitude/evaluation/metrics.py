"""The similarity and the name of a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv
from sentence_transformers import SentenceTransformer

from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output, refuse_other_models, unwrapped

__all__ = ["are_unit", "model_name", "raw_scoring_of", "scoring_of", "share_interval", "word_counts"]


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether all norms are 1 to the precision of half floats, which shows that a model normalises.

    Example:
        >>> are_unit(np.array([1.0, 1.0001])), are_unit(np.array([1.0, 1.01]))
        (True, False)
    """
    return bool(np.abs(norms - 1).max() < 1e-3)


def scoring_of(model: SentenceTransformer, similarity: Similarity | str | None = None) -> Similarity:
    """The given similarity, or the one that a model says it is for, with plain numbers as exponents.

    The model's own is that of a closing ExponentNorm, else its ``similarity_fn_name``, which must not be a distance.
    """
    model = refuse_other_models(model, "A measurement")
    if similarity is None:
        closing = getattr(list(model.children())[-1], "similarity", None)
        similarity = closing if isinstance(closing, Similarity) else model.similarity_fn_name
        if isinstance(similarity, str) and similarity not in ("cosine", "dot"):
            raise ValueError(
                f"The model's similarity_fn_name is {similarity!r}, which is not an inner product; "
                'pass similarity="cosine", "dot", "qnorm", "dnorm" or a Similarity.'
            )
    return Similarity(*Similarity.named(similarity).exponents)


def raw_scoring_of(model: SentenceTransformer, similarity: Similarity | str | None = None) -> Similarity:
    """`scoring_of` for embeddings from before a closing Normalize: the own similarity of a unit model is cosine."""
    own = scoring_of(model, similarity)
    if similarity is not None or not normalizes_output(model):
        return own
    if own != COSINE and is_cut(model):
        raise ValueError(
            f"This model is cut to truncate_dim={unwrapped(model).truncate_dim} after Normalize and "
            "scores by dot, which no similarity of its raw embeddings does. Pass similarity='cosine'."
        )
    return COSINE


def model_name(model: SentenceTransformer) -> str:
    """The name of a model: a hub id, the last two names of a path, or the names of its modules."""
    model = unwrapped(model)
    known = model.model_card_data.model_id or model.model_card_data.base_model
    for module in model.modules():
        known = known or getattr(module, "name_or_path", None)  # of a model of transformers
    if not known:
        return " + ".join(type(module).__name__ for module in model)
    path = Path(known)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(known)


def share_interval(count: float, total: int) -> tuple[float, float, float]:
    """A share with its exact 95 % interval (Clopper and Pearson, 1934): (share, low, high); nan for a total of 0.

    Example:
        >>> [round(x, 3) for x in share_interval(2, 50)]
        [0.04, 0.005, 0.137]
    """
    if not total:
        return float("nan"), float("nan"), float("nan")
    low = betaincinv(count, total - count + 1, 0.025) if count > 0 else 0.0
    high = betaincinv(count + 1, total - count, 0.975) if count < total else 1.0
    return count / total, float(low), float(high)


def word_counts(texts: Iterable[str]) -> NDArray[np.float64]:
    """Number of words of every text: n texts -> (n,)."""
    return np.array([len(text.split()) for text in texts], dtype=float)
