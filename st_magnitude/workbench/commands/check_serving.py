"""``st-magnitude check-serving``: does a server return what the model computes?"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from typer import Argument, Option

from st_magnitude._checks import InputError
from st_magnitude.workbench.commands.core import Figures, command


@command
def check_serving(
    url: Annotated[str, Argument(help="URL of the server, such as http://localhost:8000/v1.")],
    model: Annotated[str, Option(help="Folder or hub id of the model that the server serves.")],
    name: Annotated[str | None, Option(help="Name of the model on the server, if needed.")] = None,
    api_key_env: Annotated[
        str | None, Option(help="Environment variable of the key, sent as a bearer token.")
    ] = None,
    request: Annotated[
        str | None, Option(help="JSON object to add to requests, as '{\"normalize\": false}'.")
    ] = None,
    send_prompts: Annotated[bool, Option(help="Put the model's prompts before the texts.")] = False,
    tolerance: Annotated[float, Option(help="Relative error that counts as rounding.")] = 1e-4,
    timeout: Annotated[float, Option(help="Seconds to wait for an answer.")] = 60.0,
) -> Figures:
    """Check whether a server returns what the model computes.

    About two dozen texts are encoded here and by the server. The command says whether vectors and
    rankings are the same, what differs, and the usual causes. The exit code is 0 if all is the
    same, 1 if something differs, and 2 if the server could not be checked.
    """
    try:
        extra = json.loads(request or "{}")
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise InputError(
            "--request must be a JSON object as '{\"normalize\": false}'. What you gave is none; it"
            " is not shown, since it can hold a key."
        )
    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise InputError(
            "The environment variable that --api-key-env names is not set; export the key into it,"
            " and give the name of the variable, not the key."
        )
    from st_magnitude.workbench.serving.check import check_serving as check

    found = check(
        url,
        model,
        name=name,
        api_key=key,
        request=extra,
        send_prompts=send_prompts,
        tolerance=tolerance,
        timeout=timeout,
    )
    typer.echo(str(found))
    return found.to_dict() | {"same": found.same, "exit_code": 0 if found.same else 1}
