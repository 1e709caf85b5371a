"""How to score a trained model: its document exponent, and the weight of log p(d)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.geometry import Array, norms
from st_magnitude.judge import Difference, judge, nothing_found, warn_if_few
from st_magnitude.result import Result, Table, to_plain
from st_magnitude.similarity import DOT, Similarity
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.surgery.scoring import are_unit, scoring_of
from st_magnitude.workbench.choice import Choice, Rule, choose, highest_rows
from st_magnitude.workbench.folds import DEFAULT_FOLDS, folds_of

__all__ = ["ExponentCurve", "PriorCurve", "calibrate_exponent", "calibrate_prior"]

EXPONENTS = np.linspace(0.0, 1.0, 21)  # the document exponents of a sweep
FEW_DRAWS = 2_000  # of `judge`, enough to choose by
# The weights of a sweep; 1 gives log p(d) the spread of the scores.
FACTORS = np.geomspace(1 / 64, 16, 21)
UNIT_NORMS = (
    "The model normalises its embeddings, as after a training with the cosine loss: all norms are"
    " 1, and every exponent ranks alike. To choose an exponent, train with a loss that keeps norms"
    ' (--loss qnorm --keep-scoring), or remove Normalize with stm.prepare(model, "dot") and save'
    " the model."
)


@dataclass(frozen=True, repr=False)
class _Curve(Result):
    """A sweep of one number: the rankings by its values, and the choice among them."""

    rankings: dict[float, Ranking]
    choice: Choice[float]
    seed: int

    @property
    def queries(self) -> list[str]:
        """Ids of the n queries."""
        return list(self.rankings[self.choice.value].query_ids)

    @property
    def values(self) -> Array:
        """The values of the sweep in rising order, (S,)."""
        return np.array(list(self.rankings))

    @cached_property
    def per_query(self) -> Array:
        """nDCG@10 of every query at every value of the sweep, (S, n)."""
        return np.stack([ranking.ndcg for ranking in self.rankings.values()])

    @property
    def ndcg(self) -> Array:
        """Mean nDCG@10 at every value of the sweep, (S,)."""
        return self.per_query.mean(axis=1)

    @cached_property
    def held_out(self) -> Ranking:
        """The ranking of each fifth of the queries at the value that the others choose."""
        return self.choice.of(self.rankings)

    @property
    def _by_value(self) -> dict[str, float]:
        return {f"{x:g}": float(y) for x, y in zip(self.values, self.ndcg, strict=True)}

    def _over(self, value: float) -> Difference:
        return self.held_out.minus(self.rankings[value], seed=self.seed)

    def _table(self, name: str, marks: dict[float, str], title: str) -> Table:
        marks = {} if nothing_found(*self.ndcg) else marks
        pairs = zip(self.values, self.ndcg, strict=True)
        rows = [[f"{x:.4g}", y, marks.get(x, "")] for x, y in pairs]
        return Table([name, "nDCG@10", ""], rows, title)


@dataclass(frozen=True, repr=False)
class ExponentCurve(_Curve):
    """nDCG@10 over the document exponent, the recommended exponent, and the evidence for it.

    Attributes:
        rankings: The ranking at every document exponent, from 0 (dot) to 1 (cosine).
        present: The exponent at which the model is scored today.
        seed: Seed of the folds and of the draws of `judge`.
    """

    present: float

    @property
    def exponents(self) -> Array:
        """Document exponents in rising order, (E,)."""
        return self.values

    @property
    def highest(self) -> float:
        """The exponent with the highest mean nDCG@10; of several, the largest."""
        return float(self.values[highest_rows(self.per_query)[-1]])

    @property
    def best(self) -> float:
        """The recommended exponent: the first of ``present``, 1, 0 and `highest` that `judge` does
        not find clearly worse than `highest`. Models with 1 and 0 load without this package."""
        return self.choice.value

    @property
    def stock(self) -> float:
        """The better one of 0 (dot) and 1 (cosine), whose models load without this package."""
        return float(self.ndcg[-1] >= self.ndcg[0])

    @cached_property
    def versus_stock(self) -> Difference:
        """nDCG@10 at the model's exponent of today minus that at `stock`."""
        return self.at(self.present).minus(self.at(self.stock), seed=self.seed)

    @cached_property
    def versus_cosine(self) -> Difference:
        """nDCG@10 of `held_out`, whose queries did not choose, minus nDCG@10 at exponent 1."""
        return self._over(self.values[-1])

    @cached_property
    def versus_dot(self) -> Difference:
        """The same against exponent 0."""
        return self._over(self.values[0])

    def at(self, exponent: float) -> Ranking:
        """The ranking at one of the exponents."""
        return self.rankings[_nearest(self.values, exponent)]

    @property
    def best_similarity(self) -> Similarity:
        """The recommended similarity. Query exponent 1 puts the scores on one scale."""
        return Similarity(gamma_query=1.0, gamma_document=self.best)

    def tables(self) -> Iterable[Table | str]:
        marks = {self.highest: "highest"} | {self.best: "best"}
        where = self.held_out.data.where
        title = f"nDCG@10 on {where} by document exponent (0 is dot, 1 is cosine)"
        yield self._table("exponent", marks, title)
        gains = [["cosine", self.versus_cosine], ["dot", self.versus_dot]]
        title = "The exponent that the other four fifths of the queries choose, against"
        yield Table(["", "difference of nDCG@10 [95 %]"], gains, title)
        if nothing := nothing_found(*self.ndcg):
            yield nothing
        elif self.best != self.highest:
            is_kept = self.best == self.present
            why = "the model has today" if is_kept else "loads anywhere, without st_magnitude"
            found = f"Exponent {self.highest:g} is not clearly better than"
            yield f"{found} {self.best:g}, which {why}."
        if 0 < self.present < 1:
            name = "cosine" if self.stock else "dot"
            yield (
                f'For stock modules, stm.prepare(model, "{name}") rounds the exponent'
                f" {self.present:.3g} to {self.stock:g}: today's is {self.versus_stock} over it."
            )

    def to_dict(self) -> dict[str, Any]:
        """The choice and mean nDCG@10 by exponent, as JSON has them."""
        return {
            "exponent": self.best,
            "present": self.present,
            "highest": self.highest,
            "queries": len(self.queries),
            "ndcg@10": self._by_value,
            "versus_cosine": to_plain(self.versus_cosine),
            "versus_dot": to_plain(self.versus_dot),
        }


