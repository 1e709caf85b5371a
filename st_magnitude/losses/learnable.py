"""LearnableNormLoss: the exponents of the norms are learned with the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from st_magnitude.kernel.terms import Term
from st_magnitude.losses._model import exponent_norm
from st_magnitude.losses.ranking import MagnitudeRankingLoss
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output, refuse_other_models

__all__ = ["LearnableNormLoss"]


class LearnableNormLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` whose exponents are learned (arXiv 2602.09229, Eq. 7).

        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document,   gamma = sigmoid(bias)

    The exponents are parameters of the model, in its last module :class:`~st_magnitude.modules.ExponentNorm`, which
    the loss appends. So they are saved, resumed, synchronised over ranks and clipped as all other parameters are, and
    weight decay leaves them alone. At the learning rate of a text encoder they hardly move; give them their own:

        ::

            args = SentenceTransformerTrainingArguments(
                ..., learning_rate=2e-5, learning_rate_mapping=LearnableNormLoss.learning_rate_mapping(1e-2)
            )

    Args:
        model: The model to train. If it already ends in an ExponentNorm, training goes on from its exponents.
        gamma_query: First value of the query exponent, strictly between 0 and 1.
        gamma_document: First value of the document exponent, strictly between 0 and 1.
        scale: Factor of the scores, as in :class:`MagnitudeRankingLoss`.
        **options: All other arguments of MagnitudeRankingLoss, except similarity.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if an exponent starts at 0 or 1.

    Build an optimizer of your own after the loss: an optimizer that was built before does not hold the exponents, and
    its first step causes a warning. Load the saved model with :func:`st_magnitude.load`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        gamma_query: float = 0.5,
        gamma_document: float = 0.5,
        scale: float | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        refuse_other_models(model, "LearnableNormLoss")
        if isinstance(model[-1], ExponentNorm):
            gamma_query, gamma_document = model[-1].similarity.exponents
        if not (0 < gamma_query < 1 and 0 < gamma_document < 1):
            raise ValueError(
                f"Learned exponents must start strictly between 0 and 1; got gamma_query={gamma_query} and "
                f"gamma_document={gamma_document}. For fixed ones use MagnitudeRankingLoss(model, Similarity(...))."
            )
        if normalizes_output(model):
            raise ValueError(
                "LearnableNormLoss learns from the norm of embeddings, but this model ends in Normalize, so that every "
                "embedding has norm 1. Call stm.strip_normalize(model) before you build the loss."
            )
        norm = model[-1]
        if not isinstance(norm, ExponentNorm):
            norm = ExponentNorm(gamma_query, gamma_document).to(model.device)
            model.append(norm)
        norm.learnable = True
        norm.requires_grad_()
        super().__init__(model, Similarity(gamma_query, gamma_document), scale=scale, **options)

    @staticmethod
    def learning_rate_mapping(learning_rate: float = 1e-2) -> dict[str, float]:
        """The learning rate of the exponents, for ``learning_rate_mapping=`` of the training arguments."""
        return {r"\.(query|document)_bias$": learning_rate}

    @property
    def similarity(self) -> Similarity:
        norm = exponent_norm(self.model)
        return self._similarity if norm is None else norm.similarity

    def learned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        norm = exponent_norm(self.model)
        exponents = [] if norm is None else [("exponents", p) for p in norm.parameters() if p.requires_grad]
        return [*exponents, *super().learned_parameters()]

    def _learned(self) -> list[Tensor]:
        similarity = self.similarity
        return [similarity.gamma_query, similarity.gamma_document, *super()._learned()]  # type: ignore[list-item]

    def _at(self, learned: list[Tensor]) -> tuple[Similarity, Sequence[Term]]:
        _, terms = super()._at(learned[2:])
        return Similarity(*learned[:2]), terms
