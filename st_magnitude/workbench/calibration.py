"""How to score a trained model: its document exponent."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sentence_transformers import SentenceTransformer

from st_magnitude._checks import InputError
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.data.task import EncodedTask, encode
from st_magnitude.evaluation.magnitude import geometry_figures
from st_magnitude.geometry import Array, norms
from st_magnitude.judge import Difference, judge, nothing_found, warn_if_few
from st_magnitude.result import Result, Table, to_plain
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.normalize import are_unit
from st_magnitude.surgery.raw import normalizes_output
from st_magnitude.workbench.judging.folds import where
from st_magnitude.workbench.judging.options import Options, Rule, highest_rows

__all__ = ["ExponentCurve", "calibrate_exponent"]

EXPONENTS = np.linspace(0.0, 1.0, 21)  # the document exponents of a sweep
FEW_DRAWS = 2_000  # of `judge`, enough to choose by
GEOMETRY = {
    "norm_mean": "mean norm",
    "norm_cv": "its coefficient of variation",
    "mean_cosine": "mean cosine of two of them",
    "isoscore": "IsoScore (1: even in all dimensions)",
}
UNIT_NORMS = (
    "The model normalises its embeddings, as after a training with the cosine loss: all norms are"
    " 1, and every exponent ranks alike. To choose an exponent, train with a loss that keeps norms"
    ' (--loss qnorm --keep-scoring), or remove Normalize with stm.prepare(model, "dot") and save'
    " the model."
)


@dataclass(frozen=True, repr=False)
class ExponentCurve(Options[float], Result):
    """nDCG@10 over the document exponent, the recommended exponent, and the evidence for it.

    The rankings are by document exponent, from 0 (dot) to 1 (cosine).

    Attributes:
        present: The exponent at which the model is scored today.
        geometry: Norms and directions of the embeddings, with the keys of `MagnitudeEvaluator`.
    """

    present: float = 0.0
    geometry: Mapping[str, float] = field(default_factory=dict)

    @property
    def exponents(self) -> Array:
        """Document exponents in rising order, (E,)."""
        return np.array(list(self.rankings))

    @property
    def highest(self) -> float:
        """The exponent with the highest mean nDCG@10; of several, the largest."""
        return float(self.exponents[highest_rows(self.per_query)[-1]])

    @property
    def best(self) -> float:
        """The recommended exponent: the first of ``present``, 1, 0 and `highest` that `judge` does
        not find clearly worse than `highest`. Models with 1 and 0 load without this package."""
        return self.value

    @cached_property
    def versus_cosine(self) -> Difference:
        """nDCG@10 of `held_out`, whose queries did not choose, minus nDCG@10 at exponent 1."""
        return self.over(1.0)

    @cached_property
    def versus_dot(self) -> Difference:
        """The same against exponent 0."""
        return self.over(0.0)

    def at(self, exponent: float) -> Ranking:
        """The ranking at one of the exponents."""
        return self.rankings[_nearest(self.exponents, exponent)]

    @property
    def best_similarity(self) -> Similarity:
        """The recommended similarity. Query exponent 1 puts the scores on one scale."""
        return Similarity(gamma_query=1.0, gamma_document=self.best)

    def tables(self) -> Iterable[Table | str]:
        nothing = nothing_found(*self.ndcg)
        marks = {} if nothing else {self.highest: "highest"} | {self.best: "best"}
        pairs = zip(self.exponents, self.ndcg, strict=True)
        rows = [[f"{x:.4g}", y, marks.get(x, "")] for x, y in pairs]
        on = where(self.at(self.best).data)
        title = f"nDCG@10 on {on} by document exponent (0 is dot, 1 is cosine)"
        yield Table(["exponent", "nDCG@10", ""], rows, title)
        gains = [["cosine", self.versus_cosine], ["dot", self.versus_dot]]
        title = "The exponent that the other four fifths of the queries choose, against"
        yield Table(["", "difference of nDCG@10 [95 %]"], gains, title)
        if nothing:
            yield nothing
        elif self.best != self.highest:
            is_kept = self.best == self.present
            why = "the model has today" if is_kept else "loads anywhere, without st_magnitude"
            found = f"Exponent {self.highest:g} is not clearly better than"
            yield f"{found} {self.best:g}, which {why}."
        if self.geometry:
            yield self._geometry()

    def _geometry(self) -> Table:
        found = self.geometry
        rows: list[list[object]] = []
        for key, name in GEOMETRY.items():
            rows.append([name, *(found.get(f"{side}_{key}") for side in ("query", "document"))])
        if "cohens_d" in found:
            d = f"{found['cohens_d']:+.2f} ± {1.96 * found['cohens_d_error']:.2f}"
            rows.append(["Cohen's d of norms, answers minus the others", None, d])
        title = f"Embeddings of {found['dimensions']} dimensions, before any scoring"
        return Table(["", "queries", "documents"], rows, title)

    def to_dict(self) -> dict[str, Any]:
        """The choice and mean nDCG@10 by exponent, as JSON has them."""
        pairs = zip(self.exponents, self.ndcg, strict=True)
        return {
            "exponent": self.best,
            "present": self.present,
            "highest": self.highest,
            "queries": len(self.by_query),
            "ndcg@10": {f"{exponent:g}": float(mean) for exponent, mean in pairs},
            "versus_cosine": to_plain(self.versus_cosine),
            "versus_dot": to_plain(self.versus_dot),
            "geometry": to_plain(self.geometry),
        }


def calibrate_exponent(
    model: SentenceTransformer,
    data: RetrievalData,
    exponents: ArrayLike | None = None,
    seed: int = 0,
    also_relevant: Collection[str] = (),
    **options: Any,
) -> ExponentCurve:
    """Encodes once and ranks by q · d / |d|^gamma for a sweep of document exponents gamma.

    The exponent of the query never changes a ranking (arXiv 2602.09229, Prop. 4.1 and T.2), so one
    sweep covers all similarities. `st_magnitude.prepare` takes the similarity that it recommends.

    Args:
        model: A model whose embeddings keep their norm. Embeddings are taken before a closing
            ExponentNorm.
        data: Queries, corpus and judgments, usually a dev split.
        exponents: Document exponents in [0, 1]; by default 0, 0.05, ..., 1. The ends 0 and 1 and
            the model's present one are always added.
        seed: Seed of the draws of `judge`.
        also_relevant: Ids of documents that answer queries of other splits, for Cohen's d.
        **options: Options of `st_magnitude.encode`, such as ``batch_size=128``.

    Raises:
        ValueError: If no query has a relevant document, an exponent lies outside [0, 1], the model
            normalises its embeddings, or an embedding is not finite.

    Example:
        >>> from sentence_transformers.sentence_transformer.modules import BoW
        >>> model = SentenceTransformer(modules=[BoW(["bees", "honey", "wax"])], device="cpu")
        >>> corpus = {"d1": "honey", "d2": "honey, honey of bees"}
        >>> data = RetrievalData({"q": "honey"}, corpus, {"q": {"d2"}})
        >>> curve = calibrate_exponent(model, data, exponents=[0.5])
        >>> curve.ndcg.round(4), curve.highest, curve.best  # one query is a tie with cosine
        (array([1.    , 1.    , 0.6309]), 0.5, 1.0)
    """
    if normalizes_output(model):
        raise InputError(UNIT_NORMS)
    gammas = EXPONENTS if exponents is None else np.asarray(exponents, dtype=float)
    if not ((gammas >= 0) & (gammas <= 1)).all():
        raise InputError(
            "Document exponents lie in [0, 1] (0 keeps the norm, 1 removes it), got "
            f"{gammas.tolist()}."
        )
    task = encode(model, data, **options)
    warn_if_few(task.query_ids, "an exponent")
    if are_unit(norms(task.documents)):  # by a module of another name than Normalize
        raise InputError(UNIT_NORMS)
    sides = {"query": task.queries, "document": task.documents}
    is_relevant = data.is_relevant | np.isin(data.document_ids, list(also_relevant))
    geometry = {"dimensions": task.documents.shape[1]} | geometry_figures(sides, is_relevant)
    return replace(exponent_curve(task, gammas, seed), geometry=geometry)


def exponent_curve(
    task: EncodedTask, exponents: ArrayLike = EXPONENTS, seed: int = 0
) -> ExponentCurve:
    """The sweep and the choice of `calibrate_exponent` for an encoded task."""
    gammas = np.unique(np.append(exponents, [0.0, 1.0]))
    today = task.similarity.exponents[1]
    if np.abs(gammas - today).min() > 1e-6:  # a learned one is in float32
        gammas = np.sort(np.append(gammas, today))
    present = _nearest(gammas, today)
    rule = preferring(gammas, present, seed)
    return ExponentCurve.choose(task.sweep(gammas), rule, seed, present=present)


def preferring(exponents: Array, present: float, seed: int) -> Rule:
    """The rule of `ExponentCurve.best`, for nDCG@10 at rising exponents, (E, n)."""
    preferred = [int(np.abs(exponents - exponent).argmin()) for exponent in (present, 1.0, 0.0)]

    def rule(values: Array) -> int:
        highest = int(highest_rows(values)[-1])
        for row in preferred:
            gain = judge(values[highest] - values[row], num_samples=FEW_DRAWS, seed=seed)
            if not gain.is_better:
                return row
        return highest

    return rule


def _nearest(values: Array, value: float) -> float:
    return float(values[np.abs(values - value).argmin()])
