"""How changes are measured: the bench, the verdict of an interval, and the searches of a changed index."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from st_magnitude.data.task import EncodedTask
from st_magnitude.diagnosis.findings import DO, NO_BENEFIT, NOT_ENOUGH, Array, ExponentChoice, Interval, Mask
from st_magnitude.diagnosis.measure import Bootstrap
from st_magnitude.evaluation.compression import CompressionCell, compression_cells, search_compressed
from st_magnitude.similarity import COSINE, DOT, Similarity, safe_norm

__all__ = ["MIN_QUERIES", "Bench", "Check", "centred", "pruned", "storage"]

MIN_QUERIES = 25  # behind a verdict: percentile intervals of fewer queries are too short
Stored = dict[tuple[int, str, str], Array]  # (dim, precision, rescoring) -> nDCG@10 of every query


@dataclass(frozen=True)
class Check:
    """The measured gain of one change.

    Example:
        >>> [Check(gain, 100, 0.02).verdict for gain in ((0.05, 0.02, 0.08), (0.0, -0.01, 0.01), (0.05, -0.01, 0.11))]
        ['do', 'no benefit expected', 'not enough data']
    """

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
    """nDCG@10 in all, half and a quarter of the dimensions and at one bit per dimension.

    The entry ``(D, "binary", "candidate")``, which no cell shows, adds the norm to the bits at the best exponent
    below 1.
    """
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
    with_norm = search(dim, "binary", Similarity(1.0, bench.choice.magnitude_candidate))
    return cells, stored | {(dim, "binary", "candidate"): with_norm["norm"]}


def centred(bench: Bench) -> Array:
    """nDCG@10 without the mean direction of the documents, and with norms as they are. It needs no judgments."""
    queries, documents = (COSINE.document(x.double()) for x in (bench.task.queries, bench.task.documents))
    mean = documents.mean(dim=0)
    d = COSINE.document(documents - mean) * safe_norm(bench.task.documents) ** (1 - bench.scoring.exponents[1])
    changed = replace(bench.task, queries=COSINE.query(queries - mean).float(), documents=d.float())
    return changed.ndcg(changed.top(DOT))
