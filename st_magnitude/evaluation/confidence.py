"""Norm as confidence: does the norm of an embedding tell when the model is right, and which texts are new to it?

Norms are taken before a closing Normalize, where training with cosine leaves them (*On the Importance of Embedding
Norms in Self-Supervised Learning*, section 5). Every figure stands beside the same figure of the text length, because
norms often do no more than follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import mode
from sentence_transformers import SentenceTransformer
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from st_magnitude._plot import pyplot
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.metrics import raw_scoring_of
from st_magnitude.geometry import auroc, norms, risk_coverage, spearman
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import encode_raw

__all__ = ["ConfidenceReport", "NormBucket", "Novelty", "Signal", "knn_accuracy_by_norm", "norm_confidence", "novelty"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NormBucket:
    """Rows whose norm lies in (low, high], as shares of the largest norm, and the share that kNN classifies right."""

    low: float
    high: float
    count: int
    accuracy: float


def knn_accuracy_by_norm(
    embeddings: Any, labels: Any, k: int = 200, num_buckets: int = 20, min_rows: int = 50
) -> list[NormBucket]:
    """Accuracy of a nearest-neighbour classifier by norm: (n, D), (n,) -> buckets in rising order of the norm.

    Norms are divided by the largest one and sorted into buckets of equal width. The majority of its k nearest other
    rows under cosine classifies a row; ties go to the label that sorts first. A row is not its own neighbour (the paper
    does not say whether it counts).

    Args:
        embeddings: Raw embeddings, not normalised.
        labels: One label for each row, of any type that can be sorted.
        k: Number of neighbours; n - 1 if there are fewer rows.
        num_buckets: Number of buckets between 0 and the largest norm.
        min_rows: Number of rows that a bucket needs to be returned.

    Fewer than two rows, another number of labels or norms of 0 only raise a ValueError.

    Example:
        >>> rows = [[1.0, 0.0], [1.0, 0.1], [0.1, 1.0], [0.0, 1.0], [0.3, 0.2]]
        >>> for bucket in knn_accuracy_by_norm(rows, ["a", "a", "b", "b", "b"], k=1, num_buckets=2, min_rows=1):
        ...     print(bucket)
        NormBucket(low=0.0, high=0.5, count=1, accuracy=0.0)
        NormBucket(low=0.5, high=1.0, count=4, accuracy=1.0)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 5, Fig. 4 left
    (k = 200: App. C.1; 20 buckets of more than 50 rows).
    """
    sizes = norms(embeddings)
    _, classes = np.unique(np.asarray(labels), return_inverse=True)
    if len(classes) != len(sizes) or len(sizes) < 2:
        raise ValueError(
            f"Every row needs a label, and at least two rows, got {len(sizes)} rows and {len(classes)} labels."
        )
    if k < 1:
        raise ValueError(f"k must be a number of neighbours of at least 1, got {k}.")
    if not sizes.max() > 0:
        raise ValueError("All norms are 0, so that there is nothing to sort by.")
    matrix = embeddings.detach().cpu().double().numpy() if isinstance(embeddings, Tensor) else np.asarray(embeddings)
    nearest = NearestNeighbors(n_neighbors=min(k, len(matrix) - 1), metric="cosine").fit(matrix)
    neighbours = nearest.kneighbors(return_distance=False)  # (n, k): without X, no row is its own neighbour
    is_right = mode(classes[neighbours], axis=1).mode == classes
    bucket = np.clip(np.ceil(sizes / sizes.max() * num_buckets).astype(int) - 1, 0, num_buckets - 1)
    return [
        NormBucket(i / num_buckets, (i + 1) / num_buckets, int(inside.sum()), float(is_right[inside].mean()))
        for i in range(num_buckets)
        if (inside := bucket == i).sum() >= max(min_rows, 1)
    ]


@dataclass(frozen=True)
class Novelty:
    """How well norms separate texts of the training domain from other texts.

    Attributes:
        ratio: Mean norm outside over mean norm inside; the paper finds less than 1.
        auroc: Probability that a text from inside has a larger norm than one from outside.
        length_auroc: The same probability for the number of words, as a control; nan if the lengths were not given.
    """

    ratio: float
    auroc: float
    length_auroc: float

    def __str__(self) -> str:
        return (
            f"outside / inside: norm ratio {self.ratio:.3f}, AUROC of the norm {self.auroc:.3f}, "
            f"of text length {self.length_auroc:.3f}"
        )


def novelty(inside: Any, outside: Any, lengths_inside: Any = None, lengths_outside: Any = None) -> Novelty:
    """Compares norms inside the training domain with norms outside: (n,), (m,) -> ratio and AUROCs.

    The lengths are numbers of words, for the control. An empty sample raises ValueError.

    Example:
        >>> novelty([4.0, 6.0], [2.0, 3.0]).ratio
        0.5

    Source: Draganov et al., section 5, Fig. 3 and S5.
    """
    known = lengths_inside is not None and lengths_outside is not None
    area = auroc(inside, outside)  # checks both
    ratio = float(np.mean(np.asarray(outside, dtype=float)) / np.mean(np.asarray(inside, dtype=float)))
    return Novelty(ratio, area, auroc(lengths_inside, lengths_outside) if known else float("nan"))


@dataclass(frozen=True)
class Signal:
    """A number for each query that might tell right answers from wrong ones.

    Attributes:
        values: The number for every query, (n,).
        auroc: Probability that a right answer has the larger value; 0.5 is chance.
        length_spearman: Rank correlation with the number of words of the text that the value belongs to.
        coverage: Share of the queries that are answered, (n,): see `st_magnitude.geometry.risk_coverage`.
        risk: Share of wrong answers at that coverage, (n,).
        area: Area under the risk-coverage curve; a random signal has the overall error rate.
    """

    values: Array
    auroc: float
    length_spearman: float
    coverage: Array
    risk: Array
    area: float

    def threshold(self, coverage: float) -> float:
        """The value above which about this share of the queries lies."""
        _check_coverage(coverage)
        return float(np.quantile(self.values, 1 - coverage))

    def risk_at(self, coverage: float) -> float:
        """Share of wrong answers among the most confident queries, if this share of all queries is answered."""
        _check_coverage(coverage)
        return float(self.risk[max(1, round(coverage * len(self.risk))) - 1])


def _check_coverage(coverage: float) -> None:
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage must be a share of the queries in (0, 1], got {coverage}.")


@dataclass(frozen=True)
class ConfidenceReport:
    """The result of `norm_confidence`. ``print(report)`` shows it as a table.

    Attributes:
        is_correct: Whether the first document of each query is relevant, (n,).
        signals: A `Signal` under ``"query norm"``, ``"document norm"`` (of the first document), ``"score"`` (its
            cosine), ``"query length"`` and ``"document length"`` (in words).
        novelty: The comparison of the queries with the texts from outside, if any were given.
    """

    is_correct: NDArray[np.bool_]
    signals: dict[str, Signal]
    novelty: Novelty | None

    def __str__(self) -> str:
        error = 1 - self.is_correct.mean()
        lines = [
            f"{len(self.is_correct)} queries, {error:.3f} answered wrongly at rank 1 (the area of a random signal)",
            "signal             AUROC   area  risk at 50%  Spearman with text length",
        ]
        lines += [
            f"{name:16s} {s.auroc:7.3f} {s.area:6.3f} {s.risk_at(0.5):12.3f} {s.length_spearman:+26.3f}"
            for name, s in self.signals.items()
        ]
        return "\n".join(lines + ([str(self.novelty)] if self.novelty else []))

    def plot(self, path: str | Path) -> None:
        """Writes the risk-coverage curves to a PNG file.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        styles = {name: {"linestyle": ":" if name.endswith("length") else "-"} for name in self.signals}
        with risk_by_coverage(path, self.signals, styles) as axis:
            axis.axhline(1 - self.is_correct.mean(), color="#555555", linestyle="--", linewidth=1, label="random")


