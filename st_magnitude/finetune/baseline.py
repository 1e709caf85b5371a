"""The pretrained baseline: what a trained model has to beat on held-out queries."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from sentence_transformers import SentenceTransformer

from st_magnitude.data.folds import DEFAULT_FOLDS, folds_of
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import DataError, RetrievalData
from st_magnitude.data.task import EncodedTask
from st_magnitude.evaluation.calibration import exponent_curve, exponents_with, ndcg_by_exponent
from st_magnitude.evaluation.choice import System, choose, decide, fusions
from st_magnitude.evaluation.scoring import scoring_of
from st_magnitude.finetune.measure import bm25_control, card_figures, encode
from st_magnitude.finetune.settings import TrainConfig
from st_magnitude.finetune.verdict import Control, Scored, Verdict, changes_of
from st_magnitude.judge import warn_if_few
from st_magnitude.similarity import Similarity
from st_magnitude.surgery.raw import normalizes_output

__all__ = ["Baseline"]

NAMES = {  # in the table
    "BM25": "BM25 of {}",
    "the pretrained model with BM25": "pretrained + BM25",
    "the trained model with BM25": "trained + BM25",
}


class Baseline:
    """The pretrained baseline: a model and BM25, measured on held-out queries before training.

    Args:
        held_out: The queries to measure on; None: only the norms of a sample of the data.
        answers: Ids of documents that answer a query of any split.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        data: RetrievalData,
        held_out: RetrievalData | None,
        answers: Collection[str],
        config: TrainConfig,
    ) -> None:
        self.model = model
        self.config = config
        self.is_judged = held_out is not None
        self.data = data = held_out or data
        self.answers = answers
        if len(data.corpus) < 2:
            raise DataError("The corpus has one document: there is nothing to tell apart.")
        began = time.perf_counter()
        encoded = None
        if self.is_judged:
            warn_if_few(data.query_ids, "a model")
            encoded, similarity = encode(model, data)
            self.exponent = float(similarity.exponents[1])
            self.found = encoded.search(Similarity(1.0, self.exponent))
            self.folds = folds_of(data, DEFAULT_FOLDS, config.seed)
            self.lexical, self.no_control = bm25_control(data)
        self.geometry = self._geometry(encoded)
        self.seconds = time.perf_counter() - began

    def compare(
        self, of_folds: Ranking | None = None, folds: int = 0
    ) -> tuple[Verdict | None, dict[str, float]]:
        """The verdict on the trained model, and the figures of its norms.

        ``of_folds`` is the ranking of `cross_validate`, on which the verdict is then based.
        """
        verdict = None
        encoded = None
        if of_folds is not None:
            exponent = float(scoring_of(self.model, before_normalize=True).exponents[1])
            verdict = replace(self._verdict(exponent, of_folds), folds=folds)
        elif self.is_judged:
            encoded, similarity = encode(self.model, self.data)
            verdict = self._choose_scoring(encoded, similarity)
        return verdict, self._geometry(encoded)

    def _geometry(self, encoded: EncodedTask | None) -> dict[str, float]:
        return card_figures(self.model, self.data, self.answers, self.config.seed, encoded)

    def _choose_scoring(self, encoded: EncodedTask, similarity: Similarity) -> Verdict:
        """The verdict on the model as it was trained, or at `ExponentCurve.best`."""
        present = float(similarity.exponents[1])
        seed = self.config.seed
        trained = self._verdict(present, encoded.search(Similarity(1.0, present)))
        if normalizes_output(self.model):
            return trained
        exponents = exponents_with(present)
        per_query = ndcg_by_exponent(encoded, exponents)
        curve = exponent_curve(exponents, per_query, self.data.query_ids, present, seed)
        best = self._verdict(curve.best, encoded.search(Similarity(1.0, curve.best)))
        saved = trained if self.config.keep_scoring else best
        shown = curve.to_dict()["ndcg@10"]
        return replace(saved, as_trained=trained.saved, best=best.saved, curve=shown)

    def _verdict(self, exponent: float, found: Ranking) -> Verdict:
        """The verdict on a ranking of the trained model, with the document exponent of its
        scoring."""
        gain = found.minus(self.found, seed=self.config.seed)
        scored = Scored(exponent, found.mean, gain)
        changes = found.ndcg - self.found.ndcg
        before = System("the pretrained model", self.found)
        after = System("the trained model", found)
        systems = [before, after]
        if self.lexical:
            bm25 = choose(self.lexical, self.folds)
            systems = [System("BM25", bm25.ranking, bm25.value)]
            for one, its_exponent in ((before, self.exponent), (after, exponent)):
                options = fusions(one.ranking, self.lexical, its_exponent == 1.0)
                fused = choose(options, self.folds)
                name = f"{one.name} with BM25"
                systems += [one, System(name, fused.ranking, str(fused.value))]
        others = [system for system in systems if system not in (before, after)]
        return Verdict(
            queries=gain.queries,
            pretrained=self.found.mean,
            as_trained=scored,
            best=None,
            saved=scored,
            curve=None,
            controls=tuple(
                Control(
                    NAMES[one.name].format(one.how),
                    one.ranking.mean,
                    found.minus(one.ranking, seed=self.config.seed),
                )
                for one in others
            ),
            decision=decide(systems, self.config.seed),
            gained=int((changes > 0).sum()),
            lost=int((changes < 0).sum()),
            changes=changes_of(self.found, found),
            no_control=self.no_control,
        )
