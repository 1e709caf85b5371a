"""``st-magnitude calibrate``: choose the document exponent of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from st_magnitude._config import Floats, MaxLength, SkipEmpty, numbers
from st_magnitude._files import refuse_used_folder
from st_magnitude.commands.core import (
    BEIR_FOLDER,
    EncodingBatch,
    Figures,
    Model,
    command,
    folder,
    load_model,
    show_progress,
)

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_magnitude.data.retrieval import RetrievalData


@command
def calibrate(
    model: Model,
    data: Annotated[Path | None, Option(help=BEIR_FOLDER)] = None,
    split: Annotated[str, Option(help="Split of the qrels to choose on.")] = "dev",
    confirm: Annotated[str | None, Option(help="Another split, which measures the choice.")] = None,
    exponents: Annotated[
        Floats, numbers("Document exponents to try; default: 0, 0.05, ..., 1.")
    ] = None,
    exponent: Annotated[
        float | None,
        Option(min=0, max=1, help="A given exponent, to save or to confirm."),
    ] = None,
    output: Annotated[Path | None, folder("New folder for the model with the exponent.")] = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    skip_empty: SkipEmpty = False,
    seed: Annotated[int, Option(help="Seed of the intervals.")] = 0,
) -> Figures:
    """Choose the document exponent of a trained model.

    The exponent lies between 0 (dot) and 1 (cosine). If the best exponent is tied with one of these
    two, the model with 0 or 1 is preferred because it loads without st_magnitude. Nothing is
    trained. Queries and corpus are encoded once. The interval next to the best exponent comes from
    the queries that chose it and is therefore optimistic: --confirm test measures the choice on
    other queries.
    """
    if output is not None:
        refuse_used_folder(output)
    if data is None and (exponent is None or confirm is not None):
        raise ValueError("Give --data to measure on, or only --exponent and --output.")
    if exponent is not None and confirm is None and output is None:
        raise ValueError("Give --output to save this --exponent, or --confirm to measure it.")
    from st_magnitude.data.beir import check_held_out
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation.calibration import calibrate_exponent, check_keeps_norm

    encoder = load_model(model, max_length)
    check_keeps_norm(encoder)
    encode = {"batch_size": batch_size, "show_progress_bar": show_progress()}
    figures: dict[str, Any] = {"exponent": exponent}
    if data is not None:
        choosing = split if exponent is None else None
        check_held_out(data, choosing, confirm)
        read = {
            name: RetrievalData.from_beir(data, name, skip_empty)
            for name in (choosing, confirm)
            if name is not None
        }
    if data is not None and exponent is None:
        typer.echo(f"{split}: {read[split]}")
        curve = calibrate_exponent(encoder, read[split], exponents, seed=seed, encode=encode)
        typer.echo(str(curve))
        figures = {"split": split, **curve.to_dict()}
        exponent = curve.best
    assert exponent is not None
    if confirm is not None:
        typer.echo(f"{confirm}: {read[confirm]}")
        measured = _confirm(encoder, read[confirm], exponent, seed, encode)
        figures["confirm"] = {"split": confirm, **measured}
    if output is not None:
        # the saved model reads as much as the given one
        _save(encoder if max_length is None else load_model(model, None), exponent, output)
        figures["output"] = str(output)
    return figures


def _confirm(
    encoder: SentenceTransformer,
    data: RetrievalData,
    exponent: float,
    seed: int,
    encode: dict[str, Any],
) -> Figures:
    """Measures an exponent next to cosine and dot on queries that did not choose it."""
    from st_magnitude.evaluation.calibration import calibrate_exponent
    from st_magnitude.evaluation.metrics import judge
    from st_magnitude.result import interval

    curve = calibrate_exponent(encoder, data, [exponent], seed=seed, encode=encode)
    chosen = curve.per_query[list(curve.exponents).index(exponent)]
    typer.echo(f"nDCG@10 at exponent {exponent:g}: {chosen.mean():.4f}")
    figures: dict[str, Any] = {"queries": len(curve.queries), "ndcg@10": float(chosen.mean())}
    for name, other in (("cosine", curve.per_query[-1]), ("dot", curve.per_query[0])):
        gain = figures[f"versus_{name}"] = judge(chosen - other, seed=seed).gain
        typer.echo(f"  {exponent:g} - {name}: {interval(gain)} nDCG@10")
    return figures


def _save(encoder: SentenceTransformer, exponent: float, output: Path) -> None:
    from st_magnitude.saving.export import export
    from st_magnitude.similarity import Similarity
    from st_magnitude.surgery.normalize import prepare

    export(prepare(encoder, Similarity(query=1.0, document=exponent)), output)
    loads = "SentenceTransformer" if exponent in (0, 1) else "stm.load"
    typer.echo(f'Saved with document exponent {exponent:g}. Load it with {loads}("{output}").')
