"""Reads what other commands and runs wrote: training logs and compression tables."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from st_magnitude._json import parse
from st_magnitude.evaluation.compression import CompressionCell

__all__ = ["Log", "read_compression", "read_log", "to_float", "with_steps"]

Log = Sequence[Mapping[str, Any]]
LOGS = ("training.json", "revela.json", "trainer_state.json")
LOG_REMEDY = "pass the trainer_state.json of a checkpoint, the folder of the run, or the CSV file of a NormMonitor."
TABLE_REMEDY = 'pass the CSV file of "st-magnitude compress ... --output FOLDER" or of a CompressionEvaluator.'


def read_compression(path: str | Path) -> list[CompressionCell]:
    """The cells in a CSV file of ``st-magnitude compress`` or of a CompressionEvaluator; the last of several runs.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is not such a file, or has no rows.
    """
    rows = _read_csv(path, TABLE_REMEDY)
    try:
        rows = [row for row in rows if _when(row) == _when(rows[-1])]
        kinds = {"dim": int, "bytes_per_document": int, "ndcg": float, "retention": float}
        names = [field.name for field in fields(CompressionCell)]
        cells = [
            CompressionCell(*(kinds.get(name, str)(row["ndcg@10" if name == "ndcg" else name]) for name in names))
            for row in rows
        ]
    except KeyError as error:
        raise ValueError(f"{path} has no column {error}: {TABLE_REMEDY}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a compression table ({error}): {TABLE_REMEDY}") from None
    if not cells:
        raise ValueError(f"{path} has no rows: {TABLE_REMEDY}")
    return cells


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """What a training run logged, one dict per step.

    Args:
        path: The ``trainer_state.json`` of a checkpoint, the ``training.json`` or ``revela.json`` that our commands
            write, a folder that has one of them or has checkpoints (the last one is read), or the CSV file of a
            NormMonitor.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is not a log, or has no rows.
    """
    path = Path(path)
    if path.is_dir():
        states = [s for place in ("", "checkpoints/") for s in path.glob(f"{place}checkpoint-*/trainer_state.json")]
        last = sorted(states, key=lambda p: _digits(p.parent.name))[-1:]
        found = [own for name in LOGS if (own := path / name).exists()] + last
        if not found:
            raise ValueError(f"{path} has neither {', '.join(LOGS)} nor checkpoints: {LOG_REMEDY}")
        path = found[0]
    if path.suffix.lower() == ".csv":
        rows: list[dict[str, Any]] = [
            {key: number for key, text in row.items() if key and (number := to_float(text)) is not None}
            for row in _read_csv(path, LOG_REMEDY)
        ]
    else:
        try:
            state = parse(path.read_text(encoding="utf-8"))
            rows = state["log" if "log" in state else "log_history"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the state of a Trainer ({type(error).__name__} {error}): {LOG_REMEDY}"
            ) from None
    return with_steps(rows, str(path))


def with_steps(rows: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a log that have a step."""
    rows = rows if isinstance(rows, Sequence) else []
    steps = [to_float(row.get("step")) if isinstance(row, dict) else None for row in rows]
    found = [row for row, step in zip(rows, steps, strict=True) if step is not None and math.isfinite(step)]
    if not found:
        raise ValueError(f"{name} has no row with a step: {LOG_REMEDY}")
    return found


def to_float(value: Any) -> float | None:
    """The value as a float; None if it is not a number."""
    try:
        return float(value) if isinstance(value, str | float | int) else None
    except (ValueError, OverflowError):
        return None


def _read_csv(path: str | Path, remedy: str) -> list[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file ({error}): {remedy}") from None


def _when(row: Mapping[str, str]) -> tuple[str | None, str | None]:
    return row.get("epoch"), row.get("steps")


def _digits(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else -1
