"""``st-magnitude compare``: which loss to train with on your data, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.compare.config import CompareConfig
from st_magnitude.commands.core import Data, Figures, check_folder, command, say

__all__ = ["CompareConfig"]


@command()
def compare(
    *,
    data: Data,
    model: Annotated[str, typer.Option(help="Folder or hub id of the SentenceTransformer to start from.")],
    output: Annotated[Path, typer.Option(help="New folder for the winning model, tables, curves and a page.")],
    settings: CompareConfig,
) -> Figures:
    """Find out which loss to train with on your data.

    Trains candidates on your data within a budget, drops the worse two thirds again and again, and measures the best
    and plain cosine on the test split. Give the same command again to continue a run that was stopped. This command
    needs the extra "compare".
    """
    check_folder(output)
    from st_magnitude.commands.compare.run import compare as run

    def progress(line: str) -> None:
        (say if line.startswith("Note") else typer.echo)(line)

    result = run(model, data, output, settings, say=progress)
    typer.echo(f"\n{result}\n")
    say(f"Saved to {output}: model/, train_winner.py, compare.md, compare.json, report.html.")
    return result.to_dict()
