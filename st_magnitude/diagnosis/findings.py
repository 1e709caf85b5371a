"""What `diagnose` finds: figures, recommendations, and the file that keeps them. Reading it needs no model."""

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

from st_magnitude._json import from_plain, parse, to_plain
from st_magnitude.evaluation.calibration import ExponentCurve
from st_magnitude.evaluation.compression import CompressionCell

__all__ = [
    "DO",
    "NOT_ENOUGH",
    "NO_BENEFIT",
    "BaselineComparison",
    "Diagnosis",
    "EffectSize",
    "Geometry",
    "Hubness",
    "NormStatistics",
    "Provenance",
    "ReadOut",
    "Recommendation",
    "TaskSymmetry",
]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Interval = tuple[float, float, float]  # gain, low, high

DO, NO_BENEFIT, NOT_ENOUGH = "do", "no benefit expected", "not enough data"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
EFFECTS = {
    "corpus": "relevant to a query - to none",
    "hard": "relevant - 10 best irrelevant",
    "pairs": "relevant pairs - all others",
}
RESCORED = {"none": "", "query": " rescored", "norm": " rescored with norm"}


@dataclass(frozen=True)
class NormStatistics:
    """Raw norms of one role.

    Attributes:
        values: The norms, (n,).
        words: Words of the texts, (n,).
        mean, cv: Mean and coefficient of variation. Below about 0.05 length is noise, from 0.1 it may mean something
            (arXiv 2602.09229, App. M).
        quantiles: At 5, 25, 50, 75 and 95 %.
        length_spearman: Rank correlation of norm and number of words; nan where either is constant.
        cv_ratio: delta-CV, the CV over that of the baseline; None without one.
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
    """Cohen's d of document norms, pooled by degrees of freedom, and d with the log number of words regressed out.

    Attributes:
        d, without_length: The two; nan where undefined.
        undefined: Why; empty where defined.
    """

    d: float = math.nan
    without_length: float = math.nan
    undefined: str = ""


@dataclass(frozen=True)
class TaskSymmetry:
    """Do queries and documents swap roles? See `task_symmetry` for the definition.

    Attributes:
        verdict: ``"symmetric"``, ``"asymmetric"`` or ``"unclear"``.
        reason: The rule that decided.
        queries_in_corpus: Share of the queries whose text is a document too.
        answers_that_ask: Share of the relevant documents whose text is a query too.
        mutual: Of the judgments between such texts, the share that is judged in the other direction too; nan if none.
        length_auc: Probability that a relevant document has more words than a query; 0.5 is alike.
        own_text_unjudged: Share of the queries whose own text is a document and not judged relevant: cosine puts it
            first.
    """

    verdict: str
    reason: str
    queries_in_corpus: float
    answers_that_ask: float
    mutual: float
    length_auc: float
    own_text_unjudged: float


@dataclass(frozen=True)
class ReadOut:
    """nDCG@10 over the document exponent: chosen on one half of the queries, measured on the other.

    Attributes:
        curve: Over all queries, for plots; its own ``best`` was chosen on all of them.
        present: The document exponent that the model is read out with today.
        chose: Which queries chose, (n,); the others measured.
        candidate: The best other exponent by the queries that chose; of equal ones the nearest to cosine.
        gain: nDCG@10 at the candidate less that at present, on the others: (gain, low, high).
        length_candidate: The best exponent below 1 by the queries that chose.
        gain_of_length: The same of that exponent, less that of cosine.
    """

    curve: ExponentCurve
    present: float
    chose: Mask
    candidate: float
    gain: Interval
    length_candidate: float
    gain_of_length: Interval

    def ndcg(self, exponent: float) -> Array:
        """nDCG@10 of every query at an exponent of the curve: (n,)."""
        return self.curve.per_query[nearest(self.curve.exponents, exponent)]


@dataclass(frozen=True)
class Geometry:
    """Directions of the documents (all of them normalised), and of the relevant pairs.

    Attributes:
        dim, num_documents: The shape.
        intrinsic_dimension: Principal components behind 95 % of the variance.
        is_sample_limited: Fewer than 4 documents a dimension: the sample rather than the space sets that number.
        isoscore, isoscore_ceiling: And what an isotropic sample of the size reaches.
        mean_cosine: Over all pairs of documents; 0 is what random directions have.
        uniformity: Of at most 5,000 documents.
        alignment: Of the relevant pairs.
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
    """N_10, in how many of the queries' top 10 a document is.

    Attributes:
        skewness: Of N_10 over all documents; large where few documents are everywhere. nan where all are equal.
        by_chance: The skewness if each top 10 were drawn at random, (1 - 2p) / sqrt(n p (1 - p)) with p = 10 / m.
        most: The largest N_10 as a share of the queries.
        counts: How many documents have N_10 = 0, 1, ..., up to the largest.

    Source: Radovanović et al., Hubs in Space, JMLR 2010, Eq. 1.
    """

    skewness: float
    by_chance: float
    most: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class BaselineComparison:
    """The baseline beside the model, each as it is read out today.

    Attributes:
        similarity: Name of the baseline's.
        query_cv, document_cv: Of its raw norms.
        ndcg: Its nDCG@10 of every query, (n,).
        gain: That of the model less it, on all queries.
    """

    similarity: str
    query_cv: float
    document_cv: float
    ndcg: Array
    gain: Interval


