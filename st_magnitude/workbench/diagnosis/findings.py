"""The figures and recommendations of `diagnose`, as text and as tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.evaluation.compression import CompressionCell, summary
from st_magnitude.geometry import Array
from st_magnitude.judge import Difference, judge
from st_magnitude.result import UNSAVED, Result, Table
from st_magnitude.surgery.scoring import are_unit
from st_magnitude.workbench.calibration import ExponentCurve
from st_magnitude.workbench.judging.choice import System
from st_magnitude.workbench.judging.options import Options

__all__ = ["Diagnosis", "NormStatistics", "Recommendation"]

Mask = NDArray[np.bool_]

DO = "do"
NO_BENEFIT = "no benefit expected"
NOT_ENOUGH = "not enough data"
NO_MAGNITUDE = (
    "All norms are 1, and the embeddings before the normalization cannot be reached, so there are "
    "no norms to measure."
)
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class NormStatistics:
    """Raw norms of the queries or of the documents."""

    values: Array  # norm of every text, (n,)
    words: Array  # number of words of every text, (n,)
    mean: float
    cv: float  # coefficient of variation: below about 0.05 it is noise (arXiv 2602.09229, App. M)
    quantiles: tuple[float, ...]  # norms at 5, 25, 50, 75 and 95 %
    length_spearman: float  # rank correlation with the number of words; nan if one is constant

    @classmethod
    def of(cls, embeddings: Tensor, texts: Sequence[str]) -> NormStatistics:
        """The statistics of n texts and their raw embeddings, (n, D)."""
        words = np.array([len(text.split()) for text in texts], dtype=float)
        values = geometry.norms(embeddings)
        return cls(
            values=values,
            words=words,
            mean=float(values.mean()),
            cv=geometry.coefficient_of_variation(values),
            quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
            # norms of 1 differ by rounding only, which correlates with nothing
            length_spearman=math.nan if are_unit(values) else geometry.spearman(values, words),
        )

    def effect_sizes(self, is_relevant: Mask) -> dict[str, float]:
        """Cohen's d by ``is_relevant`` (n,), as fields of a diagnosis."""
        if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
            return {"cohens_d": math.nan, "adjusted_cohens_d": math.nan}
        log_words = np.log(np.maximum(self.words, 1))
        return {
            "cohens_d": geometry.cohens_d(self.values[is_relevant], self.values[~is_relevant]),
            "adjusted_cohens_d": geometry.adjusted_cohens_d(self.values, log_words, is_relevant),
        }


@dataclass(frozen=True)
class Recommendation:
    """One possible change, and whether the measurements support it."""

    name: str  # "exponent" or "storage"
    action: str  # the change in question
    verdict: str  # "do", "no benefit expected" or "not enough data", see docs/diagnose.md
    choice: str  # the setting to use
    reason: str
    gain: Difference | None = None  # in nDCG@10; None: unmeasured

    def __str__(self) -> str:
        choice = f"until then {self.choice}" if self.verdict == NOT_ENOUGH else self.choice
        return f"[{self.verdict}] {self.action}\n     {self.reason}\n     -> {choice}"


