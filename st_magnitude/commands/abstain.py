"""``st-magnitude abstain``: find the threshold above which a first document can be trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from st_magnitude.commands.core import Figures, Model, Scored, command, folder


@command
def abstain(
    model: Model,
    *,
    judged: Scored,
    confirm: Annotated[str | None, Option(help="Another split, which measures the rule.")] = None,
    risk: Annotated[float, Option(help="Largest share of wrong answers.")] = 0.1,
    delta: Annotated[float, Option(help="Probability that the guarantee fails.")] = 0.05,
    output: Annotated[Path | None, folder("Folder for abstention.json.")] = None,
    seed: Annotated[int, Option(help="Seed for the two parts.")] = 0,
) -> Figures:
    """Find when to answer and when to abstain.

    The answer to a query is its first document. The command finds the threshold of a signal above
    which at most --risk of the answers are wrong, with probability 1 - --delta. Nothing is trained.
    Queries that no document answers belong into the split: a line with an empty corpus-id and score
    0.
    """
    from st_magnitude.data.beir import check_held_out
    from st_magnitude.evaluation.abstention import calibrate_abstention

    check_held_out(judged.data, judged.split, confirm)
    others, encode = None if confirm is None else judged.read(confirm), judged.encode
    encoder, data = judged.load(model)
    rule = calibrate_abstention(encoder, data, risk, delta, judged.similarity, seed, encode)
    typer.echo(str(rule))
    confirmed = None if others is None else rule.measure(encoder, others, encode)
    if confirmed is not None:
        typer.echo(f"{confirm}:\n{confirmed}")
    if output is not None:
        typer.echo(f"Saved {rule.save(output / 'abstention.json')}.")
    return {"split": judged.split, "rule": rule, "confirm": confirmed}
