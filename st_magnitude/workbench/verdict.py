"""What to deploy, next to all other searches of the same queries, and what training changed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from st_magnitude.data.ranking import Ranking
from st_magnitude.judge import Difference, judge, nothing_found
from st_magnitude.result import UNSAVED, Result, Table, shortened
from st_magnitude.workbench.choice import (
    WITH_BM25,
    Decision,
    Fusion,
    System,
    decide,
    systems_of,
)
from st_magnitude.workbench.options import Options

__all__ = ["AFTER", "BEFORE", "CLASSIFIER", "Change", "Confirmation", "Row", "Scored", "Verdict"]
__all__ += ["row_of", "scored_of", "scoring_name", "verdict_of"]

BEFORE = "the pretrained model"
AFTER = "the trained model"
CLASSIFIER = "a linear classifier of words"

_shortened = partial(shortened, width=60)

FEW_CHANGES = 30  # queries whose nDCG@10 changes, below which no small gain can be seen
POWER = 1.43  # (1.96 + .84) / 1.96: times half of an interval, the gain found in four of five draws
LOW = 0.1  # nDCG@10 below which a file probably names one of many equally good answers
LEAST = 0.02  # nDCG@10 above chance that is worth a recommendation


def scoring_name(exponent: float) -> str:
    """The name of a scoring by its document exponent."""
    return {0.0: "dot", 1.0: "cosine"}.get(exponent, f"exponent {exponent:.2f}")


@dataclass(frozen=True)
class Scored:
    """The trained model under one similarity."""

    exponent: float  # of documents
    ndcg: float  # mean nDCG@10
    gain: Difference  # over the pretrained model

    @property
    def name(self) -> str:
        return scoring_name(self.exponent)


@dataclass(frozen=True)
class Row:
    """A search of the same queries."""

    name: str
    ndcg: float
    gain: Difference | None  # of what is deployed over this search; None for what is deployed


def _table(where: str, rows: Iterable[Row], deployed: str = "", note: str = "") -> Table:
    """The rows, next to what is deployed, or to another one of a name."""
    mark = "" if deployed else "deployed"
    cells = [[row.name, row.ndcg, mark if row.gain is None else row.gain] for row in rows]
    columns = ["search", "nDCG@10", f"{deployed or 'what is deployed'} over it"]
    return Table(columns, cells, f"nDCG@10 on {where}", note)


def _over_pretrained(rows: Iterable[Row]) -> Difference | None:
    """What is deployed minus the pretrained model; None if that is deployed."""
    return next((row.gain for row in rows if row.name == BEFORE), None)


@dataclass(frozen=True)
class Confirmation(Result):
    """What was deployed, measured once on queries that chose nothing."""

    split: str
    queries: int
    # what is deployed, the best simpler search, the best other one, the pretrained model, and the
    # classifier if the verdict has it
    rows: tuple[Row, ...]

    @property
    def where(self) -> str:
        return f"{self.queries:,} {self.split} queries"

    def __str__(self) -> str:
        deployed, *others = self.rows
        said = f"On {self.where}, {deployed.name} has nDCG@10 {deployed.ndcg:.4f}"
        over = ", ".join(f"{row.gain} over {row.name}" for row in others)
        return f"{said}: {over}." if over else f"{said}."

    def tables(self) -> Iterable[Table | str]:
        yield _table(self.where, self.rows)


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
    """All ways to search the same queries, what to deploy, and what training changed."""

    queries: int
    pretrained: float  # nDCG@10 under the similarity of the pretrained model
    as_trained: Scored  # under the similarity of the loss
    # at `ExponentCurve.best`: as trained, unless these queries have chosen another exponent, which
    # is clearly better; None for a model that normalises
    best: Scored | None
    saved: Scored  # the one of the two that the saved model is scored with
    curve: dict[str, float] | None  # nDCG@10 by document exponent
    rows: tuple[Row, ...] = ()  # the pretrained and the trained model, BM25, with BM25, others
    over_bm25: Difference | None = None  # of the saved model
    gained: int = 0  # number of queries with a higher nDCG@10 than before
    lost: int = 0
    changes: tuple[Change, ...] = ()  # the largest gain, the median change and the largest loss
    split: str = "held-out"
    folds: int = 0  # in which the queries were held out; 0 for one split
    decision: Decision | None = None  # what to deploy; None where nothing was found
    over_chance: Difference | None = None  # of the best search; chance: results of other queries
    training: Difference | None = None  # inside what to deploy: trained minus pretrained
    no_control: str = ""  # why BM25 is none, in a sentence
    penalty: float | None = None  # C of the classifier
    name: str = AFTER
    # all ways to search, the simplest first
    systems: tuple[System, ...] = field(default=(), repr=False, compare=False, metadata=UNSAVED)
    controls: tuple[System, ...] = field(default=(), repr=False, compare=False, metadata=UNSAVED)

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
        """Why nothing is recommended, if no search found anything to speak of; else empty."""
        best = max(self.pretrained, self.saved.ndcg, *(row.ndcg for row in self.rows))
        said = nothing_found(best)
        if said or self.over_chance is None or not _is_chance(self.over_chance):
            return said
        return (
            f"No search finds anything to speak of: the best nDCG@10 is {best:.4f}, which is"
            f" {self.over_chance} against the results of other queries. The rows may not belong"
            " together, for example if a column was sorted alone: look at some of them. If they do,"
            " nothing can be recommended without more queries."
        )

    @property
    def deploy(self) -> str:
        """The decision, and the gain of training inside it, or `nothing`; then the classifier, in a
        line of its own."""
        if self.decision is None:
            return self.nothing
        said = str(self.decision)
        if self.training not in (None, self.decision.lead):
            said += f" With BM25, the training changes nDCG@10 by {self.training}."
        return f"{said}\n{self._about_classifier}".strip()

    @property
    def where(self) -> str:
        """The queries that judge."""
        if self.folds:
            return f"{self.queries:,} queries, held out in {self.folds} folds"
        return f"{self.queries:,} {self.split} queries"

    @property
    def headline(self) -> str:
        """Better, worse or no clear difference, by how much and on how many queries."""
        said = f"{self.saved.gain.name}: {self.saved.gain} of nDCG@10 against the pretrained model"
        return f"{said}, on {self.where}. {self._about_bm25}".strip()

    def which_counts(self, confirmed: Confirmation) -> str:
        """Where the gain over the pretrained model has another verdict on another split: which of
        the two counts, and why."""
        here, there = (_over_pretrained(found.rows) for found in (self, confirmed))
        if here is None or there is None or here.name == there.name:
            return ""
        if there.queries >= here.queries:
            return f"This line counts, as none of the {confirmed.split} queries chose anything."
        said = (
            "The verdict on held-out queries counts, as it rests on more of them"
            f" ({here.queries:,} against {there.queries:,})."
        )
        width = POWER * (there.mean - there.low)
        needed = math.ceil(there.queries * (width / here.mean) ** 2) if here.mean else 0
        if needed > there.queries:
            said += (
                f" To show {100 * abs(here.mean):.1f} points in four of five draws, the"
                f" {confirmed.split} split would need about {needed:,}."
            )
        return said

    def advice(self) -> str:
        """Recommended next steps; none where nothing was found."""
        if self.nothing:
            return ""
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
        if self.over_bm25 is None:
            return self.no_control
        if self.over_bm25.is_worse:
            return "BM25, which needs no training, is better."
        if self.over_bm25.is_better:
            return ""
        return "It is not clearly better than BM25, which needs no training."

    @property
    def _about_classifier(self) -> str:
        """Sentences where what is deployed is not clearly better than a classifier."""
        gain = next((row.gain for row in self.rows if row.name == CLASSIFIER), None)
        if gain is None or gain.is_better:
            return ""
        said = "is better" if gain.is_worse else "is not clearly worse"
        return (
            f"{CLASSIFIER.capitalize()} {said}: {gain} over it. It cannot find a document that has"
            " no training queries."
        )

    def tables(self) -> Iterable[Table | str]:
        reference = "" if self.decision else self.name
        yield _table(self.where, self.rows, reference, self.no_control)
        if self.changes:
            yield f"{self.gained:,} queries gained and {self.lost:,} lost. For example:"
            yield "\n".join(map(str, self.changes))


def scored_of(model: System, before: System, seed: int = 0) -> Scored:
    """A trained model next to the pretrained one."""
    gain = model.ranking.minus(before.ranking, seed=seed)
    return Scored(model.exponent, model.ranking.mean, gain)


def verdict_of(
    before: System,
    after: System,
    also: Sequence[System],
    lexical: Mapping[str, Ranking],
    shown: Sequence[System] = (),
    no_control: str = "",
    classifier: Mapping[float, Ranking] | None = None,
    split: str = "held-out",
    seed: int = 0,
    decides: bool = True,
) -> Verdict:
    """The verdict on a trained model.

    Args:
        also: Other models to weigh.
        lexical: The rankings of BM25 by tokens; none, if ``no_control`` says why.
        shown: Further rows of the table, which are not weighed.
        classifier: The rankings of a linear classifier by C, not weighed either.
        decides: Whether to decide what to deploy.
    """
    systems = systems_of([before, after, *also], lexical, seed)
    best = max((system.ranking for system in systems), key=lambda ranking: ranking.mean)
    over_chance = judge((best.ndcg - best.by_chance)[best.has_answer], seed=seed)
    found = {system.name: system for system in systems}
    decision = training = penalty = None
    deployed = after
    if decides and not _is_chance(over_chance):
        decision = decide(systems, seed)
        deployed = found[decision.name]
        decision = replace(decision, is_trained=deployed.model == after.name)
    if isinstance(deployed.how, Fusion) and deployed.model in (after.name, before.name):
        pair = [found[f"{model.name}{WITH_BM25}"].ranking for model in (after, before)]
        training = pair[0].minus(pair[1], seed=seed)
    scored = scored_of(after, before, seed)
    label = f"{after.name}, {scored.name}{' (saved)' if shown else ''}"
    others = [one for one in systems if one is not before and one is not after]
    controls: list[System] = []
    if classifier:
        options = Options.choose(classifier, seed=seed)
        penalty = options.value
        controls = [System(CLASSIFIER, options.held_out)]
    rows = [before, replace(after, name=label), *shown, *others, *controls]
    changes = after.ranking.ndcg - before.ranking.ndcg
    return Verdict(
        queries=scored.gain.queries,
        pretrained=before.ranking.mean,
        as_trained=scored,
        best=None,
        saved=scored,
        curve=None,
        rows=tuple(row_of(system, deployed, seed) for system in rows),
        over_bm25=after.ranking.minus(found["BM25"].ranking, seed=seed) if lexical else None,
        gained=int((changes > 0).sum()),
        lost=int((changes < 0).sum()),
        changes=_changes_of(before.ranking, after.ranking),
        split=split,
        decision=decision,
        over_chance=over_chance,
        training=training,
        no_control=no_control,
        penalty=penalty,
        name=after.name,
        systems=tuple(systems),
        controls=tuple(controls),
    )


def row_of(system: System, deployed: System, seed: int = 0) -> Row:
    """A system next to what is deployed."""
    of = "" if system.model else f" of {system.tokens}"
    is_deployed = system.ranking is deployed.ranking
    gain = None if is_deployed else deployed.ranking.minus(system.ranking, seed=seed)
    return Row(f"{system.name}{of}", system.ranking.mean, gain)


def _is_chance(gain: Difference) -> bool:
    """Whether a gain over chance is nothing to speak of, or open and small."""
    return gain.high < LEAST or (not gain.is_better and gain.mean < LOW)


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
