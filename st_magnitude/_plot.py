"""matplotlib, if it is installed: a light and a dark theme, and figures drawn in both."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from st_magnitude._checks import needs

__all__ = ["DARK", "LIGHT", "Picture", "Theme", "draw", "ink", "key_above", "pyplot"]


@dataclass(frozen=True)
class Theme:
    """Colors of a figure: text, axes and grid, and the lines C0, C1, ..., of which the last is grey."""

    ink: str
    muted: str
    lines: tuple[str, ...]

    def settings(self) -> dict[str, Any]:
        """Settings for ``pyplot.rc_context``."""
        from cycler import cycler  # which comes with matplotlib

        return {
            "font.family": ["sans-serif"],
            "font.size": 10,
            "axes.titlesize": 10,
            "axes.labelsize": 10,
            "xtick.labelsize": 9,
            "ytick.labelsize": 9,
            "legend.fontsize": 9,
            "legend.frameon": False,
            "text.color": self.ink,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "axes.edgecolor": self.muted,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "grid.color": self.muted,
            "grid.alpha": 0.25,
            "axes.prop_cycle": cycler(color=self.lines),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.hashsalt": "st-magnitude",  # the same figure gives the same file
        }


LIGHT = Theme("#1d2127", "#6a7280", ("#1f6fb4", "#c8500f", "#22804c", "#8745b0", "#6f757d"))
DARK = Theme("#e7e9ec", "#9aa2ad", ("#6db3f2", "#ff9e5e", "#6fd39b", "#cf9bf0", "#a4abb5"))


@dataclass(frozen=True)
class Picture:
    """One figure as files: SVG for light and for dark pages, both transparent, and PNG on white."""

    light: bytes
    dark: bytes
    png: bytes


def draw(paint: Callable[[Any], None], size: tuple[float, float] = (4.8, 3.3)) -> Picture:
    """Lets a function paint into axes of the given size in inches, once for each theme.

    Example:
        >>> picture = draw(lambda axis: axis.plot([1, 2], [3, 4]))
        >>> picture.png[1:4], b"</svg>" in picture.light, picture.light == picture.dark
        (b'PNG', True, False)
    """
    plt = pyplot()
    files = []
    for theme, kind in ((LIGHT, "svg"), (DARK, "svg"), (LIGHT, "png")):
        with plt.rc_context(theme.settings()):
            figure, axis = plt.subplots(figsize=size, layout="constrained")
            paint(axis)
            file = io.BytesIO()
            options: dict[str, Any] = (
                {"transparent": True, "metadata": {"Date": None}} if kind == "svg" else {"dpi": 150}
            )
            figure.savefig(file, format=kind, **options)
            plt.close(figure)
            files.append(file.getvalue())
    return Picture(*files)


def ink() -> str:
    """The color of text in the theme that is set."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def key_above(axis: Any, columns: int = 2) -> None:
    """A legend above the axes, where it hides nothing."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def pyplot() -> Any:
    """matplotlib's pyplot, set up to draw into files.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    with needs("A figure", "plot"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt
