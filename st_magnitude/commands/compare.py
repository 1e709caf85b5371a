"""``st-magnitude compare``: which loss to train with on your data, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude.commands.core import Also, Base, DataOptions, Figures, command, folder, say
from st_magnitude.comparison.config import CompareConfig


@command
def compare(
    *,
    source: DataOptions,
    model: Base = "wordllama",
    output: Annotated[Path, folder("New folder for the winning model and tables.")],
    also: Also = None,
    settings: CompareConfig,
) -> Figures:
    """Find out which loss to train with on your data.

    Trains candidates on your data until the budget is over, stops those that fall behind, and
    measures the best one, plain cosine, the pretrained model and BM25 on the test split, or in
    five folds for a static table without a test split of your own. Give the same command again to
    continue a run that was stopped.
    """
    splits = source.splits()
    splits[settings.split]  # before a model is loaded
    from st_magnitude.comparison.compare import compare as run

    result = run(model, splits, output, settings, also=also or (), say=say)
    typer.echo(f"\n{result}")
    say(f"Saved to {output}: model/, compare.md, compare.json.")
    return result.to_dict()
