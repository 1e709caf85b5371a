"""What a change would gain: one function per change, each of which returns numbers and a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    Array,
    BaselineComparison,
    ExponentChoice,
    Geometry,
    Interval,
    Mask,
    NormStatistics,
    TaskSymmetry,
)
from st_magnitude.diagnosis.measure import Bootstrap
from st_magnitude.evaluation.compression import CompressionCell, compression_cells, search_compressed
from st_magnitude.similarity import COSINE, DOT, Similarity, safe_norm

__all__ = [
    "MIN_QUERIES",
    "Bench",
    "Check",
    "baseline",
    "exponent",
    "isotropy",
    "norm_beside_bits",
    "pruning",
    "smaller",
    "storage",
    "training",
    "verdict_of",
]

MIN_QUERIES = 25  # behind a verdict: percentile intervals of fewer queries are too short
DROPPED_SHARES = (0.25, 0.5, 0.75)
Stored = dict[tuple[int, str, str], Array]  # (dim, precision, rescoring) -> nDCG@10 of every query


@dataclass(frozen=True)
class Check:
    """The measured effect of one change."""

    verdict: str  # see `verdict_of`
    gain: Interval | None  # in nDCG@10; None if it could not be measured
    num_queries: int
    evidence: dict[str, float]  # numbers that explain the gain


@dataclass(frozen=True)
class Bench:
    """What all checks measure with."""

    task: EncodedTask
    is_relevant: Mask  # whether a document is relevant to any query, also to one outside of the task, (m,)
    choice: ExponentChoice
    scoring: Similarity  # that every change is measured with
    has_magnitude: bool  # whether the norms differ
    interval: Bootstrap  # paired, of the difference of two arrays of nDCG@10
    min_gain: float  # smallest gain that is worth a change
    tolerance: float  # share of nDCG@10 that smaller storage may cost

    @property
    def measuring(self) -> Mask:
        """The queries that chose nothing, (n,)."""
        return ~self.choice.chose

    @property
    def full(self) -> Array:
        """nDCG@10 of every query with the whole index in float32, (n,)."""
        return self.choice.ndcg(self.scoring.exponents[1])

    def check(self, values: Array, reference: Array, min_gain: float, evidence: dict[str, float]) -> Check:
        """Compares two arrays of nDCG@10 of the same queries."""
        gain = self.interval(values, reference)
        return Check(verdict_of(gain, len(values), min_gain), gain, len(values), evidence)


def verdict_of(gain: Interval, num_queries: int, min_gain: float) -> str:
    """The verdict that an interval supports.

    Example:
        >>> [verdict_of(gain, 100, 0.02) for gain in ((0.05, 0.02, 0.08), (0.0, -0.01, 0.01), (0.05, -0.01, 0.11))]
        ['do', 'no benefit expected', 'not enough data']
    """
    if num_queries < MIN_QUERIES:
        return NOT_ENOUGH
    if gain[2] < min_gain:
        return NO_BENEFIT
    return DO if gain[1] > 0 else NOT_ENOUGH


def exponent(choice: ExponentChoice, symmetry: TaskSymmetry, has_magnitude: bool, min_gain: float) -> Check:
    """Another document exponent against today's."""
    if not has_magnitude:
        return Check(NOT_ENOUGH, None, 0, {})
    measuring = ~choice.chose
    verdict = verdict_of(choice.gain, int(measuring.sum()), min_gain)
    if verdict == DO and symmetry.own_text_unjudged > 0.1:
        verdict = NOT_ENOUGH  # cosine ranks a query's own text first, where it is not judged relevant
    evidence = {
        "ndcg_present": float(choice.ndcg(choice.present)[measuring].mean()),
        "ndcg_candidate": float(choice.ndcg(choice.candidate)[measuring].mean()),
        "present": choice.present,
        "candidate": choice.candidate,
    }
    return Check(verdict, choice.gain, int(measuring.sum()), evidence)


def training(bench: Bench, symmetry: TaskSymmetry) -> Check:
    """The present norms against cosine: used by dot on a symmetric task, else at the best exponent below 1."""
    choice, number = bench.choice, int(bench.measuring.sum())
    cosine, dot = choice.ndcg(1.0), choice.ndcg(0.0)
    evidence = {
        "ndcg_cosine": float(cosine.mean()),
        "ndcg_dot": float(dot.mean()),
        "never_relevant": float((~bench.is_relevant).mean()),
        "magnitude_candidate": choice.magnitude_candidate,
    }
    if symmetry.verdict == "symmetric":
        return bench.check(dot, cosine, bench.min_gain, evidence)
    if not bench.has_magnitude:
        return Check(NOT_ENOUGH, None, 0, evidence)
    gain = choice.gain_of_magnitude
    return Check(verdict_of(gain, number, bench.min_gain), gain, number, evidence)


