"""Reports: a diagnosis as one HTML file with pictures; a picture of what compression keeps."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from st_magnitude._json import parse
from st_magnitude._plot import LIGHT, draw, pyplot
from st_magnitude.diagnosis import _figures as figures
from st_magnitude.diagnosis._html import Html, citing, document, element, picture, table
from st_magnitude.diagnosis.findings import (
    DO,
    EFFECTS,
    NO_BENEFIT,
    NOT_ENOUGH,
    QUANTILES,
    RESCORED,
    Array,
    Diagnosis,
    Interval,
    Recommendation,
    in_short,
)
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto
from st_magnitude.training.monitor import PANELS

__all__ = ["plot_compression", "read_compression", "read_log", "write_report"]

Log = Sequence[Mapping[str, Any]]
NUM_POINTS = 600  # of a scatter plot
MOST_LINES = 6  # of held-out metrics
EVIDENCE = {  # of recommendations, in words; those in percent have a format of their own
    "present": ("exponent today", ".2g"),
    "candidate": ("exponent chosen", ".2g"),
    "exponent": ("document exponent", ".2g"),
    "length_candidate": ("best exponent below 1", ".2g"),
    "share": ("share dropped", ".0%"),
    "answers_kept": ("relevant documents kept", ".1%"),
    "retention": ("nDCG@10 kept", ".1%"),
    "never_relevant": ("documents relevant to no query", ".1%"),
    "ndcg_present": ("nDCG@10 today", ".3f"),
    "ndcg_candidate": ("nDCG@10 at the exponent chosen", ".3f"),
    "ndcg_cosine": ("nDCG@10 by cosine", ".3f"),
    "ndcg_dot": ("nDCG@10 by dot", ".3f"),
    "ndcg_full": ("nDCG@10 in full", ".3f"),
    "ndcg_pruned": ("nDCG@10 pruned", ".3f"),
    "ndcg_pruned_by_words": ("nDCG@10 pruned by words instead", ".3f"),
    "ndcg_with": ("nDCG@10 with the norm", ".3f"),
    "ndcg_without": ("nDCG@10 without", ".3f"),
    "ndcg_baseline": ("nDCG@10 of the baseline", ".3f"),
    "ndcg": ("nDCG@10", ".3f"),
    "isoscore": ("IsoScore", ".3f"),
    "isoscore_ceiling": ("IsoScore at most", ".3f"),
    "mean_cosine": ("mean cosine", ".3f"),
}
SINGLE = {
    "dot_cosine_gap": "accuracy by dot less by cosine",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradient",
}
_LOGS = ("training.json", "revela.json", "trainer_state.json")
_REMEDY = "name the trainer_state.json of a checkpoint, the folder of the run, or the CSV file of a NormMonitor."


def write_report(
    diagnosis: Diagnosis | str | Path,
    output: str | Path,
    *,
    log: str | Path | Log | None = None,
    compression: str | Path | Sequence[CompressionCell] | None = None,
    title: str | None = None,
) -> Path:
    """Writes ``report.html``, one file that needs no other and no network, and its pictures as PNG files beside it.

    Recommendations come first, then all figures as pictures and tables. The page follows the reader's choice of light
    or dark, and prints. The same input gives the same files.

    Args:
        diagnosis: What `st_magnitude.diagnose` found, or the JSON file that it was saved in.
        output: A folder, made where there is none; files of the same names are replaced, others stay.
        log: Training curves: see `read_log`; or ``trainer.state.log_history``, or the rows of a NormMonitor.
        compression: Cells of a CompressionEvaluator, or its CSV file, in place of the six that a diagnosis has.
        title: Of the page; by default what the diagnosis was called, or its model.

    Returns:
        The path of the HTML file.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If a file cannot be read or written.
        ValueError: If a file is not what it should be, or there are no cells; nothing is written then.

    Example:
        >>> from st_magnitude import Diagnosis
        >>> write_report(Diagnosis.load("diagnosis.json"), "report", log="run/checkpoint-200")  # doctest: +SKIP
        PosixPath('report/report.html')
    """
    pyplot()  # before anything is read or written
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"A report is written into a folder, but {output} is a file: choose another name.")
    found = diagnosis if isinstance(diagnosis, Diagnosis) else Diagnosis.load(diagnosis)
    rows = read_log(log) if isinstance(log, (str, Path)) else [] if log is None else _with_steps(log, "The log")
    cells = read_compression(compression) if isinstance(compression, (str, Path)) else compression
    if cells is not None:
        largest(cells)  # there are some
    heading = title or found.provenance.title or f"Diagnosis of {found.provenance.model}"
    sections = [
        _advice(found),
        _norms(found),
        _exponents(found),
        _storage(found, cells),
        _directions(found),
        _hubs(found),
        *([_training(rows)] if rows else []),
        _task(found),
        _provenance(found),
    ]
    drawings = {figure.name: draw(figure.paint, figure.size) for section in sections for figure in section.figures}
    parts = [_header(heading, found, sections)]
    for section in sections:
        shown = [picture(drawings[f.name], f.alt, f.caption) for f in section.figures]
        grid = [element("div", *shown, class_="figures" if len(shown) > 1 else "figures one")] if shown else []
        parts.append(
            element("section", element("h2", section.title), *section.before, *grid, *section.after, id=section.id)
        )
    output.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        (output / f"{name}.png").write_bytes(drawing.png)
    (output / "report.html").write_text(document(heading, *parts), encoding="utf-8")
    return output / "report.html"


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
    largest(cells)  # there are some
    plt = pyplot()
    with plt.rc_context(LIGHT.settings()):
        figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
        figures.compression(axis, cells)
        axis.set_title(title)
        figure.legend(loc="outside right upper")
        figure.savefig(path, dpi=150)
        plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_compression(path: str | Path) -> list[CompressionCell]:
    """The cells in a CSV file of ``st-magnitude compress`` or of a CompressionEvaluator; of several runs, the last.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is another file, or has no rows.
    """
    remedy = 'name the CSV file of "st-magnitude compress ... --output FOLDER" or of a CompressionEvaluator.'
    rows = _read_csv(path, remedy)
    try:
        rows = [row for row in rows if _when(row) == _when(rows[-1])]
        kinds = {"dim": int, "bytes_per_document": int, "ndcg": float, "retention": float}
        names = [field.name for field in fields(CompressionCell)]
        cells = [
            CompressionCell(*(kinds.get(name, str)(row["ndcg@10" if name == "ndcg" else name]) for name in names))
            for row in rows
        ]
    except KeyError as error:
        raise ValueError(f"{path} has no column {error}: {remedy}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a table of compression ({error}): {remedy}") from None
    if not cells:
        raise ValueError(f"{path} has no rows: {remedy}")
    return cells


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """What a training run logged, one dict a step.

    Args:
        path: The ``trainer_state.json`` of a checkpoint, the ``training.json`` or ``revela.json`` that our commands
            write, a folder that has one of them or has checkpoints (the last counts), or the CSV file of a NormMonitor.

    Raises:
        OSError: If there is no such file.
        ValueError: If it holds something else, or nothing.
    """
    path = Path(path)
    if path.is_dir():
        states = [s for place in ("", "checkpoints/") for s in path.glob(f"{place}checkpoint-*/trainer_state.json")]
        last = sorted(states, key=lambda p: _number(p.parent.name))[-1:]
        found = [own for name in _LOGS if (own := path / name).exists()] + last
        if not found:
            raise ValueError(f"{path} has neither {', '.join(_LOGS)} nor checkpoints: {_REMEDY}")
        path = found[0]
    if path.suffix.lower() == ".csv":
        rows: list[dict[str, Any]] = [
            {key: number for key, text in row.items() if key and (number := _float(text)) is not None}
            for row in _read_csv(path, _REMEDY)
        ]
    else:
        try:
            state = parse(path.read_text(encoding="utf-8"))
            rows = state["log" if "log" in state else "log_history"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not the state of a Trainer ({type(error).__name__} {error}): {_REMEDY}"
            ) from None
    return _with_steps(rows, str(path))


def _with_steps(rows: Any, name: str) -> list[dict[str, Any]]:
    """Those rows of a log that have a step."""
    rows = rows if isinstance(rows, Sequence) else []
    steps = [_float(row.get("step")) if isinstance(row, dict) else None for row in rows]
    found = [row for row, step in zip(rows, steps, strict=True) if step is not None and math.isfinite(step)]
    if not found:
        raise ValueError(f"{name} has logged no step: {_REMEDY}")
    return found


def _read_csv(path: str | Path, remedy: str) -> list[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            return list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not a CSV file ({error}): {remedy}") from None


def _when(row: Mapping[str, str]) -> tuple[str | None, str | None]:
    return row.get("epoch"), row.get("steps")


def _number(name: str) -> int:
    digits = re.sub(r"\D", "", name)
    return int(digits) if digits else -1


def _float(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str | float | int) else None
    except (ValueError, OverflowError):
        return None


# ---------------------------------------------------------------------------------------------------------------------
# A page
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A picture to be: the name of its file, what it says to those who see it and who do not, and how to draw it."""

    name: str
    caption: str
    alt: str
    paint: Callable[[Any], None]
    size: tuple[float, float] = (5.0, 3.5)


