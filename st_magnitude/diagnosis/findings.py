"""The numbers and recommendations that `diagnose` returns, and the JSON file that keeps them."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from st_magnitude._json import from_plain, parse
from st_magnitude.evaluation.calibration import ExponentCurve
from st_magnitude.evaluation.compression import CompressionCell
from st_magnitude.result import to_plain

__all__ = [
    "DO",
    "NOT_ENOUGH",
    "NO_BENEFIT",
    "BaselineComparison",
    "Diagnosis",
    "EffectSize",
    "ExponentChoice",
    "Geometry",
    "Hubness",
    "NormStatistics",
    "Provenance",
    "Recommendation",
    "TaskSymmetry",
]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Interval = tuple[float, float, float]  # gain, low, high

DO, NO_BENEFIT, NOT_ENOUGH = "do", "no benefit expected", "not enough data"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class NormStatistics:
    """Raw norms of one role.

    Attributes:
        values: Norm of every text, (n,).
        words: Number of words of every text, (n,).
        mean: Mean of the norms.
        cv: Coefficient of variation, the standard deviation over the mean. Below about 0.05 the norm is noise, from 0.1
            it may carry information (arXiv 2602.09229, App. M).
        quantiles: Norms at 5, 25, 50, 75 and 95 %.
        length_spearman: Rank correlation of the norm with the number of words; nan where either is constant.
        cv_ratio: delta-CV, the CV over that of the baseline; None without a baseline.
    """

    values: Array
    words: Array
    mean: float
    cv: float
    quantiles: tuple[float, ...]
    length_spearman: float
    cv_ratio: float | None = None


@dataclass(frozen=True)
class EffectSize:
    """Cohen's d of document norms, pooled by degrees of freedom.

    Attributes:
        d: The effect size; nan where it is undefined.
        without_length: The same after the logarithm of the number of words has been regressed out of the norms.
        undefined: Why the effect size is undefined; empty where it is defined.
    """

    d: float = math.nan
    without_length: float = math.nan
    undefined: str = ""


@dataclass(frozen=True)
class TaskSymmetry:
    """Whether queries and documents swap roles. See `task_symmetry` for the definition.

    Attributes:
        verdict: ``"symmetric"``, ``"asymmetric"`` or ``"unclear"``.
        reason: The rule that decided.
        queries_in_corpus: Share of the queries whose text is also a document.
        answers_that_ask: Share of the relevant documents whose text is also a query.
        mutual: Share of the judgments between such texts that are judged in the other direction too; nan if there are
            no such judgments.
        length_auc: Probability that a relevant document has more words than a query; 0.5 means equal lengths.
        own_text_unjudged: Share of the queries whose own text is a document that is not judged relevant. Cosine ranks
            that document first.
    """

    verdict: str
    reason: str
    queries_in_corpus: float
    answers_that_ask: float
    mutual: float
    length_auc: float
    own_text_unjudged: float


@dataclass(frozen=True)
class ExponentChoice:
    """nDCG@10 by document exponent. One half of the queries chooses an exponent, the other half measures it.

    Attributes:
        curve: nDCG@10 of all queries, for plots. Its own ``best`` was chosen on all of them.
        present: Document exponent that the model is scored with today.
        chose: Whether a query belongs to the half that chooses, (n,).
        candidate: The best exponent other than the present one on the choosing half; ties go to the one nearest cosine.
        gain: nDCG@10 at the candidate minus nDCG@10 at present, on the measuring half: (gain, low, high).
        magnitude_candidate: The best exponent below 1 on the choosing half.
        gain_of_magnitude: nDCG@10 at that exponent minus nDCG@10 by cosine, on the measuring half: (gain, low, high).
    """

    curve: ExponentCurve
    present: float
    chose: Mask
    candidate: float
    gain: Interval
    magnitude_candidate: float
    gain_of_magnitude: Interval

    def ndcg(self, exponent: float) -> Array:
        """nDCG@10 of every query at an exponent of the curve: (n,)."""
        return self.curve.per_query[nearest(self.curve.exponents, exponent)]


@dataclass(frozen=True)
class Geometry:
    """Directions of the documents (all embeddings normalized) and of the relevant pairs.

    Attributes:
        dim: Dimensions of the embeddings.
        num_documents: Number of documents.
        intrinsic_dimension: Number of principal components that hold 95 % of the variance.
        is_sample_limited: Whether there are fewer than 4 documents per dimension. The size of the sample then limits
            the intrinsic dimension.
        isoscore: IsoScore of the documents.
        isoscore_ceiling: IsoScore that an isotropic sample of this size reaches.
        mean_cosine: Mean cosine over all pairs of documents; 0 for random directions.
        uniformity: Uniformity of at most 5,000 documents.
        alignment: Alignment of the relevant pairs.
        explained: Share of the variance in the first 1, 2, ... principal components of at most 5,000 documents, (dim,).
    """

    dim: int
    num_documents: int
    intrinsic_dimension: int
    is_sample_limited: bool
    isoscore: float
    isoscore_ceiling: float
    mean_cosine: float
    uniformity: float
    alignment: float
    explained: Array


@dataclass(frozen=True)
class Hubness:
    """N_10: the number of queries that have a document in their top 10.

    Attributes:
        skewness: Skewness of N_10 over all documents; large where few documents are in most top 10s, nan where N_10 is
            constant.
        by_chance: Skewness if every top 10 were drawn at random, (1 - 2p) / sqrt(n p (1 - p)) with p = 10 / m.
        most: The largest N_10 as a share of the queries.
        counts: Number of documents with N_10 = 0, 1, ..., up to the largest.

    Source: Radovanović et al., Hubs in Space, JMLR 2010, Eq. 1.
    """

    skewness: float
    by_chance: float
    most: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class BaselineComparison:
    """A baseline beside the model.

    Attributes:
        similarity: Name of the similarity that the baseline is scored with.
        query_cv: Coefficient of variation of its raw query norms.
        document_cv: Coefficient of variation of its raw document norms.
        ndcg: nDCG@10 of every query, (n,).
        gain: nDCG@10 of the model minus nDCG@10 of the baseline, on all queries: (gain, low, high).
    """

    similarity: str
    query_cv: float
    document_cv: float
    ndcg: Array
    gain: Interval


@dataclass(frozen=True)
class Recommendation:
    """One possible change, and whether the measurements support it.

    Attributes:
        name: Short fixed name: ``"exponent"``, ``"training"``, ``"pruning"``, ``"half"``, ``"quarter"``, ``"1 bit"``,
            ``"norm beside bits"``, ``"isotropy"`` or ``"baseline"``.
        action: The change in question.
        verdict: ``"do"``: the interval of the gain lies above 0 and reaches a gain worth having. ``"no benefit
            expected"``: the interval excludes a gain worth having. ``"not enough data"``: the interval does neither.
        choice: What to use.
        reason: The reason in words.
        scoring: The scoring that the change was measured with: the one that ``"exponent"`` recommends.
        gain: (gain, low, high), a 95 % bootstrap interval over queries that had no part in choosing the change; None if
            nothing could be measured.
        gain_of: The difference that the gain is.
        num_queries: Number of queries behind the interval.
        evidence: The numbers behind the recommendation, by name.
    """

    name: str
    action: str
    verdict: str
    choice: str
    reason: str
    scoring: str
    gain: Interval | None = None
    gain_of: str = ""
    num_queries: int = 0
    evidence: dict[str, float] = field(default_factory=dict)

    @property
    def measured(self) -> str:
        """The gain with its interval, the number of queries and the scoring, in one line; empty without a gain."""
        if self.gain is None:
            return ""
        gain = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*self.gain)
        return f"{self.gain_of}: {gain} on {self.num_queries:,} queries. Scoring: {self.scoring}."

    def __str__(self) -> str:
        lines = [self.measured, self.reason, f"-> {self.choice}"]
        parts = [part for line in lines for part in textwrap.wrap(line, 75, break_long_words=False)]
        title = textwrap.wrap(f"[{self.verdict}] {self.action}", 80, subsequent_indent=" " * 5, break_long_words=False)
        return "\n     ".join(["\n".join(title), *parts])


@dataclass(frozen=True)
class Provenance:
    """How a diagnosis was made.

    Attributes:
        title: Title that the caller gave; may be empty.
        model: Hub id or the end of the path of the model, as far as the model knows it.
        baseline: The same of the baseline; empty without a baseline.
        seed: Seed of the halves, the samples and the bootstrap.
        num_samples: Bootstrap resamples.
        min_gain: Smallest gain in nDCG@10 that is worth a change.
        tolerance: Share of nDCG@10 that smaller storage may cost.
        versions: Versions of st-magnitude and of the packages that it computes with, by name.
    """

    title: str
    model: str
    baseline: str
    seed: int
    num_samples: int
    min_gain: float
    tolerance: float
    versions: dict[str, str]


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    ``print(diagnosis)`` shows the recommendations in a terminal of 80 columns, and ``print(diagnosis.text())`` all
    measurements as well. `st_magnitude.diagnosis.report.write_report` makes an
    HTML page with figures, also from the JSON file that ``save(path)`` writes and ``load(path)`` reads.

    Attributes:
        similarity: Name of the similarity that the model is scored with today.
        recommended: Name of the similarity that the recommendation ``"exponent"`` advises; today's if it advises no
            change. All other recommendations and ``cells`` are measured with it.
        normalizes: Whether the model ends in Normalize. The norms here come from before it and are not used today.
        has_magnitude: False if all norms are 1 and the embeddings before the normalization cannot be reached.
        query_ids: Ids of the queries, in the order of all per-query arrays.
        document_ids: Ids of the documents, in the order of all per-document arrays.
        is_relevant: Whether a document is relevant to any query, including queries outside of the data, (m,).
        queries: Raw norms of the queries.
        documents: Raw norms of the documents.
        effects: Cohen's d of document norms under ``"corpus"``, ``"hard"`` and ``"pairs"``.
        exponent: nDCG@10 by document exponent, and the exponent that one half of the queries chose.
        geometry: Directions of the documents.
        hubness: Hubness under ``"cosine"`` and ``"dot"``.
        cells: Storage, as CompressionEvaluator measures it.
        symmetry: Symmetry of the task.
        baseline: Comparison with the baseline; None without one.
        recommendations: All recommendations; ``diagnosis["exponent"]`` finds one by name.
        provenance: How the diagnosis was made.
    """

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
    hubness: dict[str, Hubness]
    cells: list[CompressionCell]
    symmetry: TaskSymmetry
    baseline: BaselineComparison | None
    recommendations: list[Recommendation]
    provenance: Provenance

    def __getitem__(self, name: str) -> Recommendation:
        for recommendation in self.recommendations:
            if recommendation.name == name:
                return recommendation
        known = ", ".join(repr(r.name) for r in self.recommendations)
        raise KeyError(f"There is no recommendation called {name!r}; use one of {known}.")

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain JSON values: arrays become lists, nan becomes None, and infinity becomes "inf"."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Diagnosis:
        """The diagnosis that `to_dict` was called on.

        Raises:
            ValueError: If an entry is missing, has the wrong type, or its shape does not fit the other entries.
        """
        found = from_plain(cls, entries)
        _check_shapes(found)
        return found

    def save(self, path: str | Path) -> None:
        """Write a JSON file. Missing folders are created, and an existing file is replaced."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Diagnosis:
        """Read a file that `save` or ``st-magnitude diagnose --output`` wrote. No model is needed.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If the file is not a diagnosis, or one of another version.
        """
        try:
            return cls.from_dict(parse(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # includes the errors of JSON and of Unicode
            raise ValueError(
                f"{path} is not a diagnosis of this version of st-magnitude ({error}): write it again with "
                '"st-magnitude diagnose MODEL --data DATA --output FOLDER" or diagnosis.save(path).'
            ) from None

    def __str__(self) -> str:
        return self.text(verbose=False)

    def text(self, verbose: bool = True) -> str:
        """The recommendations in 80 columns, followed by all measurements unless ``verbose`` is False."""
        from st_magnitude.diagnosis.terminal import page  # which imports this module

        return page(self, verbose)


def nearest(exponents: Array, exponent: float) -> int:
    """Index of the exponent nearest to a given one."""
    return int(np.abs(exponents - exponent).argmin())


def _check_shapes(d: Diagnosis) -> None:
    n, m, curve = len(d.query_ids), len(d.document_ids), d.exponent.curve
    shapes = {
        "is_relevant": (d.is_relevant, (m,)),
        "queries.values": (d.queries.values, (n,)),
        "queries.words": (d.queries.words, (n,)),
        "documents.values": (d.documents.values, (m,)),
        "documents.words": (d.documents.words, (m,)),
        "exponent.chose": (d.exponent.chose, (n,)),
        "exponent.curve.per_query": (curve.per_query, (len(curve.exponents), n)),
        "geometry.explained": (d.geometry.explained, (d.geometry.dim,)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, not {shape}")
