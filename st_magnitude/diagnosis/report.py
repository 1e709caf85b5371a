"""A diagnosis as one HTML page with figures, and a figure of what compression keeps."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from st_magnitude._checks import needs
from st_magnitude._plot import LIGHT, draw, pyplot
from st_magnitude.diagnosis import figures
from st_magnitude.diagnosis.findings import DO, NO_BENEFIT, NOT_ENOUGH, Diagnosis
from st_magnitude.diagnosis.readers import Log, read_compression, read_log, with_steps
from st_magnitude.diagnosis.sections import Section, Table, evidence, facts, sections
from st_magnitude.diagnosis.terminal import is_numeric
from st_magnitude.diagnosis.training import training_section
from st_magnitude.evaluation.compression import CompressionCell, largest

__all__ = ["plot_compression", "read_compression", "read_log", "write_page", "write_report"]

CLASSES = {DO: "do", NO_BENEFIT: "no", NOT_ENOUGH: "open"}


def write_report(
    diagnosis: Diagnosis | str | Path,
    output: str | Path,
    *,
    log: str | Path | Log | None = None,
    compression: str | Path | Sequence[CompressionCell] | None = None,
    title: str | None = None,
    more: Sequence[Section] = (),
) -> Path:
    """Writes ``report.html``, one file that needs no other file and no network, and its figures as PNG files beside it.

    Recommendations come first, then all measurements as figures and tables, and a glossary. The page follows the
    reader's choice of light or dark, and prints. The same input gives the same files.

    Args:
        diagnosis: Result of `st_magnitude.diagnose`, or the JSON file that it was saved in.
        output: Folder for the files, created if it does not exist. Files of the same names are replaced, others stay.
        log: Training log for curves: a path that `read_log` takes, ``trainer.state.log_history``, or the rows of a
            NormMonitor.
        compression: Cells of a CompressionEvaluator, or its CSV file, shown in place of those of the diagnosis.
        title: Title of the page; by default the title of the diagnosis, or the name of its model.
        more: Further sections, such as `CompareResult.section`.

    Returns:
        The path of the HTML file.

    Raises:
        ImportError: If matplotlib or jinja2 is not installed.
        OSError: If a file cannot be read or written.
        ValueError: If a file does not hold what it should, or there are no cells. Nothing has been written then.

    Example:
        >>> from st_magnitude import Diagnosis
        >>> write_report(Diagnosis.load("diagnosis.json"), "report", log="run/checkpoint-200")  # doctest: +SKIP
        PosixPath('report/report.html')
    """
    pyplot()  # raises before anything is read or written
    output = Path(output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, but {output} is a file; choose another name.")
    found = diagnosis if isinstance(diagnosis, Diagnosis) else Diagnosis.load(diagnosis)
    rows = read_log(log) if isinstance(log, (str, Path)) else [] if log is None else with_steps(log, "The log")
    cells = read_compression(compression) if isinstance(compression, (str, Path)) else compression
    shown = sections(found, cells)
    # before the task, the provenance and the glossary
    shown[-3:-3] = [*([training_section(rows)] if rows else []), *more]
    return write_page(
        output, title or found.provenance.title or f"Diagnosis of {found.provenance.model}", facts(found), shown
    )


def write_page(output: Path, title: str, facts: str, shown: Sequence[Section]) -> Path:
    """Writes sections as ``report.html``, and their figures as PNG files beside it.

    Args:
        output: Folder for the files, created if it does not exist.
        title: Title of the page.
        facts: The sentence below the title.
        shown: Sections of the page, in their order.
    """
    drawings = {figure.name: draw(figure.paint, figure.size) for section in shown for figure in section.figures}
    page = _render(title=title, facts=facts, sections=shown, drawings=drawings)
    output.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        (output / f"{name}.png").write_bytes(drawing.png)
    (output / "report.html").write_text(page, encoding="utf-8")
    return output / "report.html"


def plot_compression(cells: Sequence[CompressionCell], path: str | Path, title: str = "") -> None:
    """Plots nDCG@10 against bytes per document: one point per cell, and a line over the cells of `pareto`.

    Args:
        cells: Cells of a CompressionEvaluator.
        path: PNG file to write, in a folder that exists.
        title: Title above the axes.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no cells.

    Example:
        >>> from st_magnitude.evaluation import CompressionCell
        >>> cells = [CompressionCell(4, "float32", "none", 16, 0.5, 1.0)]
        >>> plot_compression(cells, "compression.png")  # doctest: +SKIP
    """
    largest(cells)  # raises if there are no cells
    plt = pyplot()
    with plt.rc_context(LIGHT.settings()):
        figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
        axis.set_title(title)
        figures.compression(axis, cells)
        figure.legend(loc="outside right upper")
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _render(**content: Any) -> str:
    """The page from its templates, in which every text is escaped."""
    with needs("A report", "plot"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("st_magnitude.diagnosis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"citing": _citing, "data": _data_uri, "evidence": evidence}
    environment.globals |= {"verdict_class": CLASSES, "numeric": _numeric_columns}
    return environment.get_template("report.html").render(**content)


def _citing(text: str) -> Any:
    """Text in which papers on arXiv are links.

    Example:
        >>> _citing("x < 1 (arXiv 2602.09229, App. M)")
        Markup('x &lt; 1 (<a href="https://arxiv.org/abs/2602.09229">arXiv 2602.09229</a>, App. M)')
    """
    from markupsafe import Markup, escape

    link = Markup('<a href="https://arxiv.org/abs/{0}">arXiv {0}</a>')
    parts = re.split(r"arXiv (\d{4}\.\d{4,5})", text)
    return Markup("").join(link.format(part) if i % 2 else escape(part) for i, part in enumerate(parts))


def _data_uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _numeric_columns(table: Table) -> list[bool]:
    return [is_numeric(list(column)) for column in zip(*table.rows, strict=True)]
