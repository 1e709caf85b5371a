"""``st-magnitude admit``: choose which documents to index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import (
    Data,
    EncodingBatch,
    Figures,
    MaxLength,
    Model,
    Scoring,
    SkipEmpty,
    check_folder,
    command,
    load_model,
    show_progress,
)


@command()
def admit(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to measure on.")] = "dev",
    keep: Annotated[float | None, typer.Option(help="Share of the documents to keep, such as 0.5.")] = None,
    recall: Annotated[
        float | None, typer.Option(help="Share of the answers to keep, such as 0.99, instead of --keep.")
    ] = None,
    scorer: Annotated[str, typer.Option(help="norm, surface, embedding, or best for the best of these.")] = "best",
    output: Annotated[Path | None, typer.Option(help="Folder for kept.txt (ids) and admission.json.")] = None,
    similarity: Scoring = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    skip_empty: SkipEmpty = False,
    seed: Annotated[int, typer.Option(help="Seed for the parts of the queries and the sample of documents.")] = 0,
) -> Figures:
    """Choose which documents to index.

    Documents with a low score are left out: the norm under a magnitude model, or the score of a logistic regression on
    the text or the embedding. The answers that this loses are measured on validation queries that had no part in the
    choice. Nothing is trained but the regressions.
    """
    check_folder(output)
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation.admission import admit as choose

    judged = RetrievalData.from_beir(data, split, skip_empty)
    typer.echo(f"{split}: {judged}")
    found = choose(
        load_model(model, max_length),
        judged,
        keep=keep,
        recall=recall,
        scorer=scorer,
        similarity=similarity,
        seed=seed,
        encode={"batch_size": batch_size, "show_progress_bar": show_progress()},
    )
    typer.echo(str(found))
    if output is not None:
        found.save(output)
        typer.echo(f"Saved to {output / 'kept.txt'}: the ids to index.")
    return found.to_dict()
