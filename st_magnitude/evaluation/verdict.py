"""The trained model next to the pretrained one, to BM25 and to other models on the same queries."""

from __future__ import annotations

import hashlib
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from st_magnitude.data.folds import DEFAULT_FOLDS, folds_of
from st_magnitude.data.ranking import Ranking
from st_magnitude.evaluation.choice import WITH_BM25, Decision, System, decide, systems_of
from st_magnitude.judge import Difference, nothing_found
from st_magnitude.result import UNSAVED, Result, Table

__all__ = ["AFTER", "BEFORE", "Change", "Control", "Scored", "Verdict", "verdict_of"]

BEFORE = "the pretrained model"
AFTER = "the trained model"

_shortened = partial(textwrap.shorten, width=60, placeholder=" ...")

FEW_CHANGES = 30  # queries whose nDCG@10 changes, below which no small gain can be seen
POWER = 1.43  # (1.96 + .84) / 1.96: times half of an interval, the gain found in four of five draws
LOW = 0.1  # nDCG@10 below which a file probably names one of many equally good answers


@dataclass(frozen=True)
class Scored:
    """The trained model under one similarity."""

    exponent: float  # of documents
    ndcg: float  # mean nDCG@10
    gain: Difference  # over the pretrained model

    @property
    def name(self) -> str:
        return {0.0: "dot", 1.0: "cosine"}.get(self.exponent, f"exponent {self.exponent:.2f}")


@dataclass(frozen=True)
class Control:
    """Another search of the same queries."""

    name: str
    ndcg: float
    gain: Difference  # of the trained model over this search


@dataclass(frozen=True)
class Change:
    """A query whose nDCG@10 changed, with its first document before and after the training."""

    query: str
    ndcg: tuple[float, float]
    before: str
    after: str

    def __str__(self) -> str:
        before = _shortened(self.before)
        after = _shortened(self.after)
        lines = [f"  {_shortened(self.query)}  ({self.ndcg[0]:.2f} -> {self.ndcg[1]:.2f})"]
        if before != after:
            lines.append(f"      before: {before}")
        lines.append(f"      now:    {after}")
        return "\n".join(lines)


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
    controls: tuple[Control, ...] = ()  # BM25, models with BM25, and other models
    gained: int = 0  # number of queries with a higher nDCG@10 than before
    lost: int = 0
    changes: tuple[Change, ...] = ()  # the largest gain, the median change and the largest loss
    folds: int = 0  # in which the queries were held out; 0 for one split
    decision: Decision | None = None  # what to deploy
    training: Difference | None = None  # inside what to deploy: trained minus pretrained
    no_control: str = ""  # why BM25 is none, in a sentence
    name: str = AFTER
    # all ways to search, the simplest first
    systems: tuple[System, ...] = field(default=(), repr=False, compare=False, metadata=UNSAVED)

    @property
    def is_better(self) -> bool:
        """Whether the saved model is clearly better."""
        return self.saved.gain.is_better

    @property
    def is_worse(self) -> bool:
        """Whether the saved model is clearly worse, at the best exponent too."""
        return self.saved.gain.is_worse and (self.best or self.saved).gain.is_worse

    @property
    def nothing(self) -> str:
        """The sentence of `nothing_found`, if no search found anything; else empty."""
        others = [control.ndcg for control in self.controls]
        return nothing_found(self.pretrained, self.saved.ndcg, *others)

    @property
    def deploy(self) -> str:
        """The decision, and the gain of training inside it; empty where nothing was found."""
        if self.decision is None or self.nothing:
            return ""
        said = str(self.decision)
        if self.training not in (None, self.decision.lead):
            said += f" Inside it, the training changes nDCG@10 by {self.training}."
        return said

    def headline(self, split: str) -> str:
        """Better, worse or no clear difference, by how much and on how many queries."""
        where = f"{self.queries:,} {split} queries"
        if self.folds:
            where = f"{self.queries:,} queries, held out in {self.folds} folds"
        said = f"{self.saved.gain.name}: {self.saved.gain} of nDCG@10 against the pretrained model"
        return f"{said}, on {where}. {self._about_bm25}".strip()

    def which_counts(self, confirmed: Verdict, split: str) -> str:
        """Where the verdict on another split is another one: which of the two counts, and why."""
        test = confirmed.saved.gain
        if test.name == self.saved.gain.name:
            return ""
        if confirmed.queries >= self.queries:
            return f"The line on the {split} split counts, as none of its queries chose anything."
        said = (
            "The verdict on held-out queries counts, as it rests on more of them"
            f" ({self.queries:,} against {confirmed.queries:,})."
        )
        gain = abs(self.saved.gain.mean)
        if gain and test.mean > test.low:
            needed = confirmed.queries * (POWER * (test.mean - test.low) / gain) ** 2
            said += (
                f" To show {100 * gain:.1f} points in four of five draws, the {split} split would"
                f" need about {math.ceil(needed):,}."
            )
        return said

    def advice(self) -> str:
        """Recommended next steps."""
        if self.nothing:
            return self.nothing
        found: list[str] = []
        if self.saved.gain.is_worse and not self.is_worse:
            found.append("Another exponent is better: run calibrate, or omit --keep-scoring.")
        elif not self.is_better:
            remedy = "Train on more pairs or with another learning rate, or keep the old model."
            found += [remedy, self._power()]
        if max(self.pretrained, self.saved.ndcg) < LOW:
            found.append(
                "nDCG@10 is low for every model. If several documents answer a query and the data"
                " name one of them, no model can score high: judge the others, too."
            )
        return " ".join(filter(None, found))

    def _power(self) -> str:
        gain = self.saved.gain
        if gain.changed < FEW_CHANGES:
            return f"nDCG@10 changed for {gain.changed:,} queries only: add queries."
        smallest = 100 * POWER * (gain.mean - gain.low)
        return f"So many queries show a gain of about {smallest:.1f} points in four of five draws."

    @property
    def _about_bm25(self) -> str:
        """A sentence where the saved model is not clearly better than BM25."""
        bm25 = next((one for one in self.controls if one.name.startswith("BM25")), None)
        if bm25 is None:
            return self.no_control
        if bm25.gain.is_worse:
            return f"{bm25.name}, which needs no training, is better: {bm25.ndcg:.4f}."
        if bm25.gain.is_better:
            return ""
        return f"It is not clearly better than {bm25.name}, which needs no training."

    def tables(self) -> Iterable[Table | str]:
        rows: list[list[object]] = [[BEFORE, self.pretrained, self.saved.gain]]
        ways = dict.fromkeys((self.as_trained, self.best or self.as_trained))
        for scored in ways:
            notes = ["as trained"] if scored == self.as_trained else []
            notes += ["saved"] if scored == self.saved else []
            note = f" ({', '.join(notes)})" if len(ways) > 1 else ""
            rows.append([f"{self.name}, {scored.name}{note}", scored.ndcg, ""])
        rows += [[other.name, other.ndcg, other.gain] for other in self.controls]
        columns = ["search", "nDCG@10", "the saved model over it"]
        yield Table(columns, rows, "", self.no_control)
        if self.changes:
            yield f"{self.gained:,} queries gained and {self.lost:,} lost. For example:"
            yield "\n".join(map(str, self.changes))