@dataclass(frozen=True)
class Section:
    """Words and tables before and after some figures."""

    id: str
    title: str
    before: Sequence[Html] = ()
    figures: Sequence[Figure] = ()
    after: Sequence[Html] = ()


def _header(heading: str, d: Diagnosis, sections: Sequence[Section]) -> Html:
    facts = (
        f"{d.provenance.model}, read out by {d.similarity}: {len(d.query_ids):,} queries, {len(d.document_ids):,} "
        f"documents ({d.is_relevant.sum():,} relevant to some query), {d.geometry.dim} dimensions."
    )
    links = [element("li", element("a", s.title, href=f"#{s.id}")) for s in sections]
    return element(
        "header", element("h1", heading), element("p", facts), element("nav", element("ul", *links), aria_label="Page")
    )


def _paragraph(text: str, **attributes: str) -> Html:
    return element("p", citing(text), **attributes)


def _advice(d: Diagnosis) -> Section:
    worth = d.provenance.min_gain
    legend = (
        f"95 % bootstrap intervals over queries that had no part in choosing the change. {_sentence(DO)}: the "
        f"interval lies above 0 and reaches a gain worth having ({worth:g} nDCG@10). {_sentence(NO_BENEFIT)}: it "
        f"excludes one. {_sentence(NOT_ENOUGH)}: neither. What stores less is held against "
        f"{1 - d.provenance.tolerance:.0%} of the full nDCG@10, so that its gain is what is left above that; above 0 "
        "is enough. Each verdict stands on its own interval: of forty useless changes, one would pass."
    )
    ordered = [r for verdict in (DO, NO_BENEFIT, NOT_ENOUGH) for r in d.recommendations if r.verdict == verdict]
    shown = [r for r in d.recommendations if r.gain is not None]
    alt = "; ".join(f"{r.name}: {_interval(r.gain)}, {r.verdict}" for r in shown)
    figure = Figure(
        "gains",
        "The gain of every recommendation that could be measured, with its interval. Of half, quarter, 1 bit and "
        "pruning: what is left above the tolerance.",
        f"Gains in nDCG@10 with 95 % intervals. {alt}.",
        lambda axis: figures.gains(axis, d.recommendations, worth),
        (5.0, 1.1 + 0.34 * max(len(shown), 2)),
    )
    summary = element("ul", *(element("li", line) for line in in_short(d)))
    return Section(
        "recommendations",
        "Recommendations",
        [summary],
        [figure] if shown else [],
        [*(_article(r) for r in ordered), _paragraph(legend, class_="note")],
    )


