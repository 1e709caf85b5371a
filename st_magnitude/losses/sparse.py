"""Ranking losses on a SparseEncoder, inside the losses that make it sparse."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from sentence_transformers import SparseEncoder
from torch import Tensor, nn

from st_magnitude.losses.base import EmbeddingLoss
from st_magnitude.losses.texts import Texts
from st_magnitude.surgery.raw import unwrapped

__all__ = ["check_without_texts", "refuse_for_sparse", "with_texts"]

logger = logging.getLogger(__name__)

AnyLoss = TypeVar("AnyLoss", bound=nn.Module)


def with_texts(loss: AnyLoss) -> AnyLoss:
    """Lets a ``SpladeLoss`` or ``CachedSpladeLoss`` hand texts to the ranking loss inside.

    They hand on embeddings only; ``same_text``, ``guide``, ``teacher`` and ``prior`` need texts.

    Args:
        loss: The loss, which is also returned. Its attribute ``loss`` is one of this package.

    Raises:
        TypeError: If the loss inside is another one.

    Example:
        ::

            from sentence_transformers.sparse_encoder.losses import SpladeLoss

            inner = stm.DotRankingLoss(model, scale=1.0, prior=prior)
            weights = {"document_regularizer_weight": 3e-5, "query_regularizer_weight": 5e-5}
            loss = with_texts(SpladeLoss(model, inner, **weights))
            SparseEncoderTrainer(model=model, train_dataset=dataset, loss=loss).train()
    """
    inner: Any = getattr(loss, "loss", None)
    if not (isinstance(inner, EmbeddingLoss) and inner.takes_sparse):
        raise TypeError(
            "with_texts takes sentence-transformers' SpladeLoss or CachedSpladeLoss around a"
            f" ranking loss of st_magnitude; got a {type(loss).__name__} around"
            f" {type(inner).__name__}."
        )

    read_texts: Callable[..., Texts] = inner.read  # type: ignore[assignment]

    def read(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[list[dict[str, Tensor]], Texts]:
        columns = list(inputs[0])
        return columns, read_texts(columns, *inputs[1:])

    loss.register_forward_pre_hook(read)
    return loss


def refuse_for_sparse(loss: EmbeddingLoss, dims: Collection[int], document: float) -> None:
    """Refuses prefixes and fractional document exponents on a SparseEncoder."""
    if isinstance(unwrapped(loss.model), SparseEncoder) and (dims or 0 < document < 1):
        what = "prefixes (Term(dim=...))" if dims else f"a document exponent of {document:.3g}"
        raise TypeError(
            f"{loss.name} with {what} needs a model with one dense embedding per text; got a"
            " SparseEncoder, which is scored by the cosine or the inner product of whole"
            " embeddings."
        )


def check_without_texts(loss: EmbeddingLoss, needs_texts: object, warns: bool) -> None:
    """Refuses a prior or a guide without texts, and warns that equal texts are negatives."""
    if needs_texts is not None:
        raise ValueError(
            f"{loss.name} has a {type(needs_texts).__name__}, which needs the texts of a batch."
            " Call the loss with their features, or let the loss around it hand them on:"
            " st_magnitude.losses.with_texts(SpladeLoss(...))."
        )
    if warns and isinstance(unwrapped(loss.model), SparseEncoder):
        logger.warning(
            "%s does not see the texts of a batch, so repeated texts count as negatives. Let the"
            " loss around it hand them on, st_magnitude.losses.with_texts(SpladeLoss(...)), or pass"
            " same_text='keep'.",
            loss.name,
        )
