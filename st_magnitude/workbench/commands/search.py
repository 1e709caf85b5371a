"""``st-magnitude search``: look at what a retriever finds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from st_magnitude.workbench.commands.core import (
    DataOptions,
    Figures,
    ModelId,
    command,
    say,
    show_progress,
)

if TYPE_CHECKING:
    from st_magnitude.data.ranking import Ranking
    from st_magnitude.workbench.searcher import Searcher


SHOWN = 150  # columns of a document


@command
def search(
    model: ModelId,
    question: Annotated[str, Argument(help="What to find.")],
    *,
    source: DataOptions,
    top_k: Annotated[int, Option(min=1, help="Documents to show.")] = 5,
    system: Annotated[
        str | None,
        Option(help="A search that the folder knows, as BM25; default: as recommended."),
    ] = None,
) -> Figures:
    """Show what a retriever finds for a question.

    All documents of the data are searched, by what `train` recommended: the model, BM25, or both
    with a weight.
    """
    splits = source.splits()
    source.tell(splits)
    from st_magnitude.data.beir import canonical
    from st_magnitude.workbench.searcher import Searcher

    answers: set[str] = set()
    asked = canonical(question)
    for part in splits.values():
        for query, grades in part.relevant.items():
            if canonical(part.queries[query]) == asked:
                answers.update(grades)
    data = splits[next(iter(splits), "dev")]  # all have one corpus; without any, it says why
    searcher = Searcher.from_folder(model, data, system, show_progress_bar=show_progress())
    if about := searcher.about:
        say(about)
    found = _hits(searcher, searcher.search([question], top_k))
    if found:
        _show(found, data.corpus, answers)
    else:
        say("No document has a word of this question, or four letters in a row for 4-grams.")
    return {"model": model, "question": question, "found": found}


def _hits(searcher: Searcher, found: Ranking) -> list[dict[str, Any]]:
    """The documents of a question with their scores, and with their norms where these count."""
    (scores,) = found.values()
    hits: list[dict[str, Any]] = [{"document": x, "score": score} for x, score in scores.items()]
    if searcher.fusion is None and searcher.task.similarity.keeps_magnitude:
        norms = searcher.task.documents[found.columns[0]].norm(dim=1).tolist()
        hits = [hit | {"norm": norm} for hit, norm in zip(hits, norms, strict=False)]
    return hits


def _show(
    found: Sequence[Mapping[str, Any]], corpus: Mapping[str, str], answers: Collection[str]
) -> None:
    """Prints the documents, and which of them the data name as an answer."""
    from st_magnitude.result import Table, shortened

    columns = [name for name in ("score", "norm") if name in found[0]]
    rows: list[list[object]] = []
    for rank, hit in enumerate(found, start=1):
        numbers = [hit[name] for name in columns]
        answer = "yes" if hit["document"] in answers else ""
        rows.append([rank, *numbers, answer, shortened(corpus[hit["document"]], SHOWN)])
    typer.echo(str(Table(["rank", *columns, "answer", "document"], rows)))
