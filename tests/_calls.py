"""Every command with its smallest call, from which each test over commands takes its rows.

The words model, data and out stand for a model, its data and a new folder.
"""

import typer

from st_magnitude.workbench.commands.app import app

COMMANDS = typer.main.get_command(app).commands
CALLS = {
    "train": "--data data --model model --output out --batch-size 4 --max-steps 1",
    "search": "model tea --data data",
    "compare": "--data data --model model --output out --batch-size 4 --max-steps 1 --budget 1s"
    " --losses cosine --temperatures 0.1 --learning-rates 0.01",
    "calibrate": "model --data data",
    "compress": "model --data data",
    "check-serving": "http://127.0.0.1:9/v1 --model model",
}


def call(name, **given):
    """The words of a command, with other values of model, data and out."""
    return [name, *(str(given.get(word, word)) for word in CALLS[name].split())]


def taking(option, but=()):
    """The commands with an option, such as "output"."""
    named = {name: {x.name for x in command.params} for name, command in COMMANDS.items()}
    return [name for name, options in named.items() if option in options and name not in but]
