"""The settings of a training run, recorded next to its checkpoints: a resumed run must have the same settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from st_magnitude._config import list_differences
from st_magnitude.result import to_plain

__all__ = ["check_same_run", "record_run", "remove_checkpoints"]


def check_same_run(output: Path, settings: Mapping[str, Any]) -> None:
    """Refuses to resume a run that was started with other settings.

    Args:
        output: Folder of the run, with checkpoints in ``output/checkpoints``.
        settings: Everything that a resumed run must share with the interrupted one: the loss, the data (as a
            `st_magnitude._config.digest`), the batch size, and so on.

    Raises:
        FileExistsError: If a setting differs, or there is no record. The message names all that differ.
    """
    file = _file(output)
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if differences := list_differences(before, json.loads(json.dumps(to_plain(settings)))):
        raise FileExistsError(
            f"The run in {output} was started with other settings: {differences}. Resume with the same settings, or "
            "choose another output folder."
        )


def record_run(output: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a run next to its checkpoints, before the first of them."""
    file = _file(output)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(to_plain(settings), indent=2) + "\n", encoding="utf-8")


def remove_checkpoints(output: Path) -> None:
    """Removes the checkpoints of a finished run, which hold the state of the optimizer, and its record."""
    shutil.rmtree(output / "checkpoints", ignore_errors=True)


def _file(output: Path) -> Path:
    return output / "checkpoints" / "run.json"
