"""What a model and a task are like: one function per property, each of which returns numbers."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from scipy.stats import skew
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import (
    QUANTILES,
    Array,
    BaselineComparison,
    EffectSize,
    ExponentChoice,
    Geometry,
    Hubness,
    Interval,
    Mask,
    NormStatistics,
    nearest,
)
from st_magnitude.evaluation.calibration import ExponentCurve
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry.magnitude import counted_cohens_d, without
from st_magnitude.similarity import COSINE, Similarity

__all__ = [
    "compare",
    "directions",
    "effect_sizes",
    "exponent_choice",
    "halves",
    "hubness",
    "norm_statistics",
]

Bootstrap = Callable[[Any, Any], Interval]

logger = logging.getLogger(__name__)

UNIFORMITY_ROWS = 5000


def norm_statistics(embeddings: Tensor, words: Array) -> NormStatistics:
    """Statistics of the raw norms of one role: embeddings (n, D), number of words (n,)."""
    values = geometry.norms(embeddings)
    return NormStatistics(
        values=values,
        words=words,
        mean=float(values.mean()),
        cv=geometry.coefficient_of_variation(values),
        quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
        # Norms of 1 differ by rounding only, which must not be correlated with anything.
        length_spearman=math.nan if are_unit(values) else geometry.spearman(values, words),
    )


def effect_sizes(task: EncodedTask, is_relevant: Mask, documents: NormStatistics) -> dict[str, EffectSize]:
    """Cohen's d of document norms in three variants: ``"corpus"``, ``"hard"`` and ``"pairs"``.

    ``is_relevant`` (m,) counts queries outside of the task too; only ``"corpus"`` uses it.
    """
    degrees = task.degrees
    relevant, others = int(is_relevant.sum()), int((~is_relevant).sum())
    corpus = f"{relevant} documents are relevant to at least one query, {others} to no query"
    rows, flags = _near_queries(task)
    hard = f"{int(flags.sum())} relevant and {int((~flags).sum())} irrelevant documents are near the queries"
    return {
        "corpus": _effect(documents, np.arange(len(degrees)), is_relevant, corpus),
        "hard": _effect(documents, rows, flags, hard),
        "pairs": _pairs_effect(documents, degrees, len(task.queries)),
    }


def _near_queries(task: EncodedTask) -> tuple[NDArray[np.int64], Mask]:
    """Every query's relevant documents and its ten best irrelevant ones by cosine: columns, whether relevant."""
    rows: list[int] = []
    flags: list[bool] = []
    deep = task.top(COSINE, k=10 + max(map(len, task.columns)))
    for row, relevant in zip(deep.tolist(), map(set, task.columns), strict=True):
        negatives = [c for c in row if c not in relevant][:10]
        rows += [*relevant, *negatives]
        flags += [True] * len(relevant) + [False] * len(negatives)
    return np.array(rows), np.array(flags)


def _effect(documents: NormStatistics, rows: NDArray[np.int64], is_relevant: Mask, why_undefined: str) -> EffectSize:
    if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
        return EffectSize(undefined=why_undefined)
    norms, log_words = documents.values[rows], _log_words(documents)[rows]
    return EffectSize(
        geometry.cohens_d(norms[is_relevant], norms[~is_relevant]),
        geometry.adjusted_cohens_d(norms, log_words, is_relevant),
    )


def _pairs_effect(documents: NormStatistics, degrees: NDArray[np.int64], num_queries: int) -> EffectSize:
    """Cohen's d over all (query, document) pairs, from how many queries a document is relevant to: (m,)."""
    counts = degrees, num_queries - degrees
    if np.ptp(degrees) == 0:
        return EffectSize(
            undefined=f"every document is relevant to {degrees[0]} of the queries, so that it is 0 by construction"
        )
    if counts[1].sum() < 2:
        return EffectSize(undefined="all pairs but one are relevant")
    # Every document is in num_queries pairs, so that the regression over pairs is that over documents.
    return EffectSize(counted_cohens_d(documents.values, *counts), counted_cohens_d(without_words(documents), *counts))


def without_words(documents: NormStatistics) -> Array:
    """Norms with the logarithm of the number of words regressed out: (n,)."""
    return without(documents.values, _log_words(documents))


def _log_words(documents: NormStatistics) -> Array:
    return np.log(np.maximum(documents.words, 1))


