"""The end of a SentenceTransformer, changed in place, and the similarity by which it is scored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Router
from sentence_transformers.sentence_transformer.modules import Dropout
from torch import nn

from st_magnitude._checks import InputError
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import (
    ends_of,
    is_cut,
    normalizes_output,
    raw_producers,
    refuse_other_models,
    returns_unit_vectors,
    routes_of,
    unwrapped,
)

__all__ = ["prepare", "set_similarity_function", "strip_normalize"]

logger = logging.getLogger(__name__)


def strip_normalize(model: SentenceTransformer) -> SentenceTransformer:
    """Removes ``Normalize`` and ``ExponentNorm`` from the end of a model, in place.

    Cosine similarities and ``similarity_fn_name`` do not change: see :func:`prepare`. A Router at
    the end loses them at the end of each route.

    Raises:
        ValueError: If another module follows Normalize, or a route consists of Normalize only.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["red", "green"]), Normalize()])
        >>> [type(module).__name__ for module in strip_normalize(model)]
        ['BoW']
    """
    inner = refuse_other_models(model, "strip_normalize")
    raw_producers(inner)  # refuses a route of nothing but Normalize
    ends = [(modules, end) for _, modules, end in ends_of(inner)]
    for modules, end in ends:
        if any(isinstance(module, Dropout) for module in list(modules)[end:]):
            raise InputError(
                "The Normalize of this model is followed by Dropout, so it cannot be stripped from"
                " the end: remove it from the list of modules."
            )
    for modules, end in ends:
        del modules[end:]
    return model


def prepare(model: SentenceTransformer, similarity: str | Similarity) -> SentenceTransformer:
    """Prepares a model for training with a similarity and for scoring by it. In place.

    ========================  =========================================  ======================
    similarity                the model ends in                          ``similarity_fn_name``
    ========================  =========================================  ======================
    ``"cosine"``              ``Normalize``                              cosine
    ``"dot"``, ``"qnorm"``    raw embeddings                             dot
    ``"dnorm"``               raw embeddings                             cosine
    0 < gamma_document < 1    ``ExponentNorm``                           dot
    ========================  =========================================  ======================

    The exponent of the query never changes a ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so
    stock modules rank like each of the four named similarities.

    Args:
        model: A SentenceTransformer.
        similarity: A Similarity, or a name for :meth:`Similarity.named`.

    Raises:
        TypeError: If the model is a CrossEncoder, MultiVectorEncoder or SparseEncoder.
        ValueError: If Normalize cannot be removed.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = prepare(SentenceTransformer(modules=[BoW(["red", "green"])]), "qnorm")
        >>> model.similarity_fn_name
        'dot'
    """
    similarity = Similarity.named(similarity)
    inner = refuse_other_models(model, "prepare")
    strip_normalize(inner)
    if similarity == COSINE:
        inner.append(Normalize())
    append_exponents(inner, similarity)
    set_similarity_function(inner, similarity)
    return model


def append_exponents(model: SentenceTransformer, similarity: Similarity) -> None:
    """Appends the ExponentNorm that a fractional document exponent needs, unless there is one."""
    query, document = similarity.exponents
    if 0 < document < 1 and not isinstance(model[-1], ExponentNorm):
        model.append(ExponentNorm(query, document).to(model.device))


def why_normalize_stays(model: nn.Module) -> str | None:
    """Why only a user may remove the Normalize at the end of a model; None: a loss may, too."""
    if not isinstance(model, SentenceTransformer):
        return f"and is a {type(model).__name__}"
    if not normalizes_output(model, all):
        return "on some of its routes"
    if is_cut(model):
        return f"and is cut to truncate_dim={model.truncate_dim} after it"
    routes = routes_of(model[-1]) if isinstance(model[-1], Router) else {}
    for name, route in routes.items():
        if not any(parameter.requires_grad for parameter in route.parameters()):
            return f"on all of its routes, and the route {name!r} is frozen"
    return None


def set_similarity_function(model: SentenceTransformer, similarity: Similarity) -> None:
    """Sets ``similarity_fn_name`` to the stock function that ranks alike: cosine or dot."""
    model = unwrapped(model)
    is_cosine = similarity.exponents[1] == 1 and not isinstance(model[-1], ExponentNorm)
    name: Literal["cosine", "dot"] = "cosine" if is_cosine else "dot"
    if (before := model.similarity_fn_name) != name:
        logger.info(f"similarity_fn_name: {before} -> {name}, which ranks like {similarity.name}.")
        model.similarity_fn_name = name


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
