"""``st-magnitude train``: fine-tune a retriever on pairs, and say whether it is better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from st_magnitude._files import refuse_used_run
from st_magnitude.workbench.commands.core import (
    Also,
    DataOptions,
    Figures,
    Report,
    command,
    folder,
    save_report,
    say,
)
from st_magnitude.workbench.finetune.settings import TrainConfig

if TYPE_CHECKING:
    from st_magnitude.workbench.finetune.train import TrainedModel


@command
def train(
    *,
    source: DataOptions,
    model: Annotated[
        str | None,
        Option(
            help="Folder or hub id of a SentenceTransformer, or table for the static table"
            " wordllama; default: the table and all-MiniLM-L6-v2."
        ),
    ] = None,
    output: Annotated[Path, folder("New folder for the trained model.")],
    also: Also = None,
    report: Report = None,
    settings: TrainConfig,
) -> Figures:
    """Train a retriever on pairs, and say what to deploy.

    BM25, a static table and a small encoder are compared, the models as they come and trained, and
    each with BM25, on queries that they were not trained on: in folds, or on the dev split if you
    give one or there are many queries. What wins is trained on all pairs and saved. Pairs with
    score 0 are explicit negatives. Ctrl-C stops the last training after the current step and saves
    a checkpoint for --resume.
    """
    from st_magnitude.saving.find import refuse_missing

    refuse_used_run(output, settings.resume)  # before the data are read
    refuse_missing(*[model] if model else [], *also or ())
    splits = source.splits()
    source.tell(splits, everything=True)
    loaded = splits[settings.split]
    say(f"{settings.split}: {loaded}")
    from st_magnitude.workbench.finetune.train import train as run

    trained = run(model, splits, output, settings, also=also or (), say=say)
    trainer = trained.trainer
    steps = 0 if trainer is None else trainer.state.global_step
    figures: dict[str, object] = {"loss": settings.loss, "steps": steps}
    if trainer is None or trainer.is_world_process_zero():
        shown = {"model": model, **vars(settings)}
        save_report(report, f"Training on {loaded.name}", trained.verdict, shown, settings.seed)
        figures |= _report(trained, settings, splits.caveat)
        if trained.output is not None:
            source.show_search(trained.output)
    return figures


def _report(trained: TrainedModel, settings: TrainConfig, caveat: str) -> dict[str, object]:
    """Says, at the end, what to deploy and where it was saved, and returns the figures."""
    from st_magnitude.workbench.memory import notice

    verdict = trained.verdict
    figures: dict[str, object] = {"geometry": trained.geometry}
    figures["norm_warning"] = trained.norm_warning
    about_hashes = notice(trained.output) if trained.output and trained.trainer else ""
    for text in filter(None, (caveat, trained.norm_warning, about_hashes)):
        say(text)
    if verdict is None:
        say(
            f"There is no {settings.dev_split} split next to {settings.split}, so the trained model"
            " could not be compared with the pretrained one. Add judgments of other queries as a"
            " split, or name another one with --dev-split."
        )
    else:
        figures["dev"] = {"is_better": verdict.is_better, **verdict.to_dict()}
        typer.echo(f"\n{verdict.most_important_last()}")
    if settings.confirm is not None and trained.confirmed is not None:
        say(str(trained.confirmed))
        figures[settings.confirm] = trained.confirmed.to_dict()
    if trained.output is None:
        say("Nothing was saved.")
        return figures | {"exit_code": 3}
    load = f'{"SentenceTransformer" if trained.is_stock else "stm.load"}("{trained.output}")'
    typer.echo(f"Saved to {trained.output}. Load it with {load}.")
    if verdict is not None and verdict.decision is not None and verdict.decision.how:
        say(f"This loads the model alone: st-magnitude search uses {verdict.decision.name}.")
    return figures | {"output": str(trained.output), "load": load}