def calibrate_exponent(
    model: SentenceTransformer,
    data: RetrievalData,
    exponents: ArrayLike | None = None,
    seed: int = 0,
    **encode: Any,
) -> ExponentCurve:
    """Encodes once and ranks by q · d / |d|^gamma for a sweep of document exponents gamma.

    The exponent of the query never changes a ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so one
    sweep covers all similarities. `st_magnitude.prepare` takes the similarity that it recommends.

    Args:
        model: A model whose embeddings keep their norm. Embeddings are taken before a closing
            ExponentNorm.
        data: Queries, corpus and judgments, usually a dev split.
        exponents: Document exponents in [0, 1]; by default 0, 0.05, ..., 1. The ends 0 and 1 and
            the model's present one are always added.
        seed: Seed of the draws of `judge`.
        **encode: Options of `RetrievalData.encode`, such as ``batch_size=128``.

    Raises:
        ValueError: If no query has a relevant document, an exponent lies outside [0, 1], the model
            normalises its embeddings, or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], device="cpu")
        >>> corpus = {"d1": "honey", "d2": "honey, honey of bees"}
        >>> data = RetrievalData({"q": "honey"}, corpus, {"q": {"d2"}})
        >>> curve = calibrate_exponent(model, data, exponents=[0.5])
        >>> curve.ndcg.round(4), curve.highest, curve.best  # one query is a tie with cosine
        (array([1.    , 1.    , 0.6309]), 0.5, 1.0)
    """
    if normalizes_output(model):
        raise InputError(UNIT_NORMS)
    present = scoring_of(model).exponents[1]
    gammas = exponents_with(present, EXPONENTS if exponents is None else exponents)
    if gammas[0] < 0.0 or not gammas[-1] <= 1.0:
        raise InputError(
            "Document exponents lie in [0, 1] (0 keeps the norm, 1 removes it), got "
            f"{gammas.tolist()}."
        )
    task = data.encode(model, **encode)
    warn_if_few(task.query_ids, "an exponent")
    if are_unit(norms(task.documents)):  # by a module of another name than Normalize
        raise InputError(UNIT_NORMS)
    return exponent_curve(task, gammas, seed)


