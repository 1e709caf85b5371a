"""``st-magnitude demo``: train a retriever on the API documentation of this Python environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import Figures, command


@command()
def demo(
    output: Annotated[Path, typer.Option(help="New folder for models, figures and the picture.")] = Path("runs/demo"),
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id of the model; default: all-MiniLM-L6-v2 from PyPI.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two models.")] = 20,
    batch_size: Annotated[int, typer.Option(min=2, help="Queries in a batch.")] = 32,
    seed: Annotated[int, typer.Option(help="Seed for the data, their order and dropout.")] = 0,
) -> Figures:
    """Train two retrievers on the API docs of this environment.

    One is trained with cosine and one with QNorm, in about 4 minutes on 2 cores. Everything is local: the
    docstrings of the installed packages and a model from PyPI. This command needs the extra "demo".
    """
    from st_magnitude.commands.demo.run import run

    return run(output, model=model, steps=steps, batch_size=batch_size, seed=seed, say=typer.echo)
