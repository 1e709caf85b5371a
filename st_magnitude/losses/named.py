"""Ranking losses with a name: the four corners of the similarities, exponents that are learned, and SIGReg."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from st_magnitude._checks import at_least
from st_magnitude.kernel.terms import Term
from st_magnitude.losses.base import exponent_norm
from st_magnitude.losses.ranking import MagnitudeRankingLoss, RankingOptions
from st_magnitude.losses.regularizers import CITATION as SIGREG_CITATION
from st_magnitude.losses.regularizers import SIGReg, weighted_list
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.raw import normalizes_output, unwrapped
from st_magnitude.training.state import refuse_engine

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DotRankingLoss",
    "LearnableNormLoss",
    "QNormRankingLoss",
    "SIGRegInfoNCE",
]


class CosineRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with the cosine: sentence-transformers' MultipleNegativesRankingLoss.

    s(q, d) = cos(q, d)
    """

    def __init__(self, model: SentenceTransformer, **options: Unpack[RankingOptions]) -> None:
        super().__init__(model, COSINE, **options)


class DotRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with the dot product, to which both norms contribute (arXiv 2602.09229, Eq. 4).

    s(q, d) = q · d
    """

    def __init__(self, model: SentenceTransformer, **options: Unpack[RankingOptions]) -> None:
        super().__init__(model, DOT, **options)


class QNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with a normalised query: the norm of the document counts (Eq. 5).

    s(q, d) = q / |q| · d = |d| cos(q, d)

    Example:
        ::

            model = stm.prepare(SentenceTransformer("all-MiniLM-L6-v2"), "qnorm")
            model.fit(train_objectives=[(loader, stm.QNormRankingLoss(model))])
    """

    def __init__(self, model: SentenceTransformer, **options: Unpack[RankingOptions]) -> None:
        super().__init__(model, QNORM, **options)


class DNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with a normalised document: the norm of the query is its inverse temperature.

    s(q, d) = q · d / |d| = |q| cos(q, d)

    The trained model ranks by cosine (Eq. 6, Prop. 4.2).
    """

    def __init__(self, model: SentenceTransformer, **options: Unpack[RankingOptions]) -> None:
        super().__init__(model, DNORM, **options)


class LearnableNormLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` whose exponents are learned (arXiv 2602.09229, Eq. 7).

        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document,   gamma = sigmoid(bias)

    The exponents are parameters of the model, in its last module :class:`~st_magnitude.modules.ExponentNorm`, which
    the loss appends, and exempt from weight decay. At the learning rate of a text encoder they hardly move; give them
    their own:

        ::

            args = SentenceTransformerTrainingArguments(
                ..., learning_rate=2e-5, learning_rate_mapping=LearnableNormLoss.learning_rate_mapping(1e-2)
            )

    Args:
        model: The model to train. If it already ends in an ExponentNorm, training goes on from its exponents.
        gamma_query: First value of the query exponent, strictly between 0 and 1.
        gamma_document: The same of the document exponent.
        **options: All other arguments of MagnitudeRankingLoss, except similarity.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if an exponent starts at 0 or 1.

    Build an optimizer of your own after the loss. Load the saved model with :func:`st_magnitude.load`.
    """

    takes_sparse = False

    def __init__(
        self,
        model: SentenceTransformer,
        gamma_query: float = 0.5,
        gamma_document: float = 0.5,
        **options: Unpack[RankingOptions],
    ) -> None:
        super().__init__(model, Similarity(gamma_query, gamma_document), **options)

    def prepare_model(self) -> None:
        model = unwrapped(self.model)
        gamma_query, gamma_document = self.similarity.exponents  # of the model's ExponentNorm, or given
        if not (0 < gamma_query < 1 and 0 < gamma_document < 1):
            raise ValueError(
                f"Learned exponents must start strictly between 0 and 1; got gamma_query={gamma_query} and "
                f"gamma_document={gamma_document}. For fixed ones use MagnitudeRankingLoss(model, Similarity(...))."
            )
        if normalizes_output(model):
            raise ValueError(
                "LearnableNormLoss learns from the norm of embeddings, but this model ends in Normalize, so every "
                "embedding has norm 1. Call stm.strip_normalize(model) before you build the loss."
            )
        if not isinstance(model[-1], ExponentNorm):
            if isinstance(self.model, DistributedDataParallel):
                raise ValueError(
                    "LearnableNormLoss adds exponents to the model, which DistributedDataParallel would not average "
                    "over the processes. Build the loss before you wrap the model."
                )
            model.append(ExponentNorm(gamma_query, gamma_document).to(model.device))
        model[-1].learnable = True
        model[-1].requires_grad_()
        super().prepare_model()

    @staticmethod
    def learning_rate_mapping(learning_rate: float = 1e-2) -> dict[str, float]:
        """The learning rate of the exponents, for ``learning_rate_mapping=`` of the training arguments."""
        return {r"\.(query|document)_bias$": learning_rate}

    @property
    def similarity(self) -> Similarity:
        norm = exponent_norm(self.model)
        return self._similarity if norm is None else norm.similarity

    def check_engine(self, engine: str | None) -> None:
        refuse_engine(engine, self.name, ["exponents"], self.uses_gradient_cache)
        super().check_engine(engine)

    def _learned(self) -> list[Tensor]:
        similarity = self.similarity
        return [similarity.gamma_query, similarity.gamma_document, *super()._learned()]  # type: ignore[list-item]

    def _at(self, learned: list[Tensor]) -> tuple[Similarity, Sequence[Term]]:
        _, terms = super()._at(learned[2:])
        return Similarity(*learned[:2]), terms


class SIGRegInfoNCE(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` plus :class:`~st_magnitude.SIGReg` on the embeddings of all columns.

        L = InfoNCE + weight · SIGReg

    It is for embeddings that crowd in a cone or in few dimensions. It spreads the variance evenly over the dimensions;
    it is not designed to raise retrieval scores. The Trainer logs both terms by name. The class is a shorthand: every
    ranking loss takes ``regularizers=[(SIGReg(), 0.05)]``.

    Args:
        model: The SentenceTransformer to train.
        weight: Weight of SIGReg, whose distance from its best value grows with the batch.
        similarity: A Similarity or its name. SIGReg leaves the norm free, unless its ``scale`` is None.
        sigreg: The regularizer; None: ``SIGReg()``. Use ``SIGReg(dims=...)`` for prefixes.
        **options: All other arguments of MagnitudeRankingLoss.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if weight is negative.

    Example:
        ::

            loss = stm.SIGRegInfoNCE(model, weight=0.05, sigreg=stm.SIGReg(dims=(96, 192, 384)))
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: LeJEPA, arXiv 2511.08544.
    """

    citation = SIGREG_CITATION
    takes_sparse = False  # the entries of its embeddings are not negative, so they cannot be isotropic

    def __init__(
        self,
        model: SentenceTransformer,
        weight: float = 0.05,
        similarity: Similarity | str = COSINE,
        *,
        sigreg: SIGReg | None = None,
        **options: Unpack[RankingOptions],
    ) -> None:
        at_least("weight", weight, 0, " and is usually 0.05")
        given: dict[str, Any] = dict(options)
        given["regularizers"] = [(sigreg or SIGReg(), weight), *weighted_list(given.get("regularizers", ()))]
        super().__init__(model, similarity, **given)
