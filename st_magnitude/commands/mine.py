"""``st-magnitude mine``: hard negatives, found with the scores of a trained model."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude._config import check_ranges
from st_magnitude.commands.core import Figures, Judged, Model, command


@dataclass(frozen=True)
class MiningConfig:
    """Options of ``st-magnitude mine`` that are arguments of `mine_negatives` too, with the same defaults."""

    num_negatives: Annotated[int, typer.Option(min=1, help="Number of negatives for each query.")] = 3
    never_relevant: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Share of documents that are relevant to none of the queries; default: whatever scores best.",
        ),
    ] = None
    min_queries: Annotated[
        int, typer.Option(min=1, help="Queries that a never-relevant document must be among the ten best of.")
    ] = 3
    relative_margin: Annotated[
        float | None,
        typer.Option(help="Share of the positive's score by which a negative scores lower; 0.05 is a common choice."),
    ] = None
    absolute_margin: Annotated[
        float | None, typer.Option(help="Difference by which a negative scores lower than the positive.")
    ] = None
    max_score: Annotated[float | None, typer.Option(help="Highest score of a negative.")] = None
    min_score: Annotated[float | None, typer.Option(help="Lowest score of a negative.")] = None
    range_min: Annotated[int, typer.Option(min=0, help="Number of best candidates that are skipped.")] = 0
    range_max: Annotated[
        int | None, typer.Option(min=1, help="Number of best candidates; default: as many as the other options need.")
    ] = None
    sampling_strategy: Annotated[str, typer.Option(help="Which candidates to take: top or random.")] = "top"
    output_format: Annotated[
        str, typer.Option(help="Rows of a .parquet or .jsonl file: triplet, n-tuple, labeled-pair or labeled-list.")
    ] = "triplet"
    output_scores: Annotated[bool, typer.Option("--output-scores", help="Write the scores too.")] = False
    seed: Annotated[int, typer.Option(help="Seed for the sampling strategy random.")] = 0

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Mined(Judged):
    """The judged queries that get negatives."""

    split: Annotated[str, typer.Option(help="Split of the qrels whose queries get negatives.")] = "train"


@command()
def mine(
    model: Model,
    *,
    judged: Mined,
    output: Annotated[
        Path, typer.Option(help="New file: .parquet, .jsonl, or .tsv for a split of the data with judged negatives.")
    ],
    cross_encoder: Annotated[
        str | None, typer.Option(help="Folder or hub id of a CrossEncoder that scores for the margins and limits.")
    ] = None,
    settings: MiningConfig,
) -> Figures:
    """Mine hard negatives with the scores of a trained model.

    Documents that the model scores high and that do not answer the query become training data. With --output
    DATA/qrels/mined.tsv they are judged negatives of a new split, which train takes with --split mined.
    """
    if output.suffix not in (".parquet", ".jsonl", ".tsv"):
        raise ValueError(f"--output must end in .parquet, .jsonl or .tsv; got {output}.")
    if output.exists():
        raise FileExistsError(f"{output} exists. Choose another --output.")
    from st_magnitude.evaluation.mining import mine_negatives, with_negatives

    encoder, loaded = judged.load(model)
    options: dict[str, Any] = {**vars(settings), "similarity": judged.similarity, "encode": judged.encode}
    if cross_encoder is not None:
        from sentence_transformers import CrossEncoder

        options["cross_encoder"] = CrossEncoder(cross_encoder)
    is_qrels = output.suffix == ".tsv"
    if is_qrels:
        options["output_format"] = "triplet"
    mined = mine_negatives(encoder, loaded, **options)
    output.parent.mkdir(parents=True, exist_ok=True)
    if is_qrels:
        with_negatives(loaded, mined).save_qrels(output)
    elif output.suffix == ".parquet":
        mined.to_parquet(output)
    else:
        mined.to_json(output)
    typer.echo(f"Saved {len(mined):,} rows in {output}.")
    if "negative" in mined.column_names:
        answers = {loaded.corpus[document] for grades in loaded.relevant.values() for document in grades}
        share = sum(text not in answers for text in mined["negative"]) / max(len(mined), 1)
        typer.echo(f"{share:.1%} of the negatives are relevant to none of the queries.")
    if output.parent == judged.data / "qrels" and is_qrels:
        words = ["train", "--data", str(judged.data), "--split", output.stem]
        words += ["--negatives", str(settings.num_negatives), "--model", model, "--output", "FOLDER"]
        typer.echo(f"Next: {shlex.join(['st-magnitude', *words])}")
    return {"split": judged.split, "rows": len(mined), "output": str(output)}
