"""How to score a trained model: its document exponent, and the weight of log p(d)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.scoring import are_unit, scoring_of
from st_magnitude.geometry import Array, norms
from st_magnitude.judge import Difference, judge, nothing_found, warn_if_few
from st_magnitude.result import Result, Table, to_plain
from st_magnitude.similarity import DOT, Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["ExponentCurve", "PriorCurve", "calibrate_exponent", "calibrate_prior"]

EXPONENTS = np.linspace(0.0, 1.0, 21)  # the document exponents of a sweep
PRIOR_FOLDS = 5  # each is measured at the weight of a prior that is best on the others
# The weights of a sweep; 1 gives log p(d) the spread of the scores.
FACTORS = np.geomspace(1 / 64, 16, 21)
UNIT_NORMS = (
    "The model normalises its embeddings: all norms are 1, and every exponent ranks alike."
    " `st-magnitude train` saves such a model if cosine is clearly better than the similarity of"
    " training. To choose an exponent, train again with --keep-scoring, or remove Normalize with"
    ' stm.prepare(model, "dot") and save the model.'
)


class _Curve(Result):
    """nDCG@10 of every query over a sweep, (S, n): the common part of both curves."""

    per_query: Array
    queries: list[str]

    @property
    def ndcg(self) -> Array:
        """Mean nDCG@10 at every value of the sweep, (S,)."""
        return self.per_query.mean(axis=1)

    def _by(self, values: Array) -> dict[str, float]:
        return {f"{x:g}": float(y) for x, y in zip(values, self.ndcg, strict=True)}

    def _table(self, name: str, values: Array, marks: dict[float, str], title: str) -> Table:
        marks = {} if nothing_found(*self.ndcg) else marks
        rows = [[f"{x:.4g}", y, marks.get(x, "")] for x, y in zip(values, self.ndcg, strict=True)]
        return Table([name, "nDCG@10", ""], rows, title)


@dataclass(frozen=True, repr=False)
class ExponentCurve(_Curve):
    """nDCG@10 over the document exponent, the recommended exponent, and the evidence for it.

    Attributes:
        exponents: Document exponents in rising order, from 0 (dot) to 1 (cosine), (E,).
        per_query: nDCG@10 of every query at every exponent, (E, n).
        queries: Ids of the n queries.
        present: The exponent at which the model is scored today.
        best: The recommended exponent: the first of ``present``, 1, 0 and `highest` that `judge`
            does not find clearly worse than `highest`. Models with 1 and 0 load without this
            package.
        versus_cosine: nDCG@10 at the highest exponent minus nDCG@10 at exponent 1. It is too high,
            by up to 0.04 among 21 exponents, because the same queries chose the highest one;
            measure on others.
        versus_dot: The same against exponent 0.
    """

    exponents: Array
    per_query: Array
    queries: list[str]
    present: float
    best: float
    versus_cosine: Difference
    versus_dot: Difference

    @property
    def highest(self) -> float:
        """The exponent with the highest mean nDCG@10; of several, the largest."""
        return float(self.exponents[highest_rows(self.per_query)[-1]])

    def at(self, exponent: float) -> Array:
        """nDCG@10 of every query at one of the exponents, (n,)."""
        return self.per_query[np.abs(self.exponents - exponent).argmin()]

    def gain(self, exponent: float, over: float) -> Difference:
        """nDCG@10 at one of the exponents minus that at another."""
        return judge(self.at(exponent) - self.at(over))

    @property
    def best_similarity(self) -> Similarity:
        """The recommended similarity. Query exponent 1 puts the scores on one scale."""
        return Similarity(gamma_query=1.0, gamma_document=self.best)

    def tables(self) -> Iterable[Table | str]:
        marks = {self.highest: "highest"} | {self.best: "best"}
        title = f"nDCG@10 by document exponent, {len(self.queries)} queries (0 is dot, 1 is cosine)"
        yield self._table("exponent", self.exponents, marks, title)
        ends = (("cosine", self.versus_cosine), ("dot", self.versus_dot))
        gains = [[f"{self.highest:g} minus {name}", gain] for name, gain in ends]
        note = "Differences are too high: the same queries chose the exponent."
        yield Table(["difference", "of nDCG@10 [95 %]"], gains, note=note)
        if nothing := nothing_found(*self.ndcg):
            yield nothing
        elif self.best != self.highest:
            is_kept = self.best == self.present
            why = "is today's" if is_kept else "loads anywhere, without st_magnitude"
            yield f"Exponent {self.highest:g} is tied with {self.best:g}, which {why}."

    def to_dict(self) -> dict[str, Any]:
        """The choice and mean nDCG@10 by exponent, as JSON has them."""
        return {
            "exponent": self.best,
            "present": self.present,
            "highest": self.highest,
            "queries": len(self.queries),
            "ndcg@10": self._by(self.exponents),
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
    data = data.unread_by(model)
    warn_if_few(data.query_ids, "an exponent")
    encoded = data.encode(model, **encode)
    if are_unit(norms(encoded.documents)):  # by a module of another name than Normalize
        raise InputError(UNIT_NORMS)
    per_query = ndcg_by_exponent(encoded, gammas)
    return exponent_curve(gammas, per_query, data.query_ids, present, seed=seed)


def exponents_with(present: float, exponents: ArrayLike = EXPONENTS) -> Array:
    """Document exponents in rising order, with the ends 0 and 1 and the present one, (E,)."""
    gammas = np.unique(np.append(exponents, [0.0, 1.0]))
    is_among = np.abs(gammas - present).min() < 1e-6  # a learned one is in float32
    return gammas if is_among else np.sort(np.append(gammas, present))


def exponent_curve(
    exponents: Array, per_query: Array, queries: list[str], present: float, seed: int = 0
) -> ExponentCurve:
    """The choice of `calibrate_exponent` from nDCG@10 of queries at rising exponents, (E, n)."""
    highest = highest_rows(per_query)[-1]
    kept = int(np.abs(exponents - present).argmin())
    rows = (kept, -1, 0)
    gains = [judge(per_query[highest] - per_query[row], seed=seed) for row in rows]
    tied = [row for row, gain in zip(rows, gains, strict=True) if not gain.is_better]
    best = tied[0] if tied else highest
    return ExponentCurve(
        exponents,
        per_query,
        queries,
        present=float(exponents[kept]),
        best=float(exponents[best]),
        versus_cosine=gains[1],
        versus_dot=gains[2],
    )


def ndcg_by_exponent(encoded: EncodedTask, exponents: Iterable[float]) -> Array:
    """nDCG@10 of every query at each document exponent, (E, n)."""
    tops = encoded.tops([Similarity(1.0, float(exponent)) for exponent in exponents])
    return np.stack([encoded.ndcg(top) for top in tops])


def highest_rows(per_query: Array) -> NDArray[np.int64]:
    """The rows with the highest mean, up to rounding."""
    means = per_query.mean(axis=1)
    return np.flatnonzero(np.isclose(means, means.max(), rtol=0.0, atol=1e-12))


@dataclass(frozen=True, repr=False)
class PriorCurve(_Curve):
    """nDCG@10 over the weight of the document prior, and the recommended weight.

    Attributes:
        weights: Weights in rising order, from 0, (W,).
        per_query: nDCG@10 of every query at every weight, (W, n).
        queries: Ids of the n queries.
        weight: The recommended weight: `highest`, or 0 if ``gain`` is a tie.
        gain: Mean of ``held_out`` minus nDCG@10 without a prior.
        similarity: The similarity of the scores to which the prior is added.
        held_out: nDCG@10 of each fifth of the queries at the weight that is best on the others.
    """

    weights: Array
    per_query: Array
    queries: list[str]
    weight: float
    gain: Difference
    similarity: Similarity
    held_out: Array

    @property
    def highest(self) -> float:
        """The weight with the highest mean nDCG@10; of several, the smallest."""
        return float(self.weights[highest_rows(self.per_query)[0]])

    def to_dict(self) -> dict[str, object]:
        """The choice and mean nDCG@10 by weight, as JSON has them."""
        return {
            "weight": self.weight,
            "highest": self.highest,
            "gain": to_plain(self.gain),
            "queries": len(self.queries),
            "similarity": self.similarity.exponents,
            "ndcg@10": self._by(self.weights),
        }

    def tables(self) -> list[Table | str]:
        marks = {self.highest: "highest"} | {self.weight: "best"}
        sentence = (
            f"With the prior, on queries that did not choose its weight: {self.gain} of nDCG@10."
        )
        if self.highest and not self.weight:
            sentence += " This is not clearly a gain, so the recommended weight is 0."
        title = f"nDCG@10 by weight of log p(d), {len(self.queries)} queries"
        sentence = nothing_found(*self.ndcg) or sentence
        return [self._table("weight", self.weights, marks, title), sentence]


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
        >>> ids = [f"q{i}" for i in range(50)]
        >>> judged = dict.fromkeys(ids, {"popular"})
        >>> data = RetrievalData(dict.fromkeys(ids, "bees"), corpus, judged)
        >>> curve = calibrate_prior(model, data, {"rare": -5.0, "popular": -0.1})
        >>> curve.weight > 0, round(curve.gain.mean, 3), curve.gain.is_better
        (True, 0.369, True)

    An index for inner products ranks alike with documents ``[d, weight · log p(d)]`` and queries
    ``[q, 1]`` (docs/prior.md).

    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item
    Recommendations, RecSys 2019; Bachrach et al., Speeding Up the Xbox Recommender System Using a
    Euclidean Transformation for Inner-Product Spaces, RecSys 2014, on a bias as a dimension.
    """
    similarity = scoring_of(model, similarity)
    data = data.unread_by(model)
    prior = aligned_prior(data, log_p)
    warn_if_few(data.query_ids, "a weight")
    encoded = data.encode(model, **encode)
    return prior_curve(encoded, data.query_ids, prior, similarity, seed=seed)


