"""Statistics, tables and pictures of the magnitude study (magnitude.py), from the cells that are stored."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from norms import margin
from numpy.typing import NDArray
from scipy import stats
from search_tasks import CONTROL, TRAIN_SETS

from st_magnitude._plot import pyplot

Cell = dict[str, Any]
Cells = dict[tuple[str, str, str], list[Cell]]  # by base, training set and loss, in the order of the seeds
NAMES = {"cosine": "Cosine", "dot": "Dot", "qnorm": "QNorm", "dnorm": "DNorm", "learnable": "Learnable"}
KEEPING = ("dot", "qnorm", "learnable")  # losses whose scores contain the document norm
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
PLACES = {"in": "in domain", "out": "out of domain"}


def at(task: Cell, exponent: float, metric: str = "ndcg@10") -> float:
    return task[metric][task["exponents"].index(exponent)]


def exponent_of(cell: Cell, read_out: str, rows: str) -> float:
    """The document exponent of a scoring; ``rows`` is the training set whose dev task chose it."""
    if read_out == "chosen":
        return cell["chosen"][rows]
    return {"matched": cell["matched"], "cosine": 1.0, "dot": 0.0}[read_out]


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float
    p: float = float("nan")  # paired t over seeds

    def verdict(self, sign: float) -> str:
        """Whether the sign is that one; open where the interval contains 0 or is not known."""
        if not (self.low > 0 or self.high < 0):
            return "open"
        return "agrees" if self.mean * sign > 0 else "disagrees"

    def show(self, scale: float = 100.0, digits: int = 1) -> str:
        low, mean, high = (f"{scale * value:+.{digits}f}" for value in (self.low, self.mean, self.high))
        return f"{mean} [{low}, {high}]"


def paired(differences: list[NDArray[np.float64]], num_samples: int = 2000) -> Estimate:
    """Mean over tasks of differences by seed and query, one (S, n) a task: the wider of two intervals."""
    rng = np.random.default_rng(0)
    by_seed = np.mean([x.mean(axis=1) for x in differences], axis=0)  # (S,)
    mean = float(by_seed.mean())
    resampled = np.zeros(num_samples)
    for x in differences:
        by_query = x.mean(axis=0)
        resampled += by_query[rng.integers(len(by_query), size=(num_samples, len(by_query)))].mean(axis=1)
    low, high = np.quantile(resampled / len(differences), [0.025, 0.975])
    p = float("nan")
    if len(by_seed) > 1:
        half = margin(by_seed)
        low, high = min(low, mean - half), max(high, mean + half)
        p = float(stats.ttest_1samp(by_seed, 0.0).pvalue) if np.ptp(by_seed) else float("nan")
    return Estimate(mean, float(low), float(high), p)


def over(values: Sequence[float]) -> Estimate:
    """t interval of a mean over data sets or seeds."""
    mean, half = float(np.mean(values)), margin(values)
    return Estimate(mean, mean - half, mean + half)


def correlation(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Pearson's r with Fisher's interval."""
    found = stats.pearsonr(x, y)
    return Estimate(float(found.statistic), *map(float, found.confidence_interval()), float(found.pvalue))


def per_query(cells: list[Cell], task: str, read_out: str, rows: str) -> NDArray[np.float64]:
    """nDCG@10 of every query, (S, n)."""
    found = [(c["tasks"][task], exponent_of(c, read_out, rows)) for c in cells]
    return np.array([x["per query"][x["exponents"].index(exponent)] for x, exponent in found])


def gain(
    cells: Cells, base: str, rows: str, loss: str, tasks: Iterable[str], read_out: str = "matched"
) -> Estimate | None:
    """nDCG@10 less that of Cosine, over the seeds that both have."""
    after, before = (cells.get((base, rows, name), []) for name in (loss, "cosine"))
    seeds = {c["seed"] for c in after} & {c["seed"] for c in before}
    after, before = ([c for c in found if c["seed"] in seeds] for found in (after, before))
    if not seeds:
        return None
    return paired([per_query(after, t, read_out, rows) - per_query(before, t, "cosine", rows) for t in tasks])


