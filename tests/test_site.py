"""The documentation: public names are there once, pages are in the navigation, it builds."""

import ast
import doctest
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml
from _processes import python

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PUBLIC = [
    "",  # st_magnitude itself
    *("clip", "evaluation", "geometry", "losses", "modules", "mteb", "revela"),
    *("similarity", "training"),
    *("data.retrieval", "workbench.calibration"),
    *("workbench.judging.options", "workbench.serving"),
    *("kernel.infonce", "surgery.gradients", "surgery.normalize"),
]
MADE = {"index.md", "changelog.md", "contributing.md", "benchmarks.md"}  # by mkdocs_hooks.py
MADE |= {f"{notebook.stem}.md" for notebook in DOCS.glob("*.ipynb")}
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="in .venv-site, see .ci/run"
)


def source(module):
    path = ROOT.joinpath("st_magnitude", *filter(None, module.split(".")))
    if not path.is_dir():
        return path.with_suffix(".py")
    stub = path / "__init__.pyi"  # of a package that imports names when they are used
    return stub if stub.exists() else path / "__init__.py"


def parsed(module):
    return ast.parse(source(module).read_text(encoding="utf-8"))


def defined(path):
    """The place where a name is defined, (module, name), or (module, "") for a module."""
    module, _, name = path.rpartition(".")
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            package = module if node.level else ""
            origin = ".".join(filter(None, (package, node.module, name)))
            origin = origin.removeprefix("st_magnitude.")
            return defined(origin) if origin != path else (path, "")
    return (path, "") if source(path).exists() else (module, name)


def public_names(module):
    nodes = parsed(module).body
    for node in nodes:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports for alias in node.names]


def directives():
    """The names on the pages of the reference; a module that only heads a page has options."""
    for page in sorted((DOCS / "api").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        yield from re.findall(
            r"^::: st_magnitude\.([\w.]+)$(?!\n    options:)", text, flags=re.MULTILINE
        )


def navigation(entries):
    for entry in entries:
        for content in entry.values():
            yield from [content] if isinstance(content, str) else navigation(content)


def configuration():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_every_public_name_is_documented_once():
    documented = Counter(defined(path) for path in directives())
    public = {
        defined(f"{module}.{name}".strip(".")) for module in PUBLIC for name in public_names(module)
    }
    assert {place for place in public if place[1] and not documented[place]} == set()
    assert {place for place, times in documented.items() if times > 1} == set()


def test_every_page_is_in_the_navigation_once():
    pages = Counter(navigation(configuration()["nav"]))
    assert {page for page, times in pages.items() if times > 1} == set()
    assert set(pages) == MADE | {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_nothing_is_fetched_from_elsewhere():
    assert configuration()["theme"]["font"] is False
    for asset in ("site.css", "iframe-worker.js"):
        assert "http" not in (DOCS / "assets" / asset).read_text(encoding="utf-8")


@needs_mkdocs
def test_examples_of_the_hooks():
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    result = doctest.testmod(hooks)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds(tmp_path):
    python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site", cwd=ROOT)
    for page in navigation(configuration()["nav"]):
        html = (tmp_path / "site" / page).with_suffix(".html").read_text(encoding="utf-8")
        assert not re.findall(
            r'<(?:link|script|img|iframe)\b[^>]*(?:src|href)="?(?:https?:)?//[^">\s]+', html
        ), page
    losses = (tmp_path / "site" / "api" / "losses.html").read_text(encoding="utf-8")
    assert 'id="st_magnitude.QNormRankingLoss"' in losses
    assert ":class:" not in losses
    home_page = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="migration.html"' in home_page
    kernel_page = (tmp_path / "site" / "kernel.html").read_text(encoding="utf-8")
    assert 'src="training.png"' in kernel_page
    assert "<math" in kernel_page
    moved = (tmp_path / "site" / "how_to.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / re.search(r'href="([^"]+)"', moved)[1]).exists()
    assert 'src="assets/iframe-worker.js"' in home_page
    index = (tmp_path / "site" / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index")
    assert 'href="source/CITATION.cff.html"' in home_page
