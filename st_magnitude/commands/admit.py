"""``st-magnitude admit``: choose which documents to index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude.commands.core import Figures, Judged, Model, command, folder


@command
def admit(
    model: Model,
    *,
    judged: Judged,
    keep: Annotated[float | None, typer.Option(help="Share of the documents to keep, such as 0.5.")] = None,
    recall: Annotated[
        float | None, typer.Option(help="Share of the answers to keep, such as 0.99, instead of --keep.")
    ] = None,
    scorer: Annotated[str, typer.Option(help="surface, or norm.")] = "surface",
    output: Annotated[Path | None, folder("Folder for kept.txt (ids) and admission.json.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for the parts of the queries and the sample of documents.")] = 0,
) -> Figures:
    """Choose which documents to index.

    Documents with a low score are left out: the score of a logistic regression on the surface of the text, or the norm
    under a magnitude model. The answers that this loses are measured on validation queries that had no part in the
    choice. Nothing is trained but the regression.
    """
    from st_magnitude.evaluation.admission import admit as choose

    options: dict[str, Any] = {"scorer": scorer, "similarity": judged.similarity, "seed": seed, "encode": judged.encode}
    encoder, data = judged.load(model)
    found = choose(encoder, data, keep=keep, recall=recall, **options)
    typer.echo(str(found))
    if output is not None:
        found.save(output)
        typer.echo(f"Saved to {output / 'kept.txt'}: the ids to index.")
    return found.to_dict()
