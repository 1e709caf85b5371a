"""Ranking losses: embed, similarity, infonce, plus regularizers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypedDict

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import RandContext
from torch import Tensor

from st_magnitude._checks import InputError, at_least, one_of, positive
from st_magnitude._distributed import num_ranks
from st_magnitude._upstream import CachedLoss, batch_size_of, minibatch_of
from st_magnitude.kernel.batch import Batch, Direction, PartitionMode
from st_magnitude.kernel.infonce import infonce_of, softmaxes_of
from st_magnitude.kernel.terms import Term, check_terms, longest_prefix
from st_magnitude.losses.base import EmbeddingLoss, exponent_norm, is_table
from st_magnitude.losses.groups import sorted_by_length
from st_magnitude.losses.keys import BatchRule, Features, Texts, read_texts, warn_without_prompts
from st_magnitude.losses.labels import LabelRule, Labels
from st_magnitude.losses.negatives import FalseNegatives, MarginStrategy, SameText
from st_magnitude.losses.prior import DocumentPrior
from st_magnitude.losses.ranks import Gathered, check_on_all_ranks
from st_magnitude.losses.regularizers import Penalties, Regularizer
from st_magnitude.similarity import DOT, Similarity
from st_magnitude.surgery.raw import raw_features

# Logits are SCALE · cosine in the paper and in sentence-transformers, a temperature of 0.05.
SCALE = 20.0


class RankingOptions(TypedDict, total=False):
    """Arguments of every ranking loss; :class:`MagnitudeRankingLoss` has their defaults."""

    scale: float | Literal["auto"]
    temperature: float | None
    regularizers: Iterable[Regularizer | tuple[Regularizer, float]]
    mini_batch_size: int | None
    group_by_length: bool
    gather_across_devices: bool
    directions: Sequence[Direction]
    partition_mode: PartitionMode
    same_text: SameText
    margin: float | None
    margin_strategy: MarginStrategy
    keep_explicit_negatives: bool
    labels: Labels | None
    teacher_temperature: float | None
    teacher_weight: float
    prior: DocumentPrior | None
    hardness_strength: float


class TermOptions(RankingOptions, total=False):
    """Likewise, with the terms."""

    terms: Sequence[Term]


class MagnitudeRankingLoss(CachedLoss, EmbeddingLoss):
    """In-batch softmax ranking (InfoNCE) under any :class:`~st_magnitude.Similarity`.

    All other documents of the batch are the negatives of a query q_i with its positive d_i:

        L = sum_t w_t · mean_i [ -log softmax_j( s(q_i, d_j) / tau_t ) at j = i ],
        s(q, d) = q / |q|^gamma_query · d / |d|^gamma_document

    For cosine and for dot, at the same scale, the values are those of sentence-transformers'
    ``MultipleNegativesRankingLoss``.

    Args:
        model: The model to train, which the loss prepares as :func:`~st_magnitude.prepare` does:
            one whose similarity keeps norms removes ``Normalize``, and says so in the log.
        similarity: A Similarity or its name. None: that of the class, or dot.
        terms: Summands of the loss: temperatures, prefix dimensions and weights.
        temperature: Temperature tau of a loss of one term. None: the terms as they are.
        scale: ``"auto"`` divides the scores by n, the mean norms that the similarity leaves in,
            mean|q|^(1 - gamma_query) · mean|d|^(1 - gamma_document), over the queries and positives
            of the batch (of all devices, if gathered) and at the longest prefix: a temperature
            means what it means for cosine. A number is the paper's factor of scores at tau 0.05.
            The logits are s / (tau · n) or s · (scale / 20) / tau.
        regularizers: Functions of the embeddings (n, D) of all columns that return a scalar, or
            pairs of one and its weight. The loss is then a dict of named terms, which the Trainer
            sums and logs. A method ``of_columns`` gets the list of columns, (B, D) each, instead.
        mini_batch_size: Number of texts for which the model holds activations at a time, by
            gradient caching (GradCache, arXiv 2101.06983); the softmax still spans the whole batch.
        group_by_length: Whether texts of like length share a forward pass, copies once, which is
            faster. False: the passes of sentence-transformers, equally many in each step, as a
            static graph (DDP) and ``torch.compile(dynamic=False)`` need them.
        gather_across_devices: Whether the documents of all ranks, gathered on each of them, are
            negatives. Batches may differ in size.
        directions: What the softmax runs over, as in :func:`~st_magnitude.infonce`.
        partition_mode: Whether one softmax runs over all directions, likewise.
        same_text: ``"once"``: the n copies of a text weigh 1 / n each (with a ``prior`` 1 / q), and
            a document that is the query does not count. ``"exclude"``: nor do copies of the
            positive and positives of rows with the same query; others weigh 1 each. ``"keep"``:
            each copy counts, as in sentence-transformers. Only token ids tell copies.
        margin: A document that scores above the positive's score minus the margin does not count as
            a negative. Scores are the model's own, before the temperature. -0.1 leaves out what the
            model ranks far above the positive (Qwen3 Embedding, arXiv 2506.05176, Eq. 1).
        margin_strategy: Unit of the margin: ``"absolute"``, scores; ``"relative"``, the absolute
            value of the positive's score, which suits scores that norms make large.
        keep_explicit_negatives: Whether the explicit negatives of a row count for its query
            whatever ``margin`` says. Set it for negatives that people have chosen.
        labels: What a label column holds. None: data with labels are refused, unless these are all
            1, or all 0 as ``InputExample`` has them by default. ``"weights"``:
            factors of the losses of the rows, (B,). ``"classes"``: whole numbers (B,), below 0 for
            none; rows of one class are positives of each other. ``"teacher"``: a teacher's scores
            of the documents of the row, (B, n), as for DistillKLDivLoss, or its embeddings of all
            columns, (B, 1 + n, T), as for EmbedDistillLoss, whose inner products are scores. The
            targets of a query are softmax(t / teacher_temperature) over its scores t.
        teacher_temperature: Temperature of the targets. None: 0.05 for embeddings, 1 for scores.
        teacher_weight: Share of the teacher in the targets, from 0 to 1. The positive has the rest.
        prior: :class:`~st_magnitude.DocumentPrior`, whose log q is subtracted from all logits.
        hardness_strength: Weight exp(hardness_strength · s) of negatives; "once" is then "exclude".

    Raises:
        TypeError: If the model is a CrossEncoder, a MultiVectorEncoder or a SparseEncoder.
        ValueError: If the similarity keeps magnitude but only some routes of the model end in
            ``Normalize``, or ``truncate_dim`` cuts what it returns; if sentence-transformers'
            ``MatryoshkaLoss`` is wrapped around it; if caching is on and the model embeds by table
            lookup; if the data have labels that differ and that ``labels`` does not announce; if an
            argument is out of range.

    Inputs: (anchor, positive) or (anchor, positive, negative_1, ..., negative_n). Scores and labels
    0 and 1 of pairs are for :class:`~st_magnitude.SimilarityMSELoss`.

    Example:
        ::

            model = SentenceTransformer("all-MiniLM-L6-v2")
            loss = stm.MagnitudeRankingLoss(model, similarity="qnorm")
            SentenceTransformerTrainer(model=model, train_dataset=dataset, loss=loss).train()

    Source: Beyond the Unit Hypersphere, arXiv 2602.09229, Eq. 2 and 7, section 3.1 (scale).
    """

    fixed_similarity: Similarity | None = None  # of a class that has one

    def __init__(
        self,
        model: SentenceTransformer,
        similarity: Similarity | str | None = None,
        terms: Sequence[Term] = (Term(),),
        *,
        scale: float | Literal["auto"] = "auto",
        temperature: float | None = None,
        regularizers: Iterable[Regularizer | tuple[Regularizer, float]] = (),
        mini_batch_size: int | None = None,
        group_by_length: bool = True,
        gather_across_devices: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: PartitionMode = "joint",
        same_text: SameText = "once",
        margin: float | None = None,
        margin_strategy: MarginStrategy = "absolute",
        keep_explicit_negatives: bool = False,
        labels: Labels | None = None,
        teacher_temperature: float | None = None,
        teacher_weight: float = 1.0,
        prior: DocumentPrior | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        fixed = self.fixed_similarity
        if fixed is not None and similarity is not None and Similarity.named(similarity) != fixed:
            raise InputError(
                f"{type(self).__name__} has the similarity {fixed.name!r}; got {similarity!r}. Use "
                f"MagnitudeRankingLoss(model, {similarity!r})."
            )
        super().__init__(model, fixed or similarity or DOT, scale, SCALE, group_by_length)
        self.terms = tuple(terms)
        check_terms(self.terms, math.inf)
        if temperature is not None:
            positive("temperature", temperature)
            if scale != "auto":
                raise InputError(
                    f"scale={scale} and temperature={temperature} set the same factor, as a"
                    " temperature is 1 / scale. Pass one of them."
                )
            if len(self.terms) != 1:
                raise InputError(
                    f"temperature={temperature} is for a loss of one term, and this one has"
                    f" {len(self.terms)}. Give each term its own."
                )
            self.terms = (replace(self.terms[0], temperature=temperature),)
        self.longest = longest_prefix(self.terms)
        self.scaled_terms = self.terms
        if self.scale != "auto" and self.scale != SCALE:
            factor = SCALE / self.scale
            self.scaled_terms = tuple(
                replace(x, temperature=x.temperature * factor) for x in self.terms
            )
        self.regularizers = Penalties(regularizers)
        self.has_penalties = bool(self.regularizers.weighted)
        self.mini_batch_size = mini_batch_size  # type: ignore[assignment]
        self.uses_gradient_cache = mini_batch_size is not None
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        self.softmaxes = softmaxes_of(self.directions, partition_mode)
        if hardness_strength and same_text == "once":
            same_text = "exclude"  # copies of the positive would weigh as negatives
        self.false_negatives = FalseNegatives(
            same_text, margin, margin_strategy, keep_explicit_negatives, self.directions
        )
        self.labels = LabelRule(self.name, labels, teacher_temperature, teacher_weight)
        self.prior = prior
        self.rules: list[BatchRule] = [self.false_negatives, self.labels]
        if prior is not None:  # whose log q takes the place of the numbers of copies
            self.rules.append(prior)
        self.hardness_strength = hardness_strength
        if mini_batch_size is not None:
            at_least("mini_batch_size", mini_batch_size, 1, ", or None for no caching")
        one_of("gather_across_devices", gather_across_devices, (False, True))
        self.prepare_model()

    def forward(
        self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        columns = list(sentence_features)
        if self.directions == ("doc_to_query",):
            columns = columns[:2]  # no text is ranked against the negatives
            if labels is not None and labels.ndim == 3:  # a teacher's embeddings of all columns
                labels = labels[:, :2]
        texts = self.read(columns, labels)
        # The texts go where sentence-transformers hands labels on.
        if self.uses_gradient_cache:
            if self.group_by_length:
                size = self.mini_batch_size
                columns, self.order = sorted_by_length(columns, self.model, size)
            texts = replace(texts, order=self.order)
            total = self.forward_cached(columns, texts)  # type: ignore[arg-type]
            if not self.has_penalties:
                return total
            penalties = {name: x for name, x in texts.losses.items() if name != "infonce"}
            # InfoNCE has the gradient of the total
            return {"infonce": total - sum(penalties.values()), **penalties}
        return self.compute_loss_from_embeddings(self.embed(columns), texts)

    def read(self, columns: list[dict[str, Tensor]], labels: Tensor | None = None) -> Texts:
        """Checks and reads the features of a batch, before modules change them in place."""
        sizes: list[int] = []
        if self.gather_across_devices and num_ranks() > 1:
            check = partial(self._check_inputs, columns, labels)
            sizes = check_on_all_ranks(check, next(self.model.parameters()).device)
        else:
            self._check_inputs(columns, labels)
        return replace(self.texts_of(columns), labels=labels, sizes=sizes)

    def texts_of(self, columns: Sequence[Features]) -> Texts:
        """The keys of the texts of a batch, if a rule compares them."""
        keeps_all = self.false_negatives.same_text == "keep"
        if keeps_all and self.prior is None:
            return Texts()
        texts = read_texts(columns, self.model, self._vocabularies)
        return replace(texts, bare=()) if keeps_all else texts

    def compute_loss_from_embeddings(
        self, embeddings: list[Tensor], labels: Tensor | Texts | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The loss of raw embeddings, (B, D) each. Without texts ``same_text`` excludes nothing."""
        if isinstance(labels, Texts):
            texts = labels
        else:
            self._check_sizes(list(map(len, embeddings)), labels)
            texts = Texts(labels=labels)
        self.start()
        similarity = Similarity(*texts.learned) if texts.learned else self.similarity
        gathers = self.gather_across_devices
        columns = self.by_mean_norms(embeddings, similarity, self.longest, gathers)
        ranks = Gathered(columns, gathers, self.directions, texts.sizes)
        fields: dict[str, Any] = {"hardness_strength": self.hardness_strength}
        for rule in self.rules:
            fields |= rule.fields(texts, ranks)
        documents = ranks.join_columns(columns[1:])  # (M, D)
        batch = Batch(columns[0], documents, ranks.offset, ranks.all_queries, **fields)
        self.false_negatives.count(batch, texts, ranks, similarity, self.longest)
        losses = {"infonce": ranks.share * self.loss_of(batch, similarity)}
        if self.has_penalties:
            losses |= self.regularizers(embeddings)
        self.watch(embeddings, texts.labels, losses)
        return losses if self.has_penalties else losses["infonce"]

    def loss_of(self, batch: Batch, similarity: Similarity) -> Tensor:
        """The loss of a batch, a scalar: what a new formula overrides.

        The embeddings are divided by their mean norms, and the documents are those of all ranks.
        :class:`~st_magnitude.kernel.plain.Comparison` has scores, targets and what is left out.
        """
        return infonce_of(batch, self.scaled_terms, similarity, self.softmaxes)

    # --- gradient caching (GradCache, arXiv 2101.06983): what CachedLossMixin calls ---------------

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Tensor],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: RandContext | None = None,
    ) -> tuple[Tensor, RandContext | None]:
        """Raw embeddings (n, D) of a mini-batch, and L learned exponents as more columns, whose
        gradient is cached, scaled and synchronised with the encoder's: (n, D + L)."""
        features = minibatch_of(sentence_feature, begin, end)
        with random_state or nullcontext(), nullcontext() if with_grad else torch.no_grad():
            random_state = RandContext(*features.values()) if copy_random_state else None
            raw = raw_features(self.model, features)["sentence_embedding"]  # (n, D)
            if learned := self._learned():
                raw = torch.cat([raw, torch.stack(learned).expand(len(raw), -1)], dim=1)
            return raw, random_state

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: object = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of the whole batch, from the embeddings of its mini-batches."""
        width = reps[0][0].shape[1] - len(self._learned())
        texts = labels if isinstance(labels, Texts) else Texts()
        embeddings = [torch.cat(column)[:, :width] for column in reps]
        if texts.order:
            joined = torch.cat(embeddings)
            embeddings = [joined[torch.from_numpy(x).to(joined.device)] for x in texts.order]
        texts = replace(texts, learned=list(reps[0][0][0, width:]))
        found = self.compute_loss_from_embeddings(embeddings, texts)  # also of a subclass
        losses = found if isinstance(found, dict) else {"infonce": found}
        texts.losses.update({name: loss.detach() for name, loss in losses.items()})
        total = torch.stack(list(losses.values())).sum()
        if with_backward:
            total.backward()
            total = total.detach()
        return total

    def _learned(self) -> list[Tensor]:
        """The exponents that the loss learns, 0-d tensors."""
        return []

    # --- checks -----------------------------------------------------------------------------------

    def prepare_model(self) -> None:
        self._kinds: set[tuple[frozenset[str], ...]] = set()  # of batches that were checked
        self._vocabularies: dict[str | None, int] = {}  # of the columns of a task
        for rule in self.rules:
            rule.start()
        super().prepare_model()

    def check_model(self) -> None:
        super().check_model()
        self.check_dims(self.terms)
        if self.uses_gradient_cache and is_table(self.model):
            raise InputError(
                "mini_batch_size turns on gradient caching, which a model that looks embeddings up"
                " in a StaticEmbedding table neither supports nor needs. Leave mini_batch_size out."
            )

    @property
    def uses_norms(self) -> bool:
        return super().uses_norms or self.regularizers.uses_norms

    def get_log(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for rule in self.rules:
            found |= rule.get_log()
        return found

    def _check_inputs(
        self, columns: list[dict[str, Tensor]], labels: Tensor | None
    ) -> tuple[int, int]:
        """Refuses a batch that cannot be trained on. Returns the number of columns and their
        size."""
        kind = tuple(map(frozenset, columns))  # data sets differ in columns and in their prompts
        if kind not in self._kinds:
            self._check_kind(columns)
            self._kinds.add(kind)
        sizes = list(map(batch_size_of, columns))
        self._check_sizes(sizes, labels)
        return len(sizes), sizes[0]

    def _check_sizes(self, sizes: Sequence[int], labels: Tensor | None) -> None:
        self.refuse_unequal(sizes)
        self.labels.check(labels, sizes)

    def _check_kind(self, columns: list[dict[str, Tensor]]) -> None:
        """Refuses what depends on the names of the features of a batch alone."""
        if len(columns) < 2:
            raise InputError(
                f"{self.name} needs at least two text columns, anchor and positive; the dataset has"
                f" {len(columns)}."
            )
        if (self.uses_gradient_cache or self.has_penalties) and self.has_adaptive_layers():
            raise InputError(
                f"sentence-transformers' AdaptiveLayerLoss takes no {self.name} with"
                " mini_batch_size or regularizers."
            )
        keeps_norms = self.similarity.keeps_magnitude or exponent_norm(self.model) is not None
        has_dims = any(term.dim is not None for term in self.terms)
        if keeps_norms or has_dims or self.has_penalties:
            self.refuse_matryoshka(
                "Give the prefixes to the loss: terms=[Term(dim=128), Term(dim=256), Term()]."
            )
        warn_without_prompts(columns, self.model, self.name)

    def get_config_dict(self) -> dict[str, object]:
        found = {
            **super().get_config_dict(),
            "terms": [vars(term) for term in self.terms],
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_strength": self.hardness_strength,
            "regularizers": self.regularizers.get_config_dict(),
            "prior": None,
        }
        for rule in self.rules:
            found |= rule.get_config_dict()
        return found
