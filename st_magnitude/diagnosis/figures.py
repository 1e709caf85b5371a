"""The figures of a report: functions that draw a part of a diagnosis or of a training log into matplotlib's axes.

Colors come from the theme that is set (`_plot.Theme`): C0 to C4 for series, and ``text.color`` for everything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.special import bdtrc

from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    Array,
    ExponentChoice,
    Hubness,
    Interval,
    Recommendation,
)
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto
from st_magnitude.geometry import paired_bootstrap

__all__ = ["band", "compression", "curves", "exponents", "gains", "histogram", "hubs", "scatter", "variance"]

BOOTSTRAP_SAMPLES = 2000  # of the band around the exponent curve
LOOKS = {DO: ("C2", "o"), NO_BENEFIT: ("C4", "s"), NOT_ENOUGH: ("C1", "D")}
# (precision, rescoring) -> label, marker, color
SERIES = {
    ("float32", "none"): ("float32", "o", "C0"),
    ("int8", "none"): ("int8", "s", "C2"),
    ("binary", "none"): ("binary", "v", "C4"),
    ("binary", "query"): ("binary, rescored", "^", "C1"),
    ("binary", "norm"): ("binary, rescored with the norm", "D", "C3"),
}
# Offsets from a point, in points, at which its label is tried, and the alignment there.
PLACES = [((0, 7), "center"), ((0, -14), "center"), ((7, -3), "left"), ((-7, -3), "right"), ((0, 16), "center")]


def ink() -> str:
    """The color of text."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def key_above(axis: Any, columns: int = 2) -> None:
    """A legend above the axes, where it hides nothing."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def gains(axis: Any, recommendations: Sequence[Recommendation], min_gain: float) -> None:
    """One interval for each recommendation that has one, the first on top. The dotted line is a gain worth having."""
    shown = [r for r in recommendations if r.gain is not None][::-1]
    axis.axvline(0, color=ink(), linewidth=1)
    axis.axvline(min_gain, color=ink(), linewidth=1, linestyle=":", label=f"worth having: {min_gain:g}")
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


def histogram(axis: Any, groups: Mapping[str, Array], label: str, what: str) -> None:
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
    axis.set_ylabel(f"share of {what}")
    if len(groups) > 1:
        key_above(axis)


def scatter(axis: Any, groups: Mapping[str, tuple[Array, Array]], labels: tuple[str, str]) -> None:
    """One point per document, with a logarithmic x axis."""
    for i, (name, (x, y)) in enumerate(groups.items()):
        axis.plot(
            x, y, "os"[i % 2], color=f"C{i}", markersize=3, alpha=0.6, markeredgewidth=0, label=name, zorder=3 - i
        )
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    low, high = axis.get_xlim()
    if high / low < 30:  # too few powers of ten for ticks
        near = [s * 10**k for k in range(6) for s in ((1, 1.5, 2, 3, 4, 5, 7) if k else range(1, 10))]
        axis.set_xticks([t for t in near if low <= t <= high])
        axis.minorticks_off()
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if len(groups) > 1:
        key_above(axis)


def band(choice: ExponentChoice, seed: int) -> list[Interval]:
    """Gain of every exponent over today's, over all queries: (gain, low, high) of a paired bootstrap."""
    today = choice.ndcg(choice.present)
    return [
        paired_bootstrap(values, today, num_samples=BOOTSTRAP_SAMPLES, seed=seed) for values in choice.curve.per_query
    ]


def exponents(axis: Any, choice: ExponentChoice, intervals: Sequence[Interval]) -> None:
    """nDCG@10 by document exponent. The band is the interval of the difference from today, drawn around the curve."""
    today = float(choice.ndcg(choice.present).mean())
    gain, low, high = np.array(intervals).T + today
    gammas, chosen = choice.curve.exponents, choice.candidate
    axis.fill_between(gammas, low, high, color="C0", alpha=0.2, linewidth=0, label="95% interval against today")
    axis.axhline(today, color=ink(), linewidth=1, linestyle=":")
    axis.plot(gammas, gain, color="C0", linewidth=1.8)
    axis.plot(choice.present, today, "o", color=ink(), markersize=7, label="today")
    axis.plot(chosen, choice.ndcg(chosen).mean(), "D", color="C1", label="chosen by one half")
    axis.set_xlabel("document exponent (0: dot, 1: cosine)")
    axis.set_ylabel("nDCG@10")
    axis.grid(axis="y")
    key_above(axis)


