"""``st-magnitude mteb``: mteb on a model in a folder and on local data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from st_magnitude.workbench._config import SkipEmpty
from st_magnitude.workbench.commands.core import (
    BatchSize,
    Figures,
    ModelId,
    command,
    folder,
    say,
    show_progress,
)


@command
def mteb(
    model: ModelId,
    tasks: Annotated[list[str], Argument(help="Pairs, folders in BEIR's layout, mteb's tasks.")],
    split: Annotated[str, Option(help="Split of local data to measure on.")] = "test",
    output: Annotated[Path | None, folder("Folder of mteb's results, which are kept.")] = None,
    batch_size: BatchSize = 32,
    skip_empty: SkipEmpty = False,
) -> Figures:
    """Score a model with mteb, on local data and on mteb's tasks.

    The model is a folder or a name that mteb knows. This command needs the extra "eval".
    """
    from st_magnitude.workbench.files.pairs import load_splits

    data = [
        load_splits(task, skip_empty=skip_empty)[split] if Path(task).exists() else task
        for task in tasks
    ]
    from st_magnitude.mteb import evaluate
    from st_magnitude.workbench.judging.folds import where
    from st_magnitude.workbench.memory import unread

    data = [task if isinstance(task, str) else unread(task, model) for task in data]
    encode = {"batch_size": batch_size, "show_progress_bar": show_progress()}
    results = evaluate(model, data, output, **encode).task_results
    scores = {result.task_name: result.get_score() for result in results}
    local = ", ".join(where(task) for task in data if not isinstance(task, str))
    on = f"; here on {local}" if local else ""
    say(f"The main score of each task, which is nDCG@10 for retrieval{on}:")
    for name, score in scores.items():
        typer.echo(f"  {name}: {score:.4f}")
    return {"scores": scores}