def pruning(bench: Bench, documents: NormStatistics) -> Check:
    """The index without the documents of the smallest norms; the share to drop is chosen on one half of the queries."""
    if not bench.has_magnitude:
        return Check(NOT_ENOUGH, None, 0, {})
    chose, measuring, full, floor = bench.choice.chose, bench.measuring, bench.full, 1 - bench.tolerance
    kept = {share: _largest(documents.values, 1 - share) for share in DROPPED_SHARES}
    pruned = {share: _ndcg_among(bench, columns) for share, columns in kept.items()}
    passing = [share for share in kept if pruned[share][chose].mean() >= floor * full[chose].mean()]
    share = max(passing, default=DROPPED_SHARES[0])
    by_words = documents.words * (-1 if documents.length_spearman < 0 else 1)
    answers = np.flatnonzero(bench.is_relevant)
    evidence = {
        "share": share,
        "ndcg_full": float(full[measuring].mean()),
        "ndcg_pruned": float(pruned[share][measuring].mean()),
        "ndcg_pruned_by_words": float(_ndcg_among(bench, _largest(by_words, 1 - share))[measuring].mean()),
        "answers_kept": float(np.isin(answers, kept[share]).mean()),
    }
    return bench.check(pruned[share][measuring], floor * full[measuring], 0.0, evidence)


def _ndcg_among(bench: Bench, columns: NDArray[np.int64]) -> Array:
    return bench.task.ndcg(bench.task.top(bench.scoring, among=columns))


def _largest(values: Array, share: float) -> NDArray[np.int64]:
    """Columns of the given share of the values, the largest, in rising order; neither all nor none of them."""
    number = min(max(round(share * len(values)), 1), len(values) - 1)
    return np.sort(np.argsort(-values, kind="stable")[:number])


def storage(bench: Bench) -> tuple[list[CompressionCell], Stored]:
    """nDCG@10 in all, half and a quarter of the dimensions and at one bit per dimension.

    The entry ``(D, "binary", "candidate")``, which no cell shows, has the norm beside the bits at the best exponent
    below 1.
    """
    dim = bench.task.queries.shape[1]

    def search(prefix: int, precision: str, similarity: Similarity) -> dict[str, Array]:
        task = bench.task.prefix(prefix)
        q = similarity.query(task.queries.double()).float()
        d = similarity.document(task.documents.double()).float()
        return {kind: task.ndcg(top) for kind, top in search_compressed(q, d, precision, 100, similarity).items()}

    stored: Stored = {}
    for prefix in (dim, dim // 2, dim // 4):
        if prefix:
            stored[prefix, "float32", "none"] = search(prefix, "float32", bench.scoring)["none"]
    stored |= {(dim, "binary", kind): values for kind, values in search(dim, "binary", bench.scoring).items()}
    cells = compression_cells(stored, dim)
    with_norm = search(dim, "binary", Similarity(1.0, bench.choice.magnitude_candidate))
    return cells, stored | {(dim, "binary", "candidate"): with_norm["norm"]}


def smaller(bench: Bench, full: Array, values: Array, who: Mask) -> Check:
    """Smaller storage against the share of the full nDCG@10 that the tolerance leaves, on the given queries."""
    before, after = float(full[who].mean()), float(values[who].mean())
    retained = after / before if before else math.nan
    evidence = {"ndcg_full": before, "ndcg": after, "retention": retained}
    return bench.check(values[who], (1 - bench.tolerance) * full[who], 0.0, evidence)


def norm_beside_bits(bench: Bench, stored: Stored) -> Check:
    """Bits with one stored norm against bits alone, both rescored."""
    dim, who = bench.task.queries.shape[1], bench.measuring
    without, with_norm = stored[dim, "binary", "query"], stored[dim, "binary", "candidate"]
    evidence = {
        "ndcg_with": float(with_norm.mean()),
        "ndcg_without": float(without.mean()),
        "exponent": bench.choice.magnitude_candidate,
    }
    if not bench.has_magnitude:
        return Check(NOT_ENOUGH, None, 0, evidence)
    return bench.check(with_norm[who], without[who], bench.min_gain, evidence)


def isotropy(bench: Bench, shape: Geometry) -> Check:
    """Directions that are centred and whitened by the documents' covariance, with norms as they are.

    The covariance is shrunk: its mean eigenvalue is added to each. It needs no judgments, so that all queries measure.
    """
    queries, documents = (COSINE.document(x.double()) for x in (bench.task.queries, bench.task.documents))
    mean = documents.mean(dim=0)
    centred = documents - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))
    values = values.clamp(min=0)
    scale = (values + values.mean().clamp(min=1e-12)) ** -0.5
    q, d = (COSINE.document((x - mean) @ vectors * scale) for x in (queries, documents))
    d = d * safe_norm(bench.task.documents) ** (1 - bench.scoring.exponents[1])
    white = replace(bench.task, queries=q.float(), documents=d.float())
    evidence = {name: getattr(shape, name) for name in ("isoscore", "isoscore_ceiling", "mean_cosine")}
    return bench.check(white.ndcg(white.top(DOT)), bench.full, bench.min_gain, evidence)


def baseline(bench: Bench, comparison: BaselineComparison) -> Check:
    """The model against the baseline, on all queries."""
    evidence = {"ndcg": float(bench.full.mean()), "ndcg_baseline": float(comparison.ndcg.mean())}
    number = len(comparison.ndcg)
    return Check(verdict_of(comparison.gain, number, bench.min_gain), comparison.gain, number, evidence)
