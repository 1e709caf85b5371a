"""The sections of a diagnosis, the same for the terminal and for the HTML page: sentences, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from st_magnitude.diagnosis import advice, figures
from st_magnitude.diagnosis.findings import (
    DO,
    NO_BENEFIT,
    NOT_ENOUGH,
    QUANTILES,
    Array,
    Diagnosis,
    EffectSize,
    Interval,
    Recommendation,
)
from st_magnitude.diagnosis.measure import without_words
from st_magnitude.evaluation.compression import CompressionCell, largest, pareto

__all__ = ["Figure", "Section", "Table", "evidence", "facts", "number", "sections"]

NUM_POINTS = 600  # of a scatter plot
RESCORED = {"none": "", "query": ", rescored", "norm": ", rescored with the norm"}
EFFECTS = {
    "corpus": "documents relevant to a query against documents relevant to none",
    "hard": "relevant documents against each query's 10 best irrelevant ones",
    "pairs": "relevant pairs of query and document against all other pairs",
}
EVIDENCE = {  # of recommendations: label and format
    "present": ("exponent today", ".2g"),
    "candidate": ("chosen exponent", ".2g"),
    "exponent": ("document exponent", ".2g"),
    "magnitude_candidate": ("best exponent below 1", ".2g"),
    "share": ("share dropped", ".0%"),
    "answers_kept": ("relevant documents kept", ".1%"),
    "retention": ("nDCG@10 kept", ".1%"),
    "never_relevant": ("documents relevant to no query", ".1%"),
    "ndcg_present": ("nDCG@10 today", ".3f"),
    "ndcg_candidate": ("nDCG@10 at the chosen exponent", ".3f"),
    "ndcg_cosine": ("nDCG@10 by cosine", ".3f"),
    "ndcg_dot": ("nDCG@10 by dot", ".3f"),
    "ndcg_full": ("nDCG@10 of the full index", ".3f"),
    "ndcg_pruned": ("nDCG@10 without them", ".3f"),
    "ndcg_pruned_by_words": ("nDCG@10 if words decide", ".3f"),
    "ndcg_with": ("nDCG@10 with the norm", ".3f"),
    "ndcg_without": ("nDCG@10 without", ".3f"),
    "ndcg_baseline": ("nDCG@10 of the baseline", ".3f"),
    "ndcg": ("nDCG@10", ".3f"),
    "isoscore": ("IsoScore", ".3f"),
    "isoscore_ceiling": ("highest possible IsoScore", ".3f"),
    "mean_cosine": ("mean cosine", ".3f"),
}
GLOSSARY = {
    "nDCG@10": "Quality of a query's ten best documents, from 0 to 1. Relevant documents count more at higher ranks.",
    "Norm": "Magnitude of an embedding before any normalization. Cosine ignores it, the inner product (dot) uses it.",
    "Document exponent": "Each document is divided by its norm to this power before the inner product: 1 is cosine, 0 "
    "keeps the norm.",
    "95% interval": "Range of the gain over resamples of the queries. If it lies above 0, the gain is more than noise.",
    "CV": "Coefficient of variation: standard deviation divided by mean.",
    "Cohen's d": "Difference of two means in standard deviations; 0.2 is small, 0.8 is large.",
    "IsoScore": "Evenness of the variance over the dimensions: 1 if it is equal in all, 0 if all lies in one.",
    "Intrinsic dimension": "Number of principal components that hold 95% of the variance.",
    "Hub": "Document that is in the top 10 of many queries, whatever they ask.",
}


@dataclass(frozen=True)
class Table:
    """A table whose first column names the rows."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """A figure: its file name, its texts for readers who see it and who do not, and the function that draws it."""

    name: str
    caption: str
    alt: str
    paint: Callable[[Any], None]
    size: tuple[float, float] = (5.0, 3.5)


@dataclass(frozen=True)
class Section:
    """One part of the page, shown in the order of its attributes."""

    id: str
    title: str
    bullets: Sequence[str] = ()
    notes: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    recommendations: Sequence[Recommendation] = ()
    tables: Sequence[Table] = ()
    terms: Sequence[tuple[str, str]] = ()
    remarks: Sequence[str] = ()


def sections(d: Diagnosis, cells: Sequence[CompressionCell] | None = None, details: bool = True) -> list[Section]:
    """The sections of a diagnosis, recommendations first.

    Args:
        d: The diagnosis.
        cells: Cells of a CompressionEvaluator that are shown in place of those of the diagnosis.
        details: Whether long tables, provenance and a glossary are included, as on the HTML page. The terminal shows
            the rest.
    """
    found = [
        _recommendations(d),
        _norms(d, details),
        _exponent(d, details),
        _storage(d, cells),
        _directions(d, details),
    ]
    found += [_hubs(d), _task(d)]
    return [*found, _provenance(d), _glossary()] if details else found


def facts(d: Diagnosis) -> str:
    """The model, its scoring and the size of the data in one sentence."""
    changed = "" if d.recommended == d.similarity else f" (recommended: {d.recommended})"
    return (
        f"{d.provenance.model}, scored by {d.similarity}{changed}: {len(d.query_ids):,} queries, "
        f"{len(d.document_ids):,} documents ({d.is_relevant.sum():,} relevant to at least one query), {d.geometry.dim} "
        "dimensions."
    )


def evidence(r: Recommendation) -> list[tuple[str, str]]:
    """Labels and formatted numbers behind a recommendation."""
    labels = {name: EVIDENCE.get(name, (name.replace("_", " "), ".3g")) for name in r.evidence}
    return [(labels[name][0], number(value, labels[name][1])) for name, value in r.evidence.items()]


def _recommendations(d: Diagnosis) -> Section:
    worth, tolerance = d.provenance.min_gain, d.provenance.tolerance
    legend = (
        "Intervals are 95% bootstrap intervals over queries that had no part in choosing the change. "
        f"{DO.capitalize()}: the interval lies above 0 and reaches a gain worth having ({worth:g} nDCG@10). "
        f"{NO_BENEFIT.capitalize()}: it excludes such a gain. {NOT_ENOUGH.capitalize()}: it does neither. Smaller "
        f"storage is compared with {1 - tolerance:.0%} of the full nDCG@10, and anything above that is enough. Every "
        "verdict rests on its own interval: of forty useless changes, one would pass."
    )
    changed = d.recommended != d.similarity
    after = ", which the recommendation about the exponent advises, so that they still hold after that change"
    basis = f"All changes but the exponent are measured with {d.recommended}{after if changed else ', as used today'}."
    shown = [r for r in d.recommendations if r.gain is not None]
    alt = "; ".join(f"{r.name}: {_interval(r.gain)}, {r.verdict}" for r in shown)
    figure = Figure(
        "gains",
        "Gain of every change that could be measured, with its interval. For half, quarter, 1 bit and pruning it is "
        "what remains above the tolerance.",
        f"Gains in nDCG@10 with 95% intervals. {alt}.",
        lambda axis: figures.gains(axis, d.recommendations, worth),
        (5.0, 1.1 + 0.34 * max(len(shown), 2)),
    )
    return Section(
        "recommendations",
        "Recommendations",
        bullets=advice.summary(d),
        notes=[basis],
        figures=[figure] if shown else [],
        recommendations=[r for v in (DO, NO_BENEFIT, NOT_ENOUGH) for r in d.recommendations if r.verdict == v],
        remarks=[legend],
    )


def _norms(d: Diagnosis, details: bool) -> Section:
    notes = []
    if not d.has_magnitude:
        notes = [advice.NO_MAGNITUDE]
    elif d.normalizes:
        notes = ["The model ends in Normalize: these norms come from before it and are not used today."]
    header = ["role", "mean", "CV", *(f"{q:.0%}" for q in QUANTILES), "Spearman with words"]
    how = _decimals(d.queries.quantiles + d.documents.quantiles)
    rows = [
        [
            role,
            number(s.mean, how),
            number(s.cv, ".3f"),
            *(number(x, how) for x in s.quantiles),
            number(s.length_spearman, "+.2f"),
            *([] if s.cv_ratio is None else [number(s.cv_ratio, ".2f")]),
        ]
        for role, s in (("queries", d.queries), ("documents", d.documents))
    ]
    if d.documents.cv_ratio is not None:
        header.append("CV over baseline")
    norms = Table(
        "Norms of raw embeddings: mean, coefficient of variation (below about 0.05 the norm is noise, from 0.1 it may "
        "carry information: arXiv 2602.09229, App. M), quantiles, and rank correlation with the number of words.",
        header,
        rows,
    )
    effects = [[name, EFFECTS.get(name, name), *_effect_cells(e)] for name, e in d.effects.items()]
    compared = ["Cohen's d", "compares", "d", "without length", "why undefined"]
    if not any(e.undefined for e in d.effects.values()):
        effects, compared = [row[:-1] for row in effects], compared[:-1]
    sizes = Table(
        "Cohen's d of document norms, and the same without length: with the logarithm of the number of words regressed "
        "out, as a control for documents that are merely longer.",
        compared,
        effects,
    )
    return Section(
        "norms", "Norms", (), notes, _norm_figures(d) if d.has_magnitude and details else [], (), [norms, sizes]
    )


def _effect_cells(effect: EffectSize) -> list[str]:
    if effect.undefined:
        return ["undefined", "undefined", effect.undefined]
    return [number(effect.d, "+.2f"), number(effect.without_length, "+.2f"), ""]


def _norm_figures(d: Diagnosis) -> list[Figure]:
    s, q, effect = d.documents, d.queries, d.effects["corpus"]
    names = {True: "relevant to a query", False: "relevant to no query"}
    masks = {name: d.is_relevant == flag for flag, name in names.items() if (d.is_relevant == flag).any()}
    means = "; ".join(f"{mask.sum():,} {name}: mean {s.values[mask].mean():.3g}" for name, mask in masks.items())
    sample = np.random.default_rng(0).permutation(len(s.values))[:NUM_POINTS]
    drawn = {name: sample[mask[sample]] for name, mask in masks.items()}
    points = {name: (np.maximum(s.words[i], 1), s.values[i]) for name, i in drawn.items() if len(i)}
    correlation = number(s.length_spearman, "+.2f")
    some = f"all {len(sample):,}" if len(sample) == len(s.values) else f"{len(sample):,} of {len(s.values):,}"

    def sized(value: float) -> str:
        return f"undefined, because {effect.undefined}" if effect.undefined else number(value, "+.2f")

    def split(values: Array) -> dict[str, Array]:
        return {name: values[mask] for name, mask in masks.items()}

    return [
        Figure(
            "norms-documents",
            f"Norms of documents. Cohen's d (corpus): {sized(effect.d)}. Dashed lines are means. The first and the "
            "last bar include the outermost 0.1%.",
            f"Histogram of document norms. {means}. Cohen's d {sized(effect.d)}.",
            lambda axis: figures.histogram(axis, split(s.values), "norm", "documents"),
        ),
        Figure(
            "norms-without-length",
            "The same norms with the logarithm of the number of words regressed out. Cohen's d: "
            f"{sized(effect.without_length)}.",
            f"Histogram of document norms without length. Cohen's d {sized(effect.without_length)}.",
            lambda axis: figures.histogram(axis, split(without_words(s)), "norm, words regressed out", "documents"),
        ),
        Figure(
            "norms-and-words",
            f"Norm and number of words of {some} documents; rank correlation {correlation}.",
            f"Document norm against number of words; rank correlation {correlation}.",
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


def _exponent(d: Diagnosis, details: bool) -> Section:
    found, curve = d.exponent, d.exponent.curve
    today = found.ndcg(found.present).mean()
    half = f"{found.chose.sum():,} chose, {(~found.chose).sum():,} measured"
    gains = [
        [f"{found.candidate:.2f}", f"today's {found.present:.2f}", half, *_three(found.gain)],
        [f"{found.magnitude_candidate:.2f}", "cosine", half, *_three(found.gain_of_magnitude)],
        [f"{curve.best:.2f}", "cosine", "all chose and measured", *_three(curve.versus_cosine)],
        [f"{curve.best:.2f}", "dot", "all chose and measured", *_three(curve.versus_dot)],
    ]
    table = Table(
        "Gain of an exponent in nDCG@10 with its 95% interval. Where all queries chose and measured, it is flattering.",
        ["exponent", "compared with", "queries", "gain", "low", "high"],
        gains,
    )
    if not details:
        shown = [i for i, g in enumerate(curve.exponents) if g == found.present or round(20 * g, 6) % 4 == 0]
        rows = [[_marked(curve.exponents[i], found.present), f"{curve.ndcg[i]:.3f}"] for i in shown]
        short = Table(
            "nDCG@10 of all queries by document exponent (0 is dot, 1 is cosine).", ["exponent", "nDCG@10"], rows
        )
        return Section("exponent", "Document exponent", tables=[short, table])

    intervals = figures.band(found, d.provenance.seed)
    figure = Figure(
        "exponents",
        f"nDCG@10 of all {len(curve.queries):,} queries if documents are divided by this power of their norm. The band "
        "is the 95% paired bootstrap interval of the difference from today, drawn around the curve. Where it leaves "
        "the dotted line, the difference is more than noise. One half of the queries chose the exponent.",
        f"Curve of nDCG@10: {curve.ndcg[0]:.3f} by dot, {curve.ndcg[-1]:.3f} by cosine, {today:.3f} today at "
        f"{found.present:.2g}, {found.ndcg(found.candidate).mean():.3f} at {found.candidate:.2g}, chosen by one half.",
        lambda axis: figures.exponents(axis, found, intervals),
        (5.0, 3.7),
    )
    points = [
        [_marked(gamma, found.present), f"{value:.3f}", *_three(interval)]
        for gamma, value, interval in zip(curve.exponents, curve.ndcg, intervals, strict=True)
    ]
    every = Table(
        "nDCG@10 of all queries by document exponent, and the difference from today with its 95% interval.",
        ["exponent", "nDCG@10", "difference", "low", "high"],
        points,
    )
    return Section("exponent", "Document exponent", figures=[figure], tables=[table, every])


def _marked(gamma: float, present: float) -> str:
    return f"{gamma:.2f}" + (" (today)" if gamma == present else "")


def _storage(d: Diagnosis, given: Sequence[CompressionCell] | None) -> Section:
    cells = d.cells if given is None else list(given)
    if not cells and given is None:  # a file may have none
        return Section("storage", "Storage")
    full, front = largest(cells), pareto(cells)
    figure = Figure(
        "compression",
        "nDCG@10 by bytes per document. The numbers beside the points are dimensions.",
        f"{len(cells)} ways to store a document. The best at their size: "
        + "; ".join(f"{c.bytes_per_document} bytes ({_kind(c)}): {c.ndcg:.3f}" for c in front)
        + ".",
        lambda axis: figures.compression(axis, cells, has_key=True),
        (5.0, 4.4),
    )
    rows = [
        [
            _kind(c),
            f"{c.bytes_per_document:,}",
            f"{full.bytes_per_document / c.bytes_per_document:.1f} x",
            f"{c.ndcg:.3f}",
            number(c.retention, ".1%"),
            "yes" if c in front else "no",
        ]
        for c in cells
    ]
    source = f"Measured with {d.recommended}" if given is None else "Measured by a CompressionEvaluator"
    caption = (
        f"{source}: bytes per document for the vectors alone, nDCG@10, and its share of nDCG@10 with all dimensions in "
        "float32."
    )
    table = Table(caption, ["stored as", "bytes", "smaller", "nDCG@10", "kept", "best at its size"], rows)
    return Section("storage", "Storage", figures=[figure], tables=[table])


def _kind(c: CompressionCell) -> str:
    return f"{c.dim} x {c.precision}{RESCORED[c.rescoring]}"


def _directions(d: Diagnosis, details: bool) -> Section:
    g = d.geometry
    limited = " (the sample limits it: it has fewer than 4 documents per dimension)" if g.is_sample_limited else ""
    figure = Figure(
        "variance",
        f"Variance of the documents' directions: {g.intrinsic_dimension} principal components hold 95%{limited}.",
        f"Curve of explained variance: {g.intrinsic_dimension} of {g.dim} principal components hold 95%, the first "
        f"alone {g.explained[:1].sum():.1%}.",
        lambda axis: figures.variance(axis, g.explained, g.intrinsic_dimension),
    )
    rows = [
        ["intrinsic dimension", f"{g.intrinsic_dimension}", f"components that hold 95% of the variance{limited}"],
        ["IsoScore", number(g.isoscore, ".3f"), "1: variance is even over all dimensions, 0: one line"],
        ["highest IsoScore", number(g.isoscore_ceiling, ".3f"), "that an isotropic sample of this size reaches"],
        ["mean cosine", number(g.mean_cosine, ".3f"), "over all pairs; 0 for random directions"],
        ["uniformity", number(g.uniformity, ".3f"), "log mean Gaussian potential; lower is more even"],
        ["alignment", number(g.alignment, ".3f"), "mean squared distance of relevant pairs, 0 to 4"],
    ]
    tables = [Table(f"Directions of {g.num_documents:,} documents.", ["measure", "value", "meaning"], rows)]
    shares = [(k, g.explained[k - 1]) for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k < g.dim]
    if shares and details:
        columns = [[str(k), f"{share:.1%}"] for k, share in shares]
        tables.append(Table("Share of the variance in the first components.", ["components", "share"], columns))
    return Section("directions", "Directions", figures=[figure], tables=tables)


def _hubs(d: Diagnosis) -> Section:
    rows = [
        [name, number(h.skewness, ".2f"), number(h.by_chance, ".2f"), f"{h.most:.1%}", f"{sum(h.counts[:1]):,}"]
        for name, h in d.hubness.items()
    ]
    words = "; ".join(f"by {name} the most frequent is in {h.most:.0%} of the top 10s" for name, h in d.hubness.items())
    figure = Figure(
        "hubs",
        "Share of the documents that are in at least this many of the queries' top 10.",
        f"Curves of how often documents are found: {words}.",
        lambda axis: figures.hubs(axis, d.hubness, len(d.query_ids)),
    )
    header = ["scored by", "skewness of N10", "by chance", "share of the most frequent", "documents in no top 10"]
    caption = (
        "N10 is the number of queries that have a document in their top 10. It is skewed if few documents are in most "
        "top 10s."
    )
    return Section("hubs", "Hubs", figures=[figure], tables=[Table(caption, header, rows)])


def _task(d: Diagnosis) -> Section:
    task = d.symmetry
    rows = [
        ["queries that are also documents", f"{task.queries_in_corpus:.1%}"],
        ["relevant documents that are also queries", f"{task.answers_that_ask:.1%}"],
        ["judgments between such texts that hold both ways", number(task.mutual, ".1%")],
        ["probability that a relevant document has more words than a query", number(task.length_auc, ".1%")],
        ["queries whose own text is a document that is not judged relevant", f"{task.own_text_unjudged:.1%}"],
    ]
    tables = [Table("Whether queries and documents swap roles.", ["measure", "share"], rows)]
    if (b := d.baseline) is not None:
        own = b.ndcg.mean() + b.gain[0]
        both = [
            ["model", d.recommended, f"{own:.3f}", f"{d.queries.cv:.3f}", f"{d.documents.cv:.3f}"],
            ["baseline", b.similarity, f"{b.ndcg.mean():.3f}", f"{b.query_cv:.3f}", f"{b.document_cv:.3f}"],
        ]
        header = ["compared", "scored by", "nDCG@10", "CV of query norms", "CV of document norms"]
        tables.append(Table(f"The model and the baseline. Model minus baseline: {_interval(b.gain)}.", header, both))
    notes = [f"{task.verdict.capitalize()}: {task.reason}."]
    return Section("task", "Task", notes=notes, tables=tables)


def _provenance(d: Diagnosis) -> Section:
    p = d.provenance
    rows = [
        ["model", p.model],
        *([["baseline", p.baseline]] if p.baseline else []),
        ["scored today by", f"{d.similarity} (document exponent {d.exponent.present:.2g})"],
        ["changes measured with", d.recommended],
        ["ends in Normalize", "yes" if d.normalizes else "no"],
        ["queries with a relevant document", f"{len(d.query_ids):,}"],
        ["documents", f"{len(d.document_ids):,}"],
        ["dimensions", f"{d.geometry.dim:,}"],
        ["seed", str(p.seed)],
        ["bootstrap resamples", f"{p.num_samples:,} ({figures.BOOTSTRAP_SAMPLES:,} for the band of the curve)"],
        ["smallest gain worth having", f"{p.min_gain:g} nDCG@10"],
        ["tolerance of smaller storage", f"{p.tolerance:.0%} of nDCG@10"],
        *([name, text] for name, text in p.versions.items()),
    ]
    table = Table("Model, data and settings.", ["setting", "value"], rows)
    return Section("made", "How it was made", tables=[table])


def _glossary() -> Section:
    return Section("glossary", "Glossary", terms=list(GLOSSARY.items()))


def number(value: float, how: str) -> str:
    """A number in the given format, or a word where it has no digits.

    Example:
        >>> number(0.5, ".1%"), number(math.nan, ".2f"), number(-math.inf, "+.2f")
        ('50.0%', 'undefined', '-infinite')
    """
    if math.isnan(value):
        return "undefined"
    return format(value, how) if math.isfinite(value) else "infinite" if value > 0 else "-infinite"


def _decimals(values: Sequence[float]) -> str:
    """A format with the same number of decimals for all values, about four digits for the largest.

    Example:
        >>> _decimals([0.02, 5.4]), _decimals([3.0, 812.0])
        ('.3f', '.1f')
    """
    size = max((abs(value) for value in values if value and math.isfinite(value)), default=1.0)
    return f".{min(max(3 - math.floor(math.log10(size)), 0), 6)}f"


def _interval(gain: Interval | None) -> str:
    return "not measured" if gain is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*gain)


def _three(gain: Interval) -> list[str]:
    return [f"{x:+.3f}" for x in gain]
