"""Measurements: properties of a model and a task, and the bench on which changes are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import QUANTILES, ExponentChoice, Mask, NormStatistics
from st_magnitude.evaluation.calibration import exponent_curve, exponents_with, ndcg_by_exponent
from st_magnitude.evaluation.choice import highest_rows
from st_magnitude.evaluation.scoring import are_unit
from st_magnitude.similarity import Similarity


def norm_statistics(embeddings: Tensor, texts: Sequence[str]) -> NormStatistics:
    """Statistics of the raw norms of one role: embeddings of n texts, (n, D)."""
    words = np.array([len(text.split()) for text in texts], dtype=float)
    values = geometry.norms(embeddings)
    return NormStatistics(
        values=values,
        words=words,
        mean=float(values.mean()),
        cv=geometry.coefficient_of_variation(values),
        quantiles=tuple(float(q) for q in np.quantile(values, QUANTILES)),
        # Norms of 1 differ by rounding only, and a correlation with rounding errors means nothing.
        length_spearman=math.nan if are_unit(values) else geometry.spearman(values, words),
    )


def effect_sizes(documents: NormStatistics, is_relevant: Mask) -> dict[str, float]:
    """Cohen's d of document norms by ``is_relevant`` (m,), as fields of a diagnosis."""
    if min(is_relevant.sum(), (~is_relevant).sum()) < 2:
        return {"cohens_d": math.nan, "adjusted_cohens_d": math.nan}
    norms = documents.values
    log_words = np.log(np.maximum(documents.words, 1))
    return {
        "cohens_d": geometry.cohens_d(norms[is_relevant], norms[~is_relevant]),
        "adjusted_cohens_d": geometry.adjusted_cohens_d(norms, log_words, is_relevant),
    }


def halves(task: EncodedTask, seed: int) -> Mask:
    """A random half of the queries, (n,). Queries that share a relevant document stay together."""
    n = len(task.columns)
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), [len(c) for c in task.columns])
    columns = n + np.concatenate([list(c) for c in task.columns])
    edges = coo_array((np.ones(len(rows)), (rows, columns)), shape=(n + len(task.documents),) * 2)
    group = connected_components(edges, directed=False)[1][:n]
    sizes = np.bincount(group)
    chose = np.zeros(n, dtype=bool)
    for g in rng.permutation(np.unique(group)):
        if chose.sum() + sizes[g] <= n / 2:
            chose |= group == g
    if 4 * chose.sum() < n:  # most queries share documents, so the halves share them too
        chose[:] = False
        chose[rng.permutation(n)[: n // 2]] = True
    return chose


def exponent_choice(task: EncodedTask, present: float, seed: int) -> ExponentChoice:
    """nDCG@10 by document exponent, and what one half of the queries chooses."""
    gammas = exponents_with(present)
    per_query = ndcg_by_exponent(task, gammas)
    chose = halves(task, seed)
    curve = exponent_curve(gammas, per_query[:, chose], [], present, seed=seed)
    candidate = calibrated = curve.best
    if calibrated == curve.present:
        is_other = gammas != curve.present
        best = highest_rows(per_query[is_other][:, chose])[-1]
        candidate = float(gammas[is_other][best])
    return ExponentChoice(gammas, per_query, curve.present, chose, calibrated, candidate)


@dataclass(frozen=True)
class Bench:
    """The encoded task and the settings with which every change is measured."""

    task: EncodedTask
    choice: ExponentChoice
    scoring: Similarity
    has_magnitude: bool  # whether the norms differ
    min_gain: float
    tolerance: float
    seed: int
