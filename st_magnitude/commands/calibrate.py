"""``st-magnitude calibrate``: choose the document exponent of a trained model on validation queries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from st_magnitude._config import numbers
from st_magnitude.commands.core import (
    Data,
    EncodingBatch,
    Figures,
    MaxLength,
    Model,
    Seed,
    command,
    curve_figures,
    load_model,
)

if TYPE_CHECKING:
    from st_magnitude.corpus.beir import RetrievalData
    from st_magnitude.evaluation.calibration import ExponentCurve


@command()
def calibrate(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to choose on, usually validation data.")] = "dev",
    confirm: Annotated[str | None, typer.Option(help="Another split, on which the choice is measured.")] = None,
    exponents: Annotated[
        Sequence[float] | None,
        numbers("Document exponents to try, such as 0.25,0.5,0.75; default: 0, 0.05, ..., 1."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for the model with the chosen exponent.")] = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    seed: Seed = 0,
) -> Figures:
    """Choose the document exponent of a trained model.

    The exponent lies between 0 (dot) and 1 (cosine). Nothing is trained. Queries and corpus are encoded once. The
    interval beside the best exponent comes from the queries that chose it and is therefore optimistic: --confirm
    test measures the choice on other queries.
    """
    from st_magnitude.corpus.beir import load_beir
    from st_magnitude.evaluation.calibration import calibrate_exponent
    from st_magnitude.geometry import paired_bootstrap
    from st_magnitude.surgery.export import export
    from st_magnitude.surgery.normalize import prepare

    if output is not None and output.exists() and (output.is_file() or any(output.iterdir())):
        raise FileExistsError(f"{output} is not an empty folder. Choose another --output.")
    chosen_on = load_beir(data, split)
    confirmed_on = None if confirm is None else load_beir(data, confirm)
    encoder = load_model(model, max_length)

    def sweep(loaded: RetrievalData, gammas: Sequence[float] | None) -> ExponentCurve:
        judged = (loaded.queries, loaded.corpus, loaded.relevant_docs)
        return calibrate_exponent(encoder, *judged, gammas, batch_size, seed=seed, show_progress_bar=True)

    typer.echo(f"{split}: {chosen_on}")
    curve = sweep(chosen_on, exponents)
    typer.echo(str(curve))
    figures: dict[str, Any] = {"split": split, **curve_figures(curve)}
    if confirmed_on is not None:
        typer.echo(f"{confirm}: {confirmed_on}")
        check = sweep(confirmed_on, [curve.best])
        chosen = check.per_query[list(check.exponents).index(curve.best)]
        figures["confirm"] = {"split": confirm, "queries": len(check.queries), "ndcg@10": float(chosen.mean())}
        for name, other in (("cosine", check.per_query[-1]), ("dot", check.per_query[0])):
            gain, low, high = figures["confirm"][f"versus_{name}"] = paired_bootstrap(chosen, other, seed=seed)
            typer.echo(f"  {curve.best:g} - {name}: {gain:+.4f} [{low:+.4f}, {high:+.4f}] nDCG@10")
    if output is not None:
        export(prepare(encoder, curve.best_similarity), output)
        figures["output"] = str(output)
        typer.echo(f"Saved to {output}{'' if curve.best in (0, 1) else ', for stm.load'}.")
    return figures
