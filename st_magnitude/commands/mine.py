"""``st-magnitude mine``: hard negatives, found with the scores of a trained model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from st_magnitude.commands.core import Figures, Model, Ranked, command


@dataclass(frozen=True)
class Mined(Ranked):
    split: Annotated[str, Option(help="Split whose queries get negatives.")] = "train"


@command
def mine(
    model: Model,
    *,
    judged: Mined,
    output: Annotated[Path, Option(help="New file of judgments, such as DATA/qrels/mined.tsv.")],
    num_negatives: Annotated[int, Option(min=1, help="Number of negatives for each query.")] = 3,
    never_relevant: Annotated[
        bool, Option(help="Take only documents that are relevant to no query of any split.")
    ] = False,
    relative_margin: Annotated[
        float | None,
        Option(help="How much lower negatives must score, as a share of the positive's score."),
    ] = None,
) -> Figures:
    """Mine hard negatives with the scores of a trained model.

    Documents that the model scores high and that do not answer the query become judged negatives
    of a new split. With --output DATA/qrels/mined.tsv, train takes it with --split mined.
    """
    if output.suffix != ".tsv":
        raise ValueError(f"--output must end in .tsv; got {output}.")
    if os.path.lexists(output):
        raise FileExistsError(f"{output} exists. Choose another --output.")
    from st_magnitude.evaluation.mining import mine_negatives, with_negatives

    splits = judged.splits()
    if splits.folder is None:
        raise ValueError(
            "mine adds judgments to a folder in BEIR's layout, by its ids; train --save-data writes"
            " such a folder from pairs."
        )
    encoder, loaded = judged.load(model, splits)
    candidates = set(loaded.corpus)
    if never_relevant:
        candidates -= splits.relevant_documents()
        if not candidates:
            raise ValueError(
                "--never-relevant leaves no document: all of the corpus answer a query of some"
                " split. Leave it out, or add documents that answer none."
            )
    mined = mine_negatives(
        encoder,
        loaded,
        num_negatives=num_negatives,
        relative_margin=relative_margin,
        similarity=judged.similarity,
        candidates=candidates,
        batch_size=judged.batch_size,
    )
    with_negatives(loaded, mined).save_qrels(output)
    typer.echo(f"Saved {len(mined):,} rows in {output}.")
    return {"split": judged.split, "rows": len(mined), "output": str(output)}
