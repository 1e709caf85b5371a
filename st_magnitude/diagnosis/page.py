"""The page of a diagnosis: one HTML file with tables and pictures that needs no other file and no network."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from st_magnitude._checks import needs
from st_magnitude._plot import draw
from st_magnitude.diagnosis import figures
from st_magnitude.diagnosis.advice import NO_MAGNITUDE
from st_magnitude.diagnosis.findings import QUANTILES, Diagnosis, Recommendation
from st_magnitude.evaluation.compression import table
from st_magnitude.result import Table, cell, wrap

__all__ = ["measurements", "write_page"]

EFFECTS = {
    "corpus": "documents relevant to a query against documents relevant to none",
    "hard": "relevant documents against each query's 10 best irrelevant ones",
}


@dataclass(frozen=True)
class Figure:
    """A picture: the text below it, and the function that draws it into matplotlib's axes."""

    caption: str
    paint: Callable[[Any], None]
    size: tuple[float, float] = (5.0, 3.5)


@dataclass(frozen=True)
class Section:
    """One part of the page, shown in the order of its attributes."""

    title: str
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    recommendations: Sequence[Recommendation] = ()
    tables: Sequence[Table] = ()


def write_page(diagnosis: Diagnosis, output: str | Path) -> Path:
    """Writes ``report.html``, with its pictures inside, and returns its path. The same diagnosis gives the same file.

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
        from markupsafe import Markup, escape
    link = Markup('<a href="https://arxiv.org/abs/{0}">arXiv {0}</a>')

    def citing(text: str) -> Markup:
        """Text in which papers on arXiv are links."""
        parts = re.split(r"arXiv (\d{4}\.\d{4,5})", text)
        return Markup("").join(link.format(part) if i % 2 else escape(part) for i, part in enumerate(parts))

    environment = Environment(
        loader=PackageLoader("st_magnitude.diagnosis"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {
        "citing": citing,
        "cell": cell,
        "base64": lambda figure: base64.b64encode(draw(figure.paint, figure.size)).decode(),
        "id": lambda title: re.sub(r"\W+", "-", title.lower()),
    }
    page = environment.get_template("report.html").render(
        title=diagnosis.settings["title"] or f"Diagnosis of {diagnosis.model}",
        facts=diagnosis.facts,
        sections=[_recommendations(diagnosis), *_measurements(diagnosis)],
    )
    output = Path(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "report.html").write_text(page + "\n", encoding="utf-8")
    return output / "report.html"


def measurements(diagnosis: Diagnosis) -> str:
    """All figures of a diagnosis as text for a terminal."""
    parts = []
    for section in _measurements(diagnosis):
        parts.append(f"{section.title}\n{'=' * len(section.title)}")
        parts += [wrap(note) for note in section.notes]
        parts += [shown.to_text() for shown in section.tables]
    return "\n\n".join(parts)


def _measurements(d: Diagnosis) -> list[Section]:
    return [_norms(d), _exponent(d), _storage(d), _directions(d), _settings(d)]


def _recommendations(d: Diagnosis) -> Section:
    shown = [r for r in d.recommendations if r.gain is not None]
    gains = Figure(
        "Gain in nDCG@10 of every change that could be measured, with its 95% interval. For half, quarter, 1 bit and "
        "pruning it is the margin above the tolerance.",
        lambda axis: figures.gains(axis, shown, d.settings["min_gain"]),
        (5.0, 1.1 + 0.34 * max(len(shown), 2)),
    )
    ordered = [r for some in d.by_verdict.values() for r in some]
    return Section("Recommendations", [*d.summary, d.legend], [gains] if shown else [], ordered)


def _norms(d: Diagnosis) -> Section:
    notes = [] if d.has_magnitude else [NO_MAGNITUDE]
    if d.has_magnitude and d.normalizes:
        notes = ["The model ends in Normalize: these norms come from before it and are not used today."]
    q, m = d.queries, d.documents
    rows = [["mean", q.mean, m.mean], ["coefficient of variation (CV)", q.cv, m.cv]]
    rows += [[f"{p:.0%} quantile", *x] for p, *x in zip(QUANTILES, q.quantiles, m.quantiles, strict=True)]
    rows.append(["rank correlation with the number of words", q.length_spearman, m.length_spearman])
    norms = Table(
        ["measure", "queries", "documents"],
        rows,
        "Norms of raw embeddings. With a CV below about 0.05 the norm is noise, from 0.1 it may carry information "
        "(arXiv 2602.09229, App. M).",
    )
    effects = Table(
        ["compared", "d", "words regressed out"],
        [
            [EFFECTS[name] + (f" ({e.undefined})" if e.undefined else ""), e.d, e.without_length]
            for name, e in d.effects.items()
        ],
        "Cohen's d of document norms, and the same with the logarithm of the number of words regressed out, as a "
        "control for documents that merely have more words.",
    )
    names = {True: "relevant to a query", False: "relevant to no query"}
    masks = {name: d.is_relevant == flag for flag, name in names.items() if (d.is_relevant == flag).any()}
    groups = {name: d.documents.values[mask] for name, mask in masks.items()}
    means = "; ".join(f"{len(values):,} {name}: mean {values.mean():.3g}" for name, values in groups.items())
    drawn = Figure(
        f"Norms of documents ({means}). Dashed lines are means. The first and the last bar include the outermost 0.1%.",
        lambda axis: figures.histogram(axis, groups, "norm of a document"),
    )
    return Section("Norms", notes, [drawn] if d.has_magnitude else [], tables=[norms, effects])


def _exponent(d: Diagnosis) -> Section:
    found, intervals = d.exponent, figures.band(d.exponent, d.settings["seed"])
    names = [f"{gamma:.2f}" + (" (today)" if gamma == found.present else "") for gamma in found.exponents]
    every = Table(
        ["exponent", "nDCG@10", "difference from today"],
        list(zip(names, found.per_query.mean(axis=1), intervals, strict=True)),
        "nDCG@10 of all queries by document exponent (0 is dot, 1 is cosine), with the 95% interval of the difference.",
    )
    curve = Figure(
        f"nDCG@10 of all {len(d.query_ids):,} queries if documents are divided by this power of their norm. The band "
        "is the 95% paired bootstrap interval of the difference from today, drawn around the curve. Where it leaves "
        "the dotted line, the difference is more than noise.",
        lambda axis: figures.exponents(axis, found, intervals),
        (5.0, 3.7),
    )
    return Section("Document exponent", figures=[curve], tables=[every])


def _storage(d: Diagnosis) -> Section:
    title = f"nDCG@10 by dimensions and precision, measured with {d.recommended}. Stars mark the best at their size."
    figure = Figure(
        "nDCG@10 by bytes per document. The numbers above points are dimensions.",
        lambda axis: figures.compression(axis, d.cells),
        (5.0, 4.4),
    )
    return Section("Storage", figures=[figure], tables=[replace(table(d.cells), title=title)])


def _directions(d: Diagnosis) -> Section:
    g = d.geometry
    limited = "; the sample limits it: it has fewer than 4 documents per dimension" if g.is_sample_limited else ""
    rows = [
        ["intrinsic dimension", str(g.intrinsic_dimension), f"components that hold 95% of the variance{limited}"],
        ["IsoScore", cell(g.isoscore), "1: variance is even over all dimensions, 0: one line"],
        ["highest IsoScore", cell(g.isoscore_ceiling), "reached by an isotropic sample of this size"],
        ["mean cosine", cell(g.mean_cosine), "over all pairs; 0 for random directions"],
        ["uniformity", cell(g.uniformity), "log mean Gaussian potential; lower is more even"],
        ["alignment", cell(g.alignment), "mean squared distance of relevant pairs, 0 to 4"],
    ]
    title = f"Directions of {len(d.document_ids):,} documents in {g.dim} dimensions."
    return Section("Directions", tables=[Table(["measure", "value", "meaning"], rows, title)])


def _settings(d: Diagnosis) -> Section:
    rows = [
        ["model", d.model],
        ["scored today by", f"{d.similarity} (document exponent {d.exponent.present:.2g})"],
        ["ends in Normalize", "yes" if d.normalizes else "no"],
        ["queries whose own text is a document that is not judged relevant", f"{d.own_text_unjudged:.0%}"],
        *([name, str(value)] for name, value in d.settings.items() if name != "title"),
    ]
    return Section("Settings", tables=[Table(["setting", "value"], rows, "Model, arguments and versions.")])
