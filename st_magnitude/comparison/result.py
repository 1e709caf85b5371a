"""The result of a comparison: the recommendation and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from st_magnitude.comparison.config import Candidate
from st_magnitude.judge import Difference, nothing_found
from st_magnitude.result import Result, Table, to_plain

__all__ = ["CompareResult", "Entry", "OnTest"]

BM25 = "BM25"


@dataclass(frozen=True)
class Entry:
    """A candidate and its measurements on dev."""

    candidate: Candidate
    curve: list[tuple[int, float]]  # steps and nDCG@10 of every rung; nan if training diverged
    exponent: float  # of documents, the best one on dev; 1 is cosine
    seconds: float
    # nDCG@10 of every dev query after the last of these steps; nothing if training diverged
    ndcg: list[float] = field(default_factory=list)
    second_seed: float | None = None  # nDCG@10 at the end, trained again with another seed

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def steps(self) -> int:
        return self.curve[-1][0]

    @property
    def score(self) -> float:
        """nDCG@10 with the first seed; -inf if training diverged."""
        return _or_lowest(self.curve[-1][1])

    @property
    def mean_score(self) -> float:
        """The mean over both seeds; without a second one, `score`."""
        if self.second_seed is None:
            return self.score
        return (self.score + _or_lowest(self.second_seed)) / 2

    @property
    def shown_score(self) -> str:
        return f"{self.score:.4f}" if math.isfinite(self.score) else "diverged"

    def to_dict(self) -> dict[str, object]:
        """The figures as plain JSON values, without those of every query."""
        figures = {"name": self.name} | to_plain(self)
        del figures["ndcg"]
        return figures


@dataclass(frozen=True)
class OnTest:
    """nDCG@10 on test of "pretrained", plain cosine, the first on dev and BM25, by name."""

    queries: int
    documents: int
    ndcg: dict[str, float]
    over_pretrained: dict[str, Difference]
    over_bm25: dict[str, Difference]  # empty where bm25s is not installed or BM25 is no control
    over_cosine: Difference | None  # of the first candidate on dev; None if that is plain cosine
    no_control: str = ""  # why BM25 is none, in a sentence


@dataclass(frozen=True)
class CompareResult(Result):
    """The result of `stm.compare`."""

    model: str  # name of the pretrained model
    candidates: list[Entry]  # the best on dev first; after them those that were stopped
    test: OnTest
    pretrained: float  # nDCG@10 of the pretrained model on dev
    dev_queries: int
    left_out: int  # candidates for which there was no time
    not_compared: tuple[str, ...]  # losses of which no candidate was trained to its end
    notes: tuple[str, ...]  # sentences about the data
    train_options: str = ""  # of ``st-magnitude train``, for the winner

    @property
    def first(self) -> Entry:
        """The candidate with the highest nDCG@10 on dev at the end; of several, plain cosine.

        Where the first two are not clearly different, a second seed of both decides.
        """
        return self.candidates[0]

    @property
    def cosine(self) -> Entry:
        """Plain cosine at its own best temperature on dev."""
        return next(entry for entry in self.candidates if entry.candidate.loss == "cosine")

    @property
    def is_clear(self) -> bool:
        """Whether the first on dev is not plain cosine, and clearly better on the test split."""
        return self.test.over_cosine is not None and self.test.over_cosine.is_better

    @property
    def winner(self) -> Entry:
        """The recommended candidate: the first if it is clear, else cosine."""
        return self.first if self.is_clear else self.cosine

    @property
    def recommendation(self) -> str:
        """The loss to train with, in a few sentences."""
        if nothing := nothing_found(*self.test.ndcg.values()):
            return nothing
        name = self.winner.name
        over_cosine = self.test.over_cosine
        gain = self.test.over_pretrained[name]
        over_bm25 = self.test.over_bm25.get(name)
        better = ["the pretrained model"] if gain.is_worse else []
        if over_bm25 is not None and over_bm25.is_worse:
            better.append("BM25")
        found = [f"Use {name}."]
        if better:
            found = [f"Use {' or '.join(better)}. The best candidate, {name}, is clearly worse."]
        if over_cosine is None:
            found.append("No other candidate has a higher nDCG@10 on dev.")
        else:
            verdict = _verdict(over_cosine, "a clear gain", "a clear loss", "no clear difference")
            found.append(
                f"On the test split, {self.first.name}, the first on dev, changes nDCG@10 by "
                f"{over_cosine} against {self.cosine.name}: {verdict}."
            )
        verdict = _verdict(gain, "clearly better", "clearly worse", "not clearly better")
        found.append(f"{name} is {verdict} than the pretrained model: {gain} on test.")
        if over_bm25 is not None and not over_bm25.is_better:
            verdict = _verdict(over_bm25, "", "clearly worse", "not clearly better")
            found.append(
                f"It is {verdict} than BM25: {over_bm25}. `train` with these options weighs both."
            )
        if self.test.no_control:
            found.append(self.test.no_control)
        exponent = self.winner.exponent
        if exponent == 1:
            found.append("It is scored by cosine, so every server and database serves it.")
        else:
            how = "dot" if exponent == 0 else f"document exponent {exponent:.2f}, with stm.load"
            found.append(f"It is scored by {how}: docs/serving.md lists servers that keep norms.")
        if self.left_out:
            number = self.left_out + len(self.candidates)
            found.append(f"The time was up before {self.left_out} of {number} candidates.")
        if self.not_compared:
            found.append(f"Not compared (no time, or diverged): {', '.join(self.not_compared)}.")
        return " ".join(found)

    @property
    def test_table(self) -> Table:
        test = self.test
        models = [(of, ndcg, test.over_pretrained.get(of)) for of, ndcg in test.ndcg.items()]
        title = f"Test split, {test.queries:,} queries, {test.documents:,} documents"
        columns = ("model", "nDCG@10", "minus pretrained [95 %]")
        return Table(columns, models, title, test.no_control)

    def to_dict(self) -> dict[str, object]:
        return {
            "winner": self.winner.name,
            "recommendation": self.recommendation,
            "clear_difference": self.is_clear,
            **super().to_dict(),
            "candidates": [entry.to_dict() for entry in self.candidates],
        }

    def tables(self) -> Iterable[Table | str]:
        yield self.test_table
        whole = [entry for entry in self.candidates if entry.steps == self.first.steps]
        rows = [(e.name, e.shown_score, f"{e.exponent:.2f}", round(e.seconds)) for e in whole]
        title = f"Dev split, {self.dev_queries:,} queries, after {self.first.steps:,} steps"
        note = f"The pretrained model has {self.pretrained:.4f}."
        if again := [entry for entry in self.candidates if entry.second_seed is not None]:
            shown = " and ".join(f"{entry.second_seed:.4f} ({entry.name})" for entry in again)
            note += f" The first two are not clearly different; a second seed gave {shown}."
        if stopped := len(self.candidates) - len(whole):
            note += (
                f" {stopped} others were stopped behind a candidate of the same loss, or diverged."
            )
        yield Table(("candidate", "nDCG@10", "exponent", "seconds"), rows, title, note)
        yield self.recommendation
        yield f"Train again with the options {self.train_options}"


def _or_lowest(ndcg: float) -> float:
    return -math.inf if math.isnan(ndcg) else ndcg


def _verdict(gain: Difference, better: str, worse: str, neither: str) -> str:
    return {"better": better, "worse": worse}.get(gain.verdict, neither)
