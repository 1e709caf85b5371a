"""``st-magnitude calibrate``: choose the document exponent of a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from st_magnitude._checks import InputError
from st_magnitude._files import refuse_used_folder
from st_magnitude.workbench.commands.core import Figures, Judged, ModelId, command, folder

if TYPE_CHECKING:
    from st_magnitude.workbench.calibration import ExponentCurve


@command
def calibrate(
    model: ModelId,
    *,
    judged: Judged,
    confirm: Annotated[str | None, Option(help="Another split, to measure the choice on.")] = None,
    output: Annotated[Path | None, folder("New folder for the model with the exponent.")] = None,
) -> Figures:
    """Choose the document exponent of a trained model.

    Scores are divided by the norm of the document to this power, one of 0, 0.05, ..., 1: 0 is dot,
    and 1 is cosine. Without a clear difference the model keeps its own. Each fifth of the queries
    is measured at the exponent that the other fifths choose; --confirm test measures the exponent
    that all queries choose on another split.
    """
    if output is not None:
        refuse_used_folder(output)
    splits = judged.splits()
    splits.check_held_out(judged.split, confirm)
    if confirm is not None:
        splits[confirm]  # before the model is loaded
    encoder, split, data = judged.load(model, splits)
    if split == confirm:
        raise InputError(
            f"The {confirm} split chooses the exponent, as the model was trained on the"
            f" {judged.split} split: leave out --confirm {confirm}, or name another split."
        )
    from st_magnitude.workbench.calibration import calibrate_exponent
    from st_magnitude.workbench.memory import unread

    answers = splits.relevant_documents()
    curve = calibrate_exponent(encoder, data, also_relevant=answers, **judged.encode)
    typer.echo(str(curve))
    figures = {"split": split, **curve.to_dict()}
    if confirm is not None:
        others = unread(splits[confirm], model)
        confirmed = calibrate_exponent(encoder, others, [curve.best], **judged.encode)
        figures["confirm"] = {"split": confirm, **_gains(confirmed, curve.best)}
    if output is not None:
        from st_magnitude.saving.export import export
        from st_magnitude.similarity import Similarity
        from st_magnitude.surgery.normalize import prepare

        best = curve.best
        export(prepare(encoder, Similarity(1.0, best)), output)
        loads = "SentenceTransformer" if best in (0, 1) else "stm.load"
        typer.echo(f'Saved with document exponent {best:g}. Load it with {loads}("{output}").')
        figures["output"] = str(output)
    return figures


def _gains(curve: ExponentCurve, exponent: float) -> dict[str, object]:
    from st_magnitude.workbench.judging.folds import where

    chosen = curve.at(exponent)
    typer.echo(f"nDCG@10 on {where(chosen.data)} at exponent {exponent:g}: {chosen.mean:.4f}")
    figures: dict[str, object] = {"queries": len(chosen), "ndcg@10": chosen.mean}
    for name, other in (("cosine", 1.0), ("dot", 0.0)):
        gain = chosen - curve.at(other)
        typer.echo(f"  over {name}: {gain}")
        figures[f"versus_{name}"] = gain
    return figures
