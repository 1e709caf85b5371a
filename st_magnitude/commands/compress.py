"""``st-magnitude compress``: what shorter and coarser embeddings keep of nDCG@10."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from st_magnitude._config import whole_numbers
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
    warn,
)

if TYPE_CHECKING:
    from st_magnitude.evaluation import CompressionCell


@command()
def compress(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to measure on; read test last, and once.")] = "dev",
    dims: Annotated[
        Sequence[int] | None,
        whole_numbers("Prefixes to measure, such as 384,192,96; default: all dimensions, 1/2, 1/4 and 1/8."),
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=1, help="Number of documents that the binary search passes on to rescoring.")
    ] = 100,
    similarity: Scoring = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    skip_empty: SkipEmpty = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for compression.csv and compression.png, which are replaced.")
    ] = None,
) -> Figures:
    """Measure what shorter and quantized embeddings keep.

    The table has prefixes, int8 and binary embeddings, with their storage. Nothing is trained. Queries and corpus
    are encoded once. The picture needs the extra "plot".
    """
    check_folder(output)
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation import CompressionEvaluator
    from st_magnitude.evaluation.compression import table

    loaded = RetrievalData.from_beir(data, split, skip_empty)
    evaluator = CompressionEvaluator(
        loaded.queries,
        loaded.corpus,
        loaded.relevant,
        dims=dims,
        top_k=top_k,
        similarity=similarity,
        batch_size=batch_size,
        show_progress_bar=show_progress(),
    )
    encoder = load_model(model, max_length)
    typer.echo(f"{split}: {loaded}")
    evaluator(encoder)
    typer.echo(str(table(evaluator.cells)))
    if output is not None:
        _save(evaluator.cells, output, title=f"{Path(model).name}, {data.name} {split}")
    return {"split": split, "cells": [cell.row for cell in evaluator.cells]}


def _save(cells: list[CompressionCell], output: Path, title: str) -> None:
    from st_magnitude.diagnosis.figures import plot_compression

    output.mkdir(parents=True, exist_ok=True)
    with (output / "compression.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(cells[0].row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cell.row for cell in cells)
    typer.echo(f"Saved {output / 'compression.csv'}.")
    try:
        plot_compression(cells, output / "compression.png", title)
        typer.echo(f"Saved {output / 'compression.png'}.")
    except ImportError as error:
        warn(f"compression.png was not written: {error}")