def _article(r: Recommendation) -> Html:
    kind = {DO: "do", NO_BENEFIT: "no", NOT_ENOUGH: "open"}[r.verdict]
    parts = [
        element("h3", element("span", _sentence(r.verdict), class_="verdict"), r.action),
        element("p", "→ ", r.choice, class_="choice"),
        _paragraph(r.reason),
    ]
    if r.gain is not None:
        parts.append(_paragraph(f"{r.gain_of}: {_interval(r.gain)} on {r.num_queries:,} queries.", class_="gain"))
    if r.evidence:
        parts.append(element("dl", *(_fact(name, value) for name, value in r.evidence.items())))
    return element("article", *parts, class_=kind)


def _fact(name: str, value: float) -> Html:
    label, how = EVIDENCE.get(name, (name.replace("_", " "), ".3g"))
    return element("div", element("dt", label), element("dd", _figure(value, how)))


def _norms(d: Diagnosis) -> Section:
    notes = {
        not d.has_length: "All norms are 1, and what stands before the normalisation cannot be reached: there is no "
        "length to draw.",
        d.has_length and d.normalizes: "The model ends in Normalize: these norms are from before it, and not in use "
        "today.",
    }
    note = [_paragraph(text) for holds, text in notes.items() if holds]
    header = ["role", "texts", "mean", "CV", *(f"{q:.0%}" for q in QUANTILES), "Spearman with words", "CV / baseline's"]
    rows = [
        [
            role,
            f"{len(s.values):,}",
            *(_figure(x, ".4g") for x in (s.mean, s.cv, *s.quantiles)),
            _figure(s.length_spearman, "+.2f"),
            "" if s.cv_ratio is None else _figure(s.cv_ratio, ".2f"),
        ]
        for role, s in (("queries", d.queries), ("documents", d.documents))
    ]
    if d.documents.cv_ratio is None:
        header, rows = header[:-1], [row[:-1] for row in rows]
    effects = [
        [
            name,
            EFFECTS[name],
            *(["undefined"] * 2 if e.undefined else [_figure(x, "+.2f") for x in (e.d, e.without_length)]),
            e.undefined,
        ]
        for name, e in d.effects.items()
    ]
    compared = ["", "compared", "d", "words regressed out", "why undefined"]
    if not any(e.undefined for e in d.effects.values()):
        effects, compared = [row[:-1] for row in effects], compared[:-1]
    captions = (
        "Norms of raw embeddings: mean, coefficient of variation (standard deviation / mean; below about 0.05 noise, "
        "from 0.1 it may mean something: arXiv 2602.09229, App. M), quantiles in the same unit as the mean, and rank "
        "correlation with the number of words.",
        "Cohen's d of document norms, in standard deviations, and again with the logarithm of the number of words "
        "regressed out: the control for documents that are merely longer.",
    )
    return Section(
        "norms",
        "Norms",
        note,
        _norm_figures(d) if d.has_length else [],
        [
            table(captions[0], header, rows),
            table(captions[1], compared, effects),
        ],
    )


