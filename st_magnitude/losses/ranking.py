"""Ranking losses: embed, similarity, infonce, plus regularizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict, get_args

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin, RandContext, has_static_embedding_input
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor

from st_magnitude._checks import at_least, one_of
from st_magnitude._upstream import batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Direction, HardnessMode, PartitionMode
from st_magnitude.kernel.infonce import Precision, infonce, softmaxes_of
from st_magnitude.kernel.ring import num_ranks, ring_infonce
from st_magnitude.kernel.terms import LearnedTemperature, Term
from st_magnitude.losses.base import EmbeddingLoss, Temperatures, exponent_norm, with_temperature
from st_magnitude.losses.negatives import FalseNegatives, MarginStrategy, SameText, Texts, check_on_all_ranks
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.losses.regularizers import Penalties, Regularizer
from st_magnitude.losses.sparse import check_without_texts, refuse_for_sparse
from st_magnitude.similarity import DOT, Similarity
from st_magnitude.surgery.raw import output_width, raw_features
from st_magnitude.training.state import engine_of, refuse_engine

__all__ = ["LossOptions", "MagnitudeRankingLoss", "RankingOptions"]

logger = logging.getLogger(__name__)

# Logits are SCALE · cosine in the paper and in sentence-transformers: a temperature of 0.05 for unit vectors.
SCALE = 20.0

KERNEL_OPTIONS = ("directions", "partition_mode", "hardness_mode", "hardness_strength", "precision")
OPTIONS = ("scale", "mini_batch_size", "gather_across_devices", *KERNEL_OPTIONS)


class LossOptions(TypedDict, total=False):
    """Keyword arguments of every ranking loss; :class:`MagnitudeRankingLoss` explains them."""

    scale: float | Literal["auto"]
    temperature: float | Literal["learned"] | None
    regularizers: Iterable[Regularizer | tuple[Regularizer, float]]
    mini_batch_size: int | None
    gather_across_devices: bool | Literal["ring"]
    directions: Sequence[Direction]
    partition_mode: PartitionMode
    hardness_mode: HardnessMode | None
    hardness_strength: float
    same_text: SameText
    margin: float | None
    margin_strategy: MarginStrategy
    guide: SentenceTransformer | None
    prior: DocumentPrior | None
    precision: Precision


class RankingOptions(LossOptions, total=False):
    """Keyword arguments of every ranking loss that does not choose its terms."""

    terms: Sequence[Term]


class MagnitudeRankingLoss(CachedLossMixin, EmbeddingLoss):
    """In-batch softmax ranking (InfoNCE) under any :class:`~st_magnitude.Similarity`.

    For a batch of queries q_i with positives d_i, and with all other documents of the batch as negatives:

        L = sum_t w_t · mean_i [ -log softmax_j( s(q_i, d_j) / tau_t ) at j = i ],
        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document

    It replaces sentence-transformers' ``MultipleNegativesRankingLoss`` in ``fit`` and in the Trainer, and with
    ``mini_batch_size`` its cached variant. For cosine and for dot, at the same scale, the values are equal.

    Args:
        model: The SentenceTransformer to train. The loss sets its ``similarity_fn_name`` to the stock function that
            ranks as the similarity does, because everybody who loads the saved model scores with that function.
        similarity: A Similarity or its name.
        terms: Summands of the loss: temperatures, prefix dimensions and weights.
        temperature: Temperature of a loss of one term. ``"learned"``: all temperatures are learned, starting where
            the terms have them; a :class:`~st_magnitude.kernel.terms.LearnedTemperature` in a term does that for this
            term alone. None: the terms as they are.
        scale: ``"auto"`` divides the scores by the mean norms that the similarity leaves in,
            mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document), over the batch at hand (of all devices, if they
            are gathered) and at the longest prefix. A temperature then means what it means for cosine. A number is
            the paper's fixed factor of the scores at temperature 0.05; 20 takes other temperatures as they are.
        regularizers: Functions of the embeddings (n, D) of all columns that return a scalar, or pairs of one and its
            weight. With any of them the loss is a dict of named terms, which the Trainer sums and logs. A regularizer
            with a method ``of_columns`` gets the list of columns, (B, D) each, through that method.
        mini_batch_size: Number of texts for which the model holds activations at a time, by gradient caching
            (GradCache, arXiv 2101.06983); the softmax still spans the whole batch.
        gather_across_devices: Whether the documents of all ranks are negatives. True gathers them on each rank.
            ``"ring"`` passes them around instead: memory does not grow with the number of ranks, the loss takes 1.2
            to 1.3 times as long, and batches may differ in size. The gradients are the same.
        directions: What the softmax runs over, as in sentence-transformers: ``"query_to_doc"`` and any of
            ``"query_to_query"``, ``"doc_to_query"`` and ``"doc_to_doc"``; or ``"doc_to_query"`` alone.
        partition_mode: ``"joint"``: one softmax over all directions. ``"per_direction"``: the mean of the losses of
            ``"query_to_doc"`` and ``"doc_to_query"``.
        hardness_mode: ``"in_batch_negatives"``, ``"hard_negatives"`` or ``"all_negatives"``: documents that count
            exp(strength · s) times, where s includes ``scale="auto"`` but no temperature. See
            :func:`~st_magnitude.infonce`.
        hardness_strength: The strength of their weight.
        same_text: ``"exclude"``: a document with the tokens of the positive, and the positive of another query with
            the tokens of this one, do not count as negatives. ``"keep"``: they do, as in sentence-transformers. Inputs
            without token ids always count.
        margin: A document that scores above the positive's score minus the margin does not count as a negative.
            Without a guide the model's own scores decide, at the longest prefix, with ``scale="auto"`` but before the
            temperature; -0.1 then leaves out what the model ranks far above the positive (Qwen3 Embedding, arXiv
            2506.05176, Eq. 1). None: 0 with a guide, and no such rule without it.
        margin_strategy: Unit of the margin, as in sentence-transformers' ``GISTEmbedLoss``. ``"absolute"``: scores.
            ``"relative"``: the absolute value of the positive's score, which suits scores that norms make large.
        guide: Frozen SentenceTransformer whose scores decide (GISTEmbed, arXiv 2402.16829), by its own similarity
            function. It reads texts with its own prompts and without those of the model; where these or the
            tokenizers differ, the text that the model's tokens spell.
        prior: :class:`~st_magnitude.DocumentPrior`, whose log q is subtracted from the logits of all documents.
        precision: ``"bfloat16"`` multiplies embeddings in bfloat16, which takes a third to a half of the time of
            ``"float32"`` on hardware made for it (docs/kernel.md). ``bf16=True`` of the training arguments concerns the
            model only.

    Raises:
        TypeError: If the model is a CrossEncoder or a MultiVectorEncoder, or a SparseEncoder and the loss has prefixes
            or a fractional document exponent.
        ValueError: If the similarity keeps magnitude but the model ends in ``Normalize``, or sentence-transformers'
            ``MatryoshkaLoss``, which normalises every prefix, is wrapped around the loss; if caching is on and the
            model embeds by table lookup; if an argument is out of range.

    Inputs: (anchor, positive) or (anchor, positive, negative_1, ..., negative_n). Labels that are whole numbers are
    ignored. Scores are refused: they are for :class:`~st_magnitude.SimilarityMSELoss`.

    Example:
        ::

            model = stm.prepare(SentenceTransformer("all-MiniLM-L6-v2"), "qnorm")
            loss = stm.MagnitudeRankingLoss(model, similarity="qnorm")
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 2 and 7, section 3.1 (scale).
    """

    takes_sparse = True

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity | str = DOT,
        terms: Sequence[Term] = (Term(),),
        *,
        scale: float | Literal["auto"] = "auto",
        temperature: float | Literal["learned"] | None = None,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        mini_batch_size: int | None = None,
        gather_across_devices: bool | Literal["ring"] = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint",
        hardness_mode: HardnessMode | None = None,
        hardness_strength: float = 0.0,
        same_text: SameText = "exclude",
        margin: float | None = None,
        margin_strategy: MarginStrategy = "absolute",
        guide: SentenceTransformer | None = None,
        prior: DocumentPrior | None = None,
        precision: Precision = "float32",
    ) -> None:
        super().__init__(model, similarity, scale, SCALE)
        if mini_batch_size is not None:
            at_least("mini_batch_size", mini_batch_size, 1, ", or None for no caching")
        softmaxes = softmaxes_of(directions, partition_mode)
        one_of("gather_across_devices", gather_across_devices, (False, True, "ring"))
        one_of("precision", precision, get_args(Precision))
        if gather_across_devices == "ring" and any(len(softmax) > 1 for softmax in softmaxes):
            raise ValueError(
                "gather_across_devices='ring' has one direction in a softmax. Use gather_across_devices=True, or "
                "partition_mode='per_direction' for 'query_to_doc' and 'doc_to_query'."
            )
        self.terms = with_temperature(terms, temperature)
        is_learned = any(isinstance(term.temperature, LearnedTemperature) for term in self.terms)
        self.temperatures = Temperatures(self.terms, model) if is_learned else None
        self.directions: tuple[Direction, ...] = tuple(directions)
        self.partition_mode: PartitionMode = partition_mode
        self.hardness_mode: HardnessMode | None = hardness_mode
        self.hardness_strength = hardness_strength
        self.false_negatives = FalseNegatives(model, same_text, margin, margin_strategy, guide)
        self.prior, self.precision = prior, precision
        self.gather_across_devices = gather_across_devices
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.uses_gradient_cache = mini_batch_size is not None
        self.regularizers = Penalties(regularizers)
        self._check_model()
        self.set_similarity_function()

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        sentence_features = list(sentence_features)
        if self.directions == ("doc_to_query",):
            sentence_features = sentence_features[:2]  # no text is ranked against the negatives
        texts = self.read(sentence_features, labels)
        # The texts go where sentence-transformers hands labels on, which no ranking loss needs.
        if self.uses_gradient_cache:
            return self._named(self.forward_cached(sentence_features, texts))  # type: ignore[arg-type]
        embeddings = embed_columns(partial(raw_features, self.model), sentence_features)  # type: ignore[arg-type]
        return self.compute_loss_from_embeddings(embeddings, texts)

    def read(self, sentence_features: list[dict[str, Tensor]], labels: Tensor | None = None) -> Texts:
        """Checks and reads the features of a batch before the model does, because modules change features in place."""
        check_on_all_ranks(
            partial(self._check_inputs, sentence_features, labels),
            next(self.model.parameters()).device if self.gather_across_devices and num_ranks() > 1 else None,
            needs_one_size=self.gather_across_devices != "ring",
        )
        self.look_for_prompts(sentence_features)
        texts = self.false_negatives.texts(self.model, sentence_features, self.mini_batch_size)
        return texts if self.prior is None else replace(texts, log_q=self.prior.log_q(sentence_features[1:]))

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | Texts | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The loss of raw embeddings, (B, D) for each column. Without texts ``same_text`` excludes nothing."""
        self.refuse_unequal(list(map(len, embeddings)))
        if not isinstance(labels, Texts):
            false = self.false_negatives
            check_without_texts(self, self.prior or false.guide, not self._has_begun and false.same_text == "exclude")
        losses = self._losses(embeddings, self._learned(), labels)
        return losses if self.regularizers else losses["infonce"]

    def _losses(self, embeddings: list[Tensor], learned: list[Tensor], labels: object) -> dict[str, Tensor]:
        """InfoNCE and the penalties by name, at the values of what the loss learns."""
        self.watch(embeddings)
        queries, *documents = embeddings  # (B, D) each
        similarity, terms = self._at(learned)
        longest = max(term.dim or queries.shape[1] for term in terms)
        across = bool(self.gather_across_devices)
        queries, documents = self.by_mean_norms(queries, documents, similarity, longest, across)
        if self.scale != "auto":
            terms = [replace(term, temperature=term.temperature * (SCALE / self.scale)) for term in terms]
        texts = labels if isinstance(labels, Texts) else Texts()
        loss = self._infonce(queries, documents, terms, similarity, texts)
        return {"infonce": loss, **self.regularizers(embeddings)}

    def _infonce(
        self, queries: Tensor, documents: list[Tensor], terms: Sequence[Term], similarity: Similarity, texts: Texts
    ) -> Tensor:
        """InfoNCE of the queries of this rank, against its own documents or the documents of all ranks."""
        options: dict[str, Any] = {name: getattr(self, name) for name in KERNEL_OPTIONS}
        gather: Callable[[Tensor], Tensor] = _itself
        gather_queries, all_queries = gather, queries
        across = num_ranks() > 1 and self.gather_across_devices
        if across is True:
            gather = all_gather
            documents = [all_gather_with_grad(d) for d in documents]  # (W·B, D) each
            options |= {"offset": get_rank() * len(queries), "num_queries": len(documents[0])}
            if self.directions != ("query_to_doc",):
                gather_queries = all_gather
                options["all_queries"] = all_queries = all_gather_with_grad(queries)  # (W·B, D)
        options["exclude"] = self.false_negatives.exclude(texts, gather, gather_queries)
        if self.prior is not None:
            options |= self.prior.arguments([gather(x) for x in texts.log_q], len(all_queries))
        of_batch = ring_infonce if across == "ring" else infonce
        return of_batch(queries, torch.cat(documents), terms, similarity, **options)

    # --- what the loss learns besides the weights of the model ------------------------------------------------------

    def _learned(self) -> list[Tensor]:
        """The present values, 0-d tensors: exponents, then temperatures."""
        return [] if self.temperatures is None else list(self.temperatures())

    def _at(self, learned: list[Tensor]) -> tuple[Similarity, Sequence[Term]]:
        """The similarity and the terms at values as `_learned` returns them."""
        return self.similarity, self.terms if self.temperatures is None else self.temperatures.fill(self.terms, learned)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check_model(self) -> None:
        """Checks that the model suits the arguments."""
        if self.uses_gradient_cache and has_static_embedding_input(self.model):
            raise ValueError(
                f"mini_batch_size={self.mini_batch_size} turns on gradient caching, which a model that looks "
                "embeddings up in a StaticEmbedding table neither supports nor needs. Leave mini_batch_size out."
            )
        dims = {term.dim for term in self.terms if term.dim is not None}
        query, document = self.similarity.exponents
        refuse_for_sparse(self, dims, document)
        width = output_width(self.model)
        if width is not None and (too_long := sorted(dim for dim in dims if dim > width)):
            raise ValueError(
                f"Terms compare {too_long} dimensions, but the embeddings of this model have {width}. "
                f"Choose dims in 1..{width}."
            )
        if width is not None and width not in dims and all(term.dim is not None for term in self.terms):
            logger.warning(
                "No term of %s compares all %d dimensions, so those beyond %d are not trained. Add a term with dim=%d.",
                self.name,
                width,
                max(dims),
                width,
            )
        if 0 < document < 1 and isinstance(self.model, SentenceTransformer) and exponent_norm(self.model) is None:
            logger.warning(
                "%s trains with a document exponent of %.3g, but the saved model will score with dot products. Call "
                "stm.prepare(model, Similarity(%.3g, %.3g)), which adds the module that applies the exponent.",
                self.name,
                document,
                query,
                document,
            )

    def check_engine(self, engine: str | None) -> None:
        """Refuses an engine, as ``training.state.engine_of`` names it, that cannot train what the loss learns."""
        learned = [] if self.temperatures is None else ["temperatures"]
        refuse_engine(engine, self.name, learned, self.uses_gradient_cache)

    def begin(self) -> None:
        super().begin()
        self.check_engine(engine_of(self.model))
        if self.temperatures is not None:
            self.temperatures.begin(self.name)

    def _check_inputs(self, sentence_features: list[dict[str, Tensor]], labels: Tensor | None) -> tuple[int, int]:
        """The number of columns and rows of a batch that the loss takes."""
        if len(sentence_features) < 2:
            raise ValueError(
                f"{self.name} needs at least two text columns, anchor and positive; "
                f"the dataset has {len(sentence_features)}."
            )
        if labels is not None and labels.is_floating_point():
            raise ValueError(
                f"{self.name} would train every pair as relevant, whatever its score, but the dataset has a "
                "column of scores. Train on scores with SimilarityMSELoss, or remove the column: "
                'dataset.remove_columns("score").'
            )
        self.refuse_unequal([batch_size_of(features) for features in sentence_features])
        advice = "Give the prefixes to the loss: terms=[Term(dim=128), Term(dim=256), Term()]."
        if self.similarity.keeps_magnitude or exponent_norm(self.model) is not None:
            self.refuse_matryoshka(advice)
        elif self.uses_gradient_cache and self.temperatures is not None:
            self.refuse_matryoshka(advice, "cuts off the temperatures that {} learns with caching")
        return len(sentence_features), batch_size_of(sentence_features[0])

    # --- gradient caching: what CachedLossMixin calls ---------------------------------------------------------------

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """The raw embeddings of one mini-batch, and what the loss learns as more columns: (n, D + L).

        The gradient of these numbers is therefore cached, scaled, accumulated and synchronised with the encoder's.
        """
        features = minibatch_of(sentence_feature, begin, end)
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            random_state = RandContext(*features.values()) if copy_random_state else None
            raw = raw_features(self.model, features)["sentence_embedding"]  # (n, D)
            if learned := self._learned():
                raw = torch.cat([raw, torch.stack(learned).expand(len(raw), -1)], dim=1)
            return raw, random_state

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | Texts | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the whole batch, from the embeddings of its mini-batches."""
        width = reps[0][0].shape[1] - len(self._learned())
        losses = self._losses([torch.cat(column)[:, :width] for column in reps], list(reps[0][0][0, width:]), labels)
        self._last = {name: loss.detach() for name, loss in losses.items()}
        total = torch.stack(list(losses.values())).sum()
        if with_backward:
            total.backward()
            total = total.detach()
        return total

    def _named(self, total: Tensor) -> Tensor | dict[str, Tensor]:
        """Splits the total of a cached step, whose gradient belongs to one tensor, into terms of the same sum."""
        if not self.regularizers:
            return total
        others = {name: loss for name, loss in self._last.items() if name != "infonce"}
        return {"infonce": total - sum(others.values()), **others}

    # --- the model card ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def get_config_dict(self) -> dict[str, Any]:
        similarity, terms = self._at(self._learned())
        gamma_query, gamma_document = similarity.exponents
        return {
            "similarity": {"query": gamma_query, "document": gamma_document},
            "terms": [vars(term) | {"temperature": float(term.temperature)} for term in terms],
            **{name: getattr(self, name) for name in OPTIONS},
            "regularizers": self.regularizers.get_config_dict(),
            "prior": None if self.prior is None else self.prior.get_config_dict(),
            **self.false_negatives.get_config_dict(),
        }


def _itself(x: Tensor) -> Tensor:
    return x
