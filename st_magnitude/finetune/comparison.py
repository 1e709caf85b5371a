"""Is the trained model better than the pretrained one, and how is it best scored? Measured on held-out queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.calibration import EXPONENTS, calibrate_exponent
from st_magnitude.evaluation.metrics import scoring_of
from st_magnitude.geometry import paired_bootstrap
from st_magnitude.result import Result, Table, interval
from st_magnitude.similarity import COSINE, Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["Comparison", "Scored", "compare", "own_ndcg", "own_similarity"]


@dataclass(frozen=True)
class Scored:
    """The trained model under one similarity."""

    exponent: float  # of documents
    ndcg: float  # mean nDCG@10
    gain: tuple[float, float, float]  # over the pretrained model: (difference, low, high), paired bootstrap at 95 %

    @property
    def name(self) -> str:
        return {0.0: "dot", 1.0: "cosine"}.get(self.exponent, f"exponent {self.exponent:.2f}")


@dataclass(frozen=True)
class Comparison(Result):
    """The trained model next to the pretrained one on the same queries."""

    queries: int
    pretrained: float  # nDCG@10 under the similarity of the pretrained model
    as_trained: Scored  # under the similarity of the loss
    best: Scored | None  # at `ExponentCurve.best`, chosen by these queries; None for a model that normalises
    saved: Scored  # the one of the two that the saved model is scored with
    curve: dict[str, float] | None  # nDCG@10 by document exponent

    @property
    def is_better(self) -> bool:
        """Whether the interval of the saved model's gain lies above 0."""
        return self.saved.gain[1] > 0.0

    @property
    def is_worse(self) -> bool:
        """Whether the interval lies below 0, at the best exponent too."""
        return max(self.saved.gain[2], (self.best or self.saved).gain[2]) < 0.0

    @property
    def keeps_norm(self) -> bool:
        """Whether the saved model keeps the norms of documents, from which an exponent can be calibrated."""
        return self.best is not None and self.saved.exponent < 1.0

    def tables(self) -> Iterable[Table]:
        """One table, for the terminal and for the model card."""
        rows: list[list[Any]] = [["pretrained", self.pretrained, ""]]
        for scored in dict.fromkeys((self.as_trained, self.best or self.as_trained)):
            kind = "as trained" if scored == self.as_trained else "best"
            saved = ", saved" if scored == self.saved else ""
            rows.append([f"trained, {scored.name} ({kind}{saved})", scored.ndcg, scored.gain])
        title = f"nDCG@10 on {self.queries:,} queries, with the difference from pretrained and its 95 % interval"
        note = "The exponent was chosen on these queries, so its figure is optimistic."
        yield Table(["model", "nDCG@10", "difference"], rows, title, note if self.saved != self.as_trained else "")

    def verdict(self, split: str) -> str:
        """Whether the trained model is better than the pretrained one, in a sentence or two."""
        is_lower = self.saved.gain[2] < 0.0
        verdict = "better" if self.is_better else "clearly worse" if is_lower else "not clearly better"
        advice = " Train on more pairs or with another learning rate, or keep the pretrained model."
        if is_lower and not self.is_worse:
            advice = " Another exponent is better: run calibrate, or leave out --keep-scoring."
        return (
            f"The trained model is {verdict} than the pretrained one on the {split} split: nDCG@10 changes by "
            f"{interval(self.saved.gain)}.{'' if self.is_better else advice}"
        )


def own_similarity(model: SentenceTransformer) -> Similarity:
    """The model's own similarity; cosine if that is a distance."""
    return scoring_of(model, None if model.similarity_fn_name in ("cosine", "dot") else COSINE)


def own_ndcg(
    model: SentenceTransformer, data: RetrievalData, similarity: Similarity | None = None
) -> NDArray[np.float64]:
    """nDCG@10 of every query under the model's own similarity, or under another one."""
    encoded = data.encode(model)
    return encoded.ndcg(encoded.top(similarity or own_similarity(model)))


def compare(
    model: SentenceTransformer, data: RetrievalData, pretrained: NDArray[np.float64], keep_scoring: bool, seed: int
) -> Comparison:
    """Measures a trained model next to the pretrained one and chooses how it is scored.

    The model is scored as it was trained unless another document exponent is better. Of two that are tied, a model that
    loads without this package (exponent 0 or 1) is preferred.
    """

    def scored(exponent: float, per_query: NDArray[np.float64]) -> Scored:
        return Scored(exponent, float(per_query.mean()), paired_bootstrap(per_query, pretrained, seed=seed))

    number, before, exponent = len(pretrained), float(pretrained.mean()), float(scoring_of(model).exponents[1])
    if normalizes_output(model):
        trained = scored(exponent, own_ndcg(model, data))
        return Comparison(number, before, trained, None, trained, None)
    curve = calibrate_exponent(model, data, np.append(EXPONENTS, exponent), seed=seed)
    trained, best = (
        scored(gamma, curve.per_query[np.abs(curve.exponents - gamma).argmin()]) for gamma in (exponent, curve.best)
    )
    loads_anywhere = trained.exponent in (0.0, 1.0)
    keep = keep_scoring or (loads_anywhere and trained.ndcg >= best.ndcg)
    return Comparison(number, before, trained, best, trained if keep else best, curve.to_dict()["ndcg@10"])
