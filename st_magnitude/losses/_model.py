"""Checks of the model that a loss trains: a loss never loses the magnitude of embeddings silently."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import has_static_embedding_input
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator, ForwardDecorator
from torch import Tensor, nn

from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.normalize import set_similarity_function
from st_magnitude.surgery.raw import normalizes_output, output_width

if TYPE_CHECKING:
    from st_magnitude.losses.ranking import MagnitudeRankingLoss

__all__ = ["check_ranking_model", "exponent_norm", "refuse_matryoshka", "refuse_normalize"]

logger = logging.getLogger(__name__)


def refuse_normalize(loss: nn.Module, similarity: Similarity) -> None:
    """For a loss that learns from the norm.

    Raises:
        ValueError: If the similarity keeps magnitude and the model ends in ``Normalize``.
    """
    if similarity.keeps_magnitude and normalizes_output(loss.model):  # type: ignore[arg-type]
        is_learned = isinstance(similarity.gamma_document, Tensor)
        is_named = similarity in (DOT, QNORM, DNORM)
        argument = "'dot'" if is_learned else repr(similarity.name) if is_named else f"stm.{similarity}"
        raise ValueError(
            f"{type(loss).__name__} with {similarity} learns from the norm of embeddings, but this model ends in "
            f"Normalize, so that every embedding has norm 1. Call stm.prepare(model, {argument}) before you build the "
            "loss."
        )


def refuse_matryoshka(
    loss: nn.Module, advice: str, what: str = "normalises every prefix, which removes the norm that {} learns from"
) -> None:
    """For a loss that learns from the norm, or has more in its embeddings than the model's output.

    Raises:
        ValueError: If sentence-transformers' ``MatryoshkaLoss`` is wrapped around it.
    """
    is_wrapped = isinstance(getattr(loss.model, "forward", None), ForwardDecorator)
    if is_wrapped or isinstance(vars(loss).get("calculate_loss"), CachedLossDecorator):
        raise ValueError(f"sentence-transformers' MatryoshkaLoss {what.format(type(loss).__name__)}. {advice}")


def exponent_norm(model: nn.Module) -> ExponentNorm | None:
    """The ExponentNorm of a model, also inside the wrappers of DDP and torch.compile."""
    return next((module for module in model.modules() if isinstance(module, ExponentNorm)), None)


def check_ranking_model(loss: MagnitudeRankingLoss) -> None:
    """Checks that the model of a ranking loss suits its arguments, and sets its similarity function.

    Raises:
        ValueError: If the model ends in Normalize and the similarity keeps magnitude; if gradient caching is on and
            the model embeds by table lookup; if a term compares more dimensions than the model has.
    """
    model, similarity, name = loss.model, loss.similarity, type(loss).__name__
    refuse_normalize(loss, similarity)
    if loss.uses_gradient_cache and has_static_embedding_input(model):
        raise ValueError(
            f"mini_batch_size={loss.mini_batch_size} turns on gradient caching, which a model that looks embeddings "
            "up in a StaticEmbedding table neither supports nor needs. Leave mini_batch_size out."
        )
    dims = {term.dim for term in loss.terms if term.dim is not None}
    width = output_width(model)
    if width is not None and (too_long := sorted(dim for dim in dims if dim > width)):
        raise ValueError(
            f"Terms compare {too_long} dimensions, but the embeddings of this model have {width}. "
            f"Choose dims in 1..{width}."
        )
    if width is not None and width not in dims and all(term.dim is not None for term in loss.terms):
        logger.warning(
            "No term of %s compares all %d dimensions, so those beyond %d are not trained. Add a term with dim=%d.",
            name,
            width,
            max(dims),
            width,
        )
    if isinstance(model, SentenceTransformer):
        set_similarity_function(model, similarity)
        exponent = similarity.exponents[1]
        if 0 < exponent < 1 and exponent_norm(model) is None:
            logger.warning(
                "%s trains with a document exponent of %.3g, but the saved model will score with dot products. Call "
                "stm.prepare(model, Similarity(%.3g, %.3g)), which adds the module that applies the exponent.",
                name,
                exponent,
                *similarity.exponents,
            )