@contextmanager
def risk_by_coverage(path: str | Path, curves: Mapping[str, Any], styles: Mapping[str, Any]) -> Iterator[Any]:
    """Draws curves with ``coverage``, ``risk`` and ``area``; the block adds to the axes before they are written.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, curve in curves.items():
        style = {"linewidth": 1.5} | styles[name]
        axis.plot(curve.coverage, curve.risk, label=f"{name} ({curve.area:.3f})", **style)
    yield axis
    axis.set_xlabel("coverage: share of queries answered")
    axis.set_ylabel("risk: share of wrong answers")
    axis.set_ylim(bottom=0)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, title="signal (area)", title_fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def norm_confidence(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    outside: Sequence[str] = (),
    similarity: Similarity | str | None = None,
    batch_size: int = 32,
) -> ConfidenceReport:
    """Answers each query with its first document and measures what tells right answers from wrong ones.

    Args:
        model: Any SentenceTransformer. Embeddings are taken before a closing Normalize or ExponentNorm.
        queries: Query id -> text. Queries without a relevant document do not count.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        outside: Texts of another domain, whose norms are compared with those of the queries.
        similarity: The similarity that ranks; by default the model's own, which is cosine if it normalises.
        batch_size: Number of texts that are encoded at a time.

    Raises:
        ValueError: If the data are empty or inconsistent (see `RetrievalData`), all answers are right or all are wrong,
            or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax", "tea"])], device="cpu")
        >>> queries, corpus = {"q1": "bee bee wax", "q2": "tea"}, {"d1": "bee wax", "d2": "wax", "d3": "tea"}
        >>> report = norm_confidence(model, queries, corpus, relevant_docs={"q1": {"d1"}, "q2": {"d2"}})
        >>> report.signals["query norm"].auroc  # the query that is answered right has the larger norm
        1.0

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 5.
    """
    task = RetrievalData(queries, corpus, relevant_docs)
    similarity = raw_scoring_of(model, similarity)
    encoded = task.encode(model, batch_size=batch_size, show_progress_bar=False, before_normalize=True)
    others = None
    if outside:
        others = encode_raw(model, list(outside), "query", batch_size, False)
        check_finite(others, "outside")
    top = encoded.top(similarity, 1)
    first, is_correct = top[:, 0].numpy(), encoded.hits(top)[:, 0]
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"All {len(is_correct)} queries are answered {'right' if is_correct.all() else 'wrong'}, so that there is "
            "nothing to tell apart. Use more queries, or a larger corpus."
        )
    query_length = word_counts(queries[query] for query in task.query_ids)
    document_length = word_counts(corpus[document] for document in task.document_ids)[first]
    own_length = {"query": query_length, "document": document_length}
    values = {
        "query norm": norms(encoded.queries),
        "document norm": norms(encoded.documents)[first],
        "score": encoded.scores(COSINE, top)[:, 0].double().numpy(),
        "query length": query_length,
        "document length": document_length,
    }
    signals = {
        name: Signal(
            v,
            auroc(v[is_correct], v[~is_correct]),
            spearman(v, own_length["document" if name.startswith("document") else "query"]),
            *risk_coverage(v, is_correct),
        )
        for name, v in values.items()
    }
    strange = None
    if others is not None:
        strange = novelty(values["query norm"], norms(others), query_length, word_counts(outside))
    return ConfidenceReport(is_correct, signals, strange)


def word_counts(texts: Iterable[str]) -> Array:
    """Number of words of every text: n texts -> (n,)."""
    return np.array([len(text.split()) for text in texts], dtype=float)
