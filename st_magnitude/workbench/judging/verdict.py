"""The search to deploy, next to all others of the same queries, the gain of training, and the
deployed search on queries that chose nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from st_magnitude._checks import counted
from st_magnitude.data.ranking import Ranking
from st_magnitude.data.retrieval import RetrievalData
from st_magnitude.evaluation.lexical import TOKENS, LexicalIndex
from st_magnitude.judge import Difference, judge, nothing_found
from st_magnitude.result import UNSAVED, Result, Table
from st_magnitude.workbench.judging.choice import (
    WORTH,
    Decision,
    System,
    Way,
    decide,
    systems_of,
)
from st_magnitude.workbench.judging.controls import CLASSIFIER, Controls
from st_magnitude.workbench.judging.costs import Cost
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.folds import FEWEST, number_of_different, split_of, where

__all__ = ["AFTER", "BEFORE", "Confirmation", "Copies", "Row", "Scored", "Verdict", "confirm"]
__all__ += ["nothing_to_deploy", "scoring_name", "verdict_of"]

BEFORE = "the pretrained model"
AFTER = "the trained model"

MANY = 0.05  # share of near copies, above which the others are judged alone as well
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
    cost: Cost | None = None  # of its model


def table_of(where: str, rows: Iterable[Row], other: str = "", note: str = "") -> Table:
    """The rows, next to what is deployed, or to another one of a name, with the costs to serve if
    they are known."""
    mark = "" if other else "deployed"
    rows = list(rows)
    cells = [[row.name, row.ndcg, mark if row.gain is None else str(row.gain)] for row in rows]
    columns = ["search", "nDCG@10", f"{mark} over it".strip()]
    title = f"nDCG@10 on {where}"
    if other:
        title += f", and what {other} has over each search"
    if any(row.cost for row in rows):
        columns += ["ms", "docs/s", "MB"]
        for row, line in zip(rows, cells, strict=True):
            line[2] = str(line[2]).replace(" points", "")
            line += row.cost.cells if row.cost else ["-"] * 3
        title += (
            ", with differences in points; milliseconds to encode a query, documents encoded in a"
            " second, megabytes of weights and embeddings"
        )
    return Table(columns, cells, title, note)


@dataclass(frozen=True)
class Copies:
    """How many of the queries that judge are near copies of training queries; and where these are
    many, the difference on the others."""

    number: int
    others: Difference | None = None
    over: str = ""  # name of the other search

    @classmethod
    def of(cls, after: System, before: System, copies: Collection[str], seed: int) -> Copies:
        """The near copies, by their ids, among the queries of two searches."""
        ranking = after.ranking
        is_copy = np.array([query in copies for query in ranking.query_ids])
        differences = (ranking.ndcg - before.ranking.ndcg)[~is_copy & ranking.has_answer]
        if is_copy.sum() <= MANY * len(is_copy) or not len(differences):
            return cls(int(is_copy.sum()))
        return cls(int(is_copy.sum()), judge(differences, seed=seed), before.name)

    def __str__(self) -> str:
        if not self.number:
            return ""
        differ = "differs" if self.number == 1 else "differ"
        said = (
            f"{self.number:,} of these queries {differ} from a training query by at most one word."
        )
        if self.others is None:
            return said
        return f"{said} On the {self.others.queries:,} others: {self.others} over {self.over}."


@dataclass(frozen=True)
class Verdict(Result):
    """All ways to search the same queries, what to deploy, and what training changed."""

    rows: tuple[Row, ...]  # the pretrained and the trained model, BM25, with BM25, others
    saved: Scored  # the trained model as it is saved
    where: str  # the queries that judge
    decision: Decision | None = None  # what to deploy; None where nothing is recommended
    nothing: str = ""  # why nothing is recommended
    over_bm25: Difference | None = None  # of the saved model
    no_control: str = ""  # why BM25 is none, in a sentence
    name: str = AFTER
    base: str = BEFORE
    copies: Copies = Copies(0)  # of training queries
    left_out: str = ""  # what the budget did not hold, and one that is enough, in sentences
    # all ways to search, the simplest first
    systems: tuple[System, ...] = field(default=(), repr=False, compare=False, metadata=UNSAVED)
    controls: Controls = field(default=Controls({}), repr=False, compare=False, metadata=UNSAVED)

    @property
    def pretrained(self) -> float:
        """nDCG@10 of the pretrained model."""
        return self.saved.ndcg - self.saved.gain.mean

    @property
    def is_better(self) -> bool:
        """Whether the saved model is clearly better."""
        return self.saved.gain.is_better

    @property
    def is_worse(self) -> bool:
        """Whether the saved model is clearly worse."""
        return self.saved.gain.is_worse

    @property
    def deploy(self) -> str:
        """The decision, or `nothing`; then, each in a line of its own, the classifier and what was
        left out."""
        lines = (self.decision or self.nothing, self._about_classifier, self.left_out)
        return "\n".join(filter(None, map(str, lines)))

    @property
    def headline(self) -> str:
        """Whether the trained model is better or worse, by how much and on how many queries."""
        of_both = f"between {self.name} and {self.base}"
        said = {
            "better": f"{self.name} is better than {self.base}",
            "worse": f"{self.name} is worse than {self.base}",
        }.get(self.saved.gain.verdict, f"there is no clear difference {of_both}")
        said = f"{said[0].upper()}{said[1:]}: {self.saved.gain} of nDCG@10, on {self.where}."
        parts = (said, self.copies, self._about_bm25, self._about_low_figures)
        return " ".join(filter(None, map(str, parts)))

    @property
    def _about_low_figures(self) -> str:
        if self.nothing or max(self.pretrained, self.saved.ndcg) >= LOW:
            return ""
        return (
            "nDCG@10 is low for every model. If several documents answer a query and the data name"
            " one of them, no model can score high: judge the others, too."
        )

    @property
    def _about_bm25(self) -> str:
        if self.over_bm25 is None or self.over_bm25.is_better:
            return ""
        if self.over_bm25.is_worse:
            return f"BM25 alone is better than {self.name} alone."
        return "" if self.decision else f"Whether {self.name} is better than BM25 alone is open."

    @property
    def _about_classifier(self) -> str:
        """Sentences where what is deployed is not clearly better than a classifier."""
        gain = next((row.gain for row in self.rows if row.name == CLASSIFIER), None)
        if self.decision is None or gain is None or gain.is_better:
            return ""
        said = "is better" if gain.is_worse else "is not clearly worse"
        return (
            f"{CLASSIFIER.capitalize()} {said}: {gain} over it. It cannot find a document that has"
            " no training queries."
        )

    def placed(self, places: Mapping[str, Way]) -> Verdict:
        """The verdict with `Decision.placed`, by the names of models."""
        if self.decision is None:
            return self
        return replace(self, decision=self.decision.placed(self.systems, places))

    def to_dict(self) -> dict[str, object]:
        figures = {"queries": self.saved.gain.queries, "pretrained": self.pretrained}
        return figures | super().to_dict()

    def tables(self) -> Iterable[Table | str]:
        if self.deploy:
            yield self.deploy
        yield self.headline
        yield self.table

    @property
    def table(self) -> Table:
        return table_of(self.where, self.rows, "" if self.decision else self.name, self.no_control)


def trained_of(models: Sequence[System], deployed: System) -> System:
    """The trained model that a verdict is about: of what is deployed, of the pretrained model that
    is deployed, or the best one."""
    trained = sorted(filter(lambda one: one.base, models), key=lambda one: -one.ranking.mean)
    related = [one for one in trained if deployed.model in (one.name, one.base)]
    return (related or trained)[0]


def verdict_of(
    exam: Exam,
    models: Sequence[System],
    *,
    shown: Sequence[System] = (),
    seed: int = 0,
    worth: float = WORTH,
    decides: bool = True,
) -> Verdict:
    """The verdict on models, of which at least one was trained, next to the controls of an exam.

    Args:
        models: All models, the simplest first; the base of a trained one is among them.
        shown: Further rows of the table, which are not weighed.
        worth: Points that a less simple system has to gain (`decide`).
        decides: Whether to decide what to deploy.
    """
    controls = Controls.of(exam, seed)
    systems = systems_of(models, controls.lexical, seed)
    found = {system.name: system for system in systems}
    found_most = max((system.ranking for system in systems), key=lambda ranking: ranking.mean)
    over_chance = judge((found_most.ndcg - found_most.by_chance)[found_most.has_answer], seed=seed)
    different = number_of_different(found_most.data)
    nothing = nothing_to_deploy(found_most.mean, over_chance, different)
    decision = None
    best = max(models, key=lambda one: one.ranking.mean)
    deployed = after = trained_of(models, best)
    if decides and not nothing:
        decision = decide(systems, seed, worth)
        deployed = found[decision.name]
        after = trained_of(models, deployed if deployed.model else best)
    before = found[after.base]
    over_bm25 = None
    if controls.lexical:
        over_bm25 = after.ranking.minus(found["BM25"].ranking, seed=seed)
    gain = after.ranking.minus(before.ranking, seed=seed)
    saved = Scored(after.exponent, after.ranking.mean, gain)
    label = f"{after.name}, {saved.name}{' (saved)' if shown else ''}"
    bases = {one.base for one in models}
    pairs = [one for one in models if one.base or one.name in bases]
    others = [one for one in systems if one not in pairs]
    labelled = [replace(one, name=label) if one is after else one for one in pairs]
    rows = [*labelled, *shown, *others, *controls.systems]
    return Verdict(
        rows=tuple(row_of(system, deployed, seed) for system in rows),
        saved=saved,
        where=_where(exam, after),
        decision=decision,
        nothing=nothing,
        over_bm25=over_bm25,
        no_control=controls.no_control,
        name=after.name,
        base=before.name,
        copies=Copies.of(after, before, exam.near_copies, seed),
        systems=tuple(systems),
        controls=controls,
    )


def _where(exam: Exam, trained: System) -> str:
    data = cast(RetrievalData, exam.judged)
    if not trained.folds:
        return where(data)
    return f"{len(data.query_ids):,} queries, held out in {trained.folds} folds"


def row_of(system: System, deployed: System, seed: int = 0) -> Row:
    """A system next to what is deployed."""
    of = "" if system.model else f" of {system.tokens}"
    is_deployed = system.ranking is deployed.ranking
    gain = None if is_deployed else deployed.ranking.minus(system.ranking, seed=seed)
    return Row(f"{system.name}{of}", system.ranking.mean, gain, system.cost)


def nothing_to_deploy(ndcg: float, over_chance: Difference, queries: int) -> str:
    """Why a best nDCG@10 with this gain over chance, on so many different queries, recommends
    nothing; else empty."""
    if found := nothing_found(ndcg):
        return found
    if over_chance.high < LEAST or (not over_chance.is_better and over_chance.mean < LOW):
        return (
            f"No search finds anything to speak of: the best nDCG@10 is {ndcg:.4f}, which is"
            f" {over_chance} against the results of other queries. The rows may not belong"
            " together, for example if a column was sorted alone: look at some of them. If they do,"
            " nothing can be recommended without more queries."
        )
    if queries < FEWEST:
        judges = counted(queries, "different query")
        return f"At least ten queries are needed, and {judges} judge: nothing is recommended."
    return ""


@dataclass(frozen=True)
class Confirmation(Result):
    """The deployed search, measured once on queries that chose nothing."""

    split: str
    queries: int
    # what is deployed, the best simpler search, the best other one and the pretrained model, as far
    # as their models were trained on all pairs, and the classifier if the verdict has it
    rows: tuple[Row, ...]
    copies: Copies = Copies(0)  # of training queries

    @property
    def where(self) -> str:
        return f"{self.queries:,} {self.split} queries"

    def __str__(self) -> str:
        deployed, *others = self.rows
        said = f"On {self.where}, {deployed.name} has nDCG@10 {deployed.ndcg:.4f}"
        over = ", ".join(f"{row.gain} over {row.name}" for row in others)
        said += f": {over}." if over else "."
        return f"{said} {self.copies}".strip()

    def tables(self) -> Iterable[Table | str]:
        yield table_of(self.where, self.rows)


def confirm(
    exam: Exam, models: Sequence[System], verdict: Verdict | None = None, seed: int = 0
) -> Confirmation | None:
    """The deployed search, or the trained model, on the queries of an exam that confirm.

    Next to it stand the systems that the decision names and the model that was trained, as far as
    there are searches of their models, and the classifier.
    """
    if exam.confirm is None:
        return None
    data = exam.confirm.only(exam.confirm.query_ids)
    rankings = {model.name: model.confirm for model in models if model.confirm is not None}
    systems = {system.name: system for system in (verdict.systems if verdict else models)}
    trained = next(model for model in models if model.base)
    names = [verdict.name, verdict.base] if verdict else [trained.name, trained.base]
    if verdict is not None and verdict.decision is not None:
        decision = verdict.decision
        names = [decision.name, decision.over, decision.rival, verdict.base]
    lexical: dict[str, Ranking] = {}
    found = []
    for system in (systems[name] for name in dict.fromkeys(filter(None, names))):
        if system.model and system.model not in rankings:
            continue
        if (tokens := system.tokens) and tokens not in lexical:
            lexical[tokens] = LexicalIndex(data, TOKENS[tokens]).search(data, DEPTH)
        ranking = system.again(rankings.get(system.model), lexical.get(tokens))
        found.append(replace(system, ranking=ranking))
    copies = Copies.of(found[0], found[-1], exam.near_copies, seed)
    if verdict is not None:
        found += verdict.controls.confirm(exam)
    rows = tuple(row_of(system, found[0], seed) for system in found)
    return Confirmation(split_of(data), len(data.query_ids), rows, copies)
