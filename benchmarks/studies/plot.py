"""One style of matplotlib, and figures as files."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from cycler import cycler

matplotlib.use("Agg")
from matplotlib import pyplot as plt

INK = "#1d2127"  # of text
_MUTED = "#6a7280"  # of axes and grid
_STYLE = {
    "font.size": 9,
    "axes.labelsize": 10,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": _MUTED,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LINES = ("#1f6fb4", "#c8500f", "#22804c", "#8745b0", "#6f757d")  # C0 to C4


def draw(paint: Callable[[Any], None], size: tuple[float, float]) -> bytes:
    """Lets a function paint into axes of a size in inches, and returns the PNG file."""
    with plt.rc_context(_STYLE | {"axes.prop_cycle": cycler(color=_LINES)}):
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        paint(axis)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
        plt.close(figure)
    return file.getvalue()