@dataclass(frozen=True)
class Recommendation:
    """One change, and whether the figures carry it.

    Attributes:
        name: Short and fixed: ``"read-out"``, ``"training"``, ``"pruning"``, ``"half"``, ``"quarter"``, ``"1 bit"``,
            ``"norm beside bits"``, ``"isotropy"``, ``"baseline"``.
        action: The change in question.
        verdict: ``"do"``: the interval lies above 0, and reaches a gain worth having. ``"no benefit expected"``: it
            excludes a gain worth having. ``"not enough data"``: neither.
        choice: What to use then.
        reason: In words.
        gain: (gain, low, high), 95 % bootstrap over queries that had no part in choosing the change; None if none could
            be measured.
        gain_of: What the gain is a difference of.
        num_queries: Behind the interval.
        evidence: The figures.
    """

    name: str
    action: str
    verdict: str
    choice: str
    reason: str
    gain: Interval | None = None
    gain_of: str = ""
    num_queries: int = 0
    evidence: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"[{self.verdict}] {self.action}"]
        if self.gain is not None:
            lines.append(
                "{}: {:+.3f} [{:+.3f}, {:+.3f}] on {} queries".format(self.gain_of, *self.gain, self.num_queries)
            )
        lines += [*textwrap.wrap(self.reason, 100), f"-> {self.choice}"]
        return "\n     ".join(lines)


