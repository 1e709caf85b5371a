"""``st-magnitude check-serving``: does a server return what the model computes?"""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from st_magnitude.commands.core import Figures, command


@command
def check_serving(
    url: Annotated[
        str, typer.Argument(help="URL of the server, such as http://localhost:8000/v1.")
    ],
    model: Annotated[
        str, typer.Option(help="Folder or hub id of the model that the server is to serve.")
    ],
    name: Annotated[
        str | None,
        typer.Option(help="Name of the model on the server; default: the only one that it lists."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option(help="Environment variable with the key, which is sent as a bearer token."),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(
            help=(
                "JSON object of further entries of every request, such as '{\"normalize\": false}'."
            )
        ),
    ] = None,
    send_prompts: Annotated[
        bool,
        typer.Option(
            "--send-prompts", help="Put the model's prompt before each text that is sent."
        ),
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Relative error of a vector that counts as rounding.")
    ] = 1e-4,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 60.0,
) -> Figures:
    """Check whether a server returns what the model computes.

    Some thirty texts are encoded here and by the server. The command says whether norms are lost,
    or the pooling, the prompt, the tokens or the precision differ, and names the switch of the
    server that fixes it; if no such cause explains nearly all texts, it says that the cause is
    unknown. The exit code is 0 if all is the same, 1 if something differs, and 2 if the server
    could not be checked.
    """
    try:
        extra = json.loads(request or "{}")
    except ValueError:
        extra = None
    if not isinstance(extra, dict):
        raise ValueError(
            f"--request must be a JSON object such as '{{\"normalize\": false}}'; got {request}."
        )
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ValueError(
            "The environment variable that --api-key-env names is not set; export the key into it,"
            " and give the name of the variable, not the key."
        )
    from st_magnitude.serving.check import check_serving as check

    key = None if api_key_env is None else os.environ[api_key_env]
    options: dict[str, Any] = {
        "send_prompts": send_prompts,
        "tolerance": tolerance,
        "timeout": timeout,
    }
    found = check(url, model, name=name, api_key=key, request=extra, **options)
    typer.echo(str(found))
    return found.to_dict() | {"same": found.same, "exit_code": 0 if found.same else 1}
