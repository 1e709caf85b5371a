"""Is the trained model better than the pretrained one, and how is it best scored?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.calibration import calibrate_exponent, warn_if_few
from st_magnitude.evaluation.metrics import judge, own_scoring, scoring_of
from st_magnitude.result import Result, Table, interval
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["Scored", "Verdict", "judge_model", "own_ndcg"]

FEW_CHANGES = 30  # queries whose nDCG@10 changes, below which no small gain can be seen


@dataclass(frozen=True)
class Scored:
    """The trained model under one similarity."""

    exponent: float  # of documents
    ndcg: float  # mean nDCG@10
    # over the pretrained model: (difference, low, high), see `judge`
    gain: tuple[float, float, float]
    changed: int  # number of queries whose nDCG@10 differs from that of the pretrained model

    @property
    def name(self) -> str:
        return {0.0: "dot", 1.0: "cosine"}.get(self.exponent, f"exponent {self.exponent:.2f}")


@dataclass(frozen=True)
class Verdict(Result):
    """The trained model next to the pretrained one on the same queries."""

    queries: int
    pretrained: float  # nDCG@10 under the similarity of the pretrained model
    as_trained: Scored  # under the similarity of the loss
    # at `ExponentCurve.best`: as trained, unless these queries have chosen another exponent, which
    # is clearly better; None for a model that normalises
    best: Scored | None
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
    def caveat(self) -> str:
        """A sentence on what these queries have chosen, or nothing."""
        if self.saved == self.as_trained:
            return ""
        return "These queries have chosen the exponent, so the difference is optimistic."

    def tables(self) -> Iterable[Table]:
        rows: list[list[object]] = [["pretrained", self.pretrained, ""]]
        for scored in dict.fromkeys((self.as_trained, self.best or self.as_trained)):
            kind = "as trained" if scored == self.as_trained else "best"
            saved = ", saved" if scored == self.saved else ""
            rows.append([f"trained, {scored.name} ({kind}{saved})", scored.ndcg, scored.gain])
        title = (
            f"nDCG@10 on {self.queries:,} queries, with the difference from pretrained and its 95 %"
            " interval"
        )
        yield Table(["model", "nDCG@10", "difference"], rows, title, self.caveat)

    def summary(self, split: str, advice: str = "") -> str:
        """Whether the trained model is better than the pretrained one, in a few sentences."""
        is_lower = self.saved.gain[2] < 0.0
        name = "better" if self.is_better else "clearly worse" if is_lower else "not clearly better"
        if is_lower and not self.is_worse:
            advice = "Another exponent is better: run calibrate, or leave out --keep-scoring."
        elif not is_lower and self.saved.changed < FEW_CHANGES:
            advice = advice or "That is too little to judge by: add queries to the split."
        usual = "Train on more pairs or with another learning rate, or keep the pretrained model."
        said = (
            f"The trained model is {name} than the pretrained one on the {split} split: nDCG@10"
            f" changes by {interval(self.saved.gain)}, and for {self.saved.changed:,} of"
            f" {self.queries:,} queries at all."
        )
        parts = (said, self.caveat, "" if self.is_better else advice or usual)
        return " ".join(part for part in parts if part)


def own_ndcg(model: SentenceTransformer, data: RetrievalData) -> NDArray[np.float64]:
    """nDCG@10 of every query under the model's own similarity; cosine if it is a distance."""
    encoded = data.encode(model)
    return encoded.ndcg(encoded.top(own_scoring(model)))


def judge_model(
    model: SentenceTransformer,
    data: RetrievalData,
    pretrained: NDArray[np.float64],
    keep_scoring: bool,
    seed: int,
) -> Verdict:
    """Measures a trained model next to the pretrained one and chooses how it is scored.

    It is scored as it was trained, unless another document exponent is clearly better
    (`ExponentCurve.best`) and ``keep_scoring`` is False.
    """

    def scored(exponent: float, per_query: NDArray[np.float64]) -> Scored:
        found = judge(per_query - pretrained, seed=seed)
        return Scored(exponent, float(per_query.mean()), found.gain, found.num_changed)

    number, before = len(pretrained), float(pretrained.mean())
    if normalizes_output(model):
        warn_if_few(data.query_ids, "a model")
        trained = scored(float(scoring_of(model).exponents[1]), own_ndcg(model, data))
        return Verdict(number, before, trained, None, trained, None)
    curve = calibrate_exponent(model, data, seed=seed)
    trained, best = (scored(gamma, curve.at(gamma)) for gamma in (curve.present, curve.best))
    saved = trained if keep_scoring else best
    return Verdict(number, before, trained, best, saved, curve.to_dict()["ndcg@10"])
