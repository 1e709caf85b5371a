"""``st-magnitude search``: look at what a retriever finds."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from st_magnitude.commands.core import Figures, Model, Source, command, say, show_progress

if TYPE_CHECKING:
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.data.task import EncodedTask
    from st_magnitude.evaluation.abstention import Abstention

SHOWN = 150  # characters of a document
FAR = 0.05  # share of known questions whose best score is as low


@command
def search(
    model: Model,
    question: Annotated[
        str | None, Argument(help="A question; without it, every line of the input is one.")
    ] = None,
    *,
    source: Source,
    against: Annotated[
        str | None, Option(help="Folder or hub id of another model, to show its ranks, too.")
    ] = None,
    top_k: Annotated[int, Option(min=1, help="Documents of each model to show.")] = 5,
    risk: Annotated[
        float | None,
        Option(
            min=0,
            max=1,
            help="Largest share of wrong answers: say where nothing answers well enough for it.",
        ),
    ] = None,
) -> Figures:
    """Show what a retriever finds for a question.

    All documents of the data are searched. A search always finds something, so the last line
    compares the best score with those of questions that have an answer. With --risk, such as 0.1,
    the dev split gives a rule that says when nothing answers.
    """
    from st_magnitude.data.beir import folded

    splits = source.splits(is_quiet=True)
    parts = {name: splits[name] for name in splits}
    if risk is not None and "dev" not in parts:
        raise ValueError("--risk needs questions that nobody trained on: add a dev split.")
    answers: dict[str, set[str]] = {}
    for part in parts.values():
        for query, grades in part.relevant.items():
            answers.setdefault(folded(part.queries[query]), set()).update(grades)
    known = parts.get("dev") or next(iter(parts.values()))
    searchers = [_Searcher(name, known) for name in (model, against) if name]
    rule = None if risk is None else searchers[0].rule_for(risk)
    searches = []
    for text in [question] if question else _lines():
        found = [searcher.find(text, top_k) for searcher in searchers]
        _show(found, known.corpus, answers.get(folded(text), set()))
        answered = None
        if rule is None:
            say(searchers[0].compare(found[0]))
        else:
            answered = searchers[0].answers(text, rule)
            say("The first one answers, by the rule." if answered else "By the rule, none answers.")
        searches.append({"question": text, "found": found, "answered": answered})
    return {"model": model, "against": against, "rule": rule, "searches": searches}


def _lines() -> Iterator[str]:
    """The questions of the input, with a hint where a person types them."""
    if sys.stdin.isatty():
        typer.echo("Type a question, or an empty line to stop.", err=True)
    for line in sys.stdin:
        if not line.strip():
            return
        yield line.strip()


@dataclass(frozen=True)
class Hit:
    """A document that a model found."""

    document: str
    score: float
    norm: float | None  # None if norms do not count


class _Searcher:
    """A model with the embeddings of the corpus, and the best scores of known questions."""

    def __init__(self, name: str, known: RetrievalData) -> None:
        from st_magnitude.evaluation.scoring import scoring_of
        from st_magnitude.saving.export import load

        self.model = load(name)
        self.known = known
        self.ids = known.document_ids
        self.similarity = scoring_of(self.model)
        self.encoded = known.encode(self.model, show_progress_bar=show_progress())
        first = self.encoded.top(self.similarity, 1)
        self.best = self.encoded.scores(self.similarity, first)[:, 0]  # (n,)

    def _task(self, question: str) -> EncodedTask:
        """The corpus and the question."""
        import torch

        from st_magnitude.surgery.raw import encode_raw

        query = encode_raw(self.model, [question], "query", keep_normalize=True)  # (1, D)
        return replace(self.encoded, queries=query, columns=(), own=torch.tensor([-1]))

    def find(self, question: str, top_k: int) -> list[Hit]:
        task = self._task(question)
        top = task.top(self.similarity, top_k)
        scores = task.scores(self.similarity, top)[0].tolist()
        norms = [None] * len(scores)
        if self.similarity.keeps_magnitude:
            norms = task.documents[top[0]].norm(dim=1).tolist()
        ids = [self.ids[column] for column in top[0].tolist()]
        return [Hit(*row) for row in zip(ids, scores, norms, strict=True)]

    def rule_for(self, risk: float) -> Abstention | None:
        """Prints the rule that the known questions give; None if they are too few for one."""
        from st_magnitude.evaluation.abstention import calibrate_abstention

        encode = {"show_progress_bar": show_progress()}
        rule = calibrate_abstention(self.model, self.known, risk, encode=encode)
        typer.echo(f"{rule}\n")
        return rule if math.isfinite(rule.threshold) else None

    def answers(self, question: str, rule: Abstention) -> bool:
        """Whether the first document answers by the rule."""
        task = self._task(question)
        return bool(rule.answers(task.scores(rule.similarity, task.top(rule.similarity, 2)))[0])

    def compare(self, found: Sequence[Hit]) -> str:
        """A sentence on the best score next to those of questions that have an answer."""
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
