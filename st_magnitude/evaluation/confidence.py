"""Norm as confidence: does a model's embedding length say when it is right, and what it has not seen before?

Norms are those before a Normalize at the end: the ones that training with cosine leaves behind (*On the Importance of
Embedding Norms in Self-Supervised Learning*, section 5). Text length is measured beside them everywhere, because norms
often do no more than follow it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from st_magnitude.evaluation.magnitude import implied_similarity
from st_magnitude.evaluation.metrics import TILE, check_judgments, rank
from st_magnitude.geometry import auroc, norms, risk_coverage, spearman
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import encode_raw, normalizes_output

__all__ = ["ConfidenceReport", "NormBucket", "Novelty", "Signal", "knn_accuracy_by_norm", "norm_confidence", "novelty"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class NormBucket:
    """Rows whose norm lies in (low, high], as shares of the largest norm, and how many kNN classifies rightly."""

    low: float
    high: float
    count: int
    accuracy: float


def knn_accuracy_by_norm(
    embeddings: Any, labels: Any, k: int = 200, num_buckets: int = 20, min_rows: int = 50
) -> list[NormBucket]:
    """Accuracy of a nearest-neighbour classifier by norm: (n, D), (n,) -> the buckets with enough rows, rising.

    Norms are divided by the largest and fall into buckets of equal width. Every row is classified by the majority of
    its k nearest others under cosine; ties go to the label that sorts first. A row is not its own neighbour (the paper
    does not say whether it is there).

    Args:
        embeddings: Raw, not normalised.
        labels: Of any kind that sorts.
        k: Neighbours, at most n - 1.
        num_buckets: Of which each spans 1 / num_buckets of the largest norm.
        min_rows: Buckets with fewer rows are left out.

    Raises:
        ValueError: If embeddings and labels differ in number, there are fewer than two rows, k is below 1, or all
            norms are 0.

    Example:
        >>> rows = [[1.0, 0.0], [1.0, 0.1], [0.1, 1.0], [0.0, 1.0], [0.3, 0.2]]
        >>> for bucket in knn_accuracy_by_norm(rows, ["a", "a", "b", "b", "b"], k=1, num_buckets=2, min_rows=1):
        ...     print(bucket)
        NormBucket(low=0.0, high=0.5, count=1, accuracy=0.0)
        NormBucket(low=0.5, high=1.0, count=4, accuracy=1.0)

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 5, Fig. 4 left
    (k = 200: App. C.1; 20 buckets of more than 50 rows).
    """
    lengths = norms(embeddings)
    _, classes = np.unique(np.asarray(labels), return_inverse=True)
    if len(classes) != len(lengths) or len(lengths) < 2:
        raise ValueError(f"One label for each of at least two rows, got {len(lengths)} rows and {len(classes)} labels.")
    if k < 1:
        raise ValueError(f"k is a number of neighbours, at least 1, got {k}.")
    if not lengths.max() > 0:
        raise ValueError("All norms are 0: there is nothing to sort by.")
    matrix = embeddings.detach().cpu().double().numpy() if isinstance(embeddings, Tensor) else np.asarray(embeddings)
    nearest = NearestNeighbors(n_neighbors=min(k, len(matrix) - 1), metric="cosine").fit(matrix)
    neighbours = nearest.kneighbors(return_distance=False)  # (n, k): without X, no row is its own neighbour
    is_right = mode(classes[neighbours], axis=1).mode == classes
    bucket = np.clip(np.ceil(lengths / lengths.max() * num_buckets).astype(int) - 1, 0, num_buckets - 1)
    return [
        NormBucket(i / num_buckets, (i + 1) / num_buckets, int(inside.sum()), float(is_right[inside].mean()))
        for i in range(num_buckets)
        if (inside := bucket == i).sum() >= max(min_rows, 1)
    ]


@dataclass(frozen=True)
class Novelty:
    """How norms tell texts of the training domain from others.

    Attributes:
        ratio: Mean norm outside over mean norm inside; the paper finds less than 1.
        auroc: Probability that a text from inside is longer in norm than one from outside.
        length_auroc: The same for the number of words: what length alone would say. nan where it was not given.
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
    """Norms of embeddings from the training domain against others: (n,), (m,) -> ratio and AUROCs.

    Raises:
        ValueError: If a sample is empty.

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
    """One number a query that might tell right answers from wrong ones.

    Attributes:
        values: (n,).
        auroc: Probability that a right answer has the larger value; 0.5 knows nothing.
        length_spearman: Rank correlation with the number of words of the text it belongs to.
        coverage, risk: The risk-coverage curve, (n,) each: see `st_magnitude.geometry.risk_coverage`.
        area: Under that curve; the overall error rate is what a signal that knows nothing has.
    """

    values: Array
    auroc: float
    length_spearman: float
    coverage: Array
    risk: Array
    area: float

    def threshold(self, coverage: float) -> float:
        """The value to answer above, so that about this share of the queries is answered."""
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage is a share of the queries in (0, 1], got {coverage}.")
        return float(np.quantile(self.values, 1 - coverage))

    def risk_at(self, coverage: float) -> float:
        """Share of wrong answers when this share of the queries is answered, the most confident ones."""
        if not 0 < coverage <= 1:
            raise ValueError(f"coverage is a share of the queries in (0, 1], got {coverage}.")
        return float(self.risk[max(1, round(coverage * len(self.risk))) - 1])


@dataclass(frozen=True)
class ConfidenceReport:
    """What `norm_confidence` measures. ``print(report)`` shows it as a table.

    Attributes:
        is_correct: Whether the first document of each query is relevant, (n,).
        signals: By name: ``"query norm"``, ``"document norm"`` (of the first document), ``"score"`` (its cosine),
            ``"query length"``, ``"document length"`` (in words).
        novelty: Of queries against the texts from outside, if any were given.
    """

    is_correct: NDArray[np.bool_]
    signals: dict[str, Signal]
    novelty: Novelty | None

    def __str__(self) -> str:
        error = 1 - self.is_correct.mean()
        lines = [
            f"{len(self.is_correct)} queries, {error:.3f} answered wrongly at rank 1 (the area of a blind signal)",
            "signal             AUROC   area  risk at 50%  Spearman with text length",
        ]
        lines += [
            f"{name:16s} {s.auroc:7.3f} {s.area:6.3f} {s.risk_at(0.5):12.3f} {s.length_spearman:+26.3f}"
            for name, s in self.signals.items()
        ]
        return "\n".join(lines + ([str(self.novelty)] if self.novelty else []))

    def plot(self, path: str | Path) -> None:
        """Writes the risk-coverage curves as a PNG.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        plt = pyplot()
        figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
        for name, signal in self.signals.items():
            style = ":" if name.endswith("length") else "-"
            axis.plot(signal.coverage, signal.risk, style, label=f"{name} ({signal.area:.3f})", linewidth=1.5)
        axis.axhline(1 - self.is_correct.mean(), color="#555555", linestyle="--", linewidth=1, label="blind")
        axis.set_xlabel("coverage: share of queries answered")
        axis.set_ylabel("risk: share of those that is wrong")
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
    """Encodes once, answers each query with its first document, and asks what would have told right from wrong.

    Args:
        model: Any SentenceTransformer. A Normalize or ExponentNorm at the end is looked behind.
        queries: Query id -> text. Queries without a relevant document are left out.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        outside: Texts from elsewhere, to compare the norms of queries with.
        similarity: What ranks; by default what the model says, cosine if it normalises.
        batch_size: Texts encoded at a time.

    Raises:
        ValueError: If the data are empty or inconsistent (see `check_judgments`), fewer than two queries have a
            relevant document, or all answers are right, or all wrong.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax", "tea"])], device="cpu")
        >>> queries, corpus = {"q1": "bee bee wax", "q2": "tea"}, {"d1": "bee wax", "d2": "wax", "d3": "tea"}
        >>> report = norm_confidence(model, queries, corpus, relevant_docs={"q1": {"d1"}, "q2": {"d2"}})
        >>> report.signals["query norm"].auroc  # the query that is answered rightly is the longer one
        1.0

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 5.
    """
    relevant = check_judgments(queries, corpus, relevant_docs)
    query_ids = [query for query in queries if relevant.get(query)]
    document_ids = sorted(corpus)
    if similarity is None:
        similarity = COSINE if normalizes_output(model) else implied_similarity(model)
    similarity = Similarity(*Similarity.named(similarity).exponents)
    texts = [queries[query] for query in query_ids], [corpus[document] for document in document_ids]
    q = encode_raw(model, texts[0], "query", batch_size, False)
    d = encode_raw(model, texts[1], "document", batch_size, False)
    others = encode_raw(model, list(outside), "query", batch_size, False) if outside else None
    step = max(1, TILE // len(d))
    first = np.concatenate(
        [rank(similarity(q[i : i + step], d), 1)[:, 0].cpu().numpy() for i in range(0, len(q), step)]
    )
    is_correct = np.array([document_ids[i] in relevant[query] for query, i in zip(query_ids, first, strict=True)])
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"All {len(is_correct)} queries are answered {'rightly' if is_correct.all() else 'wrongly'}: confidence "
            "has nothing to tell apart. Use more queries, or a larger corpus."
        )
    query_length, document_length = (np.array([len(text.split()) for text in side], dtype=float) for side in texts)
    own_length = {"query": query_length, "document": document_length[first]}
    values = {
        "query norm": norms(q),
        "document norm": norms(d)[first],
        "score": COSINE.pairwise(q, d[first.tolist()]).double().cpu().numpy(),
        "query length": query_length,
        "document length": document_length[first],
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
        lengths = [float(len(text.split())) for text in outside]
        strange = novelty(values["query norm"], norms(others), query_length, lengths)
    return ConfidenceReport(is_correct, signals, strange)
