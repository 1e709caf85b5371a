"""``st-magnitude abstain``: find the threshold above which a first document can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from st_magnitude.commands.core import Figures, Judged, Model, command, folder


@command
def abstain(
    model: Model,
    *,
    judged: Judged,
    confirm: Annotated[str | None, typer.Option(help="Another split, on which the rule is measured.")] = None,
    risk: Annotated[float, typer.Option(help="Largest share of wrong answers among the answers given.")] = 0.1,
    delta: Annotated[float, typer.Option(help="Probability that the guarantee fails.")] = 0.05,
    signal: Annotated[str, typer.Option(help="score, gap (the first score minus the second), or auto.")] = "auto",
    unanswerable: Annotated[
        float | None,
        typer.Option(
            help="Share of the queries whose documents are left out. Default: 0.25, or 0 where queries of the data "
            "have no relevant document."
        ),
    ] = None,
    output: Annotated[Path | None, folder("Folder for abstention.json, usually the model's folder.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for the queries that are left out and for the two parts.")] = 0,
) -> Figures:
    """Find when to answer and when to abstain.

    The answer to a query is its first document. The command finds the threshold of a signal, such as the score, above
    which at most --risk of the answers are wrong, with probability 1 - --delta. Nothing is trained.
    """
    from st_magnitude.evaluation.abstention import calibrate_abstention

    confirmed_on, options = judged.read(confirm) if confirm is not None else None, judged.encode
    encoder, data = judged.load(model)
    rule = calibrate_abstention(encoder, data, risk, delta, signal, judged.similarity, unanswerable, seed, options)
    typer.echo(str(rule))
    figures: dict[str, Any] = {"split": judged.split, "rule": rule}
    if confirmed_on is not None:
        answers = rule.measure(encoder, confirmed_on, unanswerable, options)
        typer.echo(f"{confirm}:\n{answers}")
        shares = {"coverage": answers.coverage, "risk": answers.risk}
        figures["confirm"] = {"split": confirm, "answers": answers, **shares}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        rule.save(output)
        typer.echo(f"Saved to {output / 'abstention.json'}. Apply it by answerable({str(output)!r}, scores).")
    return figures
