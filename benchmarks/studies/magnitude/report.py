"""Tables and the picture of the magnitude study (magnitude.py), from the cells that are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.data.search_tasks import CONTROL, TRAIN_SETS
from benchmarks.studies.estimates import Estimate, markdown, over, paired, show
from benchmarks.studies.plot import plt
from numpy.typing import NDArray
from scipy import stats

Cell = dict[str, Any]
# by base, training set and loss, in the order of the seeds
Cells = dict[tuple[str, str, str], list[Cell]]
NAMES = {
    "cosine": "Cosine",
    "dot": "Dot",
    "qnorm": "QNorm",
    "dnorm": "DNorm",
    "learnable": "Learnable",
}
OTHERS = ("dot", "qnorm", "dnorm", "learnable")
KEEPING = ("dot", "qnorm", "learnable")  # losses whose scores contain the document norm
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def per_query(cells: list[Cell], task: str, scoring: str, rows: str) -> NDArray[np.float64]:
    """nDCG@10 of every query, (S, n), at the exponent of a scoring.

    Args:
        rows: The training set whose dev task chose the exponent of "chosen".
    """
    found = []
    for cell in cells:
        exponents = {"matched": cell["matched"], "cosine": 1.0, "chosen": cell["chosen"].get(rows)}
        x = cell["tasks"][task]
        found.append(x["per query"][x["exponents"].index(exponents[scoring])])
    return np.array(found)


def gain(
    cells: Cells, base: str, rows: str, loss: str, tasks: Iterable[str], scoring: str = "matched"
) -> Estimate | None:
    """nDCG@10 less that of Cosine, over the seeds that both have."""
    after, before = (cells.get((base, rows, name), []) for name in (loss, "cosine"))
    seeds = {c["seed"] for c in after} & {c["seed"] for c in before}
    if not seeds:
        return None
    a, b = ([c for c in found if c["seed"] in seeds] for found in (after, before))
    pairs = [(per_query(a, t, scoring, rows), per_query(b, t, "cosine", rows)) for t in tasks]
    return paired([x - y for x, y in pairs])


def outside(cell: Cell, rows: str) -> list[str]:
    """Tasks of other domains than that of the training."""
    return [task for task in cell["tasks"] if task not in (rows, CONTROL)]


def d_of(cells: list[Cell], task: str, key: str = "d") -> float | None:
    """Mean over seeds, or None if the task has none."""
    values = [v for cell in cells if (v := cell["tasks"][task].get(key)) is not None]
    return float(np.mean(values)) if values else None


def trained_on(cells: Cells) -> list[tuple[str, str]]:
    """(base, training set) of what is there, in order."""
    return list(dict.fromkeys((base, rows) for base, rows, _ in cells if rows in TRAIN_SETS))


# --- the paper ------------------------------------------------------------------------------------

# nDCG@10 of Cosine, then Dot, QNorm, DNorm, Learnable: MSM-Dev stands for the domain of training,
# BEIR for others
PAPER_GAINS = {
    "Table 1, Contriever": {
        "in": (30.86, 31.07, 31.35, 31.40, 32.17),
        "out": (40.96, 43.48, 44.01, 42.45, 43.58),
    },
    "Table 1, RetroMAE": {
        "in": (30.68, 31.24, 32.15, 32.92, 32.84),
        "out": (38.28, 40.09, 41.05, 41.15, 41.22),
    },
    "Table 2, from scratch": {
        "in": (17.66, 11.07, 9.58, 15.19, 11.97),
        "out": (24.38, 13.37, 15.46, 21.05, 17.91),
    },
    "Table 16, E5": {"in": (33.63, 16.74, 9.53, 26.01), "out": (45.56, 25.98, 30.36, 24.73)},
}
COMPARED = {  # base to what it is beside; E5, like MiniLM, was pretrained with Normalize
    "static": ("Table 1, Contriever", "Table 1, RetroMAE"),
    "LM table": ("Table 1, Contriever", "Table 1, RetroMAE"),
    "random": ("Table 2, from scratch",),
    "MiniLM": ("Table 1, Contriever", "Table 1, RetroMAE", "Table 16, E5"),
    "decoder": ("Table 1, Contriever", "Table 1, RetroMAE"),
}
PAPER_D = {  # Table 3, all 31 data sets
    "fine-tuned": {"cosine": 0.11, "dot": 0.30, "qnorm": 0.32, "learnable": 0.32},
    "from scratch": {"cosine": -0.33, "dot": -0.09, "qnorm": -0.24, "learnable": -0.28},
}
# Table 5: less Cosine
PAPER_STS = {"dot": (-0.4, 0.1), "qnorm": (-37.5, -43.5), "dnorm": (-41.7, -42.1)}


@dataclass(frozen=True)
class Finding:
    table: str
    what: str
    paper: str
    sign: float  # of the paper's figure
    here: Estimate
    scale: float = 1.0

    def row(self) -> list[str]:
        shown = self.here.show(self.scale, 1 if self.scale > 1 else 2)
        return [self.table, self.what, self.paper, shown, self.here.verdict(self.sign)]


def gain_findings(cells: Cells) -> list[Finding]:
    """Tables 1, 2 and 16: gains over Cosine in and out of the domain, scored as trained."""
    found = []
    for (base, rows), (column, loss) in product(trained_on(cells), enumerate(OTHERS, 1)):
        if (base, rows, loss) not in cells:
            continue
        places = {"in": [rows], "out": outside(cells[base, rows, loss][0], rows)}
        for (place, tasks), table in product(places.items(), COMPARED[base]):
            values = PAPER_GAINS[table][place]
            here = gain(cells, base, rows, loss, tasks)
            if here is not None and column < len(values):
                paper = values[column] - values[0]
                what = f"{base} on {rows}: {NAMES[loss]} - Cosine, {place}"
                found.append(Finding(table, what, f"{paper:+.1f}", paper, here, 100.0))
    return found


def d_findings(cells: Cells) -> list[Finding]:
    """Table 3: d, and d less that of Cosine, over the data sets."""
    found = []
    for (base, rows), loss in product(trained_on(cells), KEEPING):
        how = "from scratch" if base == "random" else "fine-tuned"
        runs, plain = cells.get((base, rows, loss)), cells.get((base, rows, "cosine"))
        if not runs or not plain:
            continue
        tasks = [t for t in runs[0]["tasks"] if t != CONTROL and d_of(runs, t) is not None]
        own, other = (np.array([d_of(x, t) for t in tasks], dtype=float) for x in (runs, plain))
        paper = PAPER_D[how][loss]
        less = paper - PAPER_D[how]["cosine"]
        what = f"{base} on {rows}: {NAMES[loss]}, d"
        table = f"Table 3, {how}"
        found.append(Finding(table, what, f"{paper:+.2f}", paper, over(own)))
        what = f"{what} less that of Cosine"
        found.append(Finding(table, what, f"{less:+.2f}", less, over(own - other)))
    return found


def correlation(table: str, what: str, paper: str, points: Sequence[Any]) -> list[Finding]:
    """Pearson's r with Fisher's interval."""
    if len(points) < 4:
        return []
    found = stats.pearsonr(*zip(*points, strict=True))
    r = Estimate(float(found.statistic), *map(float, found.confidence_interval()))
    return [Finding(table, f"{what}, {len(points)} points", paper, 1, r)]


def other_findings(cells: Cells, scored: dict[str, list[Cell]] | None) -> list[Finding]:
    """Fig. 3, Fig. 5, Table 18 and Table 5."""
    found, by_cv = [], []
    for base in dict.fromkeys(base for base, _ in trained_on(cells)):
        by_d = []
        for rows in TRAIN_SETS:
            kinds = ("qnorm", "cosine", "dnorm", "dot")
            runs = {loss: cells.get((base, rows, loss)) for loss in kinds}
            for task in runs["dot"][0]["tasks"] if all(runs.values()) else ():
                means = {x: per_query(runs[x], task, "matched", rows).mean() for x in kinds}
                cv = {x: np.mean([c["tasks"][task]["query cv"] for c in runs[x]]) for x in kinds}
                by_cv.append((cv["dnorm"] / cv["dot"], means["dnorm"] - means["qnorm"]))
                if (d := d_of(runs["qnorm"], task)) is not None:
                    by_d.append((d, means["qnorm"] / means["cosine"] - 1))
        found += correlation("Fig. 3", f"{base}: r of d and gain", "+0.57, +0.68", by_d)
    what = "r of query CV ratio (DNorm / Dot) and DNorm - QNorm"
    found += correlation("Fig. 5", what, "positive", by_cv)
    for base, rows in trained_on(cells):
        if runs := cells.get((base, rows, "dot")):
            what = f"{base} on {rows}: dot - cosine of a model trained with Dot, dev"
            gap = over([cell["gap"] for cell in runs])
            found.append(Finding("Table 18", what, "+2.0, +3.1; E5 +71.7", 1, gap, 100.0))
    for (name, paper), scale in product(PAPER_STS.items() if scored else (), ("0.01", "auto")):
        keys = (f"{name} {scale}", "cosine auto")
        runs, plain = ([x["matched_spearman"] for x in scored[key]] for key in keys)
        what = f"scored pairs, scale {scale}: {NAMES[name]} - Cosine, Spearman"
        first, second = np.sign(paper)
        sign = float(first * (first == second))
        shown = ", ".join(f"{value:+.1f}" for value in paper)
        here = over(np.subtract(runs, plain))
        found.append(Finding("Table 5", what, shown, sign, here, 100.0))
    return found


def count(findings: Iterable[Finding]) -> list[str]:
    """Signs by table; findings of which the paper has no sign are not counted."""
    verdicts: dict[str, list[str]] = {}
    for finding in findings:
        if finding.sign:
            verdicts.setdefault(finding.table, []).append(finding.here.verdict(finding.sign))
    kinds = ("agrees", "disagrees", "open")
    rows = [[table, *(found.count(kind) for kind in kinds)] for table, found in verdicts.items()]
    return markdown(["table", *kinds], rows)


# --- tables ---------------------------------------------------------------------------------------


def summary_table(cells: Cells) -> list[str]:
    """Gains over Cosine in points, in the domain of training and outside, matched and chosen."""
    lines = []
    for base, rows in trained_on(cells):
        if (plain := cells.get((base, rows, "cosine"))) is None:
            continue
        places = {"in domain": [rows], "out": outside(plain[0], rows)}
        for (place, tasks), scoring in product(places.items(), ("matched", "chosen")):
            found = [gain(cells, base, rows, loss, tasks, scoring) for loss in OTHERS]
            lines.append([f"{base}, {rows}", place, scoring, *map(show, found)])
    head = ["base, trained on", "tasks", "exponent", *(NAMES[loss] for loss in OTHERS)]
    return markdown(head, lines, "lll")


def boilerplate_table(cells: Cells) -> list[str]:
    """d of norms on docstrings, answers against boilerplate, and with text length out."""
    models = {"PT": "pretrained", **{NAMES[x]: x for x in ("cosine", *KEEPING)}}
    lines = []
    for base, rows in trained_on(cells):
        shown = []
        for loss in models.values():
            runs = cells.get((base, "none" if loss == "pretrained" else rows, loss), [])
            plain, less = (d_of(runs, "docstrings", key) for key in ("d", "d, length out"))
            shown.append("" if plain is None else f"{plain:+.2f} ({less:+.2f})")
        lines.append([f"{base}, {rows}", *shown])
    return markdown(["base, trained on", *models], lines)


def symmetric_table(scored: dict[str, list[Cell]]) -> list[str]:
    keys = ("matched_spearman", "symmetry_gap", "v-measure, directions", "v-measure, raw")
    lines = []
    for name, runs in scored.items():
        values = [100 * np.array([run[key] for run in runs]) for key in keys]
        lines.append([name, *(f"{x.mean():.1f} ± {x.std(ddof=1):.1f}" for x in values)])
    return markdown(["similarity, scale", *keys], lines)


def report(cells: Cells, scored: dict[str, list[Cell]] | None) -> str:
    """Everything as Markdown."""
    findings = [*gain_findings(cells), *d_findings(cells), *other_findings(cells, scored)]
    head = ["table", "finding", "paper", "here [95 %]", "sign"]
    parts = {
        "Gains over Cosine, points of nDCG@10, 95 %": summary_table(cells),
        "d of norms on docstrings, boilerplate among them": boilerplate_table(cells),
        "Scored pairs and clustering at two scales": symmetric_table(scored or {}),
        "Beside the paper": markdown(head, [finding.row() for finding in findings], "ll"),
        "Signs": count(findings),
    }
    ends = [cell["gammas"] for runs in cells.values() for cell in runs if cell["gammas"]]
    larger = sum(document > query for query, document in ends)
    line = f"γ of documents ends above that of queries in {larger} of {len(ends)} runs."
    parts["Learned exponents"] = [line]
    return "\n\n".join("\n".join([f"## {title}", "", *x]) for title, x in parts.items())


def picture(cells: Cells, path: Path) -> None:
    """nDCG@10 out of domain by document exponent."""
    bases = list(dict.fromkeys(base for base, _ in trained_on(cells)))
    figure, axes = plt.subplots(1, len(bases), figsize=(4.2 * len(bases), 3.6), squeeze=False)
    for axis, base in zip(axes[0], bases, strict=True):
        styles = zip(TRAIN_SETS, ("-", "--"), strict=True)
        for (rows, style), (i, loss) in product(styles, enumerate(NAMES)):
            if runs := cells.get((base, rows, loss)):
                tasks = [c["tasks"][t] for c in runs for t in outside(runs[0], rows)]
                curves = [[x["ndcg@10"][x["exponents"].index(e)] for e in EXPONENTS] for x in tasks]
                label = NAMES[loss] if style == "-" else None
                means = 100 * np.mean(curves, axis=0)
                axis.plot(EXPONENTS, means, style, color=f"C{i}", label=label)
        axis.set(title=base, xlabel="document exponent (solid: wordnet, dashed: docstrings)")
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("nDCG@10 out of domain")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
