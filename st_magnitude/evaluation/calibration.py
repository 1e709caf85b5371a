"""calibrate_exponent: how much of the document norm should a trained model be read out with?"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from st_magnitude.evaluation.metrics import TILE, are_unit, check_judgments, ndcg, rank
from st_magnitude.geometry import norms, paired_bootstrap
from st_magnitude.similarity import Similarity, safe_norm
from st_magnitude.surgery.raw import encode_raw

__all__ = ["ExponentCurve", "calibrate_exponent"]

logger = logging.getLogger(__name__)

FEW_QUERIES = 50


@dataclass(frozen=True)
class ExponentCurve:
    """nDCG@10 over the document exponent, the best exponent, and what it gains over cosine and dot.

    Attributes:
        exponents: Document exponents in rising order, from 0 (dot: length kept) to 1 (cosine: length removed), (E,).
        per_query: nDCG@10 of every query at every exponent, (E, n).
        queries: Ids of the n queries.
        best: The exponent with the highest mean; of equal ones the largest, which is nearest to cosine: length is used
            only where it pays.
        versus_cosine: nDCG@10 at the best exponent less that at exponent 1: (difference, low, high), a paired bootstrap
            interval. The best was chosen on these very queries, so it flatters: confirm a choice on others.
        versus_dot: The same against exponent 0.
        confidence: Of both intervals.
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
    def best_ndcg(self) -> float:
        """Mean nDCG@10 at the best exponent."""
        return float(self.ndcg.max())

    @property
    def interval(self) -> tuple[float, float]:
        """Bootstrap interval of the gain over cosine: (low, high). Containing 0, it is a tie."""
        return self.versus_cosine[1:]

    @property
    def best_similarity(self) -> Similarity:
        """The similarity to read out with; its query exponent is free, and 1 keeps scores on one scale."""
        return Similarity(query=1.0, document=self.best)

    def __str__(self) -> str:
        lines = [f"nDCG@10 by document exponent, {len(self.queries)} queries (0 is dot, 1 is cosine)"]
        lines += [
            f"  {exponent:5.3f}  {value:.4f}{'  <- best' if exponent == self.best else ''}"
            for exponent, value in zip(self.exponents, self.ndcg, strict=True)
        ]
        for name, (gain, low, high) in {"cosine": self.versus_cosine, "dot": self.versus_dot}.items():
            verdict = "a tie" if low <= 0.0 <= high else "a difference"
            lines.append(f"best - {name}: {gain:+.4f} [{low:+.4f}, {high:+.4f}] at {self.confidence:.0%}, {verdict}")
        return "\n".join(lines)


def calibrate_exponent(
    model: SentenceTransformer,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevant_docs: Mapping[str, Collection[str]],
    exponents: Any = None,
    batch_size: int = 32,
    num_samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    show_progress_bar: bool | None = None,
) -> ExponentCurve:
    """Encodes once and ranks by q · d / |d|^gamma for a sweep of document exponents gamma.

    A query's own exponent never changes its ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so one sweep covers all
    similarities. Run it on validation data; `st_magnitude.export` takes the exponent it finds.

    Args:
        model: A model whose embeddings keep their length. A closing ExponentNorm is looked behind.
        queries: Query id -> text. Queries without a relevant document are left out.
        corpus: Document id -> text.
        relevant_docs: Query id -> ids of its relevant documents.
        exponents: Document exponents in [0, 1]; by default 0, 0.05, ..., 1. The ends 0 and 1 are always among them.
        batch_size: Texts encoded at a time.
        num_samples: Bootstrap resamples of the queries.
        confidence: Of the intervals.
        seed: Of the bootstrap.
        show_progress_bar: Whether to show one; None follows the log level.

    Raises:
        ValueError: If the data are empty or inconsistent (see `check_judgments`), an exponent lies outside [0, 1], or
            the model normalises its embeddings.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], device="cpu")
        >>> queries, corpus = {"q": "honey"}, {"d1": "honey", "d2": "honey, honey of bees"}
        >>> print(calibrate_exponent(model, queries, corpus, relevant_docs={"q": {"d2"}}, exponents=[0.5]))
        nDCG@10 by document exponent, 1 queries (0 is dot, 1 is cosine)
          0.000  1.0000
          0.500  1.0000  <- best
          1.000  0.6309
        best - cosine: +0.3691 [+0.3691, +0.3691] at 95%, a difference
        best - dot: +0.0000 [+0.0000, +0.0000] at 95%, a tie
    """
    relevant = check_judgments(queries, corpus, relevant_docs)
    gammas = np.unique(np.append(np.linspace(0.0, 1.0, 21) if exponents is None else exponents, [0.0, 1.0]))
    if gammas[0] < 0.0 or not gammas[-1] <= 1.0:
        raise ValueError(f"Document exponents lie in [0, 1] (0 keeps the norm, 1 removes it), got {gammas.tolist()}.")
    query_ids = [query for query in queries if relevant.get(query)]
    document_ids = sorted(corpus)  # rank() gives a tie to the lower index: so does the evaluator, to the lower id
    documents_text = [corpus[document] for document in document_ids]
    if len(query_ids) < FEW_QUERIES:
        logger.warning(
            f"{len(query_ids)} queries are few to choose an exponent by: differences of several hundredths of nDCG are "
            f"noise. Use at least {FEW_QUERIES}, better some hundreds."
        )

    probe = norms(encode_raw(model, documents_text[:batch_size], "document", batch_size, False, keep_normalize=True))
    if are_unit(probe):
        raise ValueError(
            "The model normalises its embeddings: all norms are 1, and every exponent ranks alike. "
            'Strip the normalisation with stm.prepare(model, "dot"), then train or calibrate.'
        )
    q = encode_raw(model, [queries[query] for query in query_ids], "query", batch_size, show_progress_bar)
    d = encode_raw(model, documents_text, "document", batch_size, show_progress_bar)

    position = {document: i for i, document in enumerate(document_ids)}
    columns = [[position[document] for document in relevant[query]] for query in query_ids]
    hits = sweep_exponents(q, d, columns, gammas)  # (E, n, <= 10)
    per_query = np.stack([ndcg(h, [len(c) for c in columns]) for h in hits])
    means = per_query.mean(axis=1)
    best = int(np.flatnonzero(np.isclose(means, means.max(), rtol=0.0, atol=1e-12))[-1])
    gain = [
        paired_bootstrap(per_query[best], per_query[end], num_samples=num_samples, confidence=confidence, seed=seed)
        for end in (-1, 0)
    ]
    return ExponentCurve(gammas, per_query, query_ids, float(gammas[best]), gain[0], gain[1], confidence)


def sweep_exponents(q: Tensor, d: Tensor, columns: list[list[int]], gammas: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether the ten best documents are relevant, at every exponent: (E, n, <= 10), from one product per row tile."""
    lengths = safe_norm(d).T  # (1, m)
    rows = max(1, TILE // len(d))
    tiles = []
    for start in range(0, len(q), rows):
        inner = q[start : start + rows] @ d.T  # (rows, m)
        relevant = torch.zeros_like(inner, dtype=torch.bool)
        for row, relevant_columns in enumerate(columns[start : start + rows]):
            relevant[row, relevant_columns] = True
        hits = [relevant.gather(1, rank(inner * lengths ** -float(gamma), k=10)) for gamma in gammas]
        tiles.append(torch.stack(hits).cpu().numpy())
    return np.concatenate(tiles, axis=1)