def variance(axis: Any, explained: Array, intrinsic: int) -> None:
    """Cumulative share of the variance by principal component, and where it reaches 95%."""
    axis.plot(np.arange(len(explained) + 1), [0, *explained], color="C0", linewidth=1.8)
    axis.axhline(0.95, color=ink(), linewidth=1, linestyle=":")
    axis.plot(intrinsic, 0.95, "o", color="C1", markersize=7)
    text = f"{intrinsic} of {len(explained)} hold 95%"
    axis.text(0.97, 0.06, text, transform=axis.transAxes, ha="right")  # the curve is concave: never there
    axis.set(xlabel="principal components", ylabel="share of the variance", ylim=(0, 1.04), xlim=(0, len(explained)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(axis="y")


def hubs(axis: Any, hubness: Mapping[str, Hubness], num_queries: int) -> None:
    """Share of the documents that are in at least k of the queries' top 10, and the same for random top 10s."""
    size = max(len(hub.counts) for hub in hubness.values())
    documents = 1
    for i, (name, hub) in enumerate(hubness.items()):
        counts = np.array(hub.counts)
        documents = counts.sum()
        axis.plot(range(len(counts)), counts[::-1].cumsum()[::-1] / documents, color=f"C{i}", linewidth=1.8, label=name)
    k = np.arange(1, size)
    chance = [1.0, *bdtrc(k - 1, num_queries, min(10 / documents, 1.0))]  # P(N >= k)
    axis.plot(np.arange(size), chance, color="C4", linestyle="--", label="by chance")
    axis.set_yscale("log")
    axis.set_ylim(0.7 / documents, 1.3)
    axis.set(xlabel="in at least this many top 10s", ylabel="share of the documents")
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g}%")
    axis.grid(axis="y")
    key_above(axis, 3)


def compression(axis: Any, cells: Sequence[CompressionCell], has_key: bool = False) -> None:
    """nDCG@10 against bytes per document: one point per cell, dimensions beside it, and a line over `pareto`."""
    from matplotlib.ticker import LogLocator

    full, front = largest(cells), pareto(cells)
    axis.axhline(full.ndcg, color=ink(), linestyle="--", linewidth=1, label=f"{full.dim} x {full.precision}")
    x = [cell.bytes_per_document for cell in [*front, full]]
    y = [cell.ndcg for cell in [*front, front[-1]]]
    axis.plot(x, y, drawstyle="steps-post", color=ink(), linewidth=1, alpha=0.6, label="best at that size")
    for kind, (label, marker, color) in SERIES.items():
        chosen = [cell for cell in cells if (cell.precision, cell.rescoring) == kind]
        if chosen:
            sizes, values = [cell.bytes_per_document for cell in chosen], [cell.ndcg for cell in chosen]
            axis.plot(sizes, values, marker, color=color, markersize=6, label=label, zorder=3)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.1, y=0.12)
    axis.set_xlabel("bytes per document")
    axis.set_ylabel("nDCG@10")
    if has_key:
        key_above(axis)
    _label_dims(axis, cells)


def _label_dims(axis: Any, cells: Sequence[CompressionCell]) -> None:
    """Dimensions beside the points, once per dimension and precision, where they overlap neither points nor labels."""
    from matplotlib.transforms import Bbox

    axis.figure.canvas.draw()  # which settles the layout
    pixel = axis.figure.dpi / 72
    points = axis.transData.transform([(cell.bytes_per_document, cell.ndcg) for cell in cells])
    taken = [Bbox.from_extents(*(point - 3 * pixel), *(point + 3 * pixel)) for point in points]
    best = {(cell.dim, cell.precision): cell for cell in sorted(cells, key=lambda cell: cell.ndcg)}
    for (dim, precision), cell in sorted(best.items(), key=lambda item: -item[1].ndcg):
        color = SERIES[precision, "none" if precision != "binary" else cell.rescoring][2]
        label = axis.annotate(
            str(dim), (cell.bytes_per_document, cell.ndcg), (0, 0), textcoords="offset points", fontsize=8, color=color
        )
        for offset, alignment in PLACES:
            label.set(position=offset, horizontalalignment=alignment)
            box = label.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            label.remove()


def curves(
    axis: Any, series: Mapping[str, tuple[Array, Array]], label: str, bands: Mapping[str, tuple[Array, Array]]
) -> None:
    """One line per series (steps, values), with a band (low, high) where there is one."""
    smallest, greatest = np.inf, 0.0
    for i, (name, (steps, values)) in enumerate(series.items()):
        style = {"marker": "o", "markersize": 3} if len(steps) <= 12 else {}
        axis.plot(steps, values, color=f"C{i % 5}", linestyle=("-", "--")[i // 5 % 2], label=name, **style)
        if name in bands:
            axis.fill_between(steps, *bands[name], color=f"C{i % 5}", alpha=0.18, linewidth=0)
        smallest, greatest = min(smallest, *values, np.inf), max(greatest, *values, 0.0)
    if smallest > 0 and greatest > 100 * smallest:
        axis.set_yscale("log")
    elif greatest < 1e-3:
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")  # keeps a factor such as 1e-5 off the legend
    axis.set(xlabel="step", ylabel=label)
    axis.grid(axis="y")
    if len(series) > 1:
        key_above(axis, 2 if max(map(len, series)) < 22 else 1)
