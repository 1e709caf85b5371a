"""Hooks of the documentation site: pages made of files outside ``docs/``, links to them, and
docstrings that were written for ``help()``.

- Pages: README.md, CHANGELOG.md and CONTRIBUTING.md, the notebooks of ``docs/`` with their outputs,
  and a table of the scripts in ``benchmarks/`` and ``examples/``.
- Links of any page to a file of the repository, such as ``../examples/x.py``, lead to a page with
  its text, and work in the site and wherever the repository is read. A link to a file that does
  not exist stays, and the strict build refuses it.
- ``[losses.md](losses.md)`` goes by the name that the page has in the navigation.
- Lists: GitHub nests what is indented by two columns, Python-Markdown by four.
- Formulas: a block ``math``, which GitHub draws, becomes MathML.
- Addresses of pages that moved lead to where their text is now.
- Docstrings: Sphinx roles become links, ``::`` code blocks, simple tables those of Markdown,
  ``Example:`` a section.

This module imports nothing of st_magnitude: the site is built from source text alone, without
torch.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
SCRIPTS = "benchmarks.md"
MOVED = {
    "compare": "evaluation",
    "devices": "train",
    "how_to": "train",
    "norms": "papers",
    "prior": "losses",
    "research/abstention": "known",
    "research/boilerplate": "magnitude",
    "research/indexes": "kernel",
    "research/temperature": "magnitude",
    "research/temperature_paper": "compression",
    "security": "cli",
}  # of the same folder
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)(?P<path>[^)#\s]+)")
TITLE = re.compile(r"\[(?:docs/)?\w+\.md\]\((?!\w+:)(?P<path>[^)#\s]+)(?P<anchor>[^)\s]*)\)")
FORMULA = re.compile(r"^```math\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".cff": "yaml", ".toml": "toml", ".md": "markdown"}

# --- pages and links ------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of files outside ``docs/``, and one for every file that some
    page links to."""
    texts = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in PAGES.items()}
    texts[SCRIPTS] = scripts_page()
    texts |= {
        f"{path.stem}.md": notebook_page(path) for path in sorted((ROOT / "docs").glob("*.ipynb"))
    }
    for page, text in texts.items():
        files.append(File.generated(config, page, content=text))
    texts |= {file.src_uri: file.content_string for file in files.documentation_pages()}
    links = {(page, target) for page, text in texts.items() for target in LINK.findall(text)}
    for source in sorted({repository_path(*link) for link in links if outside(*link)}):
        text = (ROOT / source).read_text(encoding="utf-8")
        fence = f"# {source}\n\n````{LANGUAGES.get(Path(source).suffix, 'text')}\n{text}````\n"
        content = f"---\nsearch:\n  exclude: true\n---\n{fence}"
        files.append(
            File.generated(
                config, source_page(source), content=content, inclusion=InclusionLevel.NOT_IN_NAV
            )
        )
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them, and lists as Python-Markdown nests them."""
    if page.file.src_uri.startswith("source/"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        place = site_path(repository_path(page.file.src_uri, match["path"]))
        return (
            posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or ".")
            if place
            else match["path"]
        )

    def titled(match: re.Match[str]) -> str:
        """``[losses.md](losses.md)`` under the name that the page has in the navigation."""
        place = site_path(repository_path(page.file.src_uri, match["path"]))
        file = files.get_file_from_path(place) if place else None
        title = file.page.title if file and file.page else None
        return f"[{title}]({match['path']}{match['anchor']})" if title else match[0]

    markdown = FORMULA.sub(formula, markdown)
    return nested(LINK.sub(rewritten, TITLE.sub(titled, markdown)))


def formula(match: re.Match[str]) -> str:
    """MathML, which browsers draw without a script.

    Example:
        >>> formula(FORMULA.search("```math\\nx\\n```")).partition("<mrow>")[2]
        '<mi>x</mi></mrow></math></div>'
    """
    return f'<div class="formula">{convert(match[1].strip(), display="block")}</div>'


def on_post_build(config: MkDocsConfig) -> None:
    """Pages at the old addresses, which also keep the anchor."""
    for old, new in MOVED.items():
        page = f'<meta http-equiv="refresh" content="0; url={new}.html">\n'
        script = f'<script>location.replace("{new}.html" + location.hash)</script>\n'
        link = f'<a href="{new}.html">This page has moved.</a>\n'
        (Path(config.site_dir) / f"{old}.html").write_text(script + page + link, encoding="utf-8")


def repository_path(page: str, target: str) -> str:
    """Where a link of a page of the site leads, from the root of the repository."""
    home = PAGES.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(home), target))


def site_path(path: str) -> str | None:
    """The page or picture of the site for a file of the repository; None if there is no such
    file."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    for page, source in PAGES.items():
        if path == source:
            return page
    is_file = not path.startswith("..") and (ROOT / path).is_file()
    return source_page(path) if is_file else None


def source_page(path: str) -> str:
    return f"source/{path}.md"


def outside(page: str, target: str) -> bool:
    """Whether a link leads to a file of the repository that is no page by itself."""
    return (site_path(repository_path(page, target)) or "").startswith("source/")


