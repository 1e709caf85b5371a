"""What the pictures of a report show: functions that draw figures of a diagnosis or a run into matplotlib's axes.

Colours are those of the look that is set (`_plot.Theme`): C0 to C4, and ``text.color`` for what has no series.
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
    Hubness,
    Interval,
    ReadOut,
    Recommendation,
)
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto
from st_magnitude.geometry import paired_bootstrap

__all__ = ["compression", "curves", "exponents", "gains", "histogram", "hubs", "scatter", "variance"]

BOOTSTRAP_SAMPLES = 2000  # of the band around the exponent curve
LOOKS = {DO: ("C2", "o"), NO_BENEFIT: ("C4", "s"), NOT_ENOUGH: ("C1", "D")}
# (precision, rescoring) -> label, marker, colour, place of the dim beside the point
SERIES = {
    ("float32", "none"): ("float32", "o", "C0", (0, 7)),
    ("int8", "none"): ("int8", "s", "C2", (0, 7)),
    ("binary", "none"): ("binary", "v", "C4", (6, -9)),
    ("binary", "query"): ("binary, rescored", "^", "C1", (-5, 5)),
    ("binary", "norm"): ("binary, rescored with the norm", "D", "C3", (0, -13)),
}


def ink() -> str:
    """The colour of text."""
    from matplotlib import rcParams

    return rcParams["text.color"]


def key_above(axis: Any, columns: int = 2) -> None:
    """A legend above the axes, where it hides nothing."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def gains(axis: Any, recommendations: Sequence[Recommendation], min_gain: float) -> None:
    """An interval a recommendation that has one, the first on top; a gain worth having is dotted."""
    shown = [r for r in recommendations if r.gain is not None][::-1]
    axis.axvline(0, color=ink(), linewidth=1)
    axis.axvline(min_gain, color=ink(), linewidth=1, linestyle=":", label=f"worth having: {min_gain:g}")
    for verdict, (colour, marker) in LOOKS.items():
        rows = [(i, r.gain) for i, r in enumerate(shown) if r.verdict == verdict and r.gain is not None]
        if rows:
            places, found = [i for i, _ in rows], np.array([gain for _, gain in rows])
            errors = np.abs(found[:, 1:] - found[:, :1]).T
            axis.errorbar(found[:, 0], places, xerr=errors, fmt=marker, color=colour, capsize=3, label=verdict)
    axis.set_yticks(range(len(shown)), [r.name for r in shown])
    axis.set_ylim(-0.6, len(shown) - 0.4)
    axis.set_xlabel("gain in nDCG@10")
    axis.locator_params(axis="x", nbins=6)
    axis.grid(axis="x")
    key_above(axis)


def histogram(axis: Any, groups: Mapping[str, Array], label: str, what: str) -> None:
    """Shares of each group over common bins; the outermost values of all go into the first and last bin."""
    everything = np.concatenate(list(groups.values()))
    low, high = np.quantile(everything, [0.001, 0.999])
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, int(np.clip(np.sqrt(len(everything)), 8, 40)) + 1)
    for i, (name, values) in enumerate(groups.items()):
        weights = np.full(len(values), 1 / len(values))
        clipped, colour = np.clip(values, low, high), f"C{i}"
        axis.hist(clipped, bins, weights=weights, histtype="stepfilled", color=colour, alpha=0.25)
        axis.hist(clipped, bins, weights=weights, histtype="step", color=colour, linewidth=1.5, label=name)
        axis.axvline(values.mean(), color=colour, linestyle="--", linewidth=1)
    axis.set_xlabel(label)
    axis.set_ylabel(f"share of {what}")
    if len(groups) > 1:
        key_above(axis)


def scatter(axis: Any, groups: Mapping[str, tuple[Array, Array]], labels: tuple[str, str]) -> None:
    """A point a document, x on a logarithmic axis."""
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


