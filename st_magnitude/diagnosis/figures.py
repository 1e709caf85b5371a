"""The pictures of a report: functions that draw a part of a diagnosis into matplotlib's axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._plot import INK, draw, key_above
from st_magnitude.diagnosis.findings import DO, NO_BENEFIT, NOT_ENOUGH, Array, ExponentChoice, Interval, Recommendation
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto
from st_magnitude.geometry import paired_bootstrap

__all__ = ["band", "compression", "exponents", "gains", "histogram", "plot_compression"]

BOOTSTRAP_SAMPLES = 2000  # of the band around the exponent curve
LOOKS = {DO: ("C2", "o"), NO_BENEFIT: ("C4", "s"), NOT_ENOUGH: ("C1", "D")}
# (precision, rescoring) -> label, marker, color
SERIES = {
    ("float32", "none"): ("float32", "o", "C0"),
    ("int8", "none"): ("int8", "s", "C2"),
    ("rabitq", "none"): ("RaBitQ", "P", "C5"),
    ("binary", "none"): ("binary", "v", "C4"),
    ("binary", "query"): ("binary, rescored", "^", "C1"),
    ("binary", "norm"): ("binary, rescored with the norm", "D", "C3"),
}


def gains(axis: Any, recommendations: Sequence[Recommendation], min_gain: float) -> None:
    """The interval of every recommendation, the first on top. The dotted line is a gain worth having."""
    shown = recommendations[::-1]
    axis.axvline(0, color=INK, linewidth=1)
    axis.axvline(min_gain, color=INK, linewidth=1, linestyle=":", label=f"worth having: {min_gain:g}")
    for verdict, (color, marker) in LOOKS.items():
        rows = [(i, r.gain) for i, r in enumerate(shown) if r.verdict == verdict and r.gain is not None]
        if rows:
            places, found = [i for i, _ in rows], np.array([gain for _, gain in rows])
            errors = np.abs(found[:, 1:] - found[:, :1]).T
            axis.errorbar(found[:, 0], places, xerr=errors, fmt=marker, color=color, capsize=3, label=verdict)
    axis.set_yticks(range(len(shown)), [r.name for r in shown])
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.set_xlabel("gain in nDCG@10")
    axis.locator_params(axis="x", nbins=6)
    axis.grid(axis="x")
    key_above(axis)


def histogram(axis: Any, groups: Mapping[str, Array], label: str) -> None:
    """Share of each group in common bins. The first and the last bin include the outermost values."""
    everything = np.concatenate(list(groups.values()))
    low, high = np.quantile(everything, [0.001, 0.999])
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, int(np.clip(np.sqrt(len(everything)), 8, 40)) + 1)
    for i, (name, values) in enumerate(groups.items()):
        weights = np.full(len(values), 1 / len(values))
        clipped, color = np.clip(values, low, high), f"C{i}"
        axis.hist(clipped, bins, weights=weights, histtype="stepfilled", color=color, alpha=0.25)
        axis.hist(clipped, bins, weights=weights, histtype="step", color=color, linewidth=1.5, label=name)
        axis.axvline(values.mean(), color=color, linestyle="--", linewidth=1)
    axis.set_xlabel(label)
    axis.set_ylabel("share")
    if len(groups) > 1:
        key_above(axis)


def band(choice: ExponentChoice, seed: int) -> list[Interval]:
    """Gain of every exponent over today's, over all queries: (gain, low, high) of a paired bootstrap."""
    today = choice.ndcg(choice.present)
    return [paired_bootstrap(values, today, num_samples=BOOTSTRAP_SAMPLES, seed=seed) for values in choice.per_query]


def exponents(axis: Any, choice: ExponentChoice, intervals: Sequence[Interval]) -> None:
    """nDCG@10 by document exponent. The band is the interval of the difference from today, drawn around the curve."""
    today = float(choice.ndcg(choice.present).mean())
    gain, low, high = np.array(intervals).T + today
    gammas = choice.exponents
    axis.fill_between(gammas, low, high, color="C0", alpha=0.2, linewidth=0, label="95% interval against today")
    axis.axhline(today, color=INK, linewidth=1, linestyle=":")
    axis.plot(gammas, gain, color="C0", linewidth=1.8)
    axis.plot(choice.present, today, "o", color=INK, markersize=7, label="today")
    axis.plot(choice.candidate, choice.ndcg(choice.candidate).mean(), "D", color="C1", label="chosen by one half")
    axis.set_xlabel("document exponent (0: dot, 1: cosine)")
    axis.set_ylabel("nDCG@10")
    axis.grid(axis="y")
    key_above(axis)


def compression(axis: Any, cells: Sequence[CompressionCell]) -> None:
    """nDCG@10 by bytes per document: a point per cell, a line over `pareto`, and the dimensions of its cells."""
    from matplotlib.ticker import LogLocator

    full, front = largest(cells), pareto(cells)
    axis.axhline(full.ndcg, color=INK, linestyle="--", linewidth=1, label=f"{full.dim} x {full.precision}")
    x = [cell.bytes_per_document for cell in [*front, full]]
    y = [cell.ndcg for cell in [*front, front[-1]]]
    axis.plot(x, y, drawstyle="steps-post", color=INK, linewidth=1, alpha=0.6, label="best at that size")
    for kind, (label, marker, color) in SERIES.items():
        chosen = [c for c in cells if (c.precision, c.rescoring) == kind and c.axes == "prefix"]
        if chosen:
            sizes, values = [cell.bytes_per_document for cell in chosen], [cell.ndcg for cell in chosen]
            axis.plot(sizes, values, marker, color=color, markersize=6, label=label, zorder=3)
    if turned := [cell for cell in cells if cell.axes == "pca"]:
        sizes, values = [cell.bytes_per_document for cell in turned], [cell.ndcg for cell in turned]
        axis.plot(sizes, values, "x", color=INK, markersize=6, label="principal axes (PCA)", zorder=3)
    for cell in {(cell.dim, cell.precision): cell for cell in front}.values():  # bits with a norm next to bits: one
        axis.annotate(
            str(cell.dim), (cell.bytes_per_document, cell.ndcg), (0, 6), textcoords="offset points", ha="center"
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.1, y=0.12)
    axis.set_xlabel("bytes per document")
    axis.set_ylabel("nDCG@10")
    key_above(axis)


def plot_compression(cells: Sequence[CompressionCell], path: str | Path) -> None:
    """Writes nDCG@10 by bytes per document of the cells of a CompressionEvaluator to a PNG file.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no cells.

    Example:
        >>> from st_magnitude.evaluation import CompressionCell
        >>> cells = [CompressionCell(4, "float32", "none", 16, 0.5, 1.0)]
        >>> plot_compression(cells, "compression.png")  # doctest: +SKIP
    """
    Path(path).write_bytes(draw(lambda axis: compression(axis, cells), (6.4, 4.4), "png"))
