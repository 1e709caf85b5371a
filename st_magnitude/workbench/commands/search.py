"""``st-magnitude search``: look at what a retriever finds."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated

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
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.data.task import EncodedTask
    from st_magnitude.workbench.choice import Fusion


class Only(str, Enum):
    """A part of what was recommended, to search with alone."""

    MODEL = "model"
    BM25 = "bm25"


SHOWN = 150  # characters of a document
DEPTH = 100  # documents of the model and of BM25 that a fusion adds
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
    only: Annotated[
        Only | None, Option(help="Search with the model or BM25 alone; default: as recommended.")
    ] = None,
) -> Figures:
    """Show what a retriever finds for a question.

    All documents of the data are searched, by what `train` recommended: the model, BM25, or both
    with a weight. A search always finds something, so the last line compares the best score with
    those of questions that have an answer.
    """
    from st_magnitude.data.beir import canonical
    from st_magnitude.data.memory import AllReadError

    splits = source.splits(is_quiet=True)
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
        says_share = False
    names = [name for name in (model, against) if name]
    searchers = [_Searcher(name, known, _fusion(name, only), top_k) for name in names]
    searches = []
    for text in [question] if question else _questions():
        rankings = [searcher.search(searcher.ask(text)) for searcher in searchers]
        pairs = zip(searchers, rankings, strict=True)
        found = [searcher.hits(ranking, top_k) for searcher, ranking in pairs]
        _show(found, known.corpus, answers.get(canonical(text), set()))
        if says_share:
            say(searchers[0].compare(rankings[0]))
        else:
            say(f"No share is shown: {model} was trained on all questions of these data.")
        searches.append({"question": text, "found": found})
    return {"model": model, "against": against, "searches": searches}


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
    """A model with the embeddings of the corpus and of known questions, and with BM25 if that was
    recommended."""

    def __init__(self, name: str, known: RetrievalData, fusion: Fusion | None, top_k: int) -> None:
        from st_magnitude.saving.export import load

        self.model = load(name)
        self.depth = max(DEPTH, top_k)
        self.fusion = fusion
        # what the first model has read is out of them, unless it has read all
        bar = show_progress()
        self.task = known.encode(
            self.model, only=known.queries, even_read=True, show_progress_bar=bar
        )
        if fusion is not None:
            from st_magnitude.evaluation.lexical import TOKENS, LexicalIndex
            from st_magnitude.similarity import Similarity

            self.index = LexicalIndex(known, TOKENS[fusion.tokens])
            unit_queries = Similarity(1.0, self.task.similarity.exponents[1])
            self.task = replace(self.task, similarity=unit_queries)
        ranking = self.search(self.task)
        self.best = ranking.scores[ranking.has_answer, 0]

    def ask(self, question: str) -> EncodedTask:
        """The corpus and the question."""
        from st_magnitude.surgery.raw import encode_raw

        query = encode_raw(self.model, [question], "query", keep_normalize=True)  # (1, D)
        data = self.task.data.asking([question])
        return replace(self.task, data=data, query_ids=[question], queries=query)

    def search(self, task: EncodedTask) -> Ranking:
        """The ranking of the model, or the fusion."""
        found = task.search(self.depth)
        if self.fusion is None:
            return found
        return self.fusion(found, self.index.search(task.data, self.depth))

    def hits(self, found: Ranking, top_k: int) -> list[Hit]:
        """The first documents, with their norms where these count."""
        (question,) = found
        keeps = self.task.similarity.keeps_magnitude and self.fusion is None
        norms = self.task.documents[found.columns[0, :top_k]].norm(dim=1).tolist()
        rows = zip(found[question].items(), norms, strict=False)
        return [Hit(*of, norm if keeps else None) for of, norm in rows]

    def compare(self, found: Ranking) -> str:
        """A sentence on the best score next to those of questions that have an answer."""
        if not len(self.best):
            return "No question of these data has an answer, with which to compare the score."
        share = float((self.best <= found.scores[0, 0]).mean())
        said = f"{share:.0%} of {len(self.best):,} questions with an answer have no higher score."
        return f"{said} Perhaps nothing here answers this one." if share <= FAR else said


def _fusion(model: str, only: Only | None) -> Fusion | None:
    """The recommended fusion of a model with BM25; None for the model alone."""
    from st_magnitude.workbench.choice import Decision, Fusion

    decision = Decision.load(model)
    how = "" if decision is None else decision.how
    tokens = how.tokens if isinstance(how, Fusion) else how
    bm25 = Fusion(weight=0.0, unit=1.0, scale=1.0, tokens=tokens or "words")
    if only == Only.BM25:
        return bm25
    if only == Only.MODEL or decision is None:
        return None
    if not (decision.is_trained or decision.name == "BM25"):
        say(f"Searching with the trained model, although {decision.name} is recommended.")
        return None
    if not how:
        return None
    say(f"Searching with {decision.name} ({how}), as recommended: --only model leaves it out.")
    return how if isinstance(how, Fusion) else bm25


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