def _norm_figures(d: Diagnosis) -> list[Figure]:
    s, effect = d.documents, d.effects["corpus"]
    names = {True: "relevant to a query", False: "relevant to none"}
    masks = {name: d.is_relevant == flag for flag, name in names.items() if (d.is_relevant == flag).any()}
    means = "; ".join(f"{mask.sum():,} {name}: mean {s.values[mask].mean():.3g}" for name, mask in masks.items())
    x = np.log(np.maximum(s.words, 1))
    x = x - x.mean()
    residual = s.values - (x @ s.values / (x @ x) if x.any() else 0.0) * x
    ends = "Dashed: means. The outermost 0.1 % on either side are in the first and last bar."

    def sized(values: float) -> str:
        return f"undefined: {effect.undefined}" if effect.undefined else _figure(values, "+.2f")

    def split(values: Array) -> dict[str, Array]:
        return {name: values[mask] for name, mask in masks.items()}

    rng = np.random.default_rng(0)
    sample = rng.permutation(len(s.values))[:NUM_POINTS]
    points = {
        name: (np.maximum(s.words[rows], 1), s.values[rows])
        for name, mask in masks.items()
        if len(rows := sample[mask[sample]])
    }
    q = d.queries
    return [
        Figure(
            "norms-documents",
            f"Norms of documents. Cohen's d, corpus: {sized(effect.d)}. {ends}",
            f"Histogram of document norms. {means}. Cohen's d {sized(effect.d)}.",
            lambda axis: figures.histogram(axis, split(s.values), "norm", "documents"),
        ),
        Figure(
            "norms-without-length",
            "The same, moved to documents of the same number of words (log words regressed out). Cohen's d: "
            f"{sized(effect.without_length)}.",
            f"Histogram of document norms, words regressed out. Cohen's d {sized(effect.without_length)}.",
            lambda axis: figures.histogram(axis, split(residual), "norm, words regressed out", "documents"),
        ),
        Figure(
            "norms-and-words",
            f"Norm and number of words of {_some(len(sample), len(s.values))} documents; rank correlation "
            f"{_figure(s.length_spearman, '+.2f')}.",
            f"Document norm against number of words; rank correlation {_figure(s.length_spearman, '+.2f')}.",
            lambda axis: figures.scatter(axis, points, ("words", "norm")),
        ),
        Figure(
            "norms-queries",
            f"Norms of queries: mean {q.mean:.3g}, CV {q.cv:.3f}.",
            f"Histogram of {len(q.values):,} query norms: mean {q.mean:.3g}, CV {q.cv:.3f}, from {q.values.min():.3g} "
            f"to {q.values.max():.3g}.",
            lambda axis: figures.histogram(axis, {"queries": q.values}, "norm", "queries"),
        ),
    ]


