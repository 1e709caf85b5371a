"""Why a model cannot be loaded: the name of the damaged file, which upstream seldom gives."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from safetensors import safe_open
from tokenizers import Tokenizer

from st_magnitude._files import is_moving

__all__ = ["loading"]

_EXPLAINED = (ValueError, ImportError)  # for which upstream has a sentence
MOST_FILES = 1000  # to look at; the folder may be no model


@contextmanager
def loading(what: str, path: str, has_options: bool = False) -> Iterator[None]:
    """Turns the errors of loading into one that names the model and its damaged file."""
    try:
        yield
    except Exception as error:
        is_folder = os.path.isdir(path)
        where = f"The {what} at {path!r}"
        if is_folder and (damage := _damage(Path(path), str(error))):
            raise OSError(f"{where} cannot be loaded because of {damage}") from error
        if "trust_remote_code" in str(error):  # upstream shows names that the model has chosen
            raise ValueError(
                f"{where} needs classes that are not part of sentence-transformers or transformers,"
                " and no code of a model is run (docs/security.md, trust_remote_code)."
            ) from error
        if not isinstance(error, OSError) and (has_options or type(error) in _EXPLAINED):
            raise
        if isinstance(error, OSError) and not is_folder:
            said = re.split(r"\.\s", str(error))[0]
            raise OSError(
                f"There is no {what} at {path!r}: no folder has this name, and the hub gave no such"
                f" model ({said}). Check the name and the network, or give a folder."
            ) from error
        why = (
            f"{where} is incomplete, or is an adapter whose base has moved, or is of other versions"
        )
        raise OSError(f"{why}: {type(error).__name__}: {error}") from error


def _damage(folder: Path, message: str) -> str:
    """The first damaged file of a model, and what is wrong with it; empty if none is."""
    if is_moving(folder, "modules.json"):
        return f"a killed process: move the files of {folder}/.st-magnitude.moving into {folder}."
    for file in sorted(islice(folder.rglob("*"), MOST_FILES)):
        if file.is_file() and "checkpoints" not in file.parts:
            try:
                _check(file, message)
            except Exception as error:  # tokenizers raises no other
                return f"{file} ({error})."
    return ""


def _check(file: Path, message: str) -> None:
    """Raises an error for a file that is not what its name says; ``message`` is upstream's."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt"):
            return
    is_read = file.suffix == ".bin" and not file.with_name("model.safetensors").exists()
    if is_read and ("weights_only" in message or not is_zipfile(file)):
        raise ValueError("it is torn, or holds code, which is not run; take safetensors")
    if file.name == "tokenizer.json":
        Tokenizer.from_file(str(file))
    elif file.suffix == ".json":
        content = json.loads(file.read_text(encoding="utf-8"))
        if ("config" in file.name or file.name == "modules.json") and not _has_form(file, content):
            raise ValueError("this JSON has not the form of such a file")


def _has_form(file: Path, content: Any) -> bool:
    if file.name == "modules.json":
        modules = content if isinstance(content, list) else []
        return bool(modules) and all(isinstance(module, dict) for module in modules)
    if not isinstance(content, dict):
        return False
    prompts = content.get("prompts") or {}
    return isinstance(prompts, dict) and all(isinstance(x, str | None) for x in prompts.values())
