"""The similarity by which a model is scored."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import (
    is_cut,
    normalizes_output,
    refuse_other_models,
    returns_unit_vectors,
    unwrapped,
)


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether all norms are 1 up to the precision of half floats, as after Normalize."""
    return bool(np.abs(norms - 1).max() < 1e-3)


def scoring_of(
    model: SentenceTransformer,
    similarity: Similarity | str | None = None,
    *,
    before_normalize: bool = False,
) -> Similarity:
    """The given similarity, or that of a model, for embeddings before a closing ExponentNorm.

    Of the lines that fit a model, the last one counts:

    ==============================================  =====================================
    the model                                       its similarity
    ==============================================  =====================================
    scores by a distance                            refused
    scores by euclidean distances of unit vectors   cosine, which ranks alike
    scores by cosine or dot                         the same
    ends in ExponentNorm                            that of the module
    ends in Normalize, with ``before_normalize``    cosine; refused if dot of cut vectors
    ==============================================  =====================================
    """
    model = refuse_other_models(model, "A measurement")
    if similarity is not None:
        return Similarity(*Similarity.named(similarity).exponents)
    stated = None
    if isinstance(last := list(model.children())[-1], ExponentNorm):
        stated = last.similarity
    elif model.similarity_fn_name in ("cosine", "dot"):
        stated = Similarity.named(model.similarity_fn_name)
    elif model.similarity_fn_name == "euclidean" and returns_unit_vectors(model):
        stated = COSINE
    if stated is None:
        raise InputError(
            f"The model's similarity_fn_name is {model.similarity_fn_name!r}, which is not an inner"
            ' product; pass similarity="cosine" where it is an argument, or set the name.'
        )
    if not before_normalize or not normalizes_output(model):
        return Similarity(*stated.exponents)
    if stated != COSINE and is_cut(model):
        raise InputError(
            f"This model is cut to truncate_dim={unwrapped(model).truncate_dim} after Normalize "
            "and scores by dot, which no similarity of its raw embeddings does. Pass cosine as the"
            " similarity."
        )
    return COSINE


def score_by_cosine(model: SentenceTransformer, say: Callable[[str], None]) -> None:
    """Before a training, replaces a distance by cosine, and says so."""
    if (name := model.similarity_fn_name) not in ("cosine", "dot"):
        say(f"similarity_fn_name: {name} -> cosine, because no loss trains a distance.")
        model.similarity_fn_name = "cosine"