def verdict_of(
    before: System,
    after: System,
    exponent: float,
    also: Sequence[System],
    lexical: Mapping[str, Ranking],
    no_control: str = "",
    seed: int = 0,
) -> Verdict:
    """The verdict on a trained model that ranks by a document exponent.

    Args:
        also: Other models to weigh.
        lexical: The rankings of BM25 by tokens; none, if ``no_control`` says why.
    """
    folds = folds_of(before.ranking.data, DEFAULT_FOLDS, seed)
    systems = systems_of([before, after, *also], lexical, folds)
    gain = after.ranking.minus(before.ranking, seed=seed)
    scored = Scored(exponent, after.ranking.mean, gain)
    changes = after.ranking.ndcg - before.ranking.ndcg
    decision = decide(systems, seed)
    its_names = (after.name, f"{after.name}{WITH_BM25}")
    decision = replace(decision, is_trained=decision.name in its_names)
    rankings = {system.name: system.ranking for system in systems}
    names = [f"{model.name}{WITH_BM25}" for model in (after, before)]
    training = None
    if decision.name in names:
        with_training, without = (rankings[name] for name in names)
        training = with_training.minus(without, seed=seed)
    return Verdict(
        queries=gain.queries,
        pretrained=before.ranking.mean,
        as_trained=scored,
        best=None,
        saved=scored,
        curve=None,
        controls=tuple(
            Control(
                f"{one.name} of {one.how}" if isinstance(one.how, str) and one.how else one.name,
                one.ranking.mean,
                after.ranking.minus(one.ranking, seed=seed),
            )
            for one in systems
            if one not in (before, after)
        ),
        gained=int((changes > 0).sum()),
        lost=int((changes < 0).sum()),
        changes=_changes_of(before.ranking, after.ranking),
        decision=decision,
        training=training,
        no_control=no_control,
        name=after.name,
        systems=tuple(systems),
    )


def _changes_of(before: Ranking, after: Ranking) -> tuple[Change, ...]:
    """The largest gain, the median change and the largest loss; ties by a hash of the query."""
    data = after.data
    differences = dict(zip(after, after.ndcg - before.ndcg, strict=True))

    def place(query: str) -> tuple[float, str]:
        return -differences[query], hashlib.sha256(data.queries[query].encode()).hexdigest()

    changed = sorted((query for query, difference in differences.items() if difference), key=place)
    if not changed:
        return ()
    rows = {query: row for row, query in enumerate(after)}
    chosen = dict.fromkeys([changed[0], changed[len(changed) // 2], changed[-1]])
    return tuple(
        Change(
            data.queries[query],
            (float(before.ndcg[rows[query]]), float(after.ndcg[rows[query]])),
            *(data.corpus.get(found.first(query), "nothing") for found in (before, after)),
        )
        for query in chosen
    )