def outside(cell: Cell, rows: str) -> list[str]:
    """Tasks of other domains than that of the training."""
    return [task for task in cell["tasks"] if task not in (rows, CONTROL)]


def figure(cells: list[Cell], task: str, key: str) -> float:
    """Mean over seeds; nan without any."""
    return float(np.mean([cell["tasks"][task][key] for cell in cells])) if cells else float("nan")


def d_of(cells: list[Cell], task: str, pairing: str = "corpus") -> float | None:
    """Mean over seeds, or None if the task does not have this pairing."""
    values = [v for cell in cells if (v := cell["tasks"][task]["d"].get(pairing)) is not None]
    return float(np.mean(values)) if values else None


# --- the paper --------------------------------------------------------------------------------------------------------

# nDCG@10 of Cosine, then Dot, QNorm, DNorm, Learnable: MSM-Dev stands for the domain of training, BEIR for others
PAPER_GAINS = {
    "Table 1, Contriever": {"in": (30.86, 31.07, 31.35, 31.40, 32.17), "out": (40.96, 43.48, 44.01, 42.45, 43.58)},
    "Table 1, RetroMAE": {"in": (30.68, 31.24, 32.15, 32.92, 32.84), "out": (38.28, 40.09, 41.05, 41.15, 41.22)},
    "Table 2, from scratch": {"in": (17.66, 11.07, 9.58, 15.19, 11.97), "out": (24.38, 13.37, 15.46, 21.05, 17.91)},
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
PAPER_STS = {"dot": (-0.4, 0.1), "qnorm": (-37.5, -43.5), "dnorm": (-41.7, -42.1)}  # Table 5: less Cosine


@dataclass(frozen=True)
class Finding:
    table: str
    what: str
    paper: str
    sign: float  # of the paper's figure
    here: Estimate
    scale: float = 1.0

    @property
    def verdict(self) -> str:
        return self.here.verdict(self.sign)

    def row(self) -> str:
        shown = self.here.show(self.scale, 1 if self.scale > 1 else 2)
        return f"| {self.table} | {self.what} | {self.paper} | {shown} | {self.verdict} |"


def trained_on(cells: Cells) -> list[tuple[str, str]]:
    """(base, training set) of what is there, in order."""
    return list(dict.fromkeys((base, rows) for base, rows, _ in cells if rows in TRAIN_SETS))


def gain_findings(cells: Cells) -> list[Finding]:
    """Tables 1, 2 and 16: gains over Cosine in and out of the domain, scored as trained."""
    found = []
    for base, rows in trained_on(cells):
        for loss, column in zip(("dot", "qnorm", "dnorm", "learnable"), range(1, 5), strict=True):
            if (base, rows, loss) not in cells:
                continue
            places = {"in": [rows], "out": outside(cells[base, rows, loss][0], rows)}
            for place, tasks in places.items():
                here = gain(cells, base, rows, loss, tasks)
                for table in COMPARED[base]:
                    values = PAPER_GAINS[table][place]
                    if here is None or column >= len(values):
                        continue
                    paper = values[column] - values[0]
                    what = f"{base} on {rows}: {NAMES[loss]} - Cosine, {PLACES[place]}"
                    found.append(Finding(table, what, f"{paper:+.1f}", paper, here, 100.0))
    return found


def d_findings(cells: Cells) -> list[Finding]:
    """Table 3: d, and d less that of Cosine, over the data sets."""
    found = []
    for base, rows in trained_on(cells):
        how = "from scratch" if base == "random" else "fine-tuned"
        for loss in KEEPING:
            runs, plain = cells.get((base, rows, loss)), cells.get((base, rows, "cosine"))
            if not runs or not plain:
                continue
            tasks = [t for t in runs[0]["tasks"] if t != CONTROL and d_of(runs, t) is not None]
            values = np.array([[d_of(x, t) for t in tasks] for x in (runs, plain)], dtype=float)
            paper = PAPER_D[how][loss], PAPER_D[how][loss] - PAPER_D[how]["cosine"]
            for label, figures, theirs in (
                ("d", values[0], paper[0]),
                ("d less that of Cosine", values[0] - values[1], paper[1]),
            ):
                what = f"{base} on {rows}: {NAMES[loss]}, {label}"
                found.append(Finding(f"Table 3, {how}", what, f"{theirs:+.2f}", theirs, over(figures)))
    return found


def points(cells: Cells, base: str) -> list[tuple[str, str, float, float]]:
    """(training set, task, d of QNorm, gain of QNorm over Cosine in %) of all data sets: Fig. 3."""
    found = []
    for rows in TRAIN_SETS:
        runs, plain = cells.get((base, rows, "qnorm")), cells.get((base, rows, "cosine"))
        for task in runs[0]["tasks"] if runs and plain else ():
            d, here = d_of(runs, task), gain(cells, base, rows, "qnorm", [task])
            if d is not None and here is not None:
                found.append((rows, task, d, 100 * here.mean / per_query(plain, task, "cosine", rows).mean()))
    return found


def cv_points(cells: Cells) -> list[tuple[str, str, float, float]]:
    """(base, task, query CV of DNorm over that of Dot, gain of DNorm over QNorm in points) of all: Fig. 5."""
    found = []
    for base, rows in trained_on(cells):
        runs = {loss: cells.get((base, rows, loss)) for loss in ("dnorm", "dot", "qnorm")}
        for task in runs["dot"][0]["tasks"] if all(runs.values()) else ():
            cv = {loss: figure(x, task, "query cv") for loss, x in runs.items()}
            dnorm, qnorm = (per_query(runs[loss], task, "matched", rows).mean() for loss in ("dnorm", "qnorm"))
            found.append((base, task, cv["dnorm"] / cv["dot"], 100 * (dnorm - qnorm)))
    return found


def other_findings(cells: Cells, scored: dict[str, list[Cell]] | None) -> list[Finding]:
    """Fig. 3, Fig. 5, Table 18 and Table 5."""
    found = []
    for base in dict.fromkeys(base for base, _ in trained_on(cells)):
        by_dataset = points(cells, base)
        if len(by_dataset) > 3:
            r = correlation([x[2] for x in by_dataset], [x[3] for x in by_dataset])
            found.append(Finding("Fig. 3", f"{base}: r of d and gain, {len(by_dataset)} points", "+0.57, +0.68", 1, r))
    if len(by_dataset := cv_points(cells)) > 3:
        r = correlation([x[2] for x in by_dataset], [x[3] for x in by_dataset])
        what = f"r of query CV ratio (DNorm / Dot) and DNorm - QNorm, {len(by_dataset)} points"
        found.append(Finding("Fig. 5", what, "positive", 1, r))
    for base, rows in trained_on(cells):
        if runs := cells.get((base, rows, "dot")):
            gap = over([cell["gaps"][-1]["dot"] - cell["gaps"][-1]["cosine"] for cell in runs])
            what = f"{base} on {rows}: dot - cosine of a model trained with Dot, dev"
            found.append(Finding("Table 18", what, "+2.0, +3.1; E5 +71.7", 1, gap, 100.0))
    for name, paper in PAPER_STS.items():
        for scale in ("0.01", "auto"):
            if scored and f"{name} {scale}" in scored:
                runs, plain = (
                    [x["matched_spearman"] for x in scored[key]] for key in (f"{name} {scale}", "cosine auto")
                )
                what = f"scored pairs, scale {scale}: {NAMES[name]} - Cosine, Spearman"
                sign = np.sign(paper[0]) * (np.sign(paper[0]) == np.sign(paper[1]))
                shown = ", ".join(f"{value:+.1f}" for value in paper)
                found.append(Finding("Table 5", what, shown, float(sign), over(np.subtract(runs, plain)), 100.0))
    return found


def count(findings: Iterable[Finding]) -> str:
    """Signs by table; findings of which the paper has no sign are not counted."""
    lines = ["| table | agrees | disagrees | open |", "| --- | ---: | ---: | ---: |"]
    signed = [finding for finding in findings if finding.sign]
    for table in dict.fromkeys(finding.table for finding in signed):
        verdicts = [finding.verdict for finding in signed if finding.table == table]
        lines.append(
            f"| {table} | " + " | ".join(str(verdicts.count(v)) for v in ("agrees", "disagrees", "open")) + " |"
        )
    lines.append("| Table 4 (RAG) | not measured | | |")
    return "\n".join(lines)


# --- tables -----------------------------------------------------------------------------------------------------------


def header(first: str, columns: Iterable[str]) -> list[str]:
    columns = list(columns)
    return [f"| {first} | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]


def spread(values: Sequence[float], scale: float = 100.0, digits: int = 1) -> str:
    x = scale * np.asarray(values, dtype=float)
    return f"{x.mean():.{digits}f}" + (f" ± {x.std(ddof=1):.{digits}f}" if len(x) > 1 else "")


def retrieval_table(cells: Cells, base: str, rows: str, read_out: str) -> list[str]:
    """nDCG@10, mean ± standard deviation over seeds."""
    columns = {"PT": cells.get((base, "none", "pretrained"))}
    columns |= {name: cells.get((base, rows, loss)) for loss, name in NAMES.items()}
    columns = {name: runs for name, runs in columns.items() if runs}
    lines = header("task", columns)
    for task in next(iter(columns.values()))[0]["tasks"]:
        shown = [
            spread([per_query([c], task, "cosine" if name == "PT" else read_out, rows).mean() for c in runs])
            for name, runs in columns.items()
        ]
        lines.append(f"| {task} | " + " | ".join(shown) + " |")
    if read_out == "chosen":
        shown = [", ".join(f"{exponent_of(c, 'chosen', rows):g}" for c in runs) for runs in columns.values()]
        lines.append("| the exponent of dev | " + " | ".join(shown) + " |")
    return lines


def gain_table(cells: Cells, base: str, rows: str) -> list[str]:
    """Gains over Cosine in points by task and scoring; p of the paired t over seeds."""
    losses = [loss for loss in NAMES if loss != "cosine" and (base, rows, loss) in cells]
    lines = header("task, scoring", (NAMES[loss] for loss in losses))
    first = next(iter(cells[base, rows, loss][0] for loss in losses), None)
    if first is None or (base, rows, "cosine") not in cells:
        return ["(Cosine or all others are missing.)"]
    places = {"in domain": [rows], "out of domain": outside(first, rows)} | {t: [t] for t in first["tasks"]}
    for place, tasks in places.items():
        for read_out in ("matched", "chosen", "cosine"):
            found = [gain(cells, base, rows, loss, tasks, read_out) for loss in losses]
            shown = ["" if e is None else e.show() + ("" if np.isnan(e.p) else f" p {e.p:.2f}") for e in found]
            lines.append(f"| {place}, {read_out} | " + " | ".join(shown) + " |")
    return lines


def curve_table(cells: Cells, base: str, rows: str) -> list[str]:
    """nDCG@10 by document exponent, mean over the tasks in and out of the domain."""
    lines = header("loss, tasks", (f"{e:g}" for e in EXPONENTS))
    models = {"PT": cells.get((base, "none", "pretrained"))}
    for name, runs in (models | {name: cells.get((base, rows, loss)) for loss, name in NAMES.items()}).items():
        if runs:
            for place, tasks in {"in": [rows], "out": outside(runs[0], rows)}.items():
                means = [np.mean([at(c["tasks"][t], e) for c in runs for t in tasks]) for e in EXPONENTS]
                lines.append(f"| {name}, {place} | " + " | ".join(f"{100 * m:.1f}" for m in means) + " |")
    return lines


def norm_table(cells: Cells, base: str, rows: str) -> list[str]:
    """d by pairing (with text length out), CVs, and Spearman of norm and length, by task and loss."""
    columns = ("d corpus (length out)", "d hard (length out)", "d pairs", "query CV % (/ PT)", "document CV % (/ PT)")
    lines = header("task, loss", (*columns, "ρ of norm and length"))
    pretrained = cells.get((base, "none", "pretrained"), [])
    models = {"PT": pretrained} | {name: cells.get((base, rows, loss), []) for loss, name in NAMES.items()}
    models = {name: runs for name, runs in models.items() if runs}
    for task in next(iter(models.values()))[0]["tasks"]:
        before = {key: figure(pretrained, task, key) for key in ("query cv", "document cv")}
        for name, runs in models.items():
            d = {key: d_of(runs, task, key) for key in ("corpus", "hard")}
            less = {key: d_of(runs, task, f"{key}, length out") for key in d}
            shown = ["" if d[key] is None else f"{d[key]:+.2f} ({less[key]:+.2f})" for key in d]
            pairs = d_of(runs, task, "pairs")
            shown.append("" if pairs is None else f"{pairs:+.2f}")
            for key, start in before.items():
                now = figure(runs, task, key)
                shown.append(f"{100 * now:.1f}" + (f" ({now / start:.2f})" if start else ""))
            shown.append(f"{figure(runs, task, 'length spearman'):+.2f}")
            lines.append(f"| {task}, {name} | {' | '.join(shown)} |")
    return lines


def training_table(cells: Cells, base: str, rows: str) -> list[str]:
    """Dot less cosine on dev in training, exponents of Learnable at its end, clustering."""
    lines = header(
        "loss",
        (
            "dot - cosine on dev, from the start to the end of training",
            "γ query; document",
            "v-measure: directions; raw",
        ),
    )
    for loss, name in NAMES.items():
        if runs := cells.get((base, rows, loss)):
            gaps = np.mean([[100 * (g["dot"] - g["cosine"]) for g in c["gaps"]] for c in runs], axis=0)
            gammas = [c["gammas"][-1] for c in runs if c["gammas"]]
            shown = "; ".join(f"{g:.3f}" for g in np.mean(gammas, axis=0)) if gammas else ""
            clusters = "; ".join(
                spread([c["clustering"][f"v-measure, {k}"] for c in runs]) for k in ("directions", "raw")
            )
            lines.append(f"| {name} | {', '.join(f'{g:+.1f}' for g in gaps)} | {shown} | {clusters} |")
    return lines


def summary_table(cells: Cells) -> list[str]:
    """Gains over Cosine in points, in the domain of training and outside, as trained and at the exponent of dev."""
    losses = [loss for loss in NAMES if loss != "cosine"]
    lines = header("base, trained on", ("tasks", "scoring", *(NAMES[loss] for loss in losses)))
    for base, rows in trained_on(cells):
        if (plain := cells.get((base, rows, "cosine"))) is None:
            continue
        for place, tasks in {"in domain": [rows], "out": outside(plain[0], rows)}.items():
            for read_out in ("matched", "chosen"):
                found = [gain(cells, base, rows, loss, tasks, read_out) for loss in losses]
                shown = " | ".join("" if e is None else e.show() for e in found)
                lines.append(f"| {base}, {rows} | {place} | {read_out} | {shown} |")
    return lines


def boilerplate_table(cells: Cells) -> list[str]:
    """d of norms, documents that answer some query against boilerplate, and with text length out in brackets."""
    models = {"PT": "pretrained", "Cosine": "cosine", "Dot": "dot", "QNorm": "qnorm", "Learnable": "learnable"}
    lines = header("base, trained on", models)
    for base, rows in trained_on(cells):
        shown = []
        for loss in models.values():
            runs = cells.get((base, "none" if loss == "pretrained" else rows, loss), [])
            plain, less = (d_of(runs, "docstrings", f"corpus{out}") for out in ("", ", length out"))
            shown.append("" if plain is None or less is None else f"{plain:+.2f} ({less:+.2f})")
        lines.append(f"| {base}, {rows} | {' | '.join(shown)} |")
    return lines


def symmetric_table(scored: dict[str, list[Cell]]) -> list[str]:
    lines = header("similarity, scale", ("Spearman", "symmetry gap", "v-measure: directions", "v-measure: raw"))
    for key, runs in scored.items():
        keys = ("matched_spearman", "symmetry_gap", "v-measure, directions", "v-measure, raw")
        lines.append(f"| {key} | " + " | ".join(spread([run[k] for run in runs]) for k in keys) + " |")
    return lines


def report(cells: Cells, scored: dict[str, list[Cell]] | None, missing: list[str]) -> str:
    """Everything as Markdown."""
    lines: list[str] = []

    def part(title: str, rows: Iterable[str]) -> None:
        lines.extend([f"\n## {title}\n", *rows])

    part("Gains over Cosine, points of nDCG@10, 95 %", summary_table(cells))
    part("d of norms on docstrings, boilerplate among them", boilerplate_table(cells))
    for base, rows in trained_on(cells):
        where = f"{base} trained on {rows}"
        part(f"{where}: nDCG@10, matched; mean ± sd over seeds", retrieval_table(cells, base, rows, "matched"))
        part(f"{where}: nDCG@10 at the exponent of dev", retrieval_table(cells, base, rows, "chosen"))
        part(f"{where}: gain over Cosine, points, 95 %", gain_table(cells, base, rows))
        part(f"{where}: nDCG@10 by document exponent (0 dot, 1 cosine)", curve_table(cells, base, rows))
        part(f"{where}: document norms", norm_table(cells, base, rows))
        part(f"{where}: training and clustering", training_table(cells, base, rows))
    if scored:
        part("Scored pairs and clustering at two scales (static table)", symmetric_table(scored))
    findings = [*gain_findings(cells), *d_findings(cells), *other_findings(cells, scored)]
    rows = ["| table | finding | paper | here [95 %] | sign |", "| --- | --- | ---: | ---: | --- |"]
    part("Beside the paper", [*rows, *(finding.row() for finding in findings)])
    part("Signs", [count(findings)])
    ends = [cell["gammas"][-1] for runs in cells.values() for cell in runs if cell["gammas"]]
    larger = sum(document > query for query, document in ends)
    part(
        "Learned exponents",
        [f"γ of documents ends above that of queries in {larger} of {len(ends)} runs of Learnable."],
    )
    seconds = {}
    for (base, _, loss), runs in cells.items():
        if loss != "pretrained":
            seconds.setdefault(base, []).extend(sum(c["seconds"].values()) for c in runs)
    spent = [f"{base} {np.mean(s):.0f} s a cell, {sum(s) / 60:.0f} min in all" for base, s in seconds.items()]
    part("Time", [f"- {line}" for line in spent])
    if missing:
        shown = ", ".join(missing[:12]) + (", ..." if len(missing) > 12 else "")
        part("Missing", [f"{len(missing)} of the cells asked for: {shown}"])
    return "\n".join(lines).strip()


def write_csv(cells: Cells, path: Path) -> None:
    """One figure a line."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("base", "train", "loss", "seed", "task", "metric", "exponent", "value"))
        for (base, rows, loss), runs in cells.items():
            for cell in runs:
                key = (base, rows, loss, cell["seed"])
                writer.writerow((*key, "", "matched exponent", "", cell["matched"]))
                for name, value in cell["chosen"].items():
                    writer.writerow((*key, f"dev {name}", "chosen exponent", "", value))
                for name, value in cell["clustering"].items():
                    writer.writerow((*key, "clustering", name, "", value))
                for task, x in cell["tasks"].items():
                    for metric in ("ndcg@10", "recall@100", "mrr@10"):
                        for exponent, value in zip(x["exponents"], x[metric], strict=True):
                            writer.writerow((*key, task, metric, exponent, value))
                    for name, value in x["d"].items():
                        writer.writerow((*key, task, f"d {name}", "", value))
                    for name in ("query cv", "document cv", "query norm", "document norm", "length spearman"):
                        writer.writerow((*key, task, name, "", x[name]))


# --- pictures ---------------------------------------------------------------------------------------------------------


def pictures(cells: Cells, folder: Path) -> None:
    """Fig. 3 and Fig. 5 of the paper on our data, exponents in training, collapse, and scores by exponent."""
    plt = pyplot()
    bases = list(dict.fromkeys(base for base, _ in trained_on(cells)))

    def grid(name: str, draw: Callable[[Any, str], None], x: str, y: str) -> None:
        figure, axes = plt.subplots(1, len(bases), figsize=(4.2 * len(bases), 3.6), squeeze=False)
        for axis, base in zip(axes[0], bases, strict=True):
            draw(axis, base)
            axis.set(title=base, xlabel=x)
            axis.margins(x=0.12)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=7)
        axes[0][0].set_ylabel(y)
        figure.tight_layout()
        figure.savefig(folder / name, dpi=130)
        plt.close(figure)

    def gains(axis: Any, base: str) -> None:
        for rows, mark in zip(TRAIN_SETS, "os", strict=True):
            found = [p for p in points(cells, base) if p[0] == rows]
            axis.scatter([p[2] for p in found], [p[3] for p in found], marker=mark, label=f"trained on {rows}", s=22)
            for _, task, d, percent in found:
                axis.annotate(task.replace(CONTROL, "docstrings*"), (d, percent), fontsize=6, alpha=0.8)
        axis.axhline(0, color="grey", lw=0.6)
        axis.axvline(0, color="grey", lw=0.6)

    def paths(axis: Any, base: str) -> None:
        for rows, style in zip(TRAIN_SETS, ("-", "--"), strict=True):
            if runs := cells.get((base, rows, "learnable")):
                path = np.mean([c["gammas"] for c in runs], axis=0)
                for side, color in zip((0, 1), ("tab:blue", "tab:red"), strict=True):
                    label = f"{('query', 'document')[side]}, {rows}"
                    axis.plot(path[:, side], style, color=color, label=label)

    def collapse(axis: Any, base: str) -> None:
        for rows, style in zip(TRAIN_SETS, ("-", "--"), strict=True):
            for i, (loss, name) in enumerate(NAMES.items()):
                if runs := cells.get((base, rows, loss)):
                    gaps = np.mean([[100 * (g["dot"] - g["cosine"]) for g in c["gaps"]] for c in runs], axis=0)
                    steps = [g["step"] for g in runs[0]["gaps"]]
                    axis.plot(steps, gaps, style, color=f"C{i}", label=name if style == "-" else None)

    def curves(axis: Any, base: str) -> None:
        for rows, style in zip(TRAIN_SETS, ("-", "--"), strict=True):
            for i, (loss, name) in enumerate(NAMES.items()):
                if runs := cells.get((base, rows, loss)):
                    tasks = outside(runs[0], rows)
                    means = [100 * np.mean([at(c["tasks"][t], e) for c in runs for t in tasks]) for e in EXPONENTS]
                    axis.plot(EXPONENTS, means, style, color=f"C{i}", label=name if style == "-" else None)

    if not bases:
        return
    grid("gain_by_d.png", gains, "Cohen's d of document norms, QNorm", "QNorm - Cosine, %")
    grid("gammas.png", paths, "step", "learned exponent")
    grid("collapse.png", collapse, "step (solid: wordnet, dashed: docstrings)", "dot - cosine on dev, points")
    grid("exponents.png", curves, "document exponent (solid: wordnet, dashed: docstrings)", "nDCG@10 out of domain")
    figure, axis = plt.subplots(figsize=(5, 4))
    for base in bases:
        found = [p for p in cv_points(cells) if p[0] == base]
        axis.scatter([p[2] for p in found], [p[3] for p in found], label=base, s=22)
    axis.set(xlabel="query CV, DNorm / Dot", ylabel="DNorm - QNorm, points")
    axis.axhline(0, color="grey", lw=0.6)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "gain_by_cv.png", dpi=130)
    plt.close(figure)
