"""``st-magnitude search``: look at what a retriever finds."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from st_magnitude.workbench.commands.core import (
    Figures,
    KnownData,
    ModelId,
    command,
    say,
    show_progress,
)

if TYPE_CHECKING:
    from st_magnitude.data.ranking import Ranking
    from st_magnitude.workbench.searcher import Searcher


SHOWN = 150  # columns of a document
FAR = 0.05  # share of known questions whose best score is as low


def _text(given: str) -> str:
    """A text as it was typed, whatever the encoding that Python expects."""
    return os.fsencode(given).decode("utf-8", "replace")


@command
def search(
    model: ModelId,
    question: Annotated[
        str | None,
        Argument(
            parser=_text,
            metavar="[QUESTION]",
            help="A question; without it, every line of the input is one.",
        ),
    ] = None,
    *,
    source: KnownData,
    against: Annotated[
        str | None, Option(help="Folder or hub id of another model, to show its ranks, too.")
    ] = None,
    top_k: Annotated[int, Option(min=1, help="Documents of each model to show.")] = 5,
    system: Annotated[
        str | None,
        Option(help="A search of the folder's deploy.json, as BM25; default: as recommended."),
    ] = None,
) -> Figures:
    """Show what a retriever finds for a question.

    All documents of the data are searched, by what `train` recommended: the model, BM25, or both
    with a weight. A search always finds something, so the last line compares the best score with
    those of questions that have an answer.
    """
    from st_magnitude.data.beir import canonical
    from st_magnitude.workbench.memory import AllReadError, unread_split

    splits = source.splits()
    source.tell(splits)
    answers: dict[str, set[str]] = {}
    for part in splits.values():
        for query, grades in part.relevant.items():
            answers.setdefault(canonical(part.queries[query]), set()).update(grades)
    split = "dev" if "dev" in splits else next(iter(splits))
    known = splits[split]
    says_share = True
    try:
        known = unread_split(splits, split, model)[1]
    except AllReadError:
        says_share = False
    from st_magnitude.workbench.searcher import Searcher

    bar = show_progress()
    searchers = [Searcher.from_folder(model, known, system, show_progress_bar=bar)]
    if against:
        searchers.append(Searcher.from_folder(against, known, show_progress_bar=bar))
    for about in (searcher.about for searcher in searchers):
        if about:
            say(about)
    searches = []
    for text in [question] if question else _questions():
        rankings = [searcher.search([text], top_k) for searcher in searchers]
        found = [_hits(*pair) for pair in zip(searchers, rankings, strict=True)]
        if any(found):
            _show(found, known.corpus, answers.get(canonical(text), set()))
        if says_share:
            say(_compared(searchers[0], rankings[0]))
        else:
            say(f"No share is shown: {model} was trained on all questions of these data.")
        searches.append({"question": text, "found": found})
    if not searches:
        say("Nobody asked a question: give one after the model, or one a line as the input.")
    return {"model": model, "against": against, "searches": searches}


def _questions() -> Iterator[str]:
    """The questions of the input; a pipe may have blank lines and bytes that are not UTF-8."""
    from st_magnitude.workbench.files.rows import encoding_of

    is_typed = sys.stdin.isatty()
    if is_typed:
        typer.echo("Type a question, or an empty line to stop.", err=True)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        start = sys.stdin.buffer.peek(2) if isinstance(sys.stdin.buffer, io.BufferedReader) else b""
        sys.stdin.reconfigure(encoding=encoding_of(start), errors="replace")
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


def _hits(searcher: Searcher, found: Ranking) -> list[Hit]:
    """The documents of a question, with their norms where these count."""
    (question,) = found
    keeps = searcher.task.similarity.keeps_magnitude and searcher.fusion is None
    norms = searcher.task.documents[found.columns[0]].norm(dim=1).tolist()
    rows = zip(found[question].items(), norms, strict=False)
    return [Hit(*of, norm if keeps else None) for of, norm in rows]


def _compared(searcher: Searcher, found: Ranking) -> str:
    """A sentence on the best score next to those of questions that have an answer."""
    from st_magnitude.workbench.judging.folds import where

    best = searcher.usual
    if found.columns[0, 0] < 0:
        return "No document has a word of this question, or four letters in a row for 4-grams."
    if not len(best):
        return "No question of these data has an answer, with which to compare the score."
    share = float((best <= found.scores[0, 0]).mean())
    known = where(searcher.task.data)
    said = f"{share:.0%} of {known} with an answer have no higher score."
    return f"{said} Perhaps nothing here answers this one." if share <= FAR else said


def _show(found: Sequence[Sequence[Hit]], corpus: Mapping[str, str], answers: set[str]) -> None:
    """Prints the documents of one model, or of two with both ranks."""
    from st_magnitude.result import Table, shortened

    ranks = [{hit.document: str(rank) for rank, hit in enumerate(of, start=1)} for of in found]
    hits = {hit.document: hit for hit in found[0]}
    columns = [*["rank", "against"][: len(found)], "score"]
    columns += ["norm"] if any(hit.norm is not None for hit in found[0]) else []
    rows: list[list[object]] = []
    for document in dict.fromkeys(hit.document for of in found for hit in of):
        hit = hits.get(document)
        row: list[object] = [of.get(document, "-") for of in ranks]
        row += [None if hit is None else hit.score]
        row += [None if hit is None else hit.norm] if "norm" in columns else []
        text = shortened(corpus[document], SHOWN)
        rows.append([*row, "yes" if document in answers else "", text])
    typer.echo(str(Table([*columns, "answer", "document"], rows)))
