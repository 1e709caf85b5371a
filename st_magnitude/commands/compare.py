"""``st-magnitude compare``: which loss to train with on your data, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import Base, DataOptions, Figures, command, folder, say
from st_magnitude.comparison.config import CompareConfig


@command
def compare(
    *,
    source: DataOptions,
    model: Base = "wordllama",
    output: Annotated[Path, folder("New folder for the winning model and tables.")],
    settings: CompareConfig,
) -> Figures:
    """Find out which loss to train with on your data.

    Trains candidates on your data until the budget is over, stops those that fall behind, and
    measures the best one, plain cosine and the pretrained model on the test split. Give the same
    command again to continue a run that was stopped.
    """
    splits = source.splits()
    splits[settings.split]  # before a model is loaded
    from st_magnitude.comparison.compare import compare as run

    result = run(model, splits, output, settings, say=say)
    typer.echo(f"\n{result}")
    say(f"Saved to {output}: model/, compare.md, compare.json.")
    return result.to_dict()