def _exponents(d: Diagnosis) -> Section:
    found, curve = d.read_out, d.read_out.curve
    intervals = figures.band(found, d.provenance.seed)
    half = f"{found.chose.sum():,} chose, {(~found.chose).sum():,} measured"
    figure = Figure(
        "exponents",
        f"nDCG@10 over all {len(curve.queries):,} queries if documents are divided by their norm to a power. The band "
        "is the 95 % paired bootstrap interval of the difference to today, drawn around the curve: where it leaves the "
        "dotted line, the difference is more than noise. The exponent was chosen on one half of the queries.",
        f"Curve of nDCG@10: {curve.ndcg[0]:.3f} by dot, {curve.ndcg[-1]:.3f} by cosine, "
        f"{found.ndcg(found.present).mean():.3f} at today's exponent {found.present:.2g}, "
        f"{found.ndcg(found.candidate).mean():.3f} at {found.candidate:.2g}, which one half chose.",
        lambda axis: figures.exponents(axis, found, intervals),
        (5.0, 3.7),
    )
    gains = [
        [f"{found.candidate:.2g}", f"today's {found.present:.2g}", half, *_three(found.gain)],
        [f"{found.length_candidate:.2g}", "cosine", half, *_three(found.gain_of_length)],
        [f"{curve.best:.2g}", "cosine", "all chose: flattering", *_three(curve.versus_cosine)],
        [f"{curve.best:.2g}", "dot", "all chose: flattering", *_three(curve.versus_dot)],
    ]
    points = [
        [f"{gamma:.2f}" + (" (today)" if gamma == found.present else ""), f"{value:.4f}", *_three(interval)]
        for gamma, value, interval in zip(curve.exponents, curve.ndcg, intervals, strict=True)
    ]
    return Section(
        "exponent",
        "Document exponent",
        (),
        [figure],
        [
            table(
                "Gain of an exponent in nDCG@10, with its 95 % interval.",
                ["exponent", "against", "queries", "gain", "low", "high"],
                gains,
            ),
            table(
                "nDCG@10 by document exponent over all queries, and the difference to today with its 95 % interval.",
                ["exponent", "nDCG@10", "difference", "low", "high"],
                points,
            ),
        ],
    )


def _storage(d: Diagnosis, given: Sequence[CompressionCell] | None) -> Section:
    own = [_cells("What the diagnosis stored and searched again", d.cells)]
    cells = d.cells if given is None else list(given)
    front = pareto(cells)
    figure = Figure(
        "compression",
        "nDCG@10 by bytes per document, with the number of dimensions beside each point.",
        f"{len(cells)} ways to store a document. The best at their size: "
        + "; ".join(f"{c.bytes_per_document} bytes ({_kind(c)}): {c.ndcg:.3f}" for c in front)
        + ".",
        lambda axis: figures.compression(axis, cells, has_key=True),
        (5.0, 4.4),
    )
    extra = [_cells("What the CompressionEvaluator measured", cells)] if given is not None else []
    return Section("storage", "Storage", (), [figure], extra + own)


def _cells(what: str, cells: Sequence[CompressionCell]) -> Html:
    full, best = largest(cells), pareto(cells)
    rows = [
        [
            _kind(c),
            f"{c.bytes_per_document:,}",
            f"{full.bytes_per_document / c.bytes_per_document:.1f} x",
            f"{c.ndcg:.4f}",
            _figure(c.retention, ".1%"),
            "yes" if c in best else "",
        ]
        for c in cells
    ]
    caption = f"{what}: bytes per document, vectors alone; nDCG@10, and its share of that of all dimensions in float32."
    return table(caption, ["stored as", "bytes", "smaller", "nDCG@10", "kept", "best so small"], rows)


def _kind(c: CompressionCell) -> str:
    return f"{c.dim} x {c.precision}{RESCORED[c.rescoring]}"


