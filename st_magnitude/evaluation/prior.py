"""calibrate_prior chooses how much of log p(d) is added to the scores of a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.calibration import highest_rows, warn_if_few
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.result import Result, Table, interval
from st_magnitude.similarity import DOT, Similarity

__all__ = ["PriorCurve", "calibrate_prior"]

FOLDS = 5
FACTORS = np.geomspace(1 / 64, 16, 21)  # weights, in units of the spread of the scores over the spread of log p


@dataclass(frozen=True, repr=False)
class PriorCurve(Result):
    """nDCG@10 over the weight of the document prior, the recommended weight, and the evidence for it.

    Attributes:
        weights: Weights in rising order, from 0, (W,).
        per_query: nDCG@10 of every query at every weight, (W, n).
        queries: Ids of the n queries.
        weight: The recommended weight: `highest`, or 0 if ``gain`` is a tie.
        gain: nDCG@10 with the prior minus nDCG@10 without, with a paired bootstrap interval: (difference, low, high).
            It is cross-fitted: each fifth of the queries is measured at the weight that is best on the others.
        confidence: Confidence level of the interval.
        similarity: The similarity of the scores to which the prior is added.
    """

    weights: NDArray[np.float64]
    per_query: NDArray[np.float64]
    queries: list[str]
    weight: float
    gain: tuple[float, float, float]
    confidence: float
    similarity: Similarity

    @property
    def ndcg(self) -> NDArray[np.float64]:
        """Mean nDCG@10 at every weight, (W,); the first is without the prior."""
        return self.per_query.mean(axis=1)

    @property
    def highest(self) -> float:
        """The weight with the highest mean nDCG@10; of several, the smallest."""
        return float(self.weights[highest_rows(self.per_query)[0]])

    def to_dict(self) -> dict[str, Any]:
        """The choice and mean nDCG@10 by weight, as JSON has them."""
        means = {f"{weight:.6g}": float(value) for weight, value in zip(self.weights, self.ndcg, strict=True)}
        found = {"weight": self.weight, "highest": self.highest, "gain": list(self.gain), "queries": len(self.queries)}
        return found | {"similarity": self.similarity.exponents, "ndcg@10": means}

    def tables(self) -> list[Table | str]:
        """nDCG@10 by weight, and the gain."""
        marks = {self.highest: "highest"} | {self.weight: "best"}
        rows = [[f"{w:.4g}", value, marks.get(w, "")] for w, value in zip(self.weights, self.ndcg, strict=True)]
        title = f"nDCG@10 by weight of log p(d), {len(self.queries)} queries"
        verdict = "" if self.weight or not self.highest else ", a tie: the best weight is 0"
        sentence = f"With the prior, on queries that did not choose its weight: {interval(self.gain)}{verdict}."
        return [Table(["weight", "nDCG@10", ""], rows, title), sentence]


def calibrate_prior(
    model: SentenceTransformer,
    data: RetrievalData,
    log_p: Mapping[str, float] | Sequence[float] | NDArray[Any],
    similarity: Similarity | str | None = None,
    num_samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    encode: Mapping[str, Any] | None = None,
) -> PriorCurve:
    """Encodes once and ranks by s(q, d) + weight · log p(d) for a sweep of weights, of which 0 is the first.

    A softmax over the documents of a batch divides by how often each is drawn, so a model trained with it does not
    score documents by their popularity. Adding log p(d) at scoring restores it, without training. The weights of the
    sweep are in units of the spread of the model's scores over the spread of log p, and the result has absolute ones.

    Args:
        model: Any SentenceTransformer, trained with or without a prior.
        data: Queries, corpus and judgments, usually a dev split. Queries without a relevant document do not count.
        log_p: Document id -> log p(d), for every document of the corpus, or an array in the order of ``data.corpus``.
            `RetrievalData.log_prior` of the training split has it. A constant that is added to all has no effect.
        similarity: The similarity of s(q, d); by default the model's own. With a prior the norm of the query counts,
            if the similarity keeps it: "qnorm" gives every query the same weight of the prior, "dot" does not.
        num_samples: Number of bootstrap resamples of the queries.
        confidence: Confidence level of the interval.
        seed: Seed for the folds and the bootstrap.
        encode: Options of `RetrievalData.encode`, such as ``{"batch_size": 128}``.

    Raises:
        ValueError: If there are fewer than five queries with a relevant document, a document has no log p or one that
            is not finite, or an embedding is not finite.

    Example:
        >>> from sentence_transformers import SentenceTransformer
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey"])], similarity_fn_name="cosine", device="cpu")
        >>> corpus = {"rare": "bees", "popular": "bees honey honey"}
        >>> ids = [f"q{i}" for i in range(50)]
        >>> data = RetrievalData(dict.fromkeys(ids, "bees"), corpus, dict.fromkeys(ids, {"popular"}))
        >>> curve = calibrate_prior(model, data, {"rare": -5.0, "popular": -0.1})
        >>> curve.weight > 0, [round(x, 3) for x in curve.gain]
        (True, [0.369, 0.369, 0.369])

    `st_magnitude.serving.with_prior` writes the weight into the vectors of an index for inner products.

    Source: Yi et al., Sampling-Bias-Corrected Neural Modeling for Large Corpus Item Recommendations, RecSys 2019.
    """
    similarity = scoring_of(model, similarity)
    prior = aligned_prior(data, log_p)
    if len(data.query_ids) < FOLDS:
        raise ValueError(f"{len(data.query_ids)} queries have a relevant document, but at least {FOLDS} are needed.")
    warn_if_few(data.query_ids, "a weight")
    return prior_curve(
        data.encode(model, **(encode or {})), data.query_ids, prior, similarity, num_samples, confidence, seed
    )


def prior_curve(
    encoded: EncodedTask,
    query_ids: list[str],
    prior: NDArray[np.float64],
    similarity: Similarity,
    num_samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> PriorCurve:
    """`calibrate_prior` with embeddings that exist; ``prior`` is log p(d) in the order of the documents, (m,)."""
    q, d = similarity.query(encoded.queries), similarity.document(encoded.documents)
    variances = ((q.double() @ torch.cov(d.double().T)) * q.double()).sum(dim=1)  # of the scores of each query, (n,)
    unit = float(variances.clamp(min=0).sqrt().mean()) / (float(prior.std()) or np.inf)
    weights = np.unique(np.append(0.0, FACTORS * unit))
    per_query = np.stack([_with_prior(encoded, q, d, weight * prior) for weight in weights])

    fold = np.random.default_rng(seed).permutation(per_query.shape[1]) % FOLDS
    held_out = np.empty(per_query.shape[1])
    for part in range(FOLDS):
        row = highest_rows(per_query[:, fold != part])[0]
        held_out[fold == part] = per_query[row, fold == part]
    gain = paired_bootstrap(held_out, per_query[0], num_samples=num_samples, confidence=confidence, seed=seed)
    best = float(weights[highest_rows(per_query)[0]]) if gain[1] > 0 else 0.0
    return PriorCurve(weights, per_query, query_ids, best, gain, confidence, similarity)


def aligned_prior(data: RetrievalData, log_p: Any) -> NDArray[np.float64]:
    """log p(d) in the order of ``data.document_ids``, (m,)."""
    if not isinstance(log_p, Mapping):
        values = np.asarray(log_p, dtype=np.float64)
        if values.shape != (len(data.corpus),):
            raise ValueError(
                f"log_p has the shape {values.shape} for {len(data.corpus)} documents: give one value each."
            )
        log_p = dict(zip(data.corpus, values, strict=True))
    missing = [document for document in data.document_ids if document not in log_p]
    if missing:
        raise ValueError(
            f"log_p has no value for {len(missing)} of {len(data.corpus)} documents, such as {missing[0]!r}: use "
            "RetrievalData.log_prior of judgments over this corpus, whose smoothing gives every document a value."
        )
    values = np.array([log_p[document] for document in data.document_ids], dtype=np.float64)
    if not np.isfinite(values).all():
        first = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(
            f"log_p of {data.document_ids[first]!r} is {values[first]}: smooth the counts, because log 0 is not finite."
        )
    return values


def _with_prior(
    encoded: EncodedTask, q: torch.Tensor, d: torch.Tensor, bias: NDArray[np.float64]
) -> NDArray[np.float64]:
    """nDCG@10 of every query by q · d + bias: (n, D), (m, D), (m,) -> (n,). The bias is one more dimension."""
    ones, last = torch.ones_like(q[:, :1]), torch.as_tensor(bias[:, None]).to(d)
    search = EncodedTask(torch.cat([q, ones], dim=1), torch.cat([d, last], dim=1))
    return encoded.ndcg(search.top(DOT))
