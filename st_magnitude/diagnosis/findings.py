"""The figures and recommendations that `diagnose` returns, and the short text that printing them shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from st_magnitude.evaluation.compression import CompressionCell
from st_magnitude.result import Result

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Interval = tuple[float, float, float]  # gain, low, high

DO, NO_BENEFIT, NOT_ENOUGH = "do", "no benefit expected", "not enough data"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class NormStatistics:
    """Raw norms of the queries or of the documents."""

    values: Array  # norm of every text, (n,)
    words: Array  # number of words of every text, (n,)
    mean: float
    cv: float  # coefficient of variation: below about 0.05 the norm is noise (arXiv 2602.09229, App. M)
    quantiles: tuple[float, ...]  # norms at 5, 25, 50, 75 and 95 %
    length_spearman: float  # rank correlation with the number of words; nan where either is constant


@dataclass(frozen=True)
class EffectSize:
    """Cohen's d of document norms, pooled by degrees of freedom."""

    d: float = math.nan
    without_length: float = math.nan  # after the logarithm of the number of words has been regressed out of the norms
    undefined: str = ""  # why both are nan; empty where they are defined


@dataclass(frozen=True)
class ExponentChoice:
    """nDCG@10 by document exponent. One half of the queries chooses an exponent, the other half measures it."""

    exponents: Array  # in rising order, from 0 (dot) to 1 (cosine), (E,)
    per_query: Array  # nDCG@10 of every query at every exponent, (E, n)
    present: float  # exponent with which the model is scored today
    chose: Mask  # whether a query belongs to the half that chooses, (n,)
    candidate: float  # the best other exponent than the present one on the choosing half; of several, the largest
    gain: Interval  # nDCG@10 at the candidate minus nDCG@10 at present, on the measuring half
    magnitude_candidate: float  # the best exponent below 1 on the choosing half
    gain_of_magnitude: Interval  # nDCG@10 at that exponent minus nDCG@10 by cosine, on the measuring half

    def ndcg(self, exponent: float) -> Array:
        """nDCG@10 of every query at one of the exponents: (n,)."""
        return self.per_query[np.abs(self.exponents - exponent).argmin()]


@dataclass(frozen=True)
class Geometry:
    """Directions of the documents (all embeddings normalized) and of the relevant pairs."""

    dim: int
    intrinsic_dimension: int  # number of principal components that hold 95 % of the variance
    is_sample_limited: bool  # fewer than 4 documents per dimension: the sample limits the intrinsic dimension
    isoscore: float
    isoscore_ceiling: float  # IsoScore that an isotropic sample of this size reaches
    mean_cosine: float  # over all pairs of documents; 0 for random directions
    uniformity: float  # of at most 5,000 documents
    alignment: float  # of the relevant pairs


@dataclass(frozen=True)
class Recommendation:
    """One possible change, and whether the measurements support it."""

    name: str  # "exponent", "training", "pruning", "half", "quarter", "1 bit", "bits and norm", "centring" or "prior"
    action: str  # the change in question
    verdict: str  # "do", "no benefit expected" or "not enough data", as `diagnose` defines them
    choice: str  # the setting to use
    reason: str
    scoring: str  # with which the change was measured
    gain: Interval | None = None  # 95 % bootstrap interval of queries that did not choose the change; None: unmeasured
    gain_of: str = ""  # the difference that the gain is
    num_queries: int = 0  # behind the interval
    evidence: dict[str, float] = field(default_factory=dict)  # the figures behind the recommendation, by name

    @property
    def measured(self) -> str:
        """The gain with its interval, the number of queries and the scoring, in one line; empty without a gain."""
        if self.gain is None:
            return ""
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*self.gain)
        return f"{self.gain_of}: {gain} on {self.num_queries:,} queries. Scoring: {self.scoring}."

    def __str__(self) -> str:
        lines = (self.measured, self.reason, f"-> {self.choice}")
        return "\n     ".join([f"[{self.verdict}] {self.action}", *(line for line in lines if line)])