def exponents_with(present: float, exponents: ArrayLike = EXPONENTS) -> Array:
    """Document exponents in rising order, with the ends 0 and 1 and the present one, (E,)."""
    gammas = np.unique(np.append(exponents, [0.0, 1.0]))
    is_among = np.abs(gammas - present).min() < 1e-6  # a learned one is in float32
    return gammas if is_among else np.sort(np.append(gammas, present))


def exponent_curve(
    task: EncodedTask, exponents: ArrayLike = EXPONENTS, seed: int = 0
) -> ExponentCurve:
    """The sweep and the choice of `calibrate_exponent` for an encoded task."""
    today = task.similarity.exponents[1]
    gammas = exponents_with(today, exponents)
    present = _nearest(gammas, today)
    sweep = task.sweep(gammas)
    folds = folds_of(task.data, DEFAULT_FOLDS, seed)
    choice = choose(sweep, folds, preferring(gammas, present, seed))
    return ExponentCurve(sweep, choice, seed, present)


def preferring(exponents: Array, present: float, seed: int) -> Rule:
    """The rule of `ExponentCurve.best`, for nDCG@10 at rising exponents, (E, n)."""
    preferred = [int(np.abs(exponents - exponent).argmin()) for exponent in (present, 1.0, 0.0)]

    def rule(values: Array) -> int:
        highest = int(highest_rows(values)[-1])
        for row in preferred:
            gain = judge(values[highest] - values[row], num_samples=FEW_DRAWS, seed=seed)
            if not gain.is_better:
                return row
        return highest

    return rule


def _nearest(values: Array, value: float) -> float:
    return float(values[np.abs(values - value).argmin()])


@dataclass(frozen=True, repr=False)
class PriorCurve(_Curve):
    """nDCG@10 over the weight of the document prior, and the recommended weight.

    Attributes:
        rankings: The ranking at every weight, from 0.
        similarity: The similarity of the scores to which the prior is added.
        seed: Seed of the folds and of the draws of `judge`.
    """

    similarity: Similarity

    @property
    def weights(self) -> Array:
        """Weights in rising order, from 0, (W,)."""
        return self.values

    @property
    def highest(self) -> float:
        """The weight with the highest mean nDCG@10; of several, the smallest."""
        return self.choice.value

    @cached_property
    def gain(self) -> Difference:
        """nDCG@10 of `held_out`, whose queries did not choose, minus nDCG@10 without a prior."""
        return self._over(0.0)

    @property
    def weight(self) -> float:
        """The recommended weight: `highest`, or 0 if ``gain`` is a tie."""
        return self.highest if self.gain.is_better else 0.0

    def to_dict(self) -> dict[str, object]:
        """The choice and mean nDCG@10 by weight, as JSON has them."""
        return {
            "weight": self.weight,
            "highest": self.highest,
            "gain": to_plain(self.gain),
            "queries": len(self.queries),
            "similarity": self.similarity.exponents,
            "ndcg@10": self._by_value,
        }

    def tables(self) -> list[Table | str]:
        weight = self.weight
        marks = {self.highest: "highest"} | {weight: "best"}
        sentence = (
            f"With the prior, on queries that did not choose its weight: {self.gain} of nDCG@10."
        )
        if self.highest and not weight:
            sentence += " This is not clearly a gain, so the recommended weight is 0."
        title = f"nDCG@10 by weight of log p(d), {len(self.queries)} queries"
        sentence = nothing_found(*self.ndcg) or sentence
        return [self._table("weight", marks, title), sentence]


