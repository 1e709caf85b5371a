"""What a comparison found: the recommendation, tables for the terminal, and a section for the HTML report."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._json import from_plain, parse
from st_magnitude.commands.compare.candidates import CUSTOMARY, Candidate
from st_magnitude.commands.compare.study import Measurement
from st_magnitude.diagnosis import figures
from st_magnitude.diagnosis.sections import Figure, Section, Table
from st_magnitude.finetune.comparison import interval
from st_magnitude.result import to_plain

__all__ = ["CompareResult", "Entry", "OnTest"]

NO_DIFFERENCE = "no clear difference"
HEADER = ("loss", "tau", "lr", "SIGReg", "steps", "nDCG@10", "exponent", "seconds")


@dataclass(frozen=True)
class Entry:
    """A candidate and its rungs."""

    candidate: Candidate
    rungs: list[Measurement]

    @property
    def last(self) -> Measurement:
        return self.rungs[-1]

    @property
    def name(self) -> str:
        return self.candidate.name

    @property
    def seconds(self) -> float:
        return sum(rung.seconds for rung in self.rungs)

    @property
    def row(self) -> tuple[str, ...]:
        c, last = self.candidate, self.last
        scores = (f"{last.ndcg:.4f}", f"{last.exponent:.2f}") if np.isfinite(last.ndcg) else ("diverged", "")
        sigreg = f"{c.sigreg:g}" if c.sigreg else "-"
        return (
            *(c.loss, f"{c.temperature:g}", f"{c.learning_rate:g}", sigreg, f"{last.steps:,}"),
            *(*scores, f"{self.seconds:.0f}"),
        )


@dataclass(frozen=True)
class OnTest:
    """nDCG@10 on queries that chose nothing, by name of the candidate."""

    queries: int
    documents: int
    ndcg: dict[str, float]
    gains: dict[str, tuple[float, float, float]]  # of the first on dev over each control, paired bootstrap at 95 %


@dataclass(frozen=True)
class CompareResult:
    """The result of `stm.compare`.

    Attributes:
        model: Name of the pretrained model.
        candidates: All candidates, the best first: those with more steps, then those with the higher nDCG@10 on dev.
        test: The test split, which was read for two or three candidates only: the first and the controls.
        pretrained: nDCG@10 on dev of the pretrained model.
        dev_queries: Number of dev queries.
        dim: Number of dimensions of the embeddings in the index.
        budget: What was given, such as "30 min".
        seconds: What was spent.
        notes: Sentences about the data and the embeddings.
    """

    model: str
    candidates: list[Entry]
    test: OnTest
    pretrained: float
    dev_queries: int
    dim: int
    budget: str
    seconds: float
    notes: list[str]

    @classmethod
    def load(cls, path: str | Path) -> CompareResult:
        """Reads ``compare.json``, or the folder that has it."""
        path = Path(path)
        file = path / "compare.json" if path.is_dir() else path
        try:
            return from_plain(cls, parse(file.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{file} is not the result of a comparison ({error}).") from None

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        winner = self.winner
        return {
            "winner": winner.name,
            "recommendation": self.recommendation,
            "clear_difference": self.is_clear,
            "first": self.first.name,
            "cosine": self.cosine.name,
            "customary": self.customary,
            "inference": {"bytes_per_document": 4 * self.dim, "keeps_norms": winner.last.exponent < 1},
            "rungs": self.rungs,
            **to_plain(self),
            "candidates": [{"name": e.name, "seconds": e.seconds, **to_plain(e)} for e in self.candidates],
        }

    @property
    def first(self) -> Entry:
        """The candidate with the highest nDCG@10 on dev in the last rung; of several, plain cosine."""
        return self.candidates[0]

    @property
    def cosine(self) -> Entry:
        """Plain cosine at its own best temperature on dev."""
        return next(entry for entry in self.candidates if entry.candidate.is_plain_cosine)

    @property
    def customary(self) -> str | None:
        """Name of plain cosine at temperature 0.05; None if that is ``cosine``, or not in the last rung."""
        return next((name for name in self.test.gains if name != self.cosine.name), None)

    @property
    def is_clear(self) -> bool:
        """Whether the first on dev is another candidate than plain cosine and clearly better on the test split."""
        return self.first != self.cosine and self.test.gains[self.cosine.name][1] > 0

    @property
    def winner(self) -> Entry:
        """The recommended candidate, whose model is in ``output/model``: the first if it is clear, else cosine."""
        return self.first if self.is_clear else self.cosine

    @property
    def losses(self) -> list[str]:
        """Names of the losses, that of the first candidate first."""
        return list(dict.fromkeys(entry.candidate.loss for entry in self.candidates))

    @property
    def rungs(self) -> list[list[int]]:
        """Steps and number of candidates of every rung."""
        return [list(pair) for pair in sorted(Counter(r.steps for e in self.candidates for r in e.rungs).items())]

    @property
    def recommendation(self) -> str:
        """What to train with, in two or three sentences."""
        first, cosine = self.first, self.cosine
        if first == cosine:
            sentences = [f"Use {first.name}: no other candidate has a higher nDCG@10 on dev."]
        else:
            gain = self.test.gains[cosine.name]
            compared = f"{first.name}, the first on dev, changes nDCG@10 by {interval(gain)} against {cosine.name}"
            verdict = "a clear gain" if gain[1] > 0 else "a clear loss" if gain[2] < 0 else NO_DIFFERENCE
            sentences = [f"Use {self.winner.name}.", f"On the test split, {compared}: {verdict}."]
        if self.customary is not None:
            gain = self.test.gains[self.customary]
            verdict = f": {NO_DIFFERENCE}" if gain[1] <= 0 <= gain[2] else ""
            subject = "On the test split, it" if first == cosine else "The first"
            sentences.append(f"{subject} differs from cosine at {CUSTOMARY:g} by {interval(gain)}{verdict}.")
        if self.winner.last.ndcg <= self.pretrained:
            sentences.append("It is not above the pretrained model on dev; keep that, or train on more pairs.")
        return " ".join(sentences)

    @property
    def costs(self) -> str:
        """What the winner costs when it serves, in two sentences."""
        size = f"An index takes {4 * self.dim:,} bytes per document in float32, whichever loss trained the model."
        exponent = self.winner.last.exponent
        if exponent == 1:
            return f"{size} The winner is scored by cosine, so that every server and database serves it."
        how = "by dot" if exponent == 0 else f"at document exponent {exponent:.2f}, with stm.load"
        return f"{size} The winner is scored {how}: docs/serving.md lists servers and databases that keep norms."

    def tables(self, all_candidates: bool = True) -> list[Table]:
        """The test split and the candidates: all, or those of the last rung and the best of every other loss."""
        gains = {name: interval(gain) for name, gain in self.test.gains.items()}
        rows = [(name, f"{score:.4f}", gains.get(name, "")) for name, score in self.test.ndcg.items()]
        tested = Table(
            f"Test split, {self.test.queries:,} queries, {self.test.documents:,} documents",
            ("candidate", "nDCG@10", "first on dev minus it"),
            rows,
        )
        seen: set[str] = set()
        shown = []
        for entry in self.candidates:
            if all_candidates or entry.last.steps == self.first.last.steps or entry.candidate.loss not in seen:
                shown.append(entry.row)
            seen.add(entry.candidate.loss)
        what = "All candidates" if all_candidates else "The last rung, and the best of every other loss"
        caption = f"{what} ({self.dev_queries:,} dev queries, pretrained {self.pretrained:.4f})"
        return [tested, Table(caption, HEADER, shown)]

    def __str__(self) -> str:
        return self.markdown(all_candidates=False)

    def markdown(self, all_candidates: bool = True) -> str:
        """Tables of at most 80 columns, the recommendation and the costs."""
        parts = [part for table in self.tables(all_candidates) for part in (_fill(table.caption), _markdown(table))]
        return "\n\n".join([*parts, _fill(self.recommendation), _fill(self.costs)])

    def section(self) -> Section:
        """The comparison as a section of an HTML report."""
        scores = {n: max(e.last.score for e in self.candidates if e.candidate.loss == n) for n in self.losses}
        best = ", ".join(f"{name} {score:.4f}" for name, score in scores.items())
        caption = (
            "nDCG@10 on dev at the end of every rung. A rung trains anew with a whole learning rate schedule; the best "
            "third, and plain cosine, go on. The dotted line is the pretrained model."
        )
        alt = f"Best nDCG@10 on dev of every loss: {best}."
        curve = Figure("compare-curves", caption, alt, self._paint, size=(6.0, 4.0))
        rungs = ", ".join(f"{n} candidates of {steps:,} steps" for steps, n in self.rungs)
        return Section(
            "comparison",
            "Comparison of losses",
            notes=[self.recommendation, self.costs],
            figures=[curve],
            tables=self.tables(),
            remarks=[f"Budget {self.budget}, {self.seconds / 60:.1f} min spent: {rungs}.", *self.notes],
        )

    def _paint(self, axis: Any) -> None:
        colors = {name: f"C{i}" for i, name in enumerate(self.losses)}
        for entry in self.candidates[::-1]:
            x, y = [rung.steps for rung in entry.rungs], [rung.ndcg for rung in entry.rungs]
            is_winner = entry == self.winner
            style = {"linewidth": 2.5, "alpha": 1.0, "zorder": 3} if is_winner else {"linewidth": 0.9, "alpha": 0.6}
            axis.plot(x, y, color=colors[entry.candidate.loss], marker="o", markersize=5 if is_winner else 3, **style)
        for name, color in colors.items():
            axis.plot([], [], color=color, marker="o", label=name)
        axis.axhline(self.pretrained, color=figures.ink(), linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.set_xticks([n for n, _ in self.rungs], [f"{n:,}" for n, _ in self.rungs], minor=False)
        axis.minorticks_off()
        axis.set_xlabel("steps of the run")
        axis.set_ylabel("nDCG@10 on dev")
        axis.grid(axis="y")
        figures.key_above(axis, columns=5)


def _fill(text: str) -> str:
    return textwrap.fill(text, 80, break_on_hyphens=False)


def _markdown(table: Table) -> str:
    rows = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    padded = ([r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))] for r in rows)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in padded)