def _directions(d: Diagnosis) -> Section:
    g = d.geometry
    limited = " (limited by the sample: fewer than 4 documents a dimension)" if g.is_sample_limited else ""
    figure = Figure(
        "variance",
        f"Variance of the documents' directions: {g.intrinsic_dimension} principal components hold 95 %{limited}.",
        f"Curve of explained variance: {g.intrinsic_dimension} of {g.dim} principal components hold 95 %, the first "
        f"alone {g.explained[0]:.1%}.",
        lambda axis: figures.variance(axis, g.explained, g.intrinsic_dimension),
    )
    shares = [(k, g.explained[k - 1]) for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k < g.dim]
    alike = table(
        f"Directions of {g.num_documents:,} documents, all normalised.",
        ["figure", "value", "means"],
        [
            ["intrinsic dimension", f"{g.intrinsic_dimension}", f"components behind 95 % of the variance{limited}"],
            ["IsoScore", _figure(g.isoscore, ".3f"), "1: variance even over all dimensions, 0: one line"],
            ["IsoScore at most", _figure(g.isoscore_ceiling, ".3f"), "of an isotropic sample of this size"],
            ["mean cosine", _figure(g.mean_cosine, ".3f"), "over all pairs; random directions have 0"],
            ["uniformity", _figure(g.uniformity, ".2f"), "log mean Gaussian potential, lower is more even"],
            ["alignment", _figure(g.alignment, ".2f"), "mean squared distance of relevant pairs, 0 to 4"],
        ],
    )
    parts = [alike]
    if shares:
        rows = [[str(k), f"{share:.1%}"] for k, share in shares]
        parts.append(table("Share of the variance in the first components.", ["components", "share"], rows))
    return Section("directions", "Directions", (), [figure], parts)


def _hubs(d: Diagnosis) -> Section:
    rows = [
        [name, _figure(h.skewness, ".2f"), _figure(h.by_chance, ".2f"), f"{h.most:.1%}", f"{h.counts[0]:,}"]
        for name, h in d.hubness.items()
    ]
    words = "; ".join(f"by {name} the commonest is in {h.most:.0%} of the top 10s" for name, h in d.hubness.items())
    figure = Figure(
        "hubs",
        "How many of the queries' top 10 a document is in: the share of the documents that are in at least so many.",
        f"Curves of how often documents are found: {words}.",
        lambda axis: figures.hubs(axis, d.hubness, len(d.query_ids)),
    )
    header = ["by", "skewness of N10", "by chance", "commonest, of the top 10s", "documents in none"]
    caption = "N10 is in how many of the queries' top 10 a document is; its skewness is large where few are everywhere."
    return Section("hubs", "Hubs", (), [figure], [table(caption, header, rows)])


def _task(d: Diagnosis) -> Section:
    task = d.symmetry
    rows = [
        ["queries that are documents too", f"{task.queries_in_corpus:.1%}"],
        ["relevant documents that are queries too", f"{task.answers_that_ask:.1%}"],
        ["judgments between such texts that hold both ways", _figure(task.mutual, ".1%")],
        ["relevant documents with more words than a query", _figure(task.length_auc, ".1%")],
        ["queries whose own text is a document that is not judged relevant", f"{task.own_text_unjudged:.1%}"],
    ]
    caption = "Do queries and documents swap roles? Shares."
    parts: list[Html] = [_paragraph(f"{_sentence(task.verdict)}: {task.reason}."), table(caption, ["", "share"], rows)]
    if (b := d.baseline) is not None:
        own = d.read_out.ndcg(d.read_out.present).mean()
        both = [
            ["model", d.similarity, f"{own:.4f}", f"{d.queries.cv:.4f}", f"{d.documents.cv:.4f}"],
            ["baseline", b.similarity, f"{b.ndcg.mean():.4f}", f"{b.query_cv:.4f}", f"{b.document_cv:.4f}"],
        ]
        header = ["", "similarity", "nDCG@10", "CV of query norms", "CV of document norms"]
        parts.append(table(f"Beside the baseline. Model less baseline: {_interval(b.gain)}.", header, both))
    return Section("task", "Task", parts)


