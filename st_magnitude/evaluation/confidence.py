"""Norm as confidence: does the norm of an embedding tell when the model is right, and which texts are new to it?

Norms are taken before a closing Normalize, where training with cosine leaves them (*On the Importance of Embedding
Norms in Self-Supervised Learning*, section 5). Every figure stands next to the same figure of the text length, because
norms often do no more than follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import check_finite
from st_magnitude.evaluation.metrics import raw_scoring_of
from st_magnitude.geometry import auroc, norms, risk_coverage, spearman
from st_magnitude.result import Result, Table
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import encode_raw

__all__ = ["ConfidenceReport", "Signal", "norm_confidence"]

Array = NDArray[np.float64]


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

    def risk_at(self, coverage: float) -> float:
        """Share of wrong answers among the most confident queries, if this share of all queries is answered."""
        return float(self.risk[max(1, round(coverage * len(self.risk))) - 1])


@dataclass(frozen=True)
class ConfidenceReport(Result):
    """The result of `norm_confidence`. ``print(report)`` shows it as a table.

    Attributes:
        is_correct: Whether the first document of each query is relevant, (n,).
        signals: A `Signal` under ``"query norm"``, ``"document norm"`` (of the first document), ``"score"`` (its
            cosine), ``"query length"`` and ``"document length"`` (in words).
        outside: For texts of another domain, ``"norm ratio"`` (mean norm of these texts over that of the queries; the
            paper finds less than 1), ``"auroc"`` (probability that a query has the larger norm), and
            ``"length auroc"``, the same for the number of words. Empty without such texts.
    """

    is_correct: NDArray[np.bool_]
    signals: dict[str, Signal]
    outside: dict[str, float]

    def tables(self) -> list[Table | str]:
        """A row for each signal, and a row for each figure of the other texts."""
        error = 1 - self.is_correct.mean()
        title = f"{len(self.is_correct)} queries, {error:.3f} answered wrongly at rank 1 (the area of a random signal)"
        columns = ["signal", "AUROC", "area", "risk at 50%", "Spearman with length"]
        rows = [[name, s.auroc, s.area, s.risk_at(0.5), s.length_spearman] for name, s in self.signals.items()]
        parts: list[Table | str] = [Table(columns, rows, title)]
        if self.outside:
            parts.append(Table(["texts from outside", "value"], [list(item) for item in self.outside.items()]))
        return parts


def norm_confidence(
    model: SentenceTransformer,
    data: RetrievalData,
    outside: Sequence[str] = (),
    similarity: Similarity | str | None = None,
    encode: Mapping[str, Any] | None = None,
) -> ConfidenceReport:
    """Answers each query with its first document and measures what tells right answers from wrong ones.

    Args:
        model: Any SentenceTransformer. Embeddings are taken before a closing Normalize or ExponentNorm.
        data: Queries, corpus and judgments. Queries without a relevant document do not count.
        outside: Texts of another domain, whose norms are compared with those of the queries.
        similarity: The similarity that ranks; by default the model's own, which is cosine if it normalises.
        encode: Options of encoding, such as ``{"batch_size": 64}``, see `st_magnitude.data.task.encode_texts`.

    Raises:
        ValueError: If no query has a relevant document, all answers are right or all are wrong, or an embedding is not
            finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bee", "wax", "tea"])], device="cpu")
        >>> queries, corpus = {"q1": "bee bee wax", "q2": "tea"}, {"d1": "bee wax", "d2": "wax", "d3": "tea"}
        >>> report = norm_confidence(model, RetrievalData(queries, corpus, {"q1": {"d1"}, "q2": {"d2"}}))
        >>> report.signals["query norm"].auroc  # the query that is answered right has the larger norm
        1.0

    Source: Draganov et al., On the Importance of Embedding Norms in Self-Supervised Learning, section 5.
    """
    similarity = raw_scoring_of(model, similarity)
    encoded = data.encode(model, before_normalize=True, **(encode or {}))
    top = encoded.top(similarity, 1)
    first, is_correct = top[:, 0].numpy(), encoded.hits(top)[:, 0]
    if is_correct.all() or not is_correct.any():
        raise ValueError(
            f"All {len(is_correct)} queries are answered {'right' if is_correct.all() else 'wrong'}, so there is "
            "nothing to tell apart. Use more queries, or a larger corpus."
        )
    query_length = word_counts(data.queries[query] for query in data.query_ids)
    document_length = word_counts(data.corpus[document] for document in data.document_ids)[first]
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
            spearman(v, document_length if name.startswith("document") else query_length),
            *risk_coverage(v, is_correct),
        )
        for name, v in values.items()
    }
    compared: dict[str, float] = {}
    if outside:
        others = encode_raw(model, list(outside), "query", show_progress_bar=False)
        check_finite(others, "outside")
        inside, beyond = values["query norm"], norms(others)
        compared = {"norm ratio": float(beyond.mean() / inside.mean()), "auroc": auroc(inside, beyond)}
        compared["length auroc"] = auroc(query_length, word_counts(outside))
    return ConfidenceReport(is_correct, signals, compared)


def word_counts(texts: Iterable[str]) -> Array:
    """Number of words of every text: n texts -> (n,)."""
    return np.array([len(text.split()) for text in texts], dtype=float)
