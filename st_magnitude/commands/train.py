"""``st-magnitude train``: fine-tune a retriever on a folder in BEIR's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from st_magnitude._config import SkipEmpty
from st_magnitude.commands.core import Base, Data, Figures, command, folder, say
from st_magnitude.finetune.settings import TrainConfig


@command
def train(
    *,
    data: Data,
    model: Base,
    output: Annotated[Path, folder("New folder for the trained model.")],
    split: Annotated[str, Option(help="Split of the qrels to train on.")] = "train",
    dev_split: Annotated[str, Option(help="Split to compare on, if the data has it.")] = "dev",
    skip_empty: SkipEmpty = False,
    settings: TrainConfig,
) -> Figures:
    """Fine-tune a retriever on a folder in BEIR's layout.

    Pairs with score 0 in the qrels are explicit negatives. With a dev split, the trained model is
    compared with the pretrained one, and saved with its own scoring unless another is clearly
    better on the split. Ctrl-C stops the run after the current step and saves a checkpoint for
    --resume.
    """
    from st_magnitude.data.beir import relevant_documents, splits_of
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.finetune.run import train as run

    loaded = RetrievalData.from_beir(data, split, skip_empty)
    has_dev = dev_split in splits_of(data) and dev_split != split
    dev = RetrievalData.from_beir(data, dev_split, skip_empty) if has_dev else None
    typer.echo(f"{split}: {loaded}")
    answers = relevant_documents(data)  # of all splits
    trained = run(model, loaded, output, settings, dev=dev, also_relevant=answers)
    figures: dict[str, object] = {"loss": settings.loss, "steps": trained.trainer.state.global_step}
    if not trained.trainer.is_world_process_zero():
        return figures
    figures |= {"geometry": trained.geometry, "prior": trained.prior, "moved": trained.moved}
    figures["norm_warning"] = trained.norm_warning
    verdict, stuck = trained.verdict, trained.advice
    if verdict is not None:
        say(verdict.headline(dev_split))
        figures["dev"] = {"split": dev_split, "is_better": verdict.is_better, **verdict.to_dict()}
    if trained.output is not None:
        stock = verdict is None or verdict.saved.exponent in (0.0, 1.0)
        load = f'{"SentenceTransformer" if stock else "stm.load"}("{output}")'
        typer.echo(f"Saved to {output}. Load it with {load}.")
        figures |= {"output": str(output), "load": load}
    if verdict is None:
        say(
            f"There is no {dev_split} split next to {split}, so the trained model could not be"
            " compared with the pretrained one. Put judgments of other queries into"
            f" {data / 'qrels' / f'{dev_split}.tsv'}, or name another split with --dev-split."
            f" {stuck}"
        )
    else:
        typer.echo(f"\n{verdict}")
        say(verdict.advice(stuck))
    typer.echo(f"\n{trained.norms}")
    for text in filter(None, (trained.prior, trained.norm_warning)):
        say(text)
    return figures if trained.output is not None else {**figures, "exit_code": 3}
