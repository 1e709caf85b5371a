"""The result of a comparison: the recommendation and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from st_magnitude.judge import Difference
from st_magnitude.result import Result, Table, to_plain
from st_magnitude.workbench.comparison.config import Candidate
from st_magnitude.workbench.judging.choice import HERE
from st_magnitude.workbench.judging.verdict import Verdict

__all__ = ["CompareResult", "Entry"]


@dataclass(frozen=True)
class Entry:
    """A candidate and its measurements on dev."""

    candidate: Candidate
    curve: list[tuple[int, float]]  # steps and nDCG@10 of every rung; nan if training diverged
    exponent: float  # of documents, the best one on dev; 1 is cosine
    seconds: float

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def steps(self) -> int:
        return self.curve[-1][0]

    @property
    def score(self) -> float:
        """nDCG@10 at the end; -inf if training diverged."""
        ndcg = self.curve[-1][1]
        return -math.inf if math.isnan(ndcg) else ndcg

    @property
    def shown_score(self) -> str:
        return f"{self.score:.4f}" if math.isfinite(self.score) else "diverged"

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name} | to_plain(self)


@dataclass(frozen=True)
class CompareResult(Result):
    """The result of `stm.compare`."""

    model: str  # name of the pretrained model
    candidates: list[Entry]  # the best on dev first; after them those that were stopped
    test: Verdict  # on the winner
    # of the first candidate on dev over `cosine`; None if the first is plain cosine
    over_cosine: Difference | None
    pretrained: float  # nDCG@10 of the pretrained model on dev
    dev_queries: int
    left_out: int  # candidates for which there was no time
    not_compared: tuple[str, ...]  # losses of which no candidate was trained to its end
    notes: tuple[str, ...]  # sentences about the data
    train_options: str = ""  # of ``st-magnitude train``, for the winner
    is_short: bool = False  # whether the budget left out steps, or a loss

    @property
    def first(self) -> Entry:
        """The best candidate on dev at the end."""
        return self.candidates[0]

    @property
    def cosine(self) -> Entry:
        """Plain cosine at its own best setting on dev."""
        return next(entry for entry in self.candidates if entry.candidate.loss == "cosine")

    @property
    def is_clear(self) -> bool:
        """Whether the first on dev is not plain cosine, and clearly better on the test split."""
        return self.over_cosine is not None and self.over_cosine.is_better

    @property
    def winner(self) -> Entry:
        """The recommended candidate: the first if it is clear, else cosine."""
        return self.first if self.is_clear else self.cosine

    @property
    def recommendation(self) -> str:
        """The loss to train with, in a few sentences."""
        test = self.test
        if test.nothing:
            return test.nothing
        name = self.winner.name
        trains = not test.is_worse if test.decision is None else test.decision.model == HERE
        found = [f"{'Train' if trains else 'If you train at all, train'} with {name}."]
        if self.over_cosine is None:
            found.append("It is the first on dev.")
        else:
            found.append(
                f"{self.first.name}, the first on dev, changes nDCG@10 by {self.over_cosine}"
                f" against {self.cosine.name}: {self.over_cosine.name.lower()}."
            )
        found.append(test.headline)
        if self.left_out:
            number = self.left_out + len(self.candidates)
            found.append(f"The budget held {len(self.candidates)} of {number} candidates.")
        if self.not_compared:
            found.append(f"Not compared (no time, or diverged): {', '.join(self.not_compared)}.")
        if self.is_short:
            found.append("Give a longer --budget: this one has left out steps, or a loss.")
        return " ".join(found)

    def to_dict(self) -> dict[str, object]:
        return {
            "winner": self.winner.name,
            "recommendation": self.recommendation,
            "clear_difference": self.is_clear,
            **super().to_dict(),
            "candidates": [entry.to_dict() for entry in self.candidates],
        }

    def tables(self) -> Iterable[Table | str]:
        if self.test.decision is not None:
            yield self.test.deploy
        yield self.recommendation
        if self.train_options and not self.test.nothing:
            yield f"Train again with the options {self.train_options}"
        yield self.test.table
        whole = [entry for entry in self.candidates if entry.steps == self.first.steps]
        rows = [(e.name, e.shown_score, f"{e.exponent:.2f}", round(e.seconds)) for e in whole]
        title = f"nDCG@10 on {self.dev_queries:,} dev queries, after {self.first.steps:,} steps"
        note = f"The pretrained model has {self.pretrained:.4f}."
        if stopped := len(self.candidates) - len(whole):
            note += (
                f" {stopped} others were stopped behind a candidate of the same loss, or diverged."
            )
        yield Table(("candidate", "nDCG@10", "exponent", "seconds"), rows, title, note)
