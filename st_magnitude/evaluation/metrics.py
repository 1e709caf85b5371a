"""Verdicts on differences of a metric; the similarity and the name of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import is_cut, normalizes_output, refuse_other_models, unwrapped

__all__ = [
    "Judgment",
    "are_unit",
    "judge",
    "model_name",
    "own_scoring",
    "ranking_metrics",
    "raw_scoring_of",
    "scoring_of",
]


@dataclass(frozen=True)
class Judgment:
    """Whether a change of the model or of its scoring is an improvement, as `judge` finds it.

    Attributes:
        gain: Mean difference with its 95 % interval: (gain, low, high).
        num_queries, num_changed: Number of queries, and of those whose metric changed at all.
        verdict: ``"better"`` if the interval lies above 0 and reaches ``min_gain``; ``"worse"`` if
            it lies below 0; ``"no better"`` if it excludes a gain of ``min_gain``; else
            ``"undecided"``.
    """

    gain: tuple[float, float, float]
    num_queries: int
    num_changed: int
    verdict: str


def judge(
    differences: ArrayLike, min_gain: float = 0.0, num_samples: int = 10_000, seed: int = 0
) -> Judgment:
    """Judges a mean difference by an interval that holds for few queries and few changes, too.

    A bootstrap of queries that all stayed the same gives [0, 0]. This interval has one more query,
    which lost everything for the lower end and won everything for the upper end:

        low, high = quantiles at 2.5 and 97.5 % of  w_1 x_1 + ... + w_n x_n -+ w_{n+1},

    where the weights w are uniform on the simplex (Dirichlet(1, ..., 1)). For differences of 0 or
    1, these are the exact limits of Clopper and Pearson; for many changes, about a bootstrap's.

    Args:
        differences: A metric such as nDCG@10 of every query with the change minus the one without,
            each in [-1, 1], (n,).
        min_gain: The smallest gain that is worth a change.
        num_samples: Number of draws of the weights.
        seed: Seed of the draws.

    Raises:
        ValueError: If there is no query, or a difference is not a number in [-1, 1].

    Example:
        >>> judge([0.0] * 25, min_gain=0.02).verdict, judge([0.0] * 250, min_gain=0.02).verdict
        ('undecided', 'no better')

    Source: Learned-Miller and Thomas, A New Confidence Interval for the Mean of a Bounded Random
    Variable, arXiv 1905.06208. That it covers for every distribution is a conjecture without a
    known exception.
    """
    x = np.asarray(differences, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not (np.abs(x) <= 1 + 1e-9).all():
        raise ValueError(
            "differences must be one number in [-1, 1] for each query, such as differences of "
            f"nDCG@10; got an array of shape {x.shape}."
        )
    changed = x[x != 0]
    unchanged = len(x) - len(changed)
    rng = np.random.default_rng(seed)
    extra = rng.standard_exponential(num_samples)
    total = extra + (rng.standard_gamma(unchanged, num_samples) if unchanged else 0.0)
    weighted = np.zeros(num_samples)
    for value in changed:
        weights = rng.standard_exponential(num_samples)
        weighted += weights * value
        total += weights
    low = float(np.quantile((weighted - extra) / total, 0.025))
    high = float(np.quantile((weighted + extra) / total, 0.975))
    verdict = "undecided"
    if high < 0:
        verdict = "worse"
    elif high < min_gain:
        verdict = "no better"
    elif low > 0:
        verdict = "better"
    return Judgment((float(x.mean()), low, high), len(x), len(changed), verdict)


def ranking_metrics(
    hits: NDArray[np.bool_], relevant: Iterable[Sized], k: int
) -> dict[str, NDArray[np.float64]]:
    """MRR@10, recall@k and MAP@k of the best k documents: (n, <= k), n collections -> (n,)."""
    number = np.array([len(row) for row in relevant])
    ranks = np.arange(1, hits.shape[1] + 1)
    precision = hits.cumsum(axis=1) / ranks
    return {
        "mrr@10": (hits / ranks)[:, :10].max(axis=1),
        f"recall@{k}": hits.sum(axis=1) / number,
        f"map@{k}": (hits * precision).sum(axis=1) / number.clip(max=k),
    }


def are_unit(norms: NDArray[np.float64]) -> bool:
    """Whether all norms are 1 to the precision of half floats, so the model normalises."""
    return bool(np.abs(norms - 1).max() < 1e-3)


def scoring_of(
    model: SentenceTransformer, similarity: Similarity | str | None = None
) -> Similarity:
    """The given similarity, or the one that a model says it is for."""
    model = refuse_other_models(model, "A measurement")
    if similarity is None:
        closing = getattr(list(model.children())[-1], "similarity", None)
        similarity = closing if isinstance(closing, Similarity) else model.similarity_fn_name
        if isinstance(similarity, str) and similarity not in ("cosine", "dot"):
            raise ValueError(
                f"The model's similarity_fn_name is {similarity!r}, which is not an inner product;"
                ' pass similarity="cosine", "dot", "qnorm", "dnorm" or a Similarity.'
            )
    return Similarity(*Similarity.named(similarity).exponents)


def own_scoring(model: SentenceTransformer) -> Similarity:
    """The similarity that a model says it is for, and cosine in place of a distance."""
    model = refuse_other_models(model, "A measurement")
    return scoring_of(model, None if model.similarity_fn_name in ("cosine", "dot") else COSINE)


def raw_scoring_of(
    model: SentenceTransformer, similarity: Similarity | str | None = None
) -> Similarity:
    """`scoring_of` for embeddings from before a closing Normalize, which makes it cosine."""
    own = scoring_of(model, similarity)
    if similarity is not None or not normalizes_output(model):
        return own
    if own != COSINE and is_cut(model):
        raise ValueError(
            f"This model is cut to truncate_dim={unwrapped(model).truncate_dim} after Normalize "
            "and scores by dot, which no similarity of its raw embeddings does. Pass "
            "similarity='cosine'."
        )
    return COSINE


def model_name(model: SentenceTransformer) -> str:
    """The name of a model: a hub id, the last two names of a path, or the names of its modules."""
    model = unwrapped(model)
    known = model.model_card_data.model_id or model.model_card_data.base_model
    for module in model.modules():
        known = known or getattr(module, "name_or_path", None)  # of a model of transformers
    if not known:
        return " + ".join(type(module).__name__ for module in model)
    path = Path(known)
    return "/".join(path.parts[-2:]) if path.is_absolute() else str(known)
