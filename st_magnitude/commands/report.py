"""``st-magnitude report``: one HTML page from files that other commands wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import Figures, check_folder, command


@command()
def report(
    diagnosis: Annotated[Path, typer.Argument(help="The diagnosis.json that 'diagnose --output' writes.")],
    output: Annotated[Path, typer.Option(help="Folder for report.html and its pictures, which are replaced.")],
    log: Annotated[
        Path | None,
        typer.Option(help="Training curves: the folder of a trained model or of a run, or the CSV of a NormMonitor."),
    ] = None,
    compression: Annotated[
        Path | None, typer.Option(help="The compression.csv that 'compress --output' writes.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the name of the model.")] = None,
) -> Figures:
    """Make one HTML page from a diagnosis and other results.

    A training log and a compression table can be added. No model is loaded. The page is one
    HTML file that needs no other file and no network. This command needs the extra "plot".
    """
    check_folder(output)
    from st_magnitude.diagnosis.report import write_report

    page = write_report(diagnosis, output, log=log, compression=compression, title=title)
    typer.echo(f"Saved {page}.")
    return {"report": str(page), "pictures": sorted(str(picture) for picture in page.parent.glob("*.png"))}