def band(read_out: ReadOut, seed: int) -> list[Interval]:
    """Gain on today's read-out of every exponent, over all queries: (gain, low, high) of a paired bootstrap."""
    today = read_out.ndcg(read_out.present)
    return [
        paired_bootstrap(values, today, num_samples=BOOTSTRAP_SAMPLES, seed=seed) for values in read_out.curve.per_query
    ]


def exponents(axis: Any, read_out: ReadOut, intervals: Sequence[Interval]) -> None:
    """nDCG@10 by document exponent; the band is the interval of the difference to today's, drawn around the curve."""
    today = float(read_out.ndcg(read_out.present).mean())
    gain, low, high = np.array(intervals).T + today
    gammas = read_out.curve.exponents
    axis.fill_between(gammas, low, high, color="C0", alpha=0.2, linewidth=0, label="95 % interval against today")
    axis.axhline(today, color=ink(), linewidth=1, linestyle=":")
    axis.plot(gammas, gain, color="C0", linewidth=1.8)
    axis.plot(read_out.present, today, "o", color=ink(), markersize=7, label="today")
    axis.plot(read_out.candidate, read_out.ndcg(read_out.candidate).mean(), "D", color="C1", label="chosen by one half")
    axis.set_xlabel("document exponent (0: dot, 1: cosine)")
    axis.set_ylabel("nDCG@10")
    axis.grid(axis="y")
    key_above(axis)


def variance(axis: Any, explained: Array, intrinsic: int) -> None:
    """Cumulated share of the variance by principal component, and where it passes 95 %."""
    axis.plot(np.arange(len(explained) + 1), [0, *explained], color="C0", linewidth=1.8)
    axis.axhline(0.95, color=ink(), linewidth=1, linestyle=":")
    axis.plot(intrinsic, 0.95, "o", color="C1", markersize=7)
    text = f"{intrinsic} of {len(explained)} hold 95 %"
    axis.text(0.97, 0.06, text, transform=axis.transAxes, ha="right")  # the curve is concave: never there
    axis.set(xlabel="principal components", ylabel="share of the variance", ylim=(0, 1.04), xlim=(0, len(explained)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axis.grid(axis="y")


def hubs(axis: Any, hubness: Mapping[str, Hubness], num_queries: int) -> None:
    """Share of the documents that are in at least k of the queries' top 10, beside that of random top 10s."""
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
    axis.set(xlabel="in at least so many top 10s", ylabel="share of the documents")
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    axis.grid(axis="y")
    key_above(axis, 3)


def compression(axis: Any, cells: Sequence[CompressionCell], has_key: bool = False) -> None:
    """nDCG@10 against bytes per document: a point a cell with its dim beside it, and a line over those of `pareto`."""
    from matplotlib.ticker import LogLocator

    full, front = largest(cells), pareto(cells)
    axis.axhline(full.ndcg, color=ink(), linestyle="--", linewidth=1, label=f"{full.dim} x {full.precision}")
    x = [cell.bytes_per_document for cell in [*front, full]]
    y = [cell.ndcg for cell in [*front, front[-1]]]
    axis.plot(x, y, drawstyle="steps-post", color=ink(), linewidth=1, alpha=0.6, label="best at that size")
    for kind, (label, marker, colour, offset) in SERIES.items():
        chosen = [cell for cell in cells if (cell.precision, cell.rescoring) == kind]
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
                fontsize=8,
                color=colour,
            )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(base=2, numticks=32))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.margins(x=0.1, y=0.12)
    axis.set_xlabel("bytes per document")
    axis.set_ylabel("nDCG@10")
    if has_key:
        key_above(axis)


def curves(
    axis: Any, series: Mapping[str, tuple[Array, Array]], label: str, bands: Mapping[str, tuple[Array, Array]]
) -> None:
    """A line a series, (steps, values), with a band (low, high) where there is one."""
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
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")  # no 1e-5 above, where the names are
    axis.set(xlabel="step", ylabel=label)
    axis.grid(axis="y")
    if len(series) > 1:
        key_above(axis, 2 if max(map(len, series)) < 22 else 1)
