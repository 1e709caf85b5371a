"""``st-magnitude compress``: what shorter and coarser embeddings keep of nDCG@10."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from st_magnitude._config import whole_numbers
from st_magnitude.commands.core import Figures, Judged, Model, check_folder, command, warn

if TYPE_CHECKING:
    from st_magnitude.evaluation import CompressionCell


@command()
def compress(
    model: Model,
    *,
    judged: Judged,
    dims: Annotated[
        Sequence[int] | None,
        whole_numbers("Prefixes to measure, such as 384,192,96; default: all dimensions, 1/2, 1/4 and 1/8."),
    ] = None,
    top_k: Annotated[
        int, typer.Option(min=1, help="Number of documents that the binary search passes on to rescoring.")
    ] = 100,
    output: Annotated[
        Path | None, typer.Option(help="Folder for compression.csv and compression.png, which are replaced.")
    ] = None,
) -> Figures:
    """Measure what shorter and quantized embeddings keep.

    The table has prefixes, int8 and binary embeddings, with their storage. Nothing is trained. Queries and corpus
    are encoded once. The picture needs the extra "plot".
    """
    check_folder(output)
    from st_magnitude.evaluation import CompressionEvaluator
    from st_magnitude.evaluation.compression import table

    encoder, data = judged.load(model)
    options = {"dims": dims, "top_k": top_k, "similarity": judged.similarity, **judged.encode}
    evaluator = CompressionEvaluator(data.queries, data.corpus, data.relevant, **options)
    evaluator(encoder)
    typer.echo(str(table(evaluator.cells)))
    if output is not None:
        _save(evaluator.cells, output)
    return {"split": judged.split, "cells": [cell.row for cell in evaluator.cells]}


def _save(cells: list[CompressionCell], output: Path) -> None:
    from st_magnitude.diagnosis.figures import plot_compression

    output.mkdir(parents=True, exist_ok=True)
    with (output / "compression.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(cells[0].row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cell.row for cell in cells)
    typer.echo(f"Saved {output / 'compression.csv'}.")
    try:
        plot_compression(cells, output / "compression.png")
        typer.echo(f"Saved {output / 'compression.png'}.")
    except ImportError as error:
        warn(f"compression.png was not written: {error}")
