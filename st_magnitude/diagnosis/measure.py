"""Measurements: properties of a model and a task, and the bench on which changes of them are compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from st_magnitude import geometry
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    QUANTILES,
    Array,
    EffectSize,
    ExponentChoice,
    Geometry,
    Interval,
    Mask,
    NormStatistics,
)
from st_magnitude.evaluation.calibration import EXPONENTS, ndcg_by_exponent
from st_magnitude.evaluation.compression import CompressionCell, compression_cells, search_compressed
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.similarity import COSINE, DOT, Similarity, safe_norm

MIN_QUERIES = 25  # behind a verdict: percentile intervals of fewer queries are too short
SAMPLE = 5000  # documents behind the uniformity and the principal components
Bootstrap = Callable[[Any, Any], Interval]
Stored = dict[tuple[int, str, str], Array]  # (dim, precision, rescoring) -> nDCG@10 of every query


def norm_statistics(embeddings: Tensor, words: Array) -> NormStatistics:
    """Statistics of the raw norms of one role: embeddings (n, D), number of words (n,)."""
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


def effect_sizes(task: EncodedTask, is_relevant: Mask, documents: NormStatistics) -> dict[str, EffectSize]:
    """Cohen's d of document norms under ``"corpus"``, which compares by ``is_relevant`` (m,), and ``"hard"``."""
    rows, flags = _near_queries(task)
    corpus = "{} documents are relevant to at least one query, {} to no query"
    hard = "{} relevant and {} irrelevant documents are near the queries"
    return {
        "corpus": _effect(documents, np.arange(len(is_relevant)), is_relevant, corpus),
        "hard": _effect(documents, rows, flags, hard),
    }


def _near_queries(task: EncodedTask) -> tuple[NDArray[np.int64], Mask]:
    """Every query's relevant documents and its ten best irrelevant ones by cosine: columns, whether relevant."""
    rows: list[int] = []
    flags: list[bool] = []
    deep = task.top(COSINE, k=10 + max(map(len, task.columns)))
    for row, relevant in zip(deep.tolist(), task.columns, strict=True):
        negatives = [c for c in row if c not in relevant][:10]
        rows += [*relevant, *negatives]
        flags += [True] * len(relevant) + [False] * len(negatives)
    return np.array(rows), np.array(flags)


def _effect(documents: NormStatistics, rows: NDArray[np.int64], is_relevant: Mask, why_undefined: str) -> EffectSize:
    if min(counts := (int(is_relevant.sum()), int((~is_relevant).sum()))) < 2:
        return EffectSize(undefined=why_undefined.format(*counts))
    norms, log_words = documents.values[rows], np.log(np.maximum(documents.words[rows], 1))
    return EffectSize(
        geometry.cohens_d(norms[is_relevant], norms[~is_relevant]),
        geometry.adjusted_cohens_d(norms, log_words, is_relevant),
    )


