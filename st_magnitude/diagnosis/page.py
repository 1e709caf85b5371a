"""The page of a diagnosis: one HTML file with tables and pictures that needs no other file."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._checks import needs
from st_magnitude._plot import INK, draw, key_above
from st_magnitude.diagnosis.advice import NO_MAGNITUDE
from st_magnitude.diagnosis.findings import (
    QUANTILES,
    Array,
    Diagnosis,
    ExponentChoice,
    Interval,
    Recommendation,
)
from st_magnitude.evaluation.compression import table
from st_magnitude.evaluation.metrics import judge
from st_magnitude.result import Table, cell, wrap

__all__ = ["measurements", "write_page"]


@dataclass(frozen=True)
class Figure:
    """A picture: the text below it, and the function that draws it into matplotlib's axes."""

    caption: str
    paint: Callable[[Any], None]


@dataclass(frozen=True)
class Section:
    """One part of the page, shown in the order of its attributes."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    recommendations: Sequence[Recommendation] = ()
    tables: Sequence[Table] = ()


def write_page(diagnosis: Diagnosis, output: str | Path) -> Path:
    """Writes ``report.html``, with its pictures inside, and returns its path.

    The same diagnosis gives the same file.

    Args:
        diagnosis: Result of `st_magnitude.diagnose`.
        output: Folder for the file, created if it does not exist. Other files in it stay.

    Raises:
        ImportError: If matplotlib or jinja2 is not installed. Nothing has been written then.

    Example:
        >>> from st_magnitude import diagnose
        >>> write_page(diagnose(model, data), "report")  # doctest: +SKIP
        PosixPath('report/report.html')
    """
    with needs("A report", "plot"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader("st_magnitude.diagnosis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {
        "cell": cell,
        "base64": lambda figure: base64.b64encode(draw(figure.paint, (5.0, 3.7))).decode(),
        "id": lambda title: re.sub(r"\W+", "-", title.lower()),
    }
    page = environment.get_template("report.html").render(
        title=diagnosis.settings["title"] or f"Diagnosis of {diagnosis.model}",
        facts=diagnosis.facts,
        sections=[
            Section("Recommendations", [diagnosis.legend], recommendations=diagnosis.ordered),
            *_measurements(diagnosis),
        ],
    )
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.html").write_text(page + "\n", encoding="utf-8")
    return output / "report.html"


def measurements(diagnosis: Diagnosis) -> str:
    """All tables of a diagnosis as text for a terminal."""
    parts = []
    for section in _measurements(diagnosis):
        parts += [wrap(note) for note in section.notes]
        parts += [shown.to_text() for shown in section.tables]
    return "\n\n".join(parts)


def _measurements(d: Diagnosis) -> list[Section]:
    return [_norms(d), _exponent(d), _storage(d), _directions(d), _settings(d)]


def _norms(d: Diagnosis) -> Section:
    notes = [] if d.has_magnitude else [NO_MAGNITUDE]
    if d.has_magnitude and d.normalizes:
        notes = ["The model ends in Normalize: these norms come from before it and are not used."]
    sides = (d.queries, d.documents)
    rows: list[list[Any]] = [
        ["mean", *(x.mean for x in sides)],
        ["coefficient of variation (CV)", *(x.cv for x in sides)],
        *([f"{q:.0%} quantile", *(x.quantiles[i] for x in sides)] for i, q in enumerate(QUANTILES)),
        ["rank correlation with the number of words", *(x.length_spearman for x in sides)],
        ["Cohen's d, relevant to a query or to none", None, d.cohens_d],
        ["the same, with the words regressed out", None, d.adjusted_cohens_d],
    ]
    title = (
        "Norms of raw embeddings. With a CV below about 0.05 the norm is noise, from 0.1 it may "
        "carry information (arXiv 2602.09229, App. M)."
    )
    norms = Table(["measure", "queries", "documents"], rows, title)
    names = {"relevant to a query": d.is_relevant, "relevant to no query": ~d.is_relevant}
    groups = {name: d.documents.values[mask] for name, mask in names.items() if mask.any()}
    means = "; ".join(f"{len(x):,} {name}: mean {x.mean():.3g}" for name, x in groups.items())
    caption = f"Norms of documents ({means}). Dashed lines are means."
    drawn = Figure(caption, lambda axis: paint_norms(axis, groups))
    return Section("Norms", notes, [drawn] if d.has_magnitude else [], tables=[norms])


def paint_norms(axis: Any, groups: Mapping[str, Array]) -> None:
    """Share of each group in common bins. The first and the last bin include the outermost."""
    everything = np.concatenate(list(groups.values()))
    low, high = np.quantile(everything, [0.001, 0.999])
    if high - low <= 1e-6 * max(abs(low), abs(high)):
        low, high = low - 0.5, high + 0.5
    bins = np.linspace(low, high, int(np.clip(np.sqrt(len(everything)), 8, 40)) + 1)
    for i, (name, values) in enumerate(groups.items()):
        weights = np.full(len(values), 1 / len(values))
        clipped = np.clip(values, low, high)
        shared: dict[str, Any] = {"weights": weights, "color": f"C{i}"}
        axis.hist(clipped, bins, histtype="stepfilled", alpha=0.25, **shared)
        axis.hist(clipped, bins, histtype="step", linewidth=1.5, label=name, **shared)
        axis.axvline(values.mean(), color=f"C{i}", linestyle="--", linewidth=1)
    axis.set_xlabel("norm of a document")
    axis.set_ylabel("share")
    if len(groups) > 1:
        key_above(axis)


def _exponent(d: Diagnosis) -> Section:
    today = d.exponent.ndcg(d.exponent.present)
    intervals = [judge(x - today, num_samples=2000).gain for x in d.exponent.per_query]
    caption = (
        f"nDCG@10 of all {len(d.query_ids):,} queries if documents are divided by this power of "
        "their norm. The band is the 95% interval of the difference from today, drawn around the "
        "curve. Where it leaves the dotted line, the difference is more than noise."
    )
    curve = Figure(caption, lambda axis: paint_exponents(axis, d.exponent, intervals))
    return Section("Document exponent", figures=[curve])


def paint_exponents(axis: Any, choice: ExponentChoice, intervals: Sequence[Interval]) -> None:
    """nDCG@10 by document exponent, with the intervals of the difference from today as a band."""
    gammas = choice.exponents
    today = float(choice.ndcg(choice.present).mean())
    gain, low, high = np.array(intervals).T + today
    label = "95% interval against today"
    axis.fill_between(gammas, low, high, color="C0", alpha=0.2, linewidth=0, label=label)
    axis.axhline(today, color=INK, linewidth=1, linestyle=":")
    axis.plot(gammas, gain, color="C0", linewidth=1.8)
    axis.plot(choice.present, today, "o", color=INK, markersize=7, label="today")
    chosen = choice.ndcg(choice.candidate).mean()
    axis.plot(choice.candidate, chosen, "D", color="C1", label="chosen by one half")
    axis.set_xlabel("document exponent (0: dot, 1: cosine)")
    axis.set_ylabel("nDCG@10")
    axis.grid(axis="y")
    key_above(axis)


def _storage(d: Diagnosis) -> Section:
    title = f"nDCG@10 by dimensions and precision, measured with {d.recommended}. Stars mark the "
    return Section("Storage", tables=[replace(table(d.cells), title=title + "best at their size.")])


def _directions(d: Diagnosis) -> Section:
    g = d.geometry
    rows = [
        ["IsoScore", g.isoscore, "1: variance is even over all dimensions, 0: one line"],
        ["highest IsoScore", g.isoscore_ceiling, "of an isotropic sample of this size"],
        ["mean cosine", g.mean_cosine, "over all pairs; 0 for random directions"],
    ]
    title = f"Directions of {len(d.document_ids):,} documents in {g.dim} dimensions."
    return Section("Directions", tables=[Table(["measure", "value", "meaning"], rows, title)])


def _settings(d: Diagnosis) -> Section:
    unjudged = "queries whose own text is a document that is not judged relevant"
    rows = [
        ["model", d.model],
        ["scored today by", f"{d.similarity} (document exponent {d.exponent.present:.2g})"],
        ["ends in Normalize", "yes" if d.normalizes else "no"],
        [unjudged, f"{d.own_text_unjudged:.0%}"],
        *([name, str(value)] for name, value in d.settings.items() if name != "title"),
    ]
    title = "Model, arguments and versions."
    return Section("Settings", tables=[Table(["setting", "value"], rows, title)])
