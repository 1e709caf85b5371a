"""``st-magnitude compress``: what shorter and coarser embeddings keep of nDCG@10."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from st_magnitude._config import Ints, whole_numbers
from st_magnitude.commands.core import Figures, Judged, Model, command, folder


@command
def compress(
    model: Model,
    *,
    judged: Judged,
    dims: Annotated[Ints, whole_numbers("Prefixes; default: all, 1/2, 1/4 and 1/8.")] = None,
    top_k: Annotated[int, Option(min=1, help="Documents of a binary search to rescore.")] = 100,
    output: Annotated[Path | None, folder("Folder for compression.csv, which is replaced.")] = None,
) -> Figures:
    """Measure what shorter and quantized embeddings keep.

    The table has prefixes, principal axes of the corpus (PCA), int8, RaBitQ and binary embeddings,
    with their storage. Nothing is trained. Queries and corpus are encoded once. For a
    MultiVectorEncoder, the table has the token vectors that norms, pooling and both keep,
    and --dims and --top-k do not apply.
    """
    from st_magnitude.saving.export import class_of

    if class_of(model, {}) == "MultiVectorEncoder":
        return _compress_tokens(model, judged, output)
    from st_magnitude.evaluation import CompressionEvaluator
    from st_magnitude.evaluation.compression import table

    encoder, data = judged.load(model)
    options = {"similarity": judged.similarity, **judged.encode}
    evaluator = CompressionEvaluator(
        data.queries, data.corpus, data.relevant, dims=dims, top_k=top_k, pca=True, **options
    )
    evaluator(encoder)
    typer.echo(str(table(evaluator.cells)))
    rows = [cell.row for cell in evaluator.cells]
    if output is not None:
        _save_rows(rows, output)
    return {"split": judged.split, "cells": rows}


def _compress_tokens(model: str, judged: Judged, output: Path | None) -> Figures:
    from sentence_transformers import MultiVectorEncoder

    from st_magnitude.evaluation import LateInteractionEvaluator

    data = judged.read()
    encoder: Any = MultiVectorEncoder(model)
    if judged.max_length is not None:
        encoder.max_seq_length = judged.max_length
    typer.echo(f"{judged.split}: {data}")
    options = {"similarity": judged.similarity, **judged.encode}
    evaluator = LateInteractionEvaluator(data.queries, data.corpus, data.relevant, **options)
    evaluator(encoder)
    typer.echo(str(evaluator.table))
    rows = [vars(cell) for cell in evaluator.cells]
    if output is not None:
        _save_rows(rows, output)
    return {"split": judged.split, "cells": rows}


def _save_rows(rows: list[dict[str, Any]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with (output / "compression.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    typer.echo(f"Saved {output / 'compression.csv'}.")
