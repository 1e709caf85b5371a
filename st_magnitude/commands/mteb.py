"""``st-magnitude mteb``: mteb's own command line with local models and local data."""

from __future__ import annotations

import typer

from st_magnitude.commands.core import command


@command(shared_options=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def mteb(context: typer.Context) -> None:
    """Run mteb's command line with local models and local data.

    st-magnitude mteb run -m my-model -t my-data --output-folder results

    -m takes the folder of a saved model, or any name that mteb knows. -t takes a folder in BEIR's layout (retrieval),
    a .csv, .tsv or .jsonl file with the columns sentence1, sentence2 and score (STS) or text and label (clustering),
    or the name of one of mteb's tasks. All other arguments are mteb's; "mteb run --help" lists them. This command
    needs the extra "eval".
    """
    from st_magnitude.mteb import run

    try:
        scores = run([argument for argument in context.args if argument != "--"])
    except KeyError as error:  # mteb raises it for a name that it does not know
        raise ValueError(error.args[0]) from error
    for task, (metric, score) in scores.items():
        typer.echo(f"{task}: {metric} {score:.4f}")