@dataclass(frozen=True)
class Diagnosis(Result):
    """The result of `diagnose`.

    ``print(diagnosis)`` shows the recommendations. `st_magnitude.diagnosis.page` has ``measurements``, all figures as
    text, and ``write_page``, an HTML page with pictures.

    Attributes:
        model: Hub id or the end of the path of the model.
        similarity: Name of the similarity with which the model is scored today.
        recommended: Name of the similarity that the recommendation ``"exponent"`` advises. All other recommendations
            and ``cells`` are measured with it.
        normalizes: Whether the model ends in Normalize. The norms here come from before it and are not used today.
        has_magnitude: False if all norms are 1 and the embeddings before the normalization cannot be reached.
        query_ids: Ids of the queries, in the order of all per-query arrays.
        document_ids: Ids of the documents, in the order of all per-document arrays.
        is_relevant: Whether a document is relevant to any query, including queries outside of the data, (m,).
        queries: Raw norms of the queries.
        documents: Raw norms of the documents.
        effects: Cohen's d of document norms under ``"corpus"`` and ``"hard"``.
        exponent: nDCG@10 by document exponent, and the exponent that one half of the queries chose.
        geometry: Directions of the documents.
        cells: Storage, as CompressionEvaluator measures it.
        own_text_unjudged: Share of the queries whose own text is a document that is not judged relevant.
        recommendations: All recommendations; ``diagnosis["exponent"]`` finds one by name.
        settings: Arguments of `diagnose`, and the versions of this package and of those that it computes with.
    """

    model: str
    similarity: str
    recommended: str
    normalizes: bool
    has_magnitude: bool
    query_ids: list[str]
    document_ids: list[str]
    is_relevant: Mask
    queries: NormStatistics
    documents: NormStatistics
    effects: dict[str, EffectSize]
    exponent: ExponentChoice
    geometry: Geometry
    cells: list[CompressionCell]
    own_text_unjudged: float
    recommendations: list[Recommendation]
    settings: dict[str, Any]

    def __getitem__(self, name: str) -> Recommendation:
        return {r.name: r for r in self.recommendations}[name]

    @property
    def facts(self) -> str:
        """The model, its scoring and the size of the data in one sentence."""
        changed = "" if self.recommended == self.similarity else f" (recommended: {self.recommended})"
        return (
            f"{self.model}, scored by {self.similarity}{changed}: {len(self.query_ids):,} queries, "
            f"{len(self.document_ids):,} documents ({self.is_relevant.sum():,} relevant to at least one query), "
            f"{self.geometry.dim} dimensions."
        )

    @property
    def by_verdict(self) -> dict[str, list[Recommendation]]:
        """The recommendations under each verdict, ``"do"`` first."""
        return {v: [r for r in self.recommendations if r.verdict == v] for v in (DO, NO_BENEFIT, NOT_ENOUGH)}

    @property
    def summary(self) -> list[str]:
        """One line for each change to make, and one line with the names under each other verdict."""
        found = self.by_verdict
        lines = [f"Do: {r.choice} ({r.name})" for r in found.pop(DO)] or ["These measurements support no change."]
        return lines + [f"{v.capitalize()}: {', '.join(r.name for r in some)}" for v, some in found.items() if some]

    @property
    def legend(self) -> str:
        """The meaning of the verdicts and of the intervals."""
        worth, tolerance = self.settings["min_gain"], self.settings["tolerance"]
        after = ", which the recommendation about the exponent advises" if self.recommended != self.similarity else ""
        return (
            f"All changes but the exponent are measured with {self.recommended}{after}. Intervals are 95% bootstrap "
            f"intervals over queries that had no part in choosing the change. {DO.capitalize()}: the interval lies "
            f"above 0 and reaches a gain worth having ({worth:g} nDCG@10). {NO_BENEFIT.capitalize()}: it excludes "
            f"such a gain. {NOT_ENOUGH.capitalize()}: it does neither. Smaller storage is compared with "
            f"{1 - tolerance:.0%} of the full nDCG@10, and anything above that is enough. Every verdict rests on its "
            "own interval: of forty useless changes, one would pass."
        )

    def tables(self) -> list[str]:
        """The facts, the summary, all recommendations and the legend; the page has the tables."""
        ordered = (str(r) for some in self.by_verdict.values() for r in some)
        return [self.facts, "\n".join(f"- {line}" for line in self.summary), *ordered, self.legend]