def halves(task: EncodedTask, seed: int) -> Mask:
    """Which queries choose: about half of them, at random, (n,).

    Queries that share relevant documents stay in one half, unless that leaves less than a quarter for either half.
    """
    n, rng = len(task.columns), np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), [len(c) for c in task.columns])
    columns = n + np.concatenate([list(c) for c in task.columns])
    edges = coo_array((np.ones(len(rows)), (rows, columns)), shape=(n + len(task.documents),) * 2)
    group = connected_components(edges, directed=False)[1][:n]
    chose, sizes = np.zeros(n, dtype=bool), np.bincount(group)
    for g in rng.permutation(np.unique(group)):
        if chose.sum() + sizes[g] <= n / 2:
            chose |= group == g
    if 4 * chose.sum() < n:
        logger.info("Most queries share relevant documents, so the choosing and the measuring half share them too.")
        chose[:] = False
        chose[rng.permutation(n)[: n // 2]] = True
    return chose


def exponent_choice(
    task: EncodedTask, query_ids: list[str], present: float, seed: int, interval: Bootstrap
) -> ExponentChoice:
    """nDCG@10 by document exponent, the best exponents of one half of the queries, and their gains on the other."""
    gammas = np.linspace(0.0, 1.0, 21)
    if np.abs(gammas - present).min() > 1e-9:
        gammas = np.sort(np.append(gammas, present))
    tops = task.tops([Similarity(1.0, float(gamma)) for gamma in gammas])
    per_query = np.stack([task.ndcg(top) for top in tops])
    at, chose = nearest(gammas, present), halves(task, seed)

    def best(means: Array, allowed: Mask) -> int:
        means = np.where(allowed, means, -np.inf)
        return int(np.flatnonzero(means >= means.max() - 1e-12)[-1])

    means = per_query[:, chose].mean(axis=1)
    candidate, below_one = best(means, np.arange(len(gammas)) != at), best(means, gammas < 1)
    overall = best(per_query.mean(axis=1), np.full(len(gammas), True))
    curve = ExponentCurve(
        gammas,
        per_query,
        query_ids,
        float(gammas[overall]),
        interval(per_query[overall], per_query[-1]),
        interval(per_query[overall], per_query[0]),
        0.95,
    )
    return ExponentChoice(
        curve=curve,
        present=present,
        chose=chose,
        candidate=float(gammas[candidate]),
        gain=interval(per_query[candidate, ~chose], per_query[at, ~chose]),
        magnitude_candidate=float(gammas[below_one]),
        gain_of_magnitude=interval(per_query[below_one, ~chose], per_query[-1, ~chose]),
    )


def compare(baseline: EncodedTask, similarity: Similarity, own: Array, interval: Bootstrap) -> BaselineComparison:
    """Norms and nDCG@10 of the baseline beside the model's own nDCG@10 of every query, (n,)."""
    cvs = [geometry.coefficient_of_variation(geometry.norms(x)) for x in (baseline.queries, baseline.documents)]
    theirs = baseline.ndcg(baseline.top(similarity))
    return BaselineComparison(similarity.name, cvs[0], cvs[1], theirs, interval(own, theirs))


def directions(task: EncodedTask, seed: int) -> Geometry:
    """Geometry of the directions of the documents, and alignment of the relevant pairs."""
    unit = COSINE.document(task.documents)
    m, dim = unit.shape
    sample = np.random.default_rng(seed).permutation(m)[:UNIFORMITY_ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the sample is small, which is_sample_limited tells
        components = geometry.intrinsic_dimension(unit, seed=seed)
    pairs = [(i, c) for i, row in enumerate(task.columns) for c in row]
    return Geometry(
        dim=dim,
        num_documents=m,
        intrinsic_dimension=components,
        is_sample_limited=min(m, 5000) < 4 * dim,
        isoscore=geometry.isoscore(unit) if dim > 1 else math.nan,
        isoscore_ceiling=geometry.isoscore_ceiling(m, dim),
        mean_cosine=geometry.mean_cosine(unit),
        uniformity=geometry.uniformity(unit[sample]),
        alignment=geometry.alignment(task.queries[[i for i, _ in pairs]], unit[[c for _, c in pairs]]),
        explained=geometry.explained_variance(unit, seed=seed),
    )


def hubness(task: EncodedTask, similarity: Similarity) -> Hubness:
    """How often each document is in the top 10 of a query."""
    top = task.top(similarity)
    occurrences = np.bincount(top.numpy().ravel(), minlength=len(task.documents))
    n, p = len(top), top.shape[1] / len(task.documents)
    return Hubness(
        skewness=float(skew(occurrences)) if np.ptp(occurrences) else math.nan,
        by_chance=(1 - 2 * p) / math.sqrt(n * p * (1 - p)) if p < 1 else math.nan,
        most=float(occurrences.max() / n),
        counts=tuple(np.bincount(occurrences).tolist()),
    )
