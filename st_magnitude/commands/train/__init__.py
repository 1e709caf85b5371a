"""``st-magnitude train``: fine-tune a retriever on a folder in BEIR's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from st_magnitude.commands.core import Data, Figures, check_folder, command, curve_figures
from st_magnitude.commands.train.config import TrainConfig

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from st_magnitude.corpus.beir import RetrievalData

__all__ = ["TrainConfig"]


@command()
def train(
    *,
    data: Data,
    model: Annotated[str, typer.Option(help="Folder or hub id of the SentenceTransformer to start from.")],
    output: Annotated[Path, typer.Option(help="New folder for the trained model.")],
    split: Annotated[str, typer.Option(help="Split of the qrels to train on.")] = "train",
    dev_split: Annotated[str, typer.Option(help="Split of the qrels to compare on, if the data has it.")] = "dev",
    settings: TrainConfig,
) -> Figures:
    """Fine-tune a retriever on a folder in BEIR's layout.

    Pairs with score 0 in the qrels are explicit negatives. With a dev split, the document exponent is then swept on
    it. Ctrl-C stops the run after the current step and saves a checkpoint for --resume.
    """
    check_folder(output)
    from st_magnitude.commands.train.run import train as run
    from st_magnitude.corpus.beir import available_splits, load_beir

    splits = available_splits(data)
    loaded = load_beir(data, split)
    held_out = load_beir(data, dev_split) if dev_split in splits and dev_split != split else None
    typer.echo(f"{split}: {loaded}")
    trainer = run(model, loaded, output, settings)
    typer.echo(f"Saved to {output}.")
    figures: dict[str, Any] = {"output": str(output), "loss": settings.loss, "steps": trainer.state.global_step}
    if trainer.is_world_process_zero():
        figures["geometry"] = json.loads((output / "training.json").read_text(encoding="utf-8"))["geometry"]
        before, after = figures["geometry"]["before"], figures["geometry"]["after"]
        for key in after:
            typer.echo(f"  {key:40} {before[key]:.4f} -> {after[key]:.4f}")
        if held_out is not None:
            figures |= _dev_figures(trainer.model, held_out, dev_split)
    return figures


def _dev_figures(model: SentenceTransformer, held_out: RetrievalData, split: str) -> dict[str, Any]:
    from st_magnitude.evaluation import MagnitudeEvaluator
    from st_magnitude.evaluation.calibration import calibrate_exponent
    from st_magnitude.surgery.raw import normalizes_output

    judged = (held_out.queries, held_out.corpus, held_out.relevant_docs)
    scores = MagnitudeEvaluator(*judged, name=split, write_csv=False)(model)
    for key, value in scores.items():
        typer.echo(f"  {key:40} {value:.4f}")
    if normalizes_output(model):
        return {"scores": scores}
    curve = calibrate_exponent(model, *judged)
    typer.echo(str(curve))
    return {"scores": scores, "calibration": curve_figures(curve)}