def calibrate_prior(
    model: SentenceTransformer,
    data: RetrievalData,
    log_p: Mapping[str, float],
    similarity: Similarity | str | None = None,
    seed: int = 0,
    **encode: Any,
) -> PriorCurve:
    """Encodes once and ranks by s(q, d) + weight · log p(d) for a sweep of weights from 0.

    A softmax over the documents of a batch divides by how often each is drawn. Adding log p(d) at
    scoring restores how often they are asked for, without training.

    Args:
        data: Queries, corpus and judgments, usually a dev split.
        log_p: Document id -> log p(d), for every document of the corpus. `RetrievalData.log_prior`
            of the training split has it.
        similarity: The similarity of s(q, d); by default the model's. With a prior the norm of
            the query counts, if the similarity keeps it.
        seed: Seed of the folds and of the draws of `judge`.
        **encode: Options of `RetrievalData.encode`, such as ``batch_size=128``.

    Raises:
        ValueError: If a document has no log p or one that is not finite, or an embedding is not
            finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> words = BoW(["bees", "honey"])
        >>> model = SentenceTransformer(modules=[words], similarity_fn_name="cosine", device="cpu")
        >>> corpus = {"rare": "bees", "popular": "bees honey honey"}
        >>> queries = {f"q{i}": f"bees {i}" for i in range(50)}
        >>> data = RetrievalData(queries, corpus, {query: {"popular"} for query in queries})
        >>> curve = calibrate_prior(model, data, {"rare": -5.0, "popular": -0.1})
        >>> curve.weight > 0, round(curve.gain.mean, 3), curve.gain.is_better
        (True, 0.369, True)

    An index for inner products ranks alike with documents ``[d, weight · log p(d)]`` and queries
    ``[q, 1]`` (docs/prior.md).

    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019; Bachrach et al., Speeding Up the Xbox Recommender System Using a
    Euclidean Transformation for Inner-Product Spaces, RecSys 2014, on a bias as a dimension.
    """
    prior = aligned_prior(data, log_p)
    task = data.encode(model, similarity, **encode)
    warn_if_few(task.query_ids, "a weight")
    return prior_curve(task, prior, seed)


def prior_curve(task: EncodedTask, prior: Array, seed: int = 0) -> PriorCurve:
    """`calibrate_prior` of an encoded task; ``prior`` is log p of each document, (m,)."""
    q = task.similarity.query(task.queries.double())
    d = task.similarity.document(task.documents.double())
    # of the scores of each query, (n,)
    variances = ((q @ torch.cov(d.T)) * q).sum(dim=1)
    unit = float(variances.clamp(min=0).sqrt().mean()) / (float(prior.std()) or np.inf)
    bias = torch.as_tensor(prior).to(d)[:, None]
    queries = torch.cat([q, torch.ones_like(q[:, :1])], dim=1)
    rankings: dict[float, Ranking] = {}
    for weight in np.unique(np.append(0.0, FACTORS * unit)).tolist():
        documents = torch.cat([d, weight * bias], dim=1)
        added = replace(task, queries=queries, documents=documents, similarity=DOT)
        rankings[weight] = added.search(10)
    choice = choose(rankings, folds_of(task.data, DEFAULT_FOLDS, seed))
    return PriorCurve(rankings, choice, seed, task.similarity)


def aligned_prior(data: RetrievalData, log_p: Mapping[str, float]) -> Array:
    """log p(d) in the order of ``data.document_ids``, (m,)."""
    missing = [document for document in data.document_ids if document not in log_p]
    if missing:
        raise InputError(
            f"log_p has no value for {len(missing)} of {len(data.corpus)} documents, such as "
            f"{missing[0]!r}: use RetrievalData.log_prior of judgments over this corpus."
        )
    values = np.array([log_p[document] for document in data.document_ids], dtype=np.float64)
    if not np.isfinite(values).all():
        broken = data.document_ids[int(np.isfinite(values).argmin())]
        raise InputError(
            f"log_p of {broken!r} is {log_p[broken]}: smooth the counts, because log 0 is not "
            "finite."
        )
    return values
