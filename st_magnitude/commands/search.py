"""``st-magnitude search``: look at what a retriever finds."""

from __future__ import annotations

import io
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from st_magnitude._checks import InputError
from st_magnitude.commands.core import DataOptions, Figures, ModelId, command, say, show_progress

if TYPE_CHECKING:
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.data.task import EncodedTask
    from st_magnitude.evaluation.abstention import Abstention

SHOWN = 150  # characters of a document
FAR = 0.05  # share of known questions whose best score is as low


@command
def search(
    model: ModelId,
    question: Annotated[
        str | None, Argument(help="A question; without it, every line of the input is one.")
    ] = None,
    *,
    source: DataOptions,
    against: Annotated[
        str | None, Option(help="Folder or hub id of another model, to show its ranks, too.")
    ] = None,
    top_k: Annotated[int, Option(min=1, help="Documents of each model to show.")] = 5,
    risk: Annotated[
        float | None,
        Option(help="Largest share of wrong answers: say where nothing answers well enough."),
    ] = None,
) -> Figures:
    """Show what a retriever finds for a question.

    All documents of the data are searched. A search always finds something, so the last line
    compares the best score with those of questions that have an answer. With --risk, such as 0.1,
    the dev split gives a rule that says when nothing answers.
    """
    from st_magnitude.data.beir import canonical
    from st_magnitude.data.memory import AllReadError

    splits = source.splits(is_quiet=True)
    if risk is not None:
        from st_magnitude.evaluation.abstention import check_range

        check_range(risk)
        if "dev" not in splits:
            raise InputError("--risk needs questions that nobody trained on: add a dev split.")
    answers: dict[str, set[str]] = {}
    for part in splits.values():
        for query, grades in part.relevant.items():
            answers.setdefault(canonical(part.queries[query]), set()).update(grades)
    split = "dev" if "dev" in splits else next(iter(splits))
    known = splits[split]
    says_share = True
    try:
        known = splits.unread(split, model)[1]
    except AllReadError:
        if risk is not None:
            raise
        says_share = False
    searchers = [_Searcher(name, known) for name in (model, against) if name]
    rule = None if risk is None else searchers[0].rule_for(risk)
    searches = []
    for text in [question] if question else _questions():
        tasks = [searcher.ask(text) for searcher in searchers]
        pairs = zip(searchers, tasks, strict=True)
        found = [searcher.find(task, top_k) for searcher, task in pairs]
        _show(found, known.corpus, answers.get(canonical(text), set()))
        answered = None
        if not says_share:
            say(f"No share is shown: {model} was trained on all questions of these data.")
        elif rule is None:
            say(searchers[0].compare(found[0]))
        else:
            best = tasks[0].top(rule.similarity, 2)
            answered = bool(rule.answers(tasks[0].scores(rule.similarity, best))[0])
            say("The first one answers, by the rule." if answered else "By the rule, none answers.")
        searches.append({"question": text, "found": found, "answered": answered})
    return {"model": model, "against": against, "rule": rule, "searches": searches}


def _questions() -> Iterator[str]:
    """The questions of the input; a pipe may have blank lines and bytes that are not UTF-8."""
    is_typed = sys.stdin.isatty()
    if is_typed:
        typer.echo("Type a question, or an empty line to stop.", err=True)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="replace")
    for line in sys.stdin:
        if line.strip():
            yield line.strip()
        elif is_typed:
            return


@dataclass(frozen=True)
class Hit:
    """A document that a model found."""

    document: str
    score: float
    norm: float | None  # None if norms do not count


class _Searcher:
    """A model with the embeddings of the corpus and of known questions."""

    def __init__(self, name: str, known: RetrievalData) -> None:
        from st_magnitude.evaluation.abstention import encode_all
        from st_magnitude.evaluation.scoring import scoring_of
        from st_magnitude.saving.export import load

        self.model = load(name)
        self.ids = known.document_ids
        self.similarity = scoring_of(self.model)
        self.known = encode_all(self.model, known, show_progress_bar=show_progress())
        scores = self.known.scores(self.similarity, self.known.top(self.similarity, 1))  # (n, 1)
        self.best = scores[[len(row) > 0 for row in self.known.columns]]

    def ask(self, question: str) -> EncodedTask:
        """The corpus and the question."""
        from st_magnitude.data.task import EncodedTask
        from st_magnitude.surgery.raw import encode_raw

        query = encode_raw(self.model, [question], "query", keep_normalize=True)  # (1, D)
        return EncodedTask(query, self.known.documents)

    def find(self, task: EncodedTask, top_k: int) -> list[Hit]:
        top = task.top(self.similarity, top_k)
        scores = task.scores(self.similarity, top)[0].tolist()
        norms = [None] * len(scores)
        if self.similarity.keeps_magnitude:
            norms = task.documents[top[0]].norm(dim=1).tolist()
        ids = [self.ids[column] for column in top[0].tolist()]
        return [Hit(*row) for row in zip(ids, scores, norms, strict=True)]

    def rule_for(self, risk: float) -> Abstention | None:
        """Prints the rule that the known questions give; None if they are too few for one."""
        from st_magnitude.evaluation.abstention import rule_of

        rule = rule_of(self.known, self.similarity, risk)
        typer.echo(f"{rule}\n")
        return rule if math.isfinite(rule.threshold) else None

    def compare(self, found: Sequence[Hit]) -> str:
        """A sentence on the best score next to those of questions that have an answer."""
        if not len(self.best):
            return "No question of these data has an answer, with which to compare the score."
        share = float((self.best <= found[0].score).double().mean())
        said = f"{share:.0%} of {len(self.best):,} questions with an answer have no higher score."
        return f"{said} Perhaps nothing here answers this one." if share <= FAR else said


def _show(found: Sequence[Sequence[Hit]], corpus: Mapping[str, str], answers: set[str]) -> None:
    """Prints the documents of one model, or of two with both ranks."""
    from st_magnitude.result import Table

    ranks = [{hit.document: str(rank) for rank, hit in enumerate(of, start=1)} for of in found]
    hits = {hit.document: hit for hit in found[0]}
    columns = [*["rank", "against"][: len(found)], "score"]
    columns += ["norm"] if found[0][0].norm is not None else []
    rows: list[list[object]] = []
    for document in dict.fromkeys(hit.document for of in found for hit in of):
        hit = hits.get(document)
        row: list[object] = [of.get(document, "-") for of in ranks]
        row += [None if hit is None else hit.score]
        row += [None if hit is None else hit.norm] if "norm" in columns else []
        text = textwrap.shorten(corpus[document], SHOWN, placeholder=" ...")
        rows.append([*row, "yes" if document in answers else "", text])
    typer.echo(str(Table([*columns, "answer", "document"], rows)))