@dataclass(frozen=True)
class Provenance:
    """How a diagnosis was made.

    Attributes:
        title: What the caller called it; may be empty.
        model, baseline: Hub id or the end of a path, as far as the model knows it; empty without a baseline.
        seed, num_samples, min_gain, tolerance: As in `diagnose`.
        versions: Of st-magnitude and what it computes with, by name.
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
    """What `diagnose` found.

    ``print(diagnosis)`` is a page to read; `st_magnitude.diagnosis.report.write_report` makes one with pictures, also
    of the JSON file that ``save(path)`` writes and ``load(path)`` reads.

    Attributes:
        similarity: Name of the similarity that the model is read out with today.
        normalizes: The model ends in Normalize: the norms here are from before it, and not in use today.
        has_length: False if all norms are 1 and nothing before can be reached.
        query_ids, document_ids: In the order of all rows here.
        is_relevant: Whether a document is relevant to any query, (m,).
        queries, documents: Raw norms.
        effects: Cohen's d of document norms: ``"corpus"``, ``"hard"`` and ``"pairs"``.
        read_out: The exponent curve.
        geometry: Of the documents.
        hubness: Under ``"cosine"`` and ``"dot"``.
        cells: Storage, as of CompressionEvaluator.
        symmetry: Of the task.
        baseline: None without one.
        recommendations: A list, of which ``diagnosis["read-out"]`` finds one by name.
        provenance: How it was made.
    """

    similarity: str
    normalizes: bool
    has_length: bool
    query_ids: list[str]
    document_ids: list[str]
    is_relevant: Mask
    queries: NormStatistics
    documents: NormStatistics
    effects: dict[str, EffectSize]
    read_out: ReadOut
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
        raise KeyError(f"No recommendation is called {name!r}: {[r.name for r in self.recommendations]}.")

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it: arrays as lists, nan as None, infinity as "inf"."""
        return to_plain(self)

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> Diagnosis:
        """The diagnosis that `to_dict` was made from.

        Raises:
            ValueError: If an entry is missing, is not of its kind, or does not have the length of the others.
        """
        found = from_plain(cls, entries)
        _check_lengths(found)
        return found

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, in a folder that is made where there is none; replaces the file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Diagnosis:
        """Reads what `save` or ``st-magnitude diagnose --output`` wrote. No model is needed.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it holds something else, or a diagnosis of another version.
        """
        try:
            return cls.from_dict(parse(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:  # JSON's and Unicode's are, too
            raise ValueError(
                f"{path} is not a diagnosis of this version of st-magnitude ({error}): write it again with "
                '"st-magnitude diagnose MODEL --data DATA --output FOLDER" or diagnosis.save(path).'
            ) from None

    def __str__(self) -> str:
        return _page(self)


def nearest(exponents: Array, exponent: float) -> int:
    """Where in the exponents the one nearest to this is."""
    return int(np.abs(exponents - exponent).argmin())


def _check_lengths(d: Diagnosis) -> None:
    n, m, curve = len(d.query_ids), len(d.document_ids), d.read_out.curve
    shapes = {
        "is_relevant": (d.is_relevant, (m,)),
        "queries.values": (d.queries.values, (n,)),
        "queries.words": (d.queries.words, (n,)),
        "documents.values": (d.documents.values, (m,)),
        "documents.words": (d.documents.words, (m,)),
        "read_out.chose": (d.read_out.chose, (n,)),
        "read_out.curve.per_query": (curve.per_query, (len(curve.exponents), n)),
        "geometry.explained": (d.geometry.explained, (d.geometry.dim,)),
    }
    for name, (array, shape) in shapes.items():
        if array.shape != shape:
            raise ValueError(f"{name} has the shape {array.shape}, not {shape}")


def _page(d: Diagnosis) -> str:
    """The diagnosis as a page for a terminal, at most 120 columns wide."""
    shape, curve, task = d.geometry, d.read_out.curve, d.symmetry
    n, m = len(d.query_ids), len(d.document_ids)
    lines = [
        f"{n:,} queries, {m:,} documents ({d.is_relevant.sum():,} relevant to some query), {shape.dim} dimensions, "
        f"read out by {d.similarity}",
        "",
        *in_short(d),
        "",
        "Norms before Normalize: they are not in use today" if d.normalizes else "Norms",
        f"{'':12}{'mean':>8}{'CV':>7}" + "".join(f"{q:>8.0%}" for q in QUANTILES) + "   Spearman with words",
    ]
    for role, s in (("queries", d.queries), ("documents", d.documents)):
        ratio = "" if s.cv_ratio is None else f"   CV {s.cv_ratio:.2f} x the baseline's"
        quantiles = "".join(f"{q:8.3f}" for q in s.quantiles)
        words = "undefined" if math.isnan(s.length_spearman) else f"{s.length_spearman:+.2f}"
        lines.append(f"  {role:10}{s.mean:8.3f}{s.cv:7.3f}{quantiles}   {words}{ratio}")
    lines += ["", f"Cohen's d of document norms{'':21}d   length regressed out"]
    for name, effect in d.effects.items():
        figures = f"{effect.d:+7.2f}   {effect.without_length:+.2f}"
        lines.append(
            f"  {name:7}{EFFECTS[name]:34}" + (f"undefined: {effect.undefined}" if effect.undefined else figures)
        )
    shown = [i for i, g in enumerate(curve.exponents) if min(abs(g - s) for s in np.linspace(0, 1, 6)) < 1e-9]
    best, gain = d.read_out.candidate, d.read_out.gain
    lines += [
        "",
        "nDCG@10 by document exponent (0 is dot, 1 is cosine), all queries",
        "  " + "".join(f"{curve.exponents[i]:>8.1f}" for i in shown),
        "  "
        + "".join(f"{curve.ndcg[i]:>8.3f}" for i in shown)
        + f"   today {d.read_out.ndcg(d.read_out.present).mean():.3f}",
        f"  {d.read_out.chose.sum()} queries chose {best:.2g}; on the other {(~d.read_out.chose).sum()} it gains "
        + "{:+.3f} [{:+.3f}, {:+.3f}] on today's".format(*gain),
    ]
    limited = " (limited by the sample)" if shape.is_sample_limited else ""
    hubs = [
        f"{name:7} skewness {hub.skewness:5.1f} ({hub.by_chance:.1f} by chance), the commonest in {hub.most:.0%}"
        for name, hub in d.hubness.items()
    ]
    directions = [
        f"intrinsic dimension {shape.intrinsic_dimension} of {shape.dim}{limited}",
        f"IsoScore {shape.isoscore:.3f}, at most {shape.isoscore_ceiling:.3f}; mean cosine {shape.mean_cosine:.3f}",
        f"uniformity {shape.uniformity:.2f}, alignment of relevant pairs {shape.alignment:.2f}",
    ]
    lines += ["", "Directions of the documents", *(f"  {line}" for line in directions)]
    lines += ["", "Hubs: in how many of the queries' top 10 a document is", *(f"  {line}" for line in hubs)]
    lines += ["", "Storage"]
    lines += [
        f"  {c.dim:>5} {c.precision + RESCORED[c.rescoring]:26}{c.bytes_per_document:>6} bytes  nDCG@10 {c.ndcg:.3f}"
        f"  {c.retention:7.1%}"
        for c in d.cells
    ]
    lines += [
        "",
        f"Task: {task.verdict}. {task.reason[:1].upper()}{task.reason[1:]}.",
        f"  {task.queries_in_corpus:.0%} of the queries are documents too, {task.answers_that_ask:.0%} of the answers "
        f"queries; an answer is longer than a query in {task.length_auc:.0%}",
    ]
    if d.baseline is not None:
        b = d.baseline
        lines += [
            "",
            f"Baseline, read out by {b.similarity}: nDCG@10 {b.ndcg.mean():.3f}, "
            f"CV of norms {b.query_cv:.3f} (queries), {b.document_cv:.3f} (documents)",
        ]
    lines += ["", "Recommendations (95 % bootstrap intervals, over queries that did not choose what is measured)"]
    lines += [f"{i}. {r}" for i, r in enumerate(d.recommendations, 1)]
    return "\n".join(line.rstrip() for line in lines)


def in_short(d: Diagnosis) -> list[str]:
    """What to do, and the names of what not to: a line a verdict."""
    names = {
        verdict: [r for r in d.recommendations if r.verdict == verdict] for verdict in (DO, NO_BENEFIT, NOT_ENOUGH)
    }
    lines = [f"Do: {r.choice}  ({r.name})" for r in names[DO]] or ["Nothing to do that these figures carry."]
    for verdict in (NO_BENEFIT, NOT_ENOUGH):
        if names[verdict]:
            lines.append(f"{verdict[0].upper()}{verdict[1:]}: {', '.join(r.name for r in names[verdict])}")
    return lines
