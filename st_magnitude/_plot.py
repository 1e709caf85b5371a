"""matplotlib, if it is installed: one style, and figures as files."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from st_magnitude._checks import needs

INK, _MUTED = "#1d2127", "#6a7280"  # text and lines that belong to no series; axes and grid
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
    "svg.hashsalt": "st-magnitude",  # the same figure gives the same file
}
_LINES = ("#1f6fb4", "#c8500f", "#22804c", "#8745b0", "#6f757d")  # C0 to C4


def draw(
    paint: Callable[[Any], None], size: tuple[float, float] = (4.8, 3.3), kind: str = "svg"
) -> bytes:
    """Lets a function paint into axes of a size in inches, and returns the file, "svg" or "png".

    Example:
        >>> draw(lambda axis: axis.plot([1, 2], [3, 4]), kind="png")[1:4]
        b'PNG'
    """
    plt = pyplot()
    from cycler import cycler  # which comes with matplotlib

    with plt.rc_context(_STYLE | {"axes.prop_cycle": cycler(color=_LINES)}):
        figure, axis = plt.subplots(figsize=size, layout="constrained")
        paint(axis)
        file = io.BytesIO()
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(file, format=kind, dpi=150, metadata=metadata)
        plt.close(figure)
    return file.getvalue()


def key_above(axis: Any, columns: int = 2) -> None:
    """A legend above the axes, where it hides nothing."""
    place: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0)}
    axis.legend(ncols=columns, borderaxespad=0.2, columnspacing=1.2, **place)


def pyplot() -> Any:
    """matplotlib's pyplot, set up to draw into files."""
    with needs("A figure", "plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
