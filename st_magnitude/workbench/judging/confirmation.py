"""What was deployed, measured once on queries that chose nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from st_magnitude.data.ranking import Ranking
from st_magnitude.evaluation.lexical import TOKENS, LexicalIndex
from st_magnitude.judge import Difference
from st_magnitude.result import Result, Table
from st_magnitude.workbench.judging.choice import System, queries_that_show
from st_magnitude.workbench.judging.copies import NO_COPIES, Copies
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.folds import split_of
from st_magnitude.workbench.judging.verdict import (
    AFTER,
    BEFORE,
    Row,
    Verdict,
    row_of,
    table_of,
)

__all__ = ["Confirmation", "confirm"]


@dataclass(frozen=True)
class Confirmation(Result):
    """What was deployed, measured once on queries that chose nothing."""

    split: str
    queries: int
    # what is deployed, the best simpler search, the best other one, the pretrained model, and the
    # classifier if the verdict has it
    rows: tuple[Row, ...]
    copies: Copies = NO_COPIES  # of training queries

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

    def which_counts(self, verdict: Verdict) -> str:
        """Where the gain over the pretrained model has another name in a verdict: which of the two
        counts, and why."""
        here, there = (_over_pretrained(found.rows) for found in (verdict, self))
        if here is None or there is None or here.name == there.name:
            return ""
        if there.queries >= here.queries:
            return f"This line counts, as none of the {self.split} queries chose anything."
        said = (
            "The verdict on held-out queries counts, as it rests on more of them"
            f" ({here.queries:,} against {there.queries:,})."
        )
        needed = queries_that_show(there, here.mean) if here.mean else 0
        if needed > there.queries:
            said += (
                f" To show {100 * abs(here.mean):.1f} points in four of five draws, the"
                f" {self.split} split would need about {needed:,}."
            )
        return said


def _over_pretrained(rows: Iterable[Row]) -> Difference | None:
    """What is deployed minus the pretrained model; None if that is deployed."""
    return next((row.gain for row in rows if row.name == BEFORE), None)


def confirm(
    exam: Exam, models: Sequence[System], verdict: Verdict | None = None, seed: int = 0
) -> Confirmation | None:
    """What a verdict deploys, or the trained model, on the queries of an exam that confirm.

    Next to it stand the systems that the decision names, the pretrained model and the classifier.
    """
    if exam.confirm is None:
        return None
    data = exam.confirm.only(exam.confirm.query_ids)
    rankings = {model.name: model.confirm for model in models}
    systems = {model.name: model for model in models}
    names = [AFTER, BEFORE]
    if verdict is not None and verdict.decision is not None:
        decision = verdict.decision
        systems = {system.name: system for system in verdict.systems}
        names = [decision.name, decision.over, decision.rival, BEFORE]
    lexical: dict[str, Ranking] = {}
    found = []
    for name in filter(None, dict.fromkeys(names)):
        system = systems[name]
        if (tokens := system.tokens) and tokens not in lexical:
            lexical[tokens] = LexicalIndex(data, TOKENS[tokens]).search(data, DEPTH)
        ranking = system.again(rankings.get(system.model), lexical.get(tokens))
        found.append(replace(system, ranking=ranking))
    copies = Copies.of(found[0], found[-1], exam.near_copies, seed)
    if verdict is not None:
        found += verdict.controls.confirm(exam)
    rows = tuple(row_of(system, found[0], seed) for system in found)
    return Confirmation(split_of(data), len(data.query_ids), rows, copies)
