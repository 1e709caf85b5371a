"""Ranking losses: embed, similarity, infonce, plus regularizers."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import (
    CachedLossMixin,
    RandContext,
    has_static_embedding_input,
)
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import all_gather_with_grad, get_rank
from torch import Tensor, nn

from st_magnitude._upstream import minibatch_of
from st_magnitude.infonce import Direction, Term, infonce
from st_magnitude.losses._shared import auto_scale, refuse_matryoshka
from st_magnitude.modules import ExponentNorm
from st_magnitude.similarity import COSINE, DNORM, DOT, QNORM, Similarity
from st_magnitude.surgery.normalize import set_similarity_function
from st_magnitude.surgery.raw import normalizes_output, raw_features

__all__ = [
    "CosineRankingLoss",
    "DNormRankingLoss",
    "DotRankingLoss",
    "LearnableNormLoss",
    "MagnitudeRankingLoss",
    "QNormRankingLoss",
]

logger = logging.getLogger(__name__)

# Logits are SCALE · cosine in the paper and in sentence-transformers: a temperature of 0.05 for unit vectors.
SCALE = 20.0

CITATION = """
@misc{feng2026beyond,
    title={Beyond the Unit Hypersphere: Embedding Magnitude in Contrastive Learning},
    author={Xincan Feng and Taro Watanabe},
    year={2026},
    eprint={2602.09229},
    archivePrefix={arXiv},
    primaryClass={cs.LG}
}
"""

Regularizer = Callable[[Tensor], Tensor]


class MagnitudeRankingLoss(CachedLossMixin, nn.Module):
    """In-batch softmax ranking (InfoNCE) under any :class:`~st_magnitude.Similarity`.

    For a batch of queries q_i with positives d_i, and all other documents of the batch as negatives:

        L = sum_t w_t · mean_i [ -log softmax_j( s(q_i, d_j) / tau_t ) at j = i ],
        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document

    A drop-in for sentence-transformers' ``MultipleNegativesRankingLoss`` (equal to it for cosine and for dot at the
    same scale) in ``fit``, in ``SentenceTransformerTrainer`` and, with ``mini_batch_size``, for its cached variant.

    Args:
        model: The SentenceTransformer to train. Its ``similarity_fn_name`` is set to the stock function that ranks as
            the similarity does, since that is what everybody who loads the saved model will use.
        similarity: A Similarity or its name.
        terms: The summands: temperatures, prefix dimensions, weights.
        scale: What a temperature of 0.05 means: such a term has the logits ``scale · s``, others in proportion.
            20 takes temperatures as they are. ``"auto"`` divides 20 by the mean norms that the similarity leaves in,
            20 / (mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document)), of the first batch on all ranks; the
            number is then fixed, stays in ``loss.scale``, goes to the Trainer's log and is found there on resume. It
            is one number for all terms, from the norms of the longest prefix.
        regularizers: Functions of the embeddings (n, D) of all columns that return a scalar, or pairs of one and its
            weight. With any, the loss is a dict of named terms, which the Trainer sums and logs. One that has a
            method ``of_columns`` is called by that instead, with the list of columns, (B, D) each.
        mini_batch_size: Turns on gradient caching (GradCache, arXiv 2101.06983): the model holds activations for so
            many texts at a time, the softmax still spans the whole batch.
        mini_batch_num_tokens: With ``mini_batch_size``, pack mini-batches by tokens instead of texts.
        gather_across_devices: Use the documents of all ranks as negatives.
        hardness: Weight alpha of similar negatives, exp(alpha · s) with s as large as the similarity leaves it; see
            :func:`~st_magnitude.infonce`.
        direction: ``"query_to_document"``, ``"document_to_query"`` (columns of negatives are then left out) or
            ``"both"``.
        n_terms_per_step: Compute only so many of the terms in a training step, drawn anew each time (from PyTorch's
            global generator) and weighted up, so that the expected gradient is that of all. For very many terms.
        show_progress_bar: Show one for the mini-batches of a cached step.

    Raises:
        ValueError: If the similarity keeps magnitude but the model ends in ``Normalize`` or
            sentence-transformers' ``MatryoshkaLoss`` (which normalises every prefix) is wrapped around the loss;
            if the model embeds by table lookup and caching is asked for; if an argument is out of range.

    Inputs: (anchor, positive), (anchor, positive, negative) or (anchor, positive, negative_1, ..., negative_n); labels
    are ignored. One row without negatives has nothing to be ranked against: its loss is 0, with one warning.

    Example:
        ::

            model = stm.prepare(SentenceTransformer("all-MiniLM-L6-v2"), "qnorm")
            loss = stm.MagnitudeRankingLoss(model, similarity="qnorm")
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 2 and 7, section 3.1 (scale).
    """

    citation = CITATION

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity | str = DOT,
        terms: Sequence[Term] = (Term(),),
        *,
        scale: float | Literal["auto"] = "auto",
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        hardness: float = 0.0,
        direction: Direction = "query_to_document",
        n_terms_per_step: int | None = None,
        show_progress_bar: bool = False,
    ) -> None:
        super().__init__()
        if scale != "auto" and not (isinstance(scale, (int, float)) and scale > 0):
            raise ValueError(f"scale must be a positive number or 'auto', got {scale!r}.")
        if mini_batch_size is not None and mini_batch_size < 1:
            raise ValueError(f"mini_batch_size must be at least 1, or None for no caching; got {mini_batch_size}.")
        if mini_batch_num_tokens is not None and (mini_batch_size is None or mini_batch_num_tokens < 1):
            raise ValueError(
                "mini_batch_num_tokens must be at least 1 and goes with mini_batch_size, which turns caching on; got "
                f"mini_batch_num_tokens={mini_batch_num_tokens} and mini_batch_size={mini_batch_size}."
            )
        if direction not in get_args(Direction):
            raise ValueError(f"direction must be one of {get_args(Direction)}, got {direction!r}.")
        if hardness < 0:
            raise ValueError(f"hardness must not be negative, got {hardness}.")
        if not terms:
            raise ValueError("terms is empty: give at least one Term, e.g. terms=[Term(temperature=0.05)].")
        if n_terms_per_step is not None and not 1 <= n_terms_per_step <= len(terms):
            raise ValueError(f"n_terms_per_step is between 1 and the {len(terms)} terms, got {n_terms_per_step}.")
        self.model = model
        self._similarity = Similarity.named(similarity)
        self.terms = tuple(terms)
        self.n_terms_per_step = n_terms_per_step
        found = scale == "auto" and not self._similarity.keeps_magnitude  # unit vectors: there is nothing to measure
        self.scale = SCALE if found else scale
        self.direction = direction
        self.hardness = hardness
        self.gather_across_devices = gather_across_devices
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar
        self.uses_gradient_cache = mini_batch_size is not None
        self._penalties = named_penalties(regularizers)
        self.regularizers = nn.ModuleDict({n: r for n, (r, _) in self._penalties.items() if isinstance(r, nn.Module)})
        self._warned_alone = False
        self._check_model()

    def _check_model(self) -> None:
        name = type(self).__name__
        if self.similarity.keeps_magnitude and normalizes_output(self.model):
            raise ValueError(
                f"{name} with {self.similarity} learns from the length of embeddings, but this model ends in "
                f"Normalize, so all of them have length 1. Call stm.prepare(model, {self._kind!r}) before building "
                "the loss."
            )
        if self.uses_gradient_cache and has_static_embedding_input(self.model):
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} caches gradients, which a model that looks its embeddings up "
                "in a StaticEmbedding table cannot (and need not) do. Leave mini_batch_size out."
            )
        dims = {t.dim for t in self.terms if t.dim is not None}
        width = self.model.get_embedding_dimension() if hasattr(self.model, "get_embedding_dimension") else None
        if width is not None and (too_long := sorted(dim for dim in dims if dim > width)):
            raise ValueError(
                f"Terms compare {too_long} dimensions, but the embeddings of this model have {width}. "
                f"Choose dims in 1..{width}."
            )
        if width is not None and width not in dims and all(t.dim is not None for t in self.terms):
            logger.warning(
                "No term of %s compares all %d dimensions: those beyond %d are not trained. Add a term for dim=%d.",
                name,
                width,
                max(dims),
                width,
            )
        if isinstance(self.model, SentenceTransformer):
            set_similarity_function(self.model, self.similarity)
            if 0 < self.similarity.exponents[1] < 1 and self._exponent_norm is None:
                logger.warning(
                    "%s trains with a document exponent of %.3g, which the saved model will not apply: its scores "
                    "will be dot products. stm.prepare(model, Similarity(%.3g, %.3g)) adds the module that applies it.",
                    name,
                    self.similarity.exponents[1],
                    *self.similarity.exponents,
                )

    @property
    def _kind(self) -> str | Similarity:
        """What ``prepare`` would be called with."""
        return "dot" if isinstance(self.similarity.gamma_document, Tensor) else self.similarity.name

    @property
    def similarity(self) -> Similarity:
        """The similarity of raw embeddings that is trained."""
        return self._similarity

    @property
    def _exponent_norm(self) -> ExponentNorm | None:
        """The model's ExponentNorm, also inside the wrappers of DDP and torch.compile."""
        return next((m for m in self.model.modules() if isinstance(m, ExponentNorm)), None)

    # --- embeddings -------------------------------------------------------------------------------------------------

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        sentence_features = list(sentence_features)
        self._check_inputs(sentence_features)
        if self.direction == "document_to_query":
            sentence_features = sentence_features[:2]  # nothing is ranked against the negatives
        if self.uses_gradient_cache:
            return self._named(self.forward_cached(sentence_features, labels))
        embeddings = embed_columns(partial(raw_features, self.model), sentence_features)  # type: ignore[arg-type]
        return self.compute_loss_from_embeddings(embeddings, labels)

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """For CachedLossMixin: the raw embeddings of one mini-batch."""
        features = minibatch_of(sentence_feature, begin, end)
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            random_state = RandContext(*features.values()) if copy_random_state else None
            return raw_features(self.model, features)["sentence_embedding"], random_state

    def _check_inputs(self, sentence_features: list[dict[str, Tensor]]) -> None:
        if len(sentence_features) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least two text columns, anchor and positive; "
                f"the dataset has {len(sentence_features)}."
            )
        if self.similarity.keeps_magnitude or self._exponent_norm is not None:
            refuse_matryoshka(self, "Give the loss its prefixes itself: terms=[Term(dim=128), Term(dim=256), Term()].")

    # --- the loss ---------------------------------------------------------------------------------------------------

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The loss of raw embeddings: one (B, D) tensor for anchors, positives and each column of negatives."""
        losses = self._terms(embeddings, self.similarity)
        return losses if self._penalties else losses["infonce"]

    def _terms(self, embeddings: list[Tensor], similarity: Similarity) -> dict[str, Tensor]:
        queries, documents = embeddings[0], embeddings[1:]  # (B, D) each
        if self.scale == "auto":
            longest = max(t.dim or queries.shape[1] for t in self.terms)
            prefixes = [x[:, :longest] for x in embeddings]
            self.scale = auto_scale(self, prefixes[0], prefixes[1:], similarity, SCALE)
        stretch = SCALE / float(self.scale)
        terms = [Term(t.dim, t.temperature * stretch, t.weight) for t in self._drawn_terms()]
        losses = {"infonce": self._ranking(queries, documents, terms, similarity)}
        for name, (regularizer, weight) in self._penalties.items():
            of_columns = getattr(regularizer, "of_columns", None)
            losses[name] = weight * (
                regularizer(torch.cat(embeddings)) if of_columns is None else of_columns(embeddings)
            )
        return losses

    def _drawn_terms(self) -> Sequence[Term]:
        if self.n_terms_per_step is None or not torch.is_grad_enabled():  # an evaluation takes all
            return self.terms
        drawn = torch.randperm(len(self.terms))[: self.n_terms_per_step].tolist()
        factor = len(self.terms) / self.n_terms_per_step
        return [replace(self.terms[i], weight=factor * self.terms[i].weight) for i in drawn]

    def _ranking(self, queries: Tensor, documents: list[Tensor], terms: list[Term], similarity: Similarity) -> Tensor:
        offset, own_queries, own_positives = 0, queries, documents[0]
        if self.gather_across_devices:
            offset = get_rank() * len(queries)
            documents = [all_gather_with_grad(d) for d in documents]  # (W·B, D) each
        candidates = torch.cat(documents)  # (M, D)
        if len(candidates) == 1 and not self._warned_alone:
            self._warned_alone = True
            logger.warning(
                "A batch of one pair without negatives has nothing to rank against: its loss is 0. "
                "Set dataloader_drop_last=True to leave out a last batch like this one."
            )
        losses = []
        if self.direction in ("query_to_document", "both"):
            losses.append(infonce(own_queries, candidates, terms, similarity, offset=offset, hardness=self.hardness))
        if self.direction in ("document_to_query", "both"):
            if self.gather_across_devices:
                queries = all_gather_with_grad(queries)  # (W·B, D)
            losses.append(
                infonce(own_positives, queries, terms, similarity.swapped, offset=offset, hardness=self.hardness)
            )
        return sum(losses[1:], losses[0]) / len(losses)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """For CachedLossMixin: the loss of the whole batch from the embeddings of its mini-batches."""
        losses = self._terms([torch.cat(column) for column in reps], self.similarity)
        return self._total(losses, with_backward)

    def _total(self, losses: dict[str, Tensor], with_backward: bool) -> Tensor:
        self._last = {name: loss.detach() for name, loss in losses.items()}
        total = torch.stack(list(losses.values())).sum()
        if with_backward:
            total.backward()
            total = total.detach()
        return total

    def _named(self, total: Tensor) -> Tensor | dict[str, Tensor]:
        """Splits the total of a cached step, whose gradient hangs on one tensor, into terms of the same sum."""
        if not self._penalties:
            return total
        others = {name: self._last[name] for name in self._penalties}
        return {"infonce": total - sum(others.values()), **others}

    # --- what sentence-transformers asks of a loss ------------------------------------------------------------------

    def get_config_dict(self) -> dict[str, Any]:
        gamma_query, gamma_document = self.similarity.exponents
        return {
            "similarity": {"query": gamma_query, "document": gamma_document},
            "terms": [{"dim": t.dim, "temperature": float(t.temperature), "weight": t.weight} for t in self.terms],
            "scale": self.scale,
            "regularizers": {name: weight for name, (_, weight) in self._penalties.items()},
            "mini_batch_size": self.mini_batch_size,
            "mini_batch_num_tokens": self.mini_batch_num_tokens,
            "gather_across_devices": self.gather_across_devices,
            "hardness": self.hardness,
            "direction": self.direction,
            "n_terms_per_step": self.n_terms_per_step,
        }


class CosineRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = cos(q, d): sentence-transformers' MultipleNegativesRankingLoss."""

    def __init__(self, model: SentenceTransformer, scale: float | Literal["auto"] = SCALE, **options: Any) -> None:
        super().__init__(model, COSINE, scale=scale, **options)


class DotRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = q · d (arXiv 2602.09229, Eq. 4)."""

    def __init__(self, model: SentenceTransformer, scale: float | Literal["auto"] = "auto", **options: Any) -> None:
        super().__init__(model, DOT, scale=scale, **options)


class QNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = |d| cos(q, d): the document's norm counts (Eq. 5).

    Example:
        ::

            model = stm.prepare(SentenceTransformer("all-MiniLM-L6-v2"), "qnorm")
            model.fit(train_objectives=[(loader, stm.QNormRankingLoss(model))])
    """

    def __init__(self, model: SentenceTransformer, scale: float | Literal["auto"] = "auto", **options: Any) -> None:
        super().__init__(model, QNORM, scale=scale, **options)


class DNormRankingLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` with s(q, d) = |q| cos(q, d): the query's norm is its inverse temperature (Eq. 6,
    Prop. 4.2). The trained model ranks by cosine."""

    def __init__(self, model: SentenceTransformer, scale: float | Literal["auto"] = "auto", **options: Any) -> None:
        super().__init__(model, DNORM, scale=scale, **options)


class LearnableNormLoss(MagnitudeRankingLoss):
    """:class:`MagnitudeRankingLoss` whose exponents are learned, gamma = sigmoid(bias) (arXiv 2602.09229, Eq. 7).

    The exponents are parameters of the model, of its last module :class:`~st_magnitude.modules.ExponentNorm`, which
    the loss appends. So they are saved, resumed, synchronised over ranks and clipped as all others are, and not
    weight-decayed. At a text encoder's learning rate they hardly move; give them their own:

        ::

            args = SentenceTransformerTrainingArguments(
                ..., learning_rate=2e-5, learning_rate_mapping=LearnableNormLoss.learning_rate_mapping(1e-2)
            )

    Args:
        model: The model to train. If it ends in an ExponentNorm already, training goes on from its exponents.
        gamma_query: Where the query exponent begins, strictly between 0 and 1.
        gamma_document: Where the document exponent begins.
        scale: As in :class:`MagnitudeRankingLoss`.
        **options: All others of MagnitudeRankingLoss, except similarity.

    Raises:
        ValueError: As MagnitudeRankingLoss does, or if an exponent to learn begins at 0 or 1.

    Load the saved model with :func:`st_magnitude.load`.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        gamma_query: float = 0.5,
        gamma_document: float = 0.5,
        scale: float | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        if isinstance(model[-1], ExponentNorm):
            gamma_query, gamma_document = model[-1].similarity.exponents
        if not (0 < gamma_query < 1 and 0 < gamma_document < 1):
            raise ValueError(
                f"Exponents that are learned begin strictly between 0 and 1, got gamma_query={gamma_query} and "
                f"gamma_document={gamma_document}. For fixed ones use MagnitudeRankingLoss(model, Similarity(...))."
            )
        if normalizes_output(model):
            raise ValueError(
                "LearnableNormLoss learns from the length of embeddings, but this model ends in Normalize, so all of "
                "them have length 1. Call stm.strip_normalize(model) before building the loss."
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
        """The exponents' own learning rate, for ``learning_rate_mapping=`` of the training arguments."""
        return {r"\.(query|document)_bias$": learning_rate}

    @property
    def similarity(self) -> Similarity:
        norm = self._exponent_norm
        return self._similarity if norm is None else norm.similarity

    # Cached: the exponents travel as two more columns of the embeddings. They are then part of what is cached and
    # replayed, so that their gradient takes the encoder's way: scaled, accumulated and synchronised with it.

    def embed_minibatch(self, *args: Any, **kwargs: Any) -> tuple[Tensor, RandContext | None]:
        raw, random_state = super().embed_minibatch(*args, **kwargs)  # (n, D)
        exponents = torch.stack([self.similarity.gamma_query, self.similarity.gamma_document])  # type: ignore[list-item]
        return torch.cat([raw, exponents.expand(len(raw), 2)], dim=1), random_state  # (n, D + 2)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        similarity = Similarity(*reps[0][0][0, -2:])
        losses = self._terms([torch.cat(column)[:, :-2] for column in reps], similarity)
        return self._total(losses, with_backward)


def named_penalties(
    regularizers: Iterable[Regularizer | tuple[Regularizer, float]],
) -> dict[str, tuple[Regularizer, float]]:
    """Regularizers and their weights, 1 where none is given, by the names that they are logged under."""
    found: dict[str, tuple[Regularizer, float]] = {}
    for item in regularizers:
        regularizer, weight = item if isinstance(item, tuple) else (item, 1.0)
        found[_penalty_name(regularizer, taken=found)] = (regularizer, weight)
    return found


def _penalty_name(regularizer: Regularizer, taken: Collection[str]) -> str:
    """``sigreg`` for SIGReg(), ``sigreg_2`` for a second one."""
    name = str(getattr(regularizer, "name", None) or getattr(regularizer, "__name__", type(regularizer).__name__))
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return name if name not in taken else next(candidate for candidate in numbered if candidate not in taken)
