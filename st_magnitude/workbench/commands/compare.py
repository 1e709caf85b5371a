"""``st-magnitude compare``: which loss to train with on your data, within a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from st_magnitude._files import refuse_used_folder
from st_magnitude.workbench.commands.core import (
    Also,
    Base,
    DataOptions,
    Figures,
    Report,
    command,
    folder,
    save_report,
    say,
)
from st_magnitude.workbench.comparison.config import CompareConfig


@command
def compare(
    *,
    source: DataOptions,
    model: Base = "wordllama",
    output: Annotated[Path, folder("New folder for the winning model and tables.")],
    also: Also = None,
    report: Report = None,
    settings: CompareConfig,
) -> Figures:
    """Find out which loss to train with on your data.

    The command trains with losses, temperatures and learning rates until the budget is over, and
    stops trainings that fall behind. Then it measures the best model, plain cosine, the pretrained
    model and BM25 on the test split, or in five folds for a static table without a test split of
    your own.
    """
    from st_magnitude.saving.find import refuse_missing

    refuse_used_folder(output)  # before the data are read
    refuse_missing(model, *also or ())
    splits = source.splits()
    say(f"{settings.split}: {splits[settings.split]}")
    source.tell(splits)
    from st_magnitude.workbench.comparison.compare import compare as run
    from st_magnitude.workbench.memory import notice

    result = run(model, splits, output, settings, also=also or (), say=say)
    shown = {"model": model, **vars(settings)}
    save_report(report, f"Comparison on {splits.name}", result.test, shown, settings.seed)
    say(notice(output / "model"))
    typer.echo(f"\n{result.most_important_last()}\n")
    say(f"Saved to {output}: model/, compare.md, compare.json.")
    source.show_search(output / "model")
    return result.to_dict()
