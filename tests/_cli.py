"""The command line within the process of a test."""

import json

from typer.testing import CliRunner

from st_magnitude.workbench.commands.app import app


def invoke(command, *arguments, **options):
    """Runs a command; ``top_k=5`` stands for ``--top-k 5``, True for an option without a value."""
    words = [command, *map(str, arguments)]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return CliRunner().invoke(app, words)


def figures(*arguments, **options):
    """The JSON that a command prints, alone on stdout."""
    done = invoke(*arguments, json=True, **options)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refusal(*arguments, **options):
    """The message of a command that refuses its input, without line breaks."""
    done = invoke(*arguments, **options)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return " ".join(done.stderr.split())
