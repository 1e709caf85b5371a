"""Checks of the model that a loss trains: a loss never loses the magnitude of embeddings silently."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import has_static_embedding_input
from sentence_transformers.sentence_transformer.losses.matryoshka import CachedLossDecorator, ForwardDecorator
from torch import Tensor, nn

from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.normalize import set_similarity_function
from st_magnitude.surgery.raw import normalizes_output, output_width, unwrapped

if TYPE_CHECKING:
    from st_magnitude.losses.ranking import MagnitudeRankingLoss

__all__ = [
    "FiniteWatch",
    "check_ranking_model",
    "exponent_norm",
    "refuse_matryoshka",
    "refuse_normalize",
    "refuse_unequal",
    "warn_if_contradicted",
]

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


def refuse_unequal(sizes: Sequence[int]) -> None:
    """Refuses columns of a batch that differ in their number of texts."""
    if len(set(sizes)) > 1:
        raise ValueError(
            f"The columns of a batch must have one text per row each, but they have {', '.join(map(str, sizes))} texts."
        )


def warn_if_contradicted(model: Any, similarity: Similarity, name: str) -> None:
    """Warns if the model that is saved will score in another way than the loss trains it to.

    Several losses of one Trainer may disagree, and the similarity function is set by the loss that was built last.
    """
    model = unwrapped(model)
    if not isinstance(model, SentenceTransformer):
        return
    norm, trained = exponent_norm(model), similarity.exponents[1]
    saved = norm.gamma_document if norm else float(model.similarity_fn_name == "cosine")
    agrees = (trained == 1) == (saved == 1) if norm is None else math.isclose(trained, saved, abs_tol=1e-6)
    if not agrees:
        logger.warning(
            "%s trains with a document exponent of %.3g, but the model is saved for an exponent of %.3g "
            "(similarity_fn_name=%r%s), as another loss or a later call has set it. The saved model will not score as "
            "this loss trains it. Give all losses of a Trainer the same similarity.",
            name,
            trained,
            saved,
            model.similarity_fn_name,
            ", with ExponentNorm" if norm else "",
        )


class FiniteWatch:
    """Warns once about a column whose embeddings are not finite.

    It does not wait for a GPU: the answer about a batch is read when it has arrived, at a later batch.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._flags: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._has_warned = False

    def __call__(self, columns: Sequence[Tensor]) -> None:
        if self._has_warned:
            return
        if columns[0].is_cuda:
            self._read()
        if self._flags is None:
            flags = torch.stack([x.detach().isfinite().all() for x in columns])  # (columns,)
            self._flags = flags.to("cpu", non_blocking=True)
            if flags.is_cuda:
                self._arrived = torch.cuda.Event()
                self._arrived.record()
            else:
                self._read()

    def _read(self) -> None:
        if self._flags is None or not (self._arrived is None or self._arrived.query()):
            return
        flags, self._flags = self._flags.tolist(), None
        if not all(flags):
            self._has_warned = True
            numbers = ", ".join(str(number) for number, is_finite in enumerate(flags, start=1) if not is_finite)
            logger.warning(
                "%s is not finite, because the embeddings of text column %s (of %d) contain nan or infinity. Look for "
                "empty or damaged texts in that column, a learning rate that is too high, or an overflow in float16.",
                self.name,
                numbers,
                len(flags),
            )


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
