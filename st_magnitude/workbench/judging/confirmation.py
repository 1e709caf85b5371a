"""The deployed search, measured once on queries that chose nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from st_magnitude.data.ranking import Ranking
from st_magnitude.evaluation.lexical import TOKENS, LexicalIndex
from st_magnitude.result import Result, Table
from st_magnitude.workbench.judging.choice import System
from st_magnitude.workbench.judging.exam import DEPTH, Exam
from st_magnitude.workbench.judging.folds import split_of
from st_magnitude.workbench.judging.verdict import NO_COPIES, Copies, Row, Verdict, row_of, table_of

__all__ = ["Confirmation", "confirm"]


@dataclass(frozen=True)
class Confirmation(Result):
    """The deployed search, measured once on queries that chose nothing."""

    split: str
    queries: int
    # what is deployed, the best simpler search, the best other one and the pretrained model, as far
    # as their models were trained on all pairs, and the classifier if the verdict has it
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
