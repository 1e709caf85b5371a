"""``st-magnitude mine``: hard negatives, found with the scores of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from st_magnitude.commands.core import Figures, Model, Scored, command

if TYPE_CHECKING:
    from datasets import Dataset

    from st_magnitude.data.retrieval import RetrievalData


@dataclass(frozen=True)
class Mined(Scored):
    """The judged queries that get negatives."""

    split: Annotated[str, Option(help="Split whose queries get negatives.")] = "train"


@command
def mine(
    model: Model,
    *,
    judged: Mined,
    output: Annotated[
        Path, Option(help="New file: .parquet, .jsonl, or .tsv for a split with judged negatives.")
    ],
    cross_encoder: Annotated[
        str | None, Option(help="Folder or hub id of a CrossEncoder that scores for the margin.")
    ] = None,
    num_negatives: Annotated[int, Option(min=1, help="Number of negatives for each query.")] = 3,
    never_relevant: Annotated[
        bool, Option(help="Take documents that are relevant to no query of any split only.")
    ] = False,
    min_queries: Annotated[
        int, Option(min=1, help="Queries that have a never-relevant document among their ten best.")
    ] = 3,
    relative_margin: Annotated[
        float | None,
        Option(help="Share of the positive's score by which a negative scores lower, as 0.05."),
    ] = None,
) -> Figures:
    """Mine hard negatives with the scores of a trained model.

    Documents that the model scores high and that do not answer the query become training data. With
    --output DATA/qrels/mined.tsv they are judged negatives of a new split, which train takes with
    --split mined.
    """
    if output.suffix not in (".parquet", ".jsonl", ".tsv"):
        raise ValueError(f"--output must end in .parquet, .jsonl or .tsv; got {output}.")
    if output.exists():
        raise FileExistsError(f"{output} exists. Choose another --output.")
    from st_magnitude.data.beir import relevant_documents
    from st_magnitude.evaluation.mining import mine_negatives

    encoder, loaded = judged.load(model)
    scorer = None
    if cross_encoder is not None:
        from sentence_transformers import CrossEncoder

        scorer = CrossEncoder(cross_encoder)
    mined = mine_negatives(
        encoder,
        loaded,
        num_negatives=num_negatives,
        never_relevant=never_relevant,
        min_queries=min_queries,
        relative_margin=relative_margin,
        similarity=judged.similarity,
        also_relevant=relevant_documents(judged.data),
        cross_encoder=scorer,
        encode=judged.encode,
    )
    _write(output, loaded, mined)
    typer.echo(f"Saved {len(mined):,} rows in {output}.")
    return {"split": judged.split, "rows": len(mined), "output": str(output)}


def _write(output: Path, data: RetrievalData, mined: Dataset) -> None:
    from st_magnitude.evaluation.mining import with_negatives

    output.parent.mkdir(parents=True, exist_ok=True)
    if output.suffix == ".tsv":
        with_negatives(data, mined).save_qrels(output)
    elif output.suffix == ".parquet":
        mined.to_parquet(output)
    else:
        mined.to_json(output)
