"""``st-magnitude admit``: choose which documents to index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude.commands.core import (
    BEIR_FOLDER,
    EncodingBatch,
    Figures,
    MaxLength,
    Model,
    Scoring,
    check_folder,
    command,
    load_model,
    show_progress,
)


@command()
def admit(
    model: Model,
    data: Annotated[Path | None, typer.Option(help=f"{BEIR_FOLDER} The queries of --split measure the loss.")] = None,
    split: Annotated[str, typer.Option(help="Split of the qrels to measure on.")] = "dev",
    corpus: Annotated[
        Path | None,
        typer.Option(help="What to index, if it is not the corpus of --data: a file or folder as for encode."),
    ] = None,
    keep: Annotated[float | None, typer.Option(help="Share of the documents to keep, such as 0.5.")] = None,
    recall: Annotated[
        float | None, typer.Option(help="Share of the answers to keep, such as 0.99, instead of --keep.")
    ] = None,
    scorer: Annotated[str, typer.Option(help="norm, surface, embedding, or best for the best of these.")] = "best",
    output: Annotated[Path | None, typer.Option(help="Folder for kept.txt (ids) and admission.json.")] = None,
    embeddings: Annotated[
        Path | None, typer.Option(help="Folder of st-magnitude encode for this model and corpus, if there is one.")
    ] = None,
    scoring: Scoring = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    seed: Annotated[int, typer.Option(help="Seed for the parts of the queries and the samples of documents.")] = 0,
) -> Figures:
    """Choose which documents to index.

    Documents with a low score are left out: the norm under a magnitude model, or what a logistic regression on the text
    or the embedding says. The answers that this loses are measured on validation queries that had no part in the
    choice. Nothing is trained but the regressions.
    """
    check_folder(output)
    if data is None and corpus is None:
        raise ValueError("Give --data, a folder with queries and judgments, or --corpus, which has none.")
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation.admission import admit as choose

    given: dict[str, Any] = {}
    if data is not None:
        judged = RetrievalData.from_beir(data, split)
        typer.echo(f"{split}: {judged}")
        given = {"queries": judged.queries, "relevant": judged.relevant}
    found = choose(
        load_model(model, max_length),
        judged.corpus if corpus is None else corpus,
        keep=keep,
        recall=recall,
        scorer=scorer,
        similarity=scoring,
        embeddings=embeddings,
        batch_size=batch_size,
        seed=seed,
        show_progress_bar=show_progress(),
        **given,
    )
    typer.echo(str(found))
    if output is not None:
        found.save(output)
        typer.echo(f"Saved to {output / 'kept.txt'}: the ids to index.")
    return found.figures
