"""``st-magnitude compress``: what shorter and coarser embeddings keep of nDCG@10."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer
from typer import Option

from st_magnitude.workbench._config import Ints, whole_numbers
from st_magnitude.workbench.commands.core import Figures, Judged, ModelId, command, show_progress


@command
def compress(
    model: ModelId,
    *,
    judged: Judged,
    similarity: Annotated[
        str | None, Option(help="cosine, dot, qnorm or dnorm; default: the model's own.")
    ] = None,
    dims: Annotated[Ints, whole_numbers("Dimensions to keep; default: all, 1/2, 1/4, 1/8.")] = None,
    top_k: Annotated[int, Option(min=1, help="Documents to rescore after binary search.")] = 100,
) -> Figures:
    """Measure what shorter and quantized embeddings keep.

    The table has nDCG@10 and storage with fewer dimensions, and as int8, RaBitQ and bits. Nothing
    is trained.
    """
    encoder, split, data = judged.load(model, judged.splits())
    from st_magnitude.evaluation import CompressionEvaluator
    from st_magnitude.evaluation.compression import summary
    from st_magnitude.workbench.judging.folds import where

    evaluator = CompressionEvaluator(
        data.queries,
        data.corpus,
        data.relevant,
        dims=dims,
        top_k=top_k,
        similarity=similarity,
        batch_size=judged.batch_size,
        show_progress_bar=show_progress(),
    )
    evaluator(encoder)
    typer.echo(str(replace(summary(evaluator.cells), title=f"nDCG@10 on {where(data)}")))
    cells = [
        {"ndcg@10" if name == "ndcg" else name: value for name, value in vars(cell).items()}
        for cell in evaluator.cells
    ]
    return {"split": split, "cells": cells}
