"""calibrate_exponent chooses how much of the document norm a trained model is scored with."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.metrics import are_unit
from st_magnitude.geometry import norms, paired_bootstrap
from st_magnitude.result import Result, Table
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["ExponentCurve", "calibrate_exponent"]

logger = logging.getLogger(__name__)

FEW_QUERIES = 50
UNIT_NORMS = (
    "The model normalises its embeddings: all norms are 1, and every exponent ranks alike. `st-magnitude train` saves "
    "such a model if cosine is as good as the similarity of the training. To choose an exponent, train again with "
    '--keep-scoring, or remove Normalize with stm.prepare(model, "dot") and save the model.'
)


@dataclass(frozen=True, repr=False)
class ExponentCurve(Result):
    """nDCG@10 over the document exponent, the recommended exponent, and the evidence for it.

    Attributes:
        exponents: Document exponents in rising order, from 0 (dot: the norm counts in full) to 1 (cosine: the norm is
            removed), (E,).
        per_query: nDCG@10 of every query at every exponent, (E, n).
        queries: Ids of the n queries.
        best: The recommended exponent. It is `highest`, unless that is statistically tied with cosine or dot: then it
            is 1 or 0, because such a model consists of stock modules and loads without this package. Cosine goes first.
        versus_cosine: nDCG@10 at the highest exponent minus nDCG@10 at exponent 1: (difference, low, high), with a
            paired bootstrap interval. These very queries chose the highest exponent, so the difference is optimistic:
            confirm a choice on other queries.
        versus_dot: The same against exponent 0.
        confidence: Confidence level of both intervals.
    """

    exponents: NDArray[np.float64]
    per_query: NDArray[np.float64]
    queries: list[str]
    best: float
    versus_cosine: tuple[float, float, float]
    versus_dot: tuple[float, float, float]
    confidence: float

    @property
    def ndcg(self) -> NDArray[np.float64]:
        """Mean nDCG@10 at every exponent: (E,)."""
        return self.per_query.mean(axis=1)

    @property
    def highest(self) -> float:
        """The exponent with the highest mean nDCG@10; of several, the largest, which is the nearest to cosine."""
        return float(self.exponents[highest_rows(self.per_query)[-1]])

    @property
    def best_similarity(self) -> Similarity:
        """The recommended similarity. Its query exponent does not change a ranking; 1 keeps scores on one scale."""
        return Similarity(query=1.0, document=self.best)

    def tables(self) -> Iterable[Table | str]:
        """nDCG@10 by exponent, and the highest against cosine and dot."""
        marks = {self.highest: "highest"} | {self.best: "best"}
        rows = [[gamma, value, marks.get(gamma, "")] for gamma, value in zip(self.exponents, self.ndcg, strict=True)]
        title = f"nDCG@10 by document exponent, {len(self.queries)} queries (0 is dot, 1 is cosine)"
        yield Table(["exponent", "nDCG@10", ""], rows, title)
        gains = {"cosine": self.versus_cosine, "dot": self.versus_dot}
        ties = {name: "a tie" if low <= 0 <= high else "a difference" for name, (_, low, high) in gains.items()}
        verdicts = [[name, gain, ties[name]] for name, gain in gains.items()]
        yield Table([f"{self.highest:g} minus", f"nDCG@10 with {self.confidence:.0%} interval", ""], verdicts)
        if self.best != self.highest:
            yield (
                f"Exponent {self.highest:g} is tied with {'cosine' if self.best == 1 else 'dot'}, so the best exponent "
                f"is {self.best:g}: that model loads anywhere, without st_magnitude."
            )

    def to_dict(self) -> dict[str, Any]:
        """The choice and mean nDCG@10 by exponent, as JSON has them."""
        means = {f"{gamma:g}": float(value) for gamma, value in zip(self.exponents, self.ndcg, strict=True)}
        versus = {"versus_cosine": self.versus_cosine, "versus_dot": self.versus_dot}
        return {"exponent": self.best, "highest": self.highest, "queries": len(self.queries), "ndcg@10": means} | versus


def check_keeps_norm(model: SentenceTransformer) -> None:
    """Refuses a model that ends in Normalize, without encoding anything."""
    if normalizes_output(model):
        raise ValueError(UNIT_NORMS)


def calibrate_exponent(
    model: SentenceTransformer,
    data: RetrievalData,
    exponents: Any = None,
    num_samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
) -> ExponentCurve:
    """Encodes once and ranks by q · d / |d|^gamma for a sweep of document exponents gamma.

    A query's own exponent never changes its ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so one sweep covers all
    similarities. Run it on validation data; `st_magnitude.prepare` takes the similarity that it recommends.

    Args:
        model: A model whose embeddings keep their norm. Embeddings are taken before a closing ExponentNorm.
        data: Queries, corpus and judgments, usually a dev split. Queries without a relevant document do not count.
        exponents: Document exponents in [0, 1]; by default 0, 0.05, ..., 1. The ends 0 and 1 are always added.
        num_samples: Number of bootstrap resamples of the queries.
        confidence: Confidence level of the intervals.
        seed: Seed for the bootstrap.
        encode: Options of `RetrievalData.encode`, such as ``{"batch_size": 128}``.

    Raises:
        ValueError: If no query has a relevant document, an exponent lies outside [0, 1], the model normalises its
            embeddings, or an embedding is not finite.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], device="cpu")
        >>> data = RetrievalData({"q": "honey"}, {"d1": "honey", "d2": "honey, honey of bees"}, {"q": {"d2"}})
        >>> curve = calibrate_exponent(model, data, exponents=[0.5])
        >>> print(curve)
        nDCG@10 by document exponent, 1 queries (0 is dot, 1 is cosine)
        exponent  nDCG@10
          0.0000   1.0000  best
          0.5000   1.0000  highest
          1.0000   0.6309
        <BLANKLINE>
        0.5 minus   nDCG@10 with 95% interval
        cosine     +0.3691 [+0.3691, +0.3691]  a difference
        dot        +0.0000 [+0.0000, +0.0000]  a tie
        <BLANKLINE>
        Exponent 0.5 is tied with dot, so the best exponent is 0: that model loads
        anywhere, without st_magnitude.
    """
    check_keeps_norm(model)
    gammas = np.unique(np.append(np.linspace(0.0, 1.0, 21) if exponents is None else exponents, [0.0, 1.0]))
    if gammas[0] < 0.0 or not gammas[-1] <= 1.0:
        raise ValueError(f"Document exponents lie in [0, 1] (0 keeps the norm, 1 removes it), got {gammas.tolist()}.")
    warn_if_few(data.query_ids, "an exponent")
    encoded = data.encode(model, **(encode or {}))
    if are_unit(norms(encoded.documents)):  # by a module of another name than Normalize
        raise ValueError(UNIT_NORMS)
    tops = encoded.tops([Similarity(1.0, float(gamma)) for gamma in gammas])
    per_query = np.stack([encoded.ndcg(top) for top in tops])
    highest = highest_rows(per_query)[-1]
    versus_cosine, versus_dot = (
        paired_bootstrap(per_query[highest], per_query[end], num_samples=num_samples, confidence=confidence, seed=seed)
        for end in (-1, 0)
    )
    best = float(gammas[highest])
    for end, (_, low, high) in ((0.0, versus_dot), (1.0, versus_cosine)):
        if low <= 0.0 <= high:
            best = end
    return ExponentCurve(gammas, per_query, data.query_ids, best, versus_cosine, versus_dot, confidence)


def highest_rows(per_query: NDArray[np.float64]) -> NDArray[np.int64]:
    """The rows with the highest mean, or another by rounding only."""
    means = per_query.mean(axis=1)
    return np.flatnonzero(np.isclose(means, means.max(), rtol=0.0, atol=1e-12))


def warn_if_few(queries: Sequence[str], choice: str) -> None:
    """Warns of a choice by too few queries."""
    if len(queries) < FEW_QUERIES:
        logger.warning(
            f"{len(queries)} queries are few to choose {choice} by: differences of several hundredths of nDCG@10 are "
            f"noise. Use at least {FEW_QUERIES}, better some hundreds."
        )