def halves(task: EncodedTask, seed: int) -> Mask:
    """Which queries choose: about half of them, at random, (n,). Those with a common document stay together."""
    n, rng = len(task.columns), np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), [len(c) for c in task.columns])
    columns = n + np.concatenate([list(c) for c in task.columns])
    edges = coo_array((np.ones(len(rows)), (rows, columns)), shape=(n + len(task.documents),) * 2)
    group = connected_components(edges, directed=False)[1][:n]
    chose, sizes = np.zeros(n, dtype=bool), np.bincount(group)
    for g in rng.permutation(np.unique(group)):
        if chose.sum() + sizes[g] <= n / 2:
            chose |= group == g
    if 4 * chose.sum() < n:  # most queries share documents, so the halves share them too
        chose[:] = False
        chose[rng.permutation(n)[: n // 2]] = True
    return chose


def exponent_choice(task: EncodedTask, present: float, seed: int, interval: Bootstrap) -> ExponentChoice:
    """nDCG@10 by document exponent, the best exponents of one half of the queries, and their gains on the other."""
    gammas = EXPONENTS
    if np.abs(gammas - present).min() > 1e-9:
        gammas = np.sort(np.append(gammas, present))
    per_query = ndcg_by_exponent(task, gammas)
    at, chose = int(np.abs(gammas - present).argmin()), halves(task, seed)
    means = per_query[:, chose].mean(axis=1)

    def best(allowed: Mask) -> int:
        highest = means[allowed].max()
        return int(np.flatnonzero(allowed & (means >= highest - 1e-12))[-1])

    candidate, below_one = best(np.arange(len(gammas)) != at), best(gammas < 1)
    return ExponentChoice(
        exponents=gammas,
        per_query=per_query,
        present=present,
        chose=chose,
        candidate=float(gammas[candidate]),
        gain=interval(per_query[candidate, ~chose], per_query[at, ~chose]),
        magnitude_candidate=float(gammas[below_one]),
        gain_of_magnitude=interval(per_query[below_one, ~chose], per_query[-1, ~chose]),
    )


def directions(task: EncodedTask, seed: int) -> Geometry:
    """Geometry of the directions of the documents, and alignment of the relevant pairs."""
    unit = COSINE.document(task.documents)
    m, dim = unit.shape
    sample = np.random.default_rng(seed).permutation(m)[:SAMPLE]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about a small sample, which is_sample_limited reports
        components = geometry.intrinsic_dimension(unit, seed=seed)
    pairs = [(i, c) for i, row in enumerate(task.columns) for c in row]
    return Geometry(
        dim=dim,
        intrinsic_dimension=components,
        is_sample_limited=min(m, SAMPLE) < 4 * dim,
        isoscore=geometry.isoscore(unit) if dim > 1 else math.nan,
        isoscore_ceiling=geometry.isoscore_ceiling(m, dim),
        mean_cosine=geometry.mean_cosine(unit),
        uniformity=geometry.uniformity(unit[sample]),
        alignment=geometry.alignment(task.queries[[i for i, _ in pairs]], unit[[c for _, c in pairs]]),
    )


def own_text_unjudged(data: RetrievalData) -> float:
    """Share of the queries whose lower-cased words are also a document that is not judged relevant to them."""

    def words(text: str) -> tuple[str, ...]:
        return tuple(text.lower().split())

    answers = {words(text) for text in data.corpus.values()}
    asked = [(words(data.queries[query]), data.relevant[query]) for query in data.query_ids]
    found = [text in answers and text not in {words(data.corpus[d]) for d in judged} for text, judged in asked]
    return float(np.mean(found))


@dataclass(frozen=True)
class Check:
    """The measured gain of one change."""

    gain: Interval | None = None  # in nDCG@10; None if it could not be measured
    num_queries: int = 0
    min_gain: float = 0.0

    @property
    def verdict(self) -> str:
        """The verdict that the interval supports."""
        if self.gain is None or self.num_queries < MIN_QUERIES:
            return NOT_ENOUGH
        if self.gain[2] < self.min_gain:
            return NO_BENEFIT
        return DO if self.gain[1] > 0 else NOT_ENOUGH


@dataclass(frozen=True)
class Bench:
    """The encoded task and the settings with which every change is measured."""

    task: EncodedTask
    is_relevant: Mask  # whether a document is relevant to any query, also to one outside of the task, (m,)
    choice: ExponentChoice
    scoring: Similarity
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

    def gain(self, values: Array, reference: Array) -> Check:
        """Compares two arrays of nDCG@10 of the same queries."""
        return Check(self.interval(values, reference), len(values), self.min_gain)

    def margin(self, values: Array, full: Array) -> Check:
        """Compares nDCG@10 of a smaller index with the share of the full nDCG@10 that the tolerance leaves."""
        return Check(self.interval(values, (1 - self.tolerance) * full), len(values))


def pruned(bench: Bench, order: Array, share: float) -> tuple[Array, Mask]:
    """nDCG@10 without the given share of the documents, lowest in ``order`` (m,), and which documents remain."""
    number = min(max(round((1 - share) * len(order)), 1), len(order) - 1)  # neither all nor none
    kept = np.zeros(len(order), dtype=bool)
    kept[np.argsort(-order, kind="stable")[:number]] = True
    return bench.task.ndcg(bench.task.top(bench.scoring, among=kept)), kept


def storage(bench: Bench) -> tuple[list[CompressionCell], Stored]:
    """nDCG@10 in all, half and a quarter of the dimensions and at one bit per dimension."""
    dim = bench.task.queries.shape[1]

    def search(prefix: int, precision: str, similarity: Similarity) -> dict[str, Array]:
        task = bench.task.prefix(prefix)
        q = similarity.query(task.queries.double()).float()
        d = similarity.document(task.documents.double()).float()
        return {kind: task.ndcg(top) for kind, top in search_compressed(q, d, precision, 100, similarity).items()}

    prefixes = [prefix for prefix in (dim, dim // 2, dim // 4) if prefix]
    stored = {(k, "float32", "none"): search(k, "float32", bench.scoring)["none"] for k in prefixes}
    stored |= {(dim, "binary", kind): values for kind, values in search(dim, "binary", bench.scoring).items()}
    cells = compression_cells(stored, dim)
    # An entry that no cell shows: bits and norm at the best exponent below 1.
    with_norm = search(dim, "binary", Similarity(1.0, bench.choice.magnitude_candidate))
    return cells, stored | {(dim, "binary", "candidate"): with_norm["norm"]}


def centred(bench: Bench) -> Array:
    """nDCG@10 without the mean direction of the documents, and with norms as they are. It needs no judgments."""
    queries, documents = (COSINE.document(x.double()) for x in (bench.task.queries, bench.task.documents))
    mean = documents.mean(dim=0)
    d = COSINE.document(documents - mean) * safe_norm(bench.task.documents) ** (1 - bench.scoring.exponents[1])
    changed = replace(bench.task, queries=COSINE.query(queries - mean).float(), documents=d.float())
    return changed.ndcg(changed.top(DOT))
