"""``st-magnitude abstain``: find the threshold above which a first document can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude.commands.core import (
    Data,
    EncodingBatch,
    Figures,
    MaxLength,
    Model,
    Scoring,
    SkipEmpty,
    check_folder,
    command,
    load_model,
    show_progress,
)


@command()
def abstain(
    model: Model,
    data: Data,
    split: Annotated[str, typer.Option(help="Split of the qrels to calibrate on, usually validation data.")] = "dev",
    confirm: Annotated[str | None, typer.Option(help="Another split, on which the rule is measured.")] = None,
    risk: Annotated[float, typer.Option(help="Largest share of wrong answers among the answers given.")] = 0.1,
    delta: Annotated[float, typer.Option(help="Probability that the guarantee fails.")] = 0.05,
    signal: Annotated[
        str, typer.Option(help="score, gap, 'query norm', 'document norm', combined, or auto for the best of these.")
    ] = "auto",
    unanswerable: Annotated[
        float | None,
        typer.Option(
            help="Share of the queries whose documents are left out. Default: 0.25, or 0 where queries of the data "
            "have no relevant document."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for abstention.json, usually the model's folder.")] = None,
    similarity: Scoring = None,
    batch_size: EncodingBatch = 32,
    max_length: MaxLength = None,
    skip_empty: SkipEmpty = False,
    seed: Annotated[int, typer.Option(help="Seed for the queries that are left out and for the two parts.")] = 0,
) -> Figures:
    """Find when to answer and when to abstain.

    The answer to a query is its first document. The command finds the threshold of a signal, such as the score, above
    which at most --risk of the answers are wrong, with probability 1 - --delta. Nothing is trained.
    """
    check_folder(output)
    from st_magnitude.data.retrieval import RetrievalData
    from st_magnitude.evaluation.abstention import calibrate_abstention

    judged = RetrievalData.from_beir(data, split, skip_empty)
    confirmed_on = RetrievalData.from_beir(data, confirm, skip_empty) if confirm is not None else None
    encoder = load_model(model, max_length)
    typer.echo(f"{split}: {judged}")
    options = {"batch_size": batch_size, "show_progress_bar": show_progress()}
    rule = calibrate_abstention(encoder, judged, risk, delta, signal, similarity, unanswerable, seed, options)
    typer.echo(str(rule))
    figures: dict[str, Any] = {"split": split, "rule": rule}
    if confirmed_on is not None:
        answers = rule.measure(encoder, confirmed_on, unanswerable, options)
        typer.echo(f"{confirm}:\n{answers}")
        figures["confirm"] = {
            "split": confirm,
            "answers": answers,
            "coverage": answers.coverage,
            "risk": answers.risk,
        }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        rule.save(output)
        typer.echo(f"Saved to {output / 'abstention.json'}. Apply it by answerable({str(output)!r}, scores).")
    return figures
