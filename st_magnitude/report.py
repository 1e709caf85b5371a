"""Pictures of what the evaluators measure; they need matplotlib, the extra "plot"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from st_magnitude._plot import pyplot
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto

__all__ = ["plot_compression"]

# (precision, rescoring) -> label, marker, colour, place of the dim beside the point
_SERIES = {
    ("float32", "none"): ("float32", "o", "#1f6fb4", (0, 7)),
    ("int8", "none"): ("int8", "s", "#2a9d5c", (0, 7)),
    ("binary", "none"): ("binary", "v", "#8a8a8a", (6, -9)),
    ("binary", "query"): ("binary, rescored", "^", "#e08a1e", (-5, 5)),
    ("binary", "norm"): ("binary, rescored with the norm", "D", "#c43c39", (0, -13)),
}


def plot_compression(cells: Sequence[CompressionCell], path: str | Path, title: str = "") -> None:
    """nDCG@10 against bytes per document: a point a cell with its dim beside it, and a line over those of `pareto`.

    Args:
        cells: Of a CompressionEvaluator.
        path: The PNG to write, in a folder that exists.
        title: Above the axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no cells.

    Example:
        >>> from st_magnitude.evaluation import CompressionCell
        >>> cells = [CompressionCell(4, "float32", "none", 16, 0.5, 1.0)]
        >>> plot_compression(cells, "compression.png")  # doctest: +SKIP
    """
    full = largest(cells)
    plt = pyplot()
    from matplotlib.ticker import LogLocator

    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axis.axhline(full.ndcg, color="#555555", linestyle="--", linewidth=1, label=f"{full.dim} x {full.precision}")
    front = pareto(cells)
    x = [cell.bytes_per_document for cell in [*front, full]]
    y = [cell.ndcg for cell in [*front, front[-1]]]
    axis.plot(x, y, drawstyle="steps-post", color="#222222", linewidth=1, alpha=0.6, label="best at that size")
    for key, (label, marker, colour, offset) in _SERIES.items():
        chosen = [cell for cell in cells if (cell.precision, cell.rescoring) == key]
        if not chosen:
            continue
        sizes, values = [cell.bytes_per_document for cell in chosen], [cell.ndcg for cell in chosen]
        axis.plot(sizes, values, marker, color=colour, markersize=6, label=label, zorder=3)
        for cell in chosen:
            axis.annotate(
                str(cell.dim),
                (cell.bytes_per_document, cell.ndcg),
                offset,
                textcoords="offset points",
                ha="center" if offset[0] == 0 else "right" if offset[0] < 0 else "left",
                fontsize=7,
                color=colour,
            )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.06, y=0.1)
    axis.set_xlabel("bytes per document")
    axis.set_ylabel("nDCG@10")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
