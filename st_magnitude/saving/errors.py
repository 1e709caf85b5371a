"""Errors of loading that name the model, and never advise to run its code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from st_magnitude._files import is_moving

__all__ = ["loading"]

_EXPLAINED = (ValueError, ImportError)  # for which upstream has a sentence
_NO_CODE = "and no code of a model is run (docs/security.md, trust_remote_code)."


@contextmanager
def loading(what: str, path: str, has_options: bool = False) -> Iterator[None]:
    """Turns the errors of loading into one that names the model."""
    try:
        yield
    except Exception as error:
        where = f"The {what} at {path!r}"
        said = str(error)
        is_folder = os.path.isdir(path)
        if is_folder and is_moving(Path(path), "modules.json"):
            raise OSError(
                f"{where} cannot be loaded because of a killed process: move the files of"
                f" {path}/.st-magnitude.moving into {path}."
            ) from error
        # Upstream advises to run the code, and shows names that the model has chosen.
        if "trust_remote_code" in said:
            raise ValueError(
                f"{where} needs classes that are not part of sentence-transformers or transformers,"
                f" {_NO_CODE}"
            ) from error
        if "weights_only" in said:
            raise OSError(
                f"{where} has weights that are torn or hold code, {_NO_CODE} Take safetensors."
            ) from error
        if not isinstance(error, OSError) and (has_options or type(error) in _EXPLAINED):
            raise
        if isinstance(error, OSError) and not is_folder:
            said = said.partition(". ")[0]
            raise OSError(
                f"There is no {what} at {path!r}: no folder has this name, and the hub gave no such"
                f" model ({said}). Check the name and the network, or give a folder."
            ) from error
        raise OSError(
            f"{where} is incomplete, or is an adapter whose base has moved, or is of other"
            f" versions: {type(error).__name__}: {said}"
        ) from error
