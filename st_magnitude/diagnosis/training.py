"""The log of a training run as a section of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from st_magnitude.diagnosis import figures
from st_magnitude.diagnosis.findings import Array
from st_magnitude.diagnosis.readers import Log, to_float
from st_magnitude.diagnosis.sections import Figure, Section, Table, number
from st_magnitude.training.monitor import PANELS

__all__ = ["training_section"]

MOST_LINES = 6  # held-out metrics in one figure
SINGLE = {
    "dot_cosine_gap": "accuracy by dot minus accuracy by cosine",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
}
Series = Mapping[str, tuple[Array, Array]]  # name -> steps, values


def training_section(rows: Log) -> Section:
    """Losses, held-out metrics and norms over the steps of a run, and a table of everything that it logged."""
    series = _series(rows)
    ends = ["_norm_mean", "_effective_lr"]
    roles = list(dict.fromkeys(k[: -len(end)] for k in series for end in ends if k.endswith(end)))
    held_out = [k for k in series if k.startswith("eval_") and "ndcg" in k.lower()]
    panels: list[tuple[str, str, dict[str, str]]] = [
        ("loss", "loss", {k: k for k in series if k in ("loss", "eval_loss")}),
        ("held-out", "held-out metric", {k: k.removeprefix("eval_") for k in held_out[:MOST_LINES]}),
        *((name.replace("_", "-"), words, _of_roles(series, roles, name)) for name, words in PANELS.items()),
        *((name.replace("_", "-"), words, {name: words} if name in series else {}) for name, words in SINGLE.items()),
    ]
    more = (
        f" The figure shows the first {MOST_LINES} of {len(held_out)} held-out metrics."
        if held_out[MOST_LINES:]
        else ""
    )
    logged = [
        [name, f"{len(x):,}", *(number(v, ".4g") for v in (y[0], y[-1], np.nanmin(y), np.nanmax(y)))]
        for name, (x, y) in series.items()
        if np.isfinite(y).any()
    ]
    table = Table(
        f"Everything that the run logged, in the units of the log.{more}",
        ["name", "values", "first", "last", "smallest", "largest"],
        logged,
    )
    steps = max(int(x[-1]) for x, _ in series.values()) if series else 0
    return Section(
        "training",
        "Training",
        notes=[f"The run has {steps:,} steps."],
        figures=[_curve(f"training-{name}", words, series, lines) for name, words, lines in panels if lines],
        tables=[table] if logged else [],
    )


def _series(rows: Log) -> dict[str, tuple[Array, Array]]:
    """Steps and values of every number in a log, in the order of the steps."""
    skipped = ("step", "epoch", "total_flos")
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        for key, value in row.items():
            parsed = None if isinstance(value, str) else to_float(value)
            if parsed is not None and key not in skipped and not key.endswith(("runtime", "per_second")):
                found.setdefault(str(key), {})[float(row["step"])] = parsed
    return {
        key: (np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for key, values in found.items()
    }


def _of_roles(series: Mapping[str, Any], roles: Sequence[str], name: str) -> dict[str, str]:
    return {f"{role}_{name}": role for role in roles if f"{role}_{name}" in series}


def _curve(name: str, words: str, series: Series, lines: Mapping[str, str]) -> Figure:
    shown = {label: series[key] for key, label in lines.items()}
    bands = {}
    for key, label in lines.items():
        low, high = (series.get(key.replace("_norm_mean", f"_norm_{p}")) for p in ("p05", "p95"))
        if key.endswith("_norm_mean") and low is not None and high is not None and len(low[0]) == len(series[key][0]):
            bands[label] = (low[1], high[1])
    ends = "; ".join(f"{label} from {y[0]:.4g} to {y[-1]:.4g}" for label, (_, y) in shown.items())
    caption = f"{words[:1].upper()}{words[1:]}: {ends}."
    return Figure(name, caption, f"Training: {words}. {ends}.", lambda axis: figures.curves(axis, shown, words, bands))
