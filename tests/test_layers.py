"""Imports point down: the layers of docs/architecture.md, read from the source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "st_magnitude"

# From the bottom up. A module may import from lower layers and from its own; __init__ and __main__ of the package stand
# above all others.
LAYERS = (
    ("similarity", "result", "_config", "_plot", "_upstream", "_checks", "_files", "_lazy"),
    ("geometry", "kernel"),
    ("modules", "pruning"),
    ("losses", "training", "surgery", "data"),
    ("clip", "revela", "evaluation"),
    ("diagnosis", "serving", "mteb", "finetune"),
    ("comparison",),
    ("commands",),
    ("__init__", "__main__"),
)
LAYER = {name: height for height, names in enumerate(LAYERS) for name in names}
STRANGERS = {("clip", "revela"), ("revela", "clip")}  # on one layer, but neither may know the other


MODULES = sorted(PACKAGE.rglob("*.py"))


def home(path: Path) -> str:
    """The folder below the package, or the module itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """What every import statement of a module, those inside functions too, takes from the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == PACKAGE.name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path: Path):
    for name in imports(path):
        parts = name.split(".")
        target = parts[1] if len(parts) > 1 and parts[1] in LAYER else "__init__"
        if parts[1:] != ["__version__"]:
            assert LAYER[target] <= LAYER[home(path)], f"it imports {name}, which lies above it"
            assert (home(path), target) not in STRANGERS, f"it imports {name}"


def test_every_module_has_a_layer():
    assert {home(path) for path in MODULES} <= set(LAYER)


def test_only_clip_knows_open_clip():
    for path in MODULES:
        if home(path) != "clip":
            assert "import open_clip" not in path.read_text(encoding="utf-8")
            assert "from open_clip" not in path.read_text(encoding="utf-8")