def scripts_page() -> str:
    """The scripts behind the figures, by the first paragraph of their docstrings."""
    lines = [
        "# Benchmarks and examples",
        "",
        (
            "The figures of these pages come from the scripts in `benchmarks/`, and from the"
            " commands and the earlier commits that the pages name."
        ),
        (
            "`make bench` prints those of the README and most others; it takes more than an hour on"
            " two cores."
        ),
    ]
    for folder in ("benchmarks", "examples"):
        lines += ["", f"## {folder.capitalize()}", "", "| script | |", "| --- | --- |"]
        for script in sorted((ROOT / folder).rglob("*.py")):
            path = script.relative_to(ROOT).as_posix()
            docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
            first = " ".join(docstring.partition("\n\n")[0].split())
            lines.append(f"| [{path.partition('/')[2]}](../{path}) | {first} |")
    return "\n".join(lines) + "\n"


def notebook_page(path: Path) -> str:
    """The cells of a notebook as Markdown, with printed text and pictures as they were saved."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            picture = output.get("data", {}).get("image/png")
            if picture:
                parts.append(
                    "![A figure that the cell above"
                    f" draws](data:image/png;base64,{''.join(picture).strip()})"
                )
            elif output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


ITEM = re.compile(r"(?P<marker>[-*]|\d+\.) +")


def nested(markdown: str) -> str:
    """Indents by four what belongs to a list item, and puts a blank line before a list that
    interrupts a paragraph.

    Example:
        >>> print(nested("Text:\\n- one\\n\\n  more\\n"), end="")
        Text:
        <BLANKLINE>
        - one
        <BLANKLINE>
            more
    """
    lines: list[str] = []
    width = 0  # of the marker of the list item that is open, 0 outside of lists
    fence = False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip())
        if not fence and (item := ITEM.match(line)):
            if not width and lines and lines[-1].strip():
                lines.append("")
            width = len(item[0])
        elif width and indent >= width:
            line = " " * (4 - width) + line
        elif line.strip() and not fence and (indent == 0 and not (lines and lines[-1].strip())):
            width = 0
        if line.lstrip().startswith("```"):
            fence = not fence
        lines.append(line)
    return "\n".join(lines)


# --- docstrings -----------------------------------------------------------------------------------


class Docstrings(griffe.Extension):
    """Rewrites docstrings of the house (Google style, with a little reStructuredText) to what
    mkdocstrings reads."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {path.rpartition(".")[2]: path for path in documented()}

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for thing in walk(pkg):
            if thing.docstring is not None:
                thing.docstring.value = self.markdown(thing.docstring.value)

    def markdown(self, text: str) -> str:
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
        text = re.sub(r"^( *)::\n\n((?:\1 .*\n|\n)*\1 .*)", code_block, text, flags=re.MULTILINE)
        text = re.sub(r"(?<=\w)::$", ":", text, flags=re.MULTILINE)
        text = re.sub(
            r"^( *)=+(?:  =+)+\n(?:.+\n)+\1=+(?:  =+)+$", simple_table, text, flags=re.MULTILINE
        )
        text = re.sub(r":(?:class|func|meth|attr|mod):`(~?)([\w.]+)`", self.reference, text)
        return re.sub(r"(?<=/)<(\w+)>", r"&lt;\1&gt;", text)  # a placeholder in a path

    def reference(self, match: re.Match[str]) -> str:
        short, path = match.groups()
        name = path.rpartition(".")[2] if short else path.removeprefix("st_magnitude.")
        place = next(
            (self.places[part] for part in reversed(path.split(".")) if part in self.places), None
        )
        return f"[`{name}`][{place}]" if place else f"`{name}`"


def documented() -> Iterator[str]:
    """The paths of the directives in ``docs/api`` that have a heading, and so an anchor: modules
    have none."""
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        yield from re.findall(r"^::: ([\w.]+)$(?!\n    options:)", text, flags=re.MULTILINE)


def walk(thing: griffe.Object) -> Iterator[griffe.Object]:
    yield thing
    for member in list(thing.members.values()):
        if isinstance(member, griffe.Object):
            yield from walk(member)


def code_block(match: re.Match[str]) -> str:
    indent, code = match.groups()
    return textwrap.indent(f"```python\n{textwrap.dedent(code).strip()}\n```", indent)


def simple_table(match: re.Match[str]) -> str:
    """A simple table of reStructuredText; a row without a first cell goes on the one above."""
    indent, lines = match[1], [line.removeprefix(match[1]) for line in match[0].split("\n")]
    columns = [found.span() for found in re.finditer("=+", lines[0])]
    columns = [*columns[:-1], (columns[-1][0], 1000)]
    rows: list[list[str]] = []
    for line in lines[1:]:
        cells = [line[begin:end].strip().replace("|", "\\|") for begin, end in columns]
        if line.startswith("="):
            continue
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [
                f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)
            ]
    rows.insert(1, ["---"] * len(columns))
    return "\n".join(f"{indent}| {' | '.join(row)} |" for row in rows)