def _provenance(d: Diagnosis) -> Section:
    p = d.provenance
    rows = [
        ["model", p.model],
        *([["baseline", p.baseline]] if p.baseline else []),
        ["read out today by", f"{d.similarity}, document exponent {d.read_out.present:.2g}"],
        ["ends in Normalize", "yes" if d.normalizes else "no"],
        ["queries with a relevant document", f"{len(d.query_ids):,}"],
        ["documents", f"{len(d.document_ids):,}"],
        ["dimensions", f"{d.geometry.dim:,}"],
        ["seed", str(p.seed)],
        ["bootstrap resamples", f"{p.num_samples:,} (of the curve's band {figures.BOOTSTRAP_SAMPLES:,})"],
        ["smallest gain worth having", f"{p.min_gain:g} nDCG@10"],
        ["tolerance of storage", f"{p.tolerance:.0%} of nDCG@10"],
        *([name, text] for name, text in p.versions.items()),
    ]
    return Section("made", "How it was made", [table("Model, data and settings.", ["", "value"], rows)])


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


def _training(rows: Log) -> Section:
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
    drawn = [_curve(f"training-{name}", words, series, lines) for name, words, lines in panels if lines]
    more = f" Of {len(held_out)} held-out metrics the first {MOST_LINES} are drawn." if held_out[MOST_LINES:] else ""
    figures_of = [
        [name, f"{len(x):,}", *(_figure(v, ".4g") for v in (y[0], y[-1], np.nanmin(y), np.nanmax(y)))]
        for name, (x, y) in series.items()
        if np.isfinite(y).any()
    ]
    caption = f"Everything that the run logged, in the units of the log.{more}"
    steps = max(int(x[-1]) for x, _ in series.values()) if series else 0
    return Section(
        "training",
        "Training",
        [_paragraph(f"{steps:,} steps.")],
        drawn,
        [table(caption, ["figure", "values", "first", "last", "smallest", "largest"], figures_of)]
        if figures_of
        else [],
    )


def _series(rows: Log) -> dict[str, tuple[Array, Array]]:
    """Steps and values of every number in a log, in the order of the steps."""
    skipped = ("step", "epoch", "total_flos")
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        for key, value in row.items():
            number = None if isinstance(value, str) else _float(value)
            if number is not None and key not in skipped and not key.endswith(("runtime", "per_second")):
                found.setdefault(str(key), {})[float(row["step"])] = number
    return {
        key: (np.array(sorted(values)), np.array([values[step] for step in sorted(values)]))
        for key, values in found.items()
    }


def _of_roles(series: Mapping[str, Any], roles: Sequence[str], name: str) -> dict[str, str]:
    return {f"{role}_{name}": role for role in roles if f"{role}_{name}" in series}


def _curve(name: str, words: str, series: Mapping[str, tuple[Array, Array]], lines: Mapping[str, str]) -> Figure:
    shown = {label: series[key] for key, label in lines.items()}
    bands = {}
    for key, label in lines.items():
        low, high = (series.get(key.replace("_norm_mean", f"_norm_{p}")) for p in ("p05", "p95"))
        if key.endswith("_norm_mean") and low is not None and high is not None and len(low[0]) == len(series[key][0]):
            bands[label] = (low[1], high[1])
    ends = "; ".join(f"{label} from {y[0]:.4g} to {y[-1]:.4g}" for label, (_, y) in shown.items())
    caption = f"{_sentence(words)}. {_sentence(ends)}."
    return Figure(name, caption, f"Training: {words}. {ends}.", lambda axis: figures.curves(axis, shown, words, bands))


# ---------------------------------------------------------------------------------------------------------------------
# Words
# ---------------------------------------------------------------------------------------------------------------------


def _figure(value: float, how: str) -> str:
    """A number, or why there is none.

    Example:
        >>> _figure(0.5, ".1%"), _figure(math.nan, ".2f"), _figure(-math.inf, "+.2f")
        ('50.0%', 'undefined', '-infinite')
    """
    if math.isnan(value):
        return "undefined"
    return format(value, how) if math.isfinite(value) else "infinite" if value > 0 else "-infinite"


def _interval(gain: Interval | None) -> str:
    return "not measured" if gain is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gain)


def _three(gain: Interval) -> list[str]:
    return [f"{x:+.4f}" for x in gain]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _some(number: int, total: int) -> str:
    return f"all {total:,}" if number == total else f"{number:,} of {total:,}"