def prior_curve(
    encoded: EncodedTask,
    query_ids: list[str],
    prior: Array,
    similarity: Similarity,
    seed: int = 0,
) -> PriorCurve:
    """`calibrate_prior` of an encoded task; ``prior`` is log p of each document, (m,)."""
    q = similarity.query(encoded.queries.double())
    d = similarity.document(encoded.documents.double())
    # of the scores of each query, (n,)
    variances = ((q @ torch.cov(d.T)) * q).sum(dim=1)
    unit = float(variances.clamp(min=0).sqrt().mean()) / (float(prior.std()) or np.inf)
    weights = np.unique(np.append(0.0, FACTORS * unit))
    per_query = np.stack([_with_prior(encoded, q, d, weight * prior) for weight in weights])

    fold = np.random.default_rng(seed).permutation(per_query.shape[1]) % PRIOR_FOLDS
    held_out = np.empty(len(fold))
    for part in range(PRIOR_FOLDS):
        row = highest_rows(per_query[:, fold != part])[0]
        held_out[fold == part] = per_query[row, fold == part]
    gain = judge(held_out - per_query[0], seed=seed)
    best = float(weights[highest_rows(per_query)[0]]) if gain.is_better else 0.0
    return PriorCurve(weights, per_query, query_ids, best, gain, similarity, held_out)


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


def _with_prior(encoded: EncodedTask, q: torch.Tensor, d: torch.Tensor, bias: Array) -> Array:
    """nDCG@10 of every query by q · d + bias, one more dimension: (n, D), (m, D), (m,) -> (n,)."""
    queries = torch.cat([q, torch.ones_like(q[:, :1])], dim=1)
    documents = torch.cat([d, torch.as_tensor(bias[:, None]).to(d)], dim=1)
    return encoded.ndcg(replace(encoded, queries=queries, documents=documents).top(DOT))
