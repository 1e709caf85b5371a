"""``st-magnitude calibrate``: choose the document exponent of a trained model on validation
queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude._config import MaxLength, SkipEmpty, numbers
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


@command
def calibrate(
    model: Model,
    data: Annotated[Path | None, typer.Option(help=BEIR_FOLDER)] = None,
    split: Annotated[
        str, typer.Option(help="Split of the qrels to choose on, usually validation data.")
    ] = "dev",
    confirm: Annotated[
        str | None, typer.Option(help="Another split, on which the choice is measured.")
    ] = None,
    exponents: Annotated[
        Sequence[float] | None,
        numbers("Document exponents to try, such as 0.25,0.5,0.75; default: 0, 0.05, ..., 1."),
    ] = None,
    exponent: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="A given exponent to save or confirm. Without --confirm it needs no --data.",
        ),
    ] = None,
    output: Annotated[
        Path | None, folder("New folder for the model with the chosen exponent.")
    ] = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    skip_empty: SkipEmpty = False,
    seed: Annotated[int, typer.Option(help="Seed of the intervals.")] = 0,
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
        raise ValueError(
            "Give --data with the queries to measure on, or only --exponent and --output."
        )
    if exponent is not None and confirm is None and output is None:
        raise ValueError(
            "With --exponent, give --output to save the model or --confirm to measure it."
        )
    from st_magnitude.data.beir import check_held_out
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation.calibration import calibrate_exponent, check_keeps_norm
    from st_magnitude.evaluation.metrics import judge
    from st_magnitude.result import interval
    from st_magnitude.saving.export import export
    from st_magnitude.similarity import Similarity
    from st_magnitude.surgery.normalize import prepare

    encoder = load_model(model, max_length)
    check_keeps_norm(encoder)
    chosen_on = confirmed_on = None
    if data is not None and exponent is None:
        check_held_out(data, split, confirm)
        chosen_on = RetrievalData.from_beir(data, split, skip_empty)
    if data is not None and confirm is not None:
        check_held_out(data, confirm)
        confirmed_on = RetrievalData.from_beir(data, confirm, skip_empty)

    encode = {"batch_size": batch_size, "show_progress_bar": show_progress()}
    figures: dict[str, Any] = {"exponent": exponent}
    if chosen_on is not None:
        typer.echo(f"{split}: {chosen_on}")
        curve = calibrate_exponent(encoder, chosen_on, exponents, seed=seed, encode=encode)
        typer.echo(str(curve))
        figures = {"split": split, **curve.to_dict()}
        exponent = curve.best
    assert exponent is not None
    if confirmed_on is not None:
        typer.echo(f"{confirm}: {confirmed_on}")
        curve = calibrate_exponent(encoder, confirmed_on, [exponent], seed=seed, encode=encode)
        chosen = curve.per_query[list(curve.exponents).index(exponent)]
        typer.echo(f"nDCG@10 at exponent {exponent:g}: {chosen.mean():.4f}")
        figures["confirm"] = {
            "split": confirm,
            "queries": len(curve.queries),
            "ndcg@10": float(chosen.mean()),
        }
        for name, other in (("cosine", curve.per_query[-1]), ("dot", curve.per_query[0])):
            gain = figures["confirm"][f"versus_{name}"] = judge(chosen - other, seed=seed).gain
            typer.echo(f"  {exponent:g} - {name}: {interval(gain)} nDCG@10")
    if output is not None:
        if max_length is not None:
            encoder = load_model(model, None)  # the saved model reads as much as the given one
        export(prepare(encoder, Similarity(query=1.0, document=exponent)), output)
        loads = "SentenceTransformer" if exponent in (0, 1) else "stm.load"
        typer.echo(
            f"Saved to {output} with document exponent {exponent:g}. Load it with"
            f' {loads}("{output}").'
        )
        figures["output"] = str(output)
    return figures