@dataclass(frozen=True)
class Diagnosis(Result):
    """The result of `diagnose`.

    ``print(diagnosis)`` shows the recommendations, and ``diagnosis["exponent"]`` is one of them.
    `measurements` are the tables of all figures.
    """

    model: str  # hub id or the end of the path of the model
    data: str  # name of the data, or ""
    similarity: str  # name of the similarity with which the model is scored today
    recommended: str  # the one that the recommendation "exponent" advises, of all other figures
    normalizes: bool  # whether the model ends in Normalize: the norms here come from before it
    has_magnitude: bool  # False if all norms are 1, and those before cannot be reached
    query_ids: list[str]  # in the order of all per-query arrays
    document_ids: list[str]  # in the order of all per-document arrays
    is_relevant: Mask  # whether a document is relevant to any query, also outside the data, (m,)
    queries: NormStatistics
    documents: NormStatistics
    # Cohen's d of the norms of documents, relevant to a query against relevant to none: plain, and
    # with the logarithm of the number of words regressed out; nan of fewer than two on a side
    cohens_d: float
    adjusted_cohens_d: float
    exponent: ExponentCurve
    tried: Options[float] = field(metadata=UNSAVED)  # the exponent instead of the present one
    # of the directions of the documents
    isoscore: float
    isoscore_ceiling: float  # IsoScore that an isotropic sample of this size reaches
    mean_cosine: float  # over all pairs; 0 for random directions
    cells: list[CompressionCell]  # the formats of CompressionEvaluator
    recommendations: list[Recommendation]
    # arguments of `diagnose`
    min_gain: float
    tolerance: float
    seed: int

    def __getitem__(self, name: str) -> Recommendation:
        return {r.name: r for r in self.recommendations}[name]

    def tables(self) -> list[str]:
        is_new = self.recommended != self.similarity
        changed = f" (recommended: {self.recommended})" if is_new else ""
        place = f" on {self.data}" if self.data else ""
        facts = (
            f"{self.model}{place}, scored by {self.similarity}{changed}: "
            f"{len(self.query_ids):,} queries, {len(self.document_ids):,} documents "
            f"({self.is_relevant.sum():,} answer a query), "
            f"{self.cells[0].dim} dimensions."
        )
        verdicts = (DO, NO_BENEFIT, NOT_ENOUGH)
        ordered = sorted(self.recommendations, key=lambda r: verdicts.index(r.verdict))
        legend = (
            "The exponent: do, if the 95 % interval lies above 0 and reaches"
            f" {100 * self.min_gain:g} points; no benefit expected, if it excludes such a gain."
            f" Storage, scored by {self.recommended}: do, if the interval of the cost lies within"
            " what is allowed; no benefit expected, if it lies above. Not enough data: neither."
        )
        return [facts, *map(str, ordered), legend]

    @property
    def systems(self) -> list[System]:
        """The model at the present exponent, and at those that the other folds choose."""
        curve = self.exponent
        rankings = {curve.present: curve.at(curve.present)}
        rankings[self.tried.value] = self.tried.held_out
        return [
            System(f"document exponent {exponent:.2g}", ranking)
            for exponent, ranking in rankings.items()
        ]

    @property
    def measurements(self) -> list[Table]:
        """Norms, nDCG@10 by exponent, storage and directions."""
        title = f"nDCG@10 by dimensions and precision, measured with {self.recommended}. Stars mark"
        storage = replace(
            summary(self.cells, self.tolerance), title=f"{title} the best at their size."
        )
        return [self._norms(), self._exponents(), storage, self._directions()]

    def _norms(self) -> Table:
        sides = (self.queries, self.documents)
        rows: list[list[object]] = [
            ["mean", *(side.mean for side in sides)],
            ["coefficient of variation (CV)", *(side.cv for side in sides)],
        ]
        for i, share in enumerate(QUANTILES):
            rows.append([f"{share:.0%} quantile", *(side.quantiles[i] for side in sides)])
        rows += [
            ["rank correlation with the number of words", *(x.length_spearman for x in sides)],
            ["Cohen's d, documents that answer a query or none", None, self.cohens_d],
            ["the same, with the words regressed out", None, self.adjusted_cohens_d],
        ]
        title = (
            "Norms of raw embeddings. With a CV below about 0.05 the norm is noise, from 0.1 it "
            "may carry information (arXiv 2602.09229, App. M)."
        )
        note = "" if self.has_magnitude else NO_MAGNITUDE
        if self.has_magnitude and self.normalizes:
            note = "The model ends in Normalize: these norms come from before it and are not used."
        return Table(["measure", "queries", "documents"], rows, title, note)

    def _exponents(self) -> Table:
        curve = self.exponent
        today = curve.at(curve.present).ndcg
        marks = {self.tried.value: "tried", curve.present: "today"}
        rows = []
        for exponent, values in zip(curve.exponents, curve.per_query, strict=True):
            gain = judge(values - today, num_samples=2000)
            rows.append([f"{exponent:.2g}", values.mean(), gain, marks.get(exponent, "")])
        title = f"nDCG@10 of all {len(self.query_ids):,} queries by document exponent"
        return Table(["exponent", "nDCG@10", "minus today [95 %]", ""], rows, title)

    def _directions(self) -> Table:
        rows = [
            ["IsoScore", self.isoscore, "1: variance is even over all dimensions, 0: one line"],
            ["highest IsoScore", self.isoscore_ceiling, "of an isotropic sample of this size"],
            ["mean cosine", self.mean_cosine, "over all pairs; 0 for random directions"],
        ]
        title = (
            f"Directions of {len(self.document_ids):,} documents in {self.cells[0].dim} dimensions"
        )
        return Table(["measure", "value", "meaning"], rows, title)
