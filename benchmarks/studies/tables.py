"""Rebuilds the tables of docs/research/ from the stored cells.

    python benchmarks/studies/tables.py [--check]

A table stands between ``<!-- NAME -->`` and ``<!-- end -->``. With --check nothing is written, and
the exit status is 1 if a page differs from what the cells give, if the page "Evidence" quotes a
figure that the page it links does not have, if a section of README or a guide that links a study
has a decimal that no page it links has, if README or docs/start.md show a line with a figure
that no stored run printed, or if a sentence of `headlines.py` does not say what its table has.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.speed import encoders, epoch, training
from benchmarks.studies import archive, headlines, runs
from benchmarks.studies.archive import ROOT
from benchmarks.studies.known import begin, few_shot, known, mixed, null, scope

Table = Callable[[], list[str]]
PAGES = [
    page
    for page in sorted((ROOT / "docs").glob("research/*.md"))
    if "<!-- end -->" in page.read_text(encoding="utf-8")
]
OWN_FIGURES = ("serving.md",)  # of versions
QUOTING = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in OWN_FIGURES),
]


TABLES: dict[str, Table] = {
    **archive.TABLES,
    **known.TABLES,
    **begin.TABLES,
    "known null": null.table,
    "known mixed": mixed.table,
    "known scope": scope.table,
    "known few shot": few_shot.table,
    "whole trainings": training.table,
    "encoders": encoders.table,
    "one epoch": epoch.table,
}


def rebuilt(page: str) -> str:
    """The page with its tables as the cells give them."""

    def table(match: re.Match[str]) -> str:
        return "\n".join([f"<!-- {match[1]} -->", "", *TABLES[match[1]](), "", "<!-- end -->"])

    return re.sub(r"<!-- ([^>]+) -->\n.*?<!-- end -->", table, page, flags=re.DOTALL)


def unquoted() -> list[str]:
    """Figures of the page "Evidence" that are not on the page which their row links."""
    index = ROOT / "docs" / "research" / "index.md"
    found = []
    for row in index.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in row.split("|")]
        if len(cells) != 7 or not (link := re.search(r"\]\(([^)#]+)", cells[5])):
            continue
        page = (index.parent / link[1]).read_text(encoding="utf-8")
        found += [f"{link[1]}: {x}" for x in cells[2].split("; ") if x not in page]
    return found


FIGURE = re.compile(r"(?<![\w.,/])0?(\.\d+|[1-9]\d*\.\d+)(?![\w.])")


def unknown(page: Path, text: str) -> list[str]:
    """Decimals of a page that no page has which their section links, without code and numbers of
    theorems, sections and papers."""
    other = r"^```.*?^```|`[^`\n]*`|(?:Prop\.|Cor\.|arXiv|[Ss]ection) [\d.]+"
    text = re.sub(other, "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE):
        links = [page.parent / link for link in re.findall(r"\]\(([^)#:\s]+\.md)", section)]
        if any("research" in link.parts for link in links):
            known = {x for link in links for x in FIGURE.findall(link.read_text(encoding="utf-8"))}
            found += [x for x in FIGURE.findall(section) if x not in known]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    changed = {page: after for page, text in before.items() if (after := rebuilt(text)) != text}
    if arguments.check:
        lines = [f"{page} is not what the cells give.\n" for page in changed]
        lines += [f"Evidence quotes what the page does not have: {x}\n" for x in unquoted()]
        for page in QUOTING:
            text = page.read_text(encoding="utf-8")
            lines += [f"{page}: no linked page has {x}\n" for x in unknown(page, text)]
        for page in (ROOT / "README.md", ROOT / "docs" / "start.md"):
            lines += [f"{page}: no stored run printed {x!r}\n" for x in runs.unknown_lines(page)]
        sentences = headlines.headlines()
        for name in sentences:
            wrong = headlines.contradicted(name, (ROOT / name).read_text(encoding="utf-8"))
            lines += [f"{name}: {x}\n" for x in wrong]
        if lines:
            parser.exit(1, "".join(lines))
        fences = sum(text.count("<!-- end -->") for text in before.values())
        said = sum(map(len, sentences.values()))
        print(f"{fences} tables on {len(before)} pages agree with the cells, and {said} sentences")
        print(f"with the tables. {len(QUOTING)} pages quote only what pages have that they link.")
        return
    for page, text in changed.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
